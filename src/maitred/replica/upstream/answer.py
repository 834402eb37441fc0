"""Reads a server's stream, and finds out whether it is whole. Pure: bytes in, parts out.

Servers break off in many ways, and most of them look like an end. So an answer is only whole if everything that makes
one has come: a finish reason for every choice and, after that, ``[DONE]`` (of a dialect without it, the usage, and the
end of the body). Whatever else happens is a failure: bytes
that are no events, events that are no JSON, an error inside, a choice that goes on after its end, a sequence of
choices that was not asked for, more chunks than tokens (something was sent twice), and silence where the terminator
should be.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from maitred.core.answer import Part
from maitred.core.errors import MaitredError, ReplicaLost
from maitred.core.relay import Batch
from maitred.core.request import FinishReason, Usage
from maitred.replica.upstream.dialects import Dialect
from maitred.replica.upstream.failures import ServerError, error_in, failure_of
from maitred.replica.upstream.logprobs import Logprobs, scores_of
from maitred.wire.event_cutter import EventCutter

MOST_EVENT_BYTES = 8 << 20
"""Of one event. The largest honest ones have log-probabilities for many tokens."""
_EXTRAS: Mapping[str, type] = {"tool_calls": list, "refusal": str, "reasoning_content": str, "reasoning": str}
"""Members of a delta that are passed on as they are."""
_FINISHES: Mapping[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn"), FinishReason.STOP),
    **dict.fromkeys(("length", "max_tokens", "model_length"), FinishReason.LENGTH),
    **dict.fromkeys(("tool_calls", "function_call"), FinishReason.TOOL_CALLS),
    "content_filter": FinishReason.CONTENT_FILTER,
}
"""Every word that means an end. Others, such as ``abort`` and ``error``, mean that there is none."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None

    def usage(self) -> Usage | None:
        prompt, completion, details = self.prompt_tokens, self.completion_tokens, self.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        if prompt is None or completion is None or min(prompt, completion, cached) < 0:
            return None
        return Usage(prompt, completion, min(cached, prompt))


class _Delta(msgspec.Struct):
    content: Any = None
    tool_calls: Any = None
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


_chunk = msgspec.json.Decoder(_Chunk)
_SILENT = _Delta()


class Reader(Protocol):
    """Makes parts of the bytes of one stream, whatever API it is of."""

    begun: bool
    """Whether any part of the answer has come."""
    whole: bool
    """Whether everything has come."""

    def feed(self, data: bytes) -> Batch | None:
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


class AnswerReader:
    """One stream of OpenAI's API; implements `Reader`.

    Args:
        server: Its name, for the log.
        choices: How many were asked for.
        dialect: What it keeps to.
        samples: Of these choices, how many answer the same prompt.

    Attributes:
        begun: Whether any part of the answer has come; a role alone is none.
        whole: Whether everything has come.
    """

    def __init__(self, server: str, choices: int, dialect: Dialect, samples: int = 1) -> None:
        self.begun = False
        self.whole = False
        self._server = server
        self._dialect = dialect
        self._events = EventCutter()
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

    def feed(self, data: bytes) -> Batch | None:
        """What these bytes add; None if nothing, and before the first part: a count alone is no sign of an answer.

        Raises:
            ReplicaLost: The answer has failed.
            MaitredError: The server said at the beginning why there is none; see `failures`.
        """
        parts: list[Part] = []
        usage, self._usage = self._usage, None
        events = self._events.feed(data)
        self._undecoded_bytes = 0 if events else self._undecoded_bytes + len(data)
        if self._undecoded_bytes > MOST_EVENT_BYTES:
            raise broken("it sent an event without an end")
        chunks = _chunks_of(events) if len(events) > 1 else None
        before = self._chunks
        if chunks is not None:
            usage = self._take_all(chunks, events, parts) or usage
            if len(chunks) < len(events):
                self._end()
        else:
            for event in events:
                if self.whole:
                    break
                if event.strip() == b"[DONE]":
                    self._end()
                elif event.strip() != b"null":  # llama.cpp begins texts to continue with one, which says nothing
                    usage = self._take(_chunk_or_none(event), event, parts) or usage
        if not self.begun:
            self._usage = usage
            return None
        return Batch(parts, usage, self._chunks - before) if parts or usage is not None else None

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

    def _take_all(self, chunks: Sequence[_Chunk], events: Sequence[bytes], parts: list[Part]) -> Usage | None:
        """Takes what came at once; plain text of an only choice becomes one part, however many chunks it came in."""
        usage = None
        texts: list[str] = []
        for chunk, event in zip(chunks, events, strict=False):
            text = _plain_text_of(chunk) if self._choices == 1 and self._unfinished else None
            if text is None:
                self._say(texts, parts)
                usage = self._take(chunk, event, parts) or usage
                continue
            texts.append(text)
            self.begun = True
            self._chunks += 1
            if chunk.usage is not None and (counted := chunk.usage.usage()) is not None:
                usage = self._settled(counted, running=True) or usage
        self._say(texts, parts)
        return usage

    def _say(self, texts: list[str], parts: list[Part]) -> None:
        """Makes one part of them, if there are any."""
        if texts:
            text = "".join(texts)
            texts.clear()
            parts.append(Part(0, text))
            self._offsets[0] += len(text)

    def _take(self, chunk: _Chunk | None, data: bytes, parts: list[Part]) -> Usage | None:
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

    def _part(self, choice: _Choice) -> Part | None:
        index, delta = choice.index, choice.delta or _SILENT
        if not 0 <= index < self._choices:
            raise broken(f"it sent a choice {index} of {self._choices}")
        text = choice.text if choice.text is not None else delta.content
        text = text if isinstance(text, str) else ""
        extra = None
        if delta.tool_calls or delta.refusal or delta.reasoning_content or delta.reasoning:
            extra = {name: value for name in _EXTRAS if (value := getattr(delta, name))}
            if not all(isinstance(value, _EXTRAS[name]) for name, value in extra.items()):
                raise broken("it sent a delta whose members have other types than OpenAI's")
        if not text and extra is None and not choice.finish_reason:
            return None
        if index not in self._unfinished:
            raise broken(f"choice {index} went on after its end")
        scores = scores_of(choice.logprobs, self._offsets[index])
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
        return Part(index, text, finish, scores, extra)

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
        return failure_of(self._server, error.status or 502, error, None)


def _chunk_or_none(data: bytes) -> _Chunk | None:
    """Reads a chunk; None if it is none. What in it is no UTF-8 is replaced, as in every stream of events."""
    try:
        try:
            return _chunk.decode(data)
        except UnicodeDecodeError:
            return _chunk.decode(data.decode("utf-8", "replace"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def _chunks_of(events: Sequence[bytes]) -> list[_Chunk] | None:
    """Reads events in one call, a line each; without ``[DONE]``, if that is the last one.

    Where a line begins with ``{`` and the one before ends with ``}``, no value can go on from one to the next, and with
    as many values as lines each has its own. None: they are not like that, and have to be looked at one by one.
    """
    count = len(events) - (events[-1] == b"[DONE]")
    lines = b"\n".join(events[:count])
    if lines.count(b"}\n{") != count - 1 or lines.count(b"\n") != count - 1:
        return None
    try:
        chunks = _chunk.decode_lines(lines)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return chunks if len(chunks) == count else None


def _plain_text_of(chunk: _Chunk) -> str | None:
    """The text of a chunk that has nothing else, as most have; None of any other."""
    choices = chunk.choices
    if choices is None or len(choices) != 1:
        return None
    choice = choices[0]
    delta = choice.delta
    if delta is None or choice.index or choice.text is not None or choice.finish_reason or choice.logprobs is not None:
        return None
    if delta.tool_calls or delta.refusal or delta.reasoning_content or delta.reasoning:
        return None
    text = delta.content
    return text if isinstance(text, str) and text else None


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
