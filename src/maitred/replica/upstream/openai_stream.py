"""Reads a server's stream, and finds out whether it is whole. Pure: bytes in, parts out.

Servers break off in many ways, and most of them look like an end. So an answer is only whole if everything that makes
one has come: a finish reason for every choice and, after that, ``[DONE]`` (of a dialect without it, the usage, and the
end of the body). Whatever else happens is a failure: bytes
that are no events, events that are no JSON, an error inside, a choice that goes on after its end, a sequence of
choices that was not asked for, more chunks than tokens (something was sent twice), and silence where the terminator
should be.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from maitred.core.answer import TextDelta
from maitred.core.errors import MaitredError, ReplicaLost
from maitred.core.request import FinishReason, Usage
from maitred.core.text_replica import TextBatch
from maitred.replica.upstream.chunk import (
    ChunkChoice,
    ChunkDelta,
    UpstreamChunk,
    are_calls,
    parse_chunk,
    parse_chunks,
    parse_scores,
)
from maitred.replica.upstream.dialects import UpstreamDialect
from maitred.replica.upstream.errors import ServerError, error_in, to_failure
from maitred.wire.sse import SSESplitter

MOST_EVENT_BYTES = 8 << 20
"""Of one event. The largest honest ones have log-probabilities for many tokens."""
_EXTRAS: Mapping[str, Callable[[object], bool]] = {
    "tool_calls": are_calls,
    **dict.fromkeys(("refusal", "reasoning_content", "reasoning"), lambda value: isinstance(value, str)),
}
"""Members of a delta that are passed on as they are, and what they have to be."""
_FINISHES: Mapping[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn"), FinishReason.STOP),
    **dict.fromkeys(("length", "max_tokens", "model_length"), FinishReason.LENGTH),
    **dict.fromkeys(("tool_calls", "function_call"), FinishReason.TOOL_CALLS),
    "content_filter": FinishReason.CONTENT_FILTER,
}
"""Every word that means an end. Others, such as ``abort`` and ``error``, mean that there is none."""


_SILENT = ChunkDelta()


class StreamParser(Protocol):
    """Makes parts of the bytes of one stream, whatever API it is of."""

    begun: bool
    """Whether any part of the answer has come."""
    whole: bool
    """Whether everything has come."""

    def feed(self, data: bytes) -> TextBatch | None:
        """What these bytes add; None if nothing.

        Raises:
            ReplicaLost: The answer has failed.
            MaitredError: The server said at the beginning why there is none; see `failures`.
        """
        ...

    def ended(self) -> None:
        """The body has ended, as HTTP sees it.

        Raises:
            ReplicaLost: The answer has not.
        """
        ...


class OpenAIStreamParser:
    """One stream of OpenAI's API; implements `StreamParser`.

    Args:
        server: Its name, for the log.
        choices: How many were asked for.
        dialect: What it keeps to.
        samples: Of these choices, how many answer the same prompt.

    Attributes:
        begun: Whether any part of the answer has come; a role alone is none.
        whole: Whether everything has come.
    """

    def __init__(self, server: str, choices: int, dialect: UpstreamDialect, samples: int = 1) -> None:
        self.begun = False
        self.whole = False
        self._server = server
        self._dialect = dialect
        self._events = SSESplitter()
        self._unfinished = set(range(choices))
        self._choices = choices
        self._samples = samples
        self._offsets = [0] * choices
        self._chunks = 0
        self._usage: Usage | None = None
        """As told before the first part."""
        self._counted = False
        self._own: list[Usage] = []
        """Of single choices, where each is counted by itself."""
        self._undecoded_bytes = 0

    def feed(self, data: bytes) -> TextBatch | None:
        """What these bytes add; None if nothing, and before the first part: a count alone is no sign of an answer.

        Raises:
            ReplicaLost: The answer has failed.
            MaitredError: The server said at the beginning why there is none; see `failures`.
        """
        events = self._events.feed(data)
        if len(events) == 1 and (batch := self._only_text(events[0])) is not None:
            return batch
        self._undecoded_bytes = 0 if events else self._undecoded_bytes + len(data)
        if self._undecoded_bytes > MOST_EVENT_BYTES:
            raise broken("it sent an event without an end")
        parts: list[TextDelta] = []
        usage, self._usage = self._usage, None
        before = self._chunks
        chunks = parse_chunks(events) if events and not self.whole else None
        if chunks is None:
            usage = self._take_each(events, parts) or usage
        else:
            usage = self._take_all(chunks, events, parts) or usage
            if len(chunks) < len(events):
                self._end()
        if not self.begun:
            self._usage = usage
            return None
        if not parts and usage is None:
            return None
        return TextBatch(parts, usage, self._chunks - before, self.whole)

    def ended(self) -> None:
        """The body has ended, as HTTP sees it.

        Raises:
            ReplicaLost: The answer has not.
        """
        if not self._dialect.done and self.begun and not self._unfinished and self._counted:
            self.whole = True
        if not self.whole:
            raise broken("the body ended before [DONE]" if self.begun else "the body was empty")

    def _end(self) -> None:
        """``[DONE]`` has come."""
        if self._unfinished:
            raise broken(f"it ended with {len(self._unfinished)} of {self._choices} choices unfinished")
        self.whole = True

    def _only_text(self, event: bytes) -> TextBatch | None:
        """Takes an event that only goes on with the text of an only choice, as most do; None: nothing was taken."""
        if not self.begun or self._choices != 1 or not self._unfinished:
            return None
        chunk = parse_chunk(event)
        text = None if chunk is None else chunk.plain_text()
        if chunk is None or text is None:
            return None
        self._chunks += 1
        self._offsets[0] += len(text)
        self._undecoded_bytes = 0
        count = None if chunk.usage is None else chunk.usage.usage()
        usage = None if count is None else self._settled(count, running=True)
        return TextBatch([TextDelta(0, text)], usage, 1)

    def _take_each(self, events: Sequence[bytes], parts: list[TextDelta]) -> Usage | None:
        """Takes events that may be anything; returns the usage in them."""
        usage = None
        for event in events:
            if self.whole:
                break
            if event.strip() == b"[DONE]":
                self._end()
            elif event.strip() != b"null":  # llama.cpp begins texts to continue with one, which says nothing
                usage = self._take(parse_chunk(event), event, parts) or usage
        return usage

    def _take_all(
        self, chunks: Sequence[UpstreamChunk], events: Sequence[bytes], parts: list[TextDelta]
    ) -> Usage | None:
        """Takes what came at once; plain text of an only choice becomes one part, however many chunks it came in."""
        usage: Usage | None = None
        texts: list[str] = []
        only = self._choices == 1
        for chunk, event in zip(chunks, events, strict=False):
            text = chunk.plain_text() if only and self._unfinished else None
            if text is None:
                if texts:
                    self._say(texts, parts)
                    texts = []
                usage = self._take(chunk, event, parts) or usage
                continue
            texts.append(text)
            self.begun = True
            self._chunks += 1
            if chunk.usage is not None and (counted := chunk.usage.usage()) is not None:
                usage = self._settled(counted, running=True) or usage
        if texts:
            self._say(texts, parts)
        return usage

    def _say(self, texts: Sequence[str], parts: list[TextDelta]) -> None:
        """Makes one part of them."""
        text = "".join(texts)
        parts.append(TextDelta(0, text))
        self._offsets[0] += len(text)

    def _take(self, chunk: UpstreamChunk | None, data: bytes, parts: list[TextDelta]) -> Usage | None:
        """Takes one event; appends the parts in it and returns the usage in it."""
        if chunk is None:
            self._raise_error_in(data)
            raise broken("it sent an event that is no chunk of an answer")
        if chunk.choices is None:
            self._raise_error_in(data)
            if chunk.usage is None:
                raise broken("it sent an event that is no chunk of an answer")
        usage = chunk.usage.usage() if chunk.usage is not None else None
        for choice in chunk.choices or ():
            part = self._part(choice)
            if part is not None:
                parts.append(part)
        return usage and self._settled(usage, running=bool(chunk.choices))

    def _settled(self, usage: Usage, *, running: bool) -> Usage | None:
        """What a count says of the whole answer.

        Args:
            usage: As it was sent.
            running: Whether it came with a choice: then, of several, it is of that one only.
        """
        if self._choices > 1 and self._dialect.usage_per_choice:
            self._own.append(usage)
            if len(self._own) < self._choices:
                return None
            usage = _together(self._own, self._samples)
        elif self._choices > 1 and running:
            return None
        if self._dialect.counts_chunks and usage.completion_tokens < self._chunks:
            raise broken(f"{self._chunks} chunks have {usage.completion_tokens} tokens: some came twice")
        self._counted = True
        return usage

    def _part(self, choice: ChunkChoice) -> TextDelta | None:
        index, delta = choice.index, choice.delta or _SILENT
        if not 0 <= index < self._choices:
            raise broken(f"it sent a choice {index} of {self._choices}")
        text = choice.text if choice.text is not None else delta.content
        text = text if isinstance(text, str) else ""
        extra = None
        if delta.tool_calls or delta.refusal or delta.reasoning_content or delta.reasoning:
            extra = {name: value for name in _EXTRAS if (value := getattr(delta, name))}
            if not all(_EXTRAS[name](value) for name, value in extra.items()):
                raise broken("it sent a delta whose members have other types than OpenAI's")
        if not text and extra is None and not choice.finish_reason:
            return None
        if index not in self._unfinished:
            raise broken(f"choice {index} went on after its end")
        scores = parse_scores(choice.logprobs, self._offsets[index])
        self._offsets[index] += len(text)
        if text or extra is not None:
            self._chunks += 1
        finish = None
        if choice.finish_reason:
            finish = _FINISHES.get(choice.finish_reason)
            if finish is None:
                raise broken(f"a choice ended for the reason {choice.finish_reason[:40]!r}, which is no end")
            self._unfinished.discard(index)
        self.begun = True
        return TextDelta(index, text, finish, scores, extra)

    def _raise_error_in(self, data: bytes) -> None:
        """Raises what an event says went wrong, if it says so."""
        try:
            error = error_in(msgspec.json.decode(data))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return
        if error is not None:
            raise self._failure(error)

    def _failure(self, error: ServerError) -> MaitredError:
        """The request may be at fault only while nothing has come; afterwards, the answer has broken off."""
        if self.begun:
            return broken(f"it reported an error: {error.message[:200]}")
        return to_failure(self._server, error.status or 502, error, None)


def _together(own: Sequence[Usage], samples: int) -> Usage:
    """The usage of all choices: a prompt counts once, however many answers it has.

    Of its tokens those were cached that none of its answers had to compute.
    """
    prompt_tokens = sum(usage.prompt_tokens for usage in own) // samples
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in own)
    return Usage(prompt_tokens, sum(usage.completion_tokens for usage in own), max(0, prompt_tokens - computed))


def broken(how: str, kind: type[ReplicaLost] = ReplicaLost) -> ReplicaLost:
    """An answer that failed: the caller is told that it did, the log what happened."""
    failure = kind()
    failure.add_note(how)
    return failure


def how_broken(failure: BaseException) -> str:
    """What is noted on a failure, for the log."""
    notes: Sequence[str] = getattr(failure, "__notes__", ())
    return "; ".join(notes) or str(failure)
