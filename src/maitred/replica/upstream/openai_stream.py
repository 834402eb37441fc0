"""Parser of OpenAI's event streams, which finds out whether an answer is complete. Pure: bytes in, deltas out.

Servers break off in many ways, and most of them look like an end. So an answer is complete only if everything has come
that makes it so: a finish reason for every choice and, after that, ``[DONE]`` (in a dialect without it, the usage, and
the end of the body). Everything else is a failure: bytes that are no events, events that are no JSON, an error in an
event, a choice that goes on after its end, a choice that was not asked for, more chunks than tokens (something was sent
twice), and silence where the terminator should be.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from maitred.core.errors import MaitredError, ReplicaLost
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason, Usage
from maitred.core.text_replica import TextBatch
from maitred.replica.upstream.chunk import (
    ChunkChoice,
    ChunkDelta,
    UpstreamChunk,
    are_tool_calls,
    parse_chunk,
    parse_chunks,
    parse_scores,
)
from maitred.replica.upstream.dialects import UpstreamDialect
from maitred.replica.upstream.errors import ServerError, make_failure, parse_error
from maitred.wire.sse import SSESplitter

MAX_EVENT_BYTES = 8 << 20
"""Largest event that is accepted. The largest legitimate ones have log-probabilities for many tokens."""
_EXTRA_FIELDS: Mapping[str, Callable[[object], bool]] = {
    "tool_calls": are_tool_calls,
    **dict.fromkeys(("refusal", "reasoning_content", "reasoning"), lambda value: isinstance(value, str)),
}
"""Fields of a delta that are passed on as they are, each with the check of its type."""
_FINISH_REASONS: Mapping[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn"), FinishReason.STOP),
    **dict.fromkeys(("length", "max_tokens", "model_length"), FinishReason.LENGTH),
    **dict.fromkeys(("tool_calls", "function_call"), FinishReason.TOOL_CALLS),
    "content_filter": FinishReason.CONTENT_FILTER,
}
"""Finish reason for every word that means an end.

Other words, such as ``abort`` and ``error``, mean that there is none.
"""


_EMPTY_DELTA = ChunkDelta()


class StreamParser(Protocol):
    """Parser of the bytes of one stream, whatever its API."""

    has_begun: bool
    """Whether any part of the answer has come."""
    is_complete: bool
    """Whether everything has come."""

    def feed(self, data: bytes) -> TextBatch | None:
        """Parses bytes and returns the batch that they add; None if they add nothing.

        Raises:
            ReplicaLost: The answer has failed.
            MaitredError: The server reported at the beginning why there is no answer; see `errors`.
        """
        ...

    def on_end(self) -> None:
        """Notes the end of the body, as HTTP sees it.

        Raises:
            ReplicaLost: The answer is not complete.
        """
        ...


class OpenAIStreamParser:
    """Parser of one stream of OpenAI's API. Implements `StreamParser`.

    Args:
        server: Name of the server, for the log.
        choices: Number of choices that were asked for.
        dialect: Dialect of the server.
        samples: How many of these choices answer the same prompt.

    Attributes:
        has_begun: Whether any part of the answer has come; a role alone is none.
        is_complete: Whether everything has come.
    """

    def __init__(self, server: str, choices: int, dialect: UpstreamDialect, samples: int = 1) -> None:
        self.has_begun = False
        self.is_complete = False
        self._server = server
        self._dialect = dialect
        self._splitter = SSESplitter()
        self._unfinished = set(range(choices))
        self._choices = choices
        self._samples = samples
        self._offsets = [0] * choices
        self._chunk_count = 0
        self._early_usage: Usage | None = None
        """Usage that came before the first part."""
        self._has_usage = False
        self._choice_usages: list[Usage] = []
        """Usages of single choices, where each is counted by itself."""
        self._undecoded_bytes = 0

    def feed(self, data: bytes) -> TextBatch | None:
        """Parses bytes and returns the batch that they add; None if they add nothing.

        Before the first part there is no batch either: a usage alone is no sign of an answer.

        Raises:
            ReplicaLost: The answer has failed.
            MaitredError: The server reported at the beginning why there is no answer; see `errors`.
        """
        events = self._splitter.feed(data)
        if len(events) == 1 and (batch := self._take_text_event(events[0])) is not None:
            return batch
        self._undecoded_bytes = 0 if events else self._undecoded_bytes + len(data)
        if self._undecoded_bytes > MAX_EVENT_BYTES:
            raise make_replica_lost("it sent an event without an end")
        parts: list[TextDelta] = []
        usage, self._early_usage = self._early_usage, None
        chunks_before = self._chunk_count
        chunks = parse_chunks(events) if events and not self.is_complete else None
        if chunks is None:
            usage = self._take_events(events, parts) or usage
        else:
            usage = self._take_chunks(chunks, events, parts) or usage
            if len(chunks) < len(events):
                self._on_done()
        if not self.has_begun:
            self._early_usage = usage
            return None
        if not parts and usage is None:
            return None
        return TextBatch(parts, usage, self._chunk_count - chunks_before, self.is_complete)

    def on_end(self) -> None:
        """Notes the end of the body, as HTTP sees it.

        Raises:
            ReplicaLost: The answer is not complete.
        """
        if not self._dialect.sends_done and self.has_begun and not self._unfinished and self._has_usage:
            self.is_complete = True
        if not self.is_complete:
            raise make_replica_lost("the body ended before [DONE]" if self.has_begun else "the body was empty")

    def _on_done(self) -> None:
        """Ends the answer at ``[DONE]``; fails it if a choice is unfinished."""
        if self._unfinished:
            raise make_replica_lost(f"it ended with {len(self._unfinished)} of {self._choices} choices unfinished")
        self.is_complete = True

    def _take_text_event(self, event: bytes) -> TextBatch | None:
        """Takes an event that only adds text to a single choice, as most do; None: nothing was taken."""
        if not self.has_begun or self._choices != 1 or not self._unfinished:
            return None
        chunk = parse_chunk(event)
        text = None if chunk is None else chunk.plain_text()
        if chunk is None or text is None:
            return None
        self._chunk_count += 1
        self._offsets[0] += len(text)
        self._undecoded_bytes = 0
        reported_usage = None if chunk.usage is None else chunk.usage.to_usage()
        usage = None if reported_usage is None else self._check_usage(reported_usage, running=True)
        return TextBatch([TextDelta(0, text)], usage, 1)

    def _take_events(self, events: Sequence[bytes], parts: list[TextDelta]) -> Usage | None:
        """Takes events of any kind, one by one; returns the usage in them."""
        usage = None
        for event in events:
            if self.is_complete:
                break
            if event.strip() == b"[DONE]":
                self._on_done()
            elif event.strip() != b"null":  # llama.cpp begins texts to continue with a null, which has no meaning
                usage = self._take_chunk(parse_chunk(event), event, parts) or usage
        return usage

    def _take_chunks(
        self, chunks: Sequence[UpstreamChunk], events: Sequence[bytes], parts: list[TextDelta]
    ) -> Usage | None:
        """Takes chunks that came at once; consecutive text of a single choice becomes one part."""
        usage: Usage | None = None
        texts: list[str] = []
        single_choice = self._choices == 1
        for chunk, event in zip(chunks, events, strict=False):
            text = chunk.plain_text() if single_choice and self._unfinished else None
            if text is None:
                if texts:
                    self._append_text(texts, parts)
                    texts = []
                usage = self._take_chunk(chunk, event, parts) or usage
                continue
            texts.append(text)
            self.has_begun = True
            self._chunk_count += 1
            if chunk.usage is not None and (reported_usage := chunk.usage.to_usage()) is not None:
                usage = self._check_usage(reported_usage, running=True) or usage
        if texts:
            self._append_text(texts, parts)
        return usage

    def _append_text(self, texts: Sequence[str], parts: list[TextDelta]) -> None:
        """Appends one part that holds all these texts."""
        text = "".join(texts)
        parts.append(TextDelta(0, text))
        self._offsets[0] += len(text)

    def _take_chunk(self, chunk: UpstreamChunk | None, data: bytes, parts: list[TextDelta]) -> Usage | None:
        """Takes one chunk; appends its parts and returns its usage."""
        if chunk is None:
            self._raise_reported_error(data)
            raise make_replica_lost("it sent an event that is no chunk of an answer")
        if chunk.choices is None:
            self._raise_reported_error(data)
            if chunk.usage is None:
                raise make_replica_lost("it sent an event that is no chunk of an answer")
        usage = chunk.usage.to_usage() if chunk.usage is not None else None
        for choice in chunk.choices or ():
            part = self._make_delta(choice)
            if part is not None:
                parts.append(part)
        return usage and self._check_usage(usage, running=bool(chunk.choices))

    def _check_usage(self, usage: Usage, *, running: bool) -> Usage | None:
        """Returns the usage of the whole answer, if a reported one stands for it.

        Args:
            usage: Usage as it was reported.
            running: Whether it came with a choice: then, of several, it belongs to that one only.
        """
        if self._choices > 1 and self._dialect.has_usage_per_choice:
            self._choice_usages.append(usage)
            if len(self._choice_usages) < self._choices:
                return None
            usage = _merge_usages(self._choice_usages, self._samples)
        elif self._choices > 1 and running:
            return None
        if self._dialect.has_token_per_chunk and usage.completion_tokens < self._chunk_count:
            raise make_replica_lost(
                f"{self._chunk_count} chunks have {usage.completion_tokens} tokens: some came twice"
            )
        self._has_usage = True
        return usage

    def _make_delta(self, choice: ChunkChoice) -> TextDelta | None:
        index, delta = choice.index, choice.delta or _EMPTY_DELTA
        if not 0 <= index < self._choices:
            raise make_replica_lost(f"it sent a choice {index} of {self._choices}")
        text = choice.text if choice.text is not None else delta.content
        text = text if isinstance(text, str) else ""
        extra = None
        if delta.tool_calls or delta.refusal or delta.reasoning_content or delta.reasoning:
            extra = {name: value for name in _EXTRA_FIELDS if (value := getattr(delta, name))}
            if not all(_EXTRA_FIELDS[name](value) for name, value in extra.items()):
                raise make_replica_lost("it sent a delta whose members have other types than OpenAI's")
        if not text and extra is None and not choice.finish_reason:
            return None
        if index not in self._unfinished:
            raise make_replica_lost(f"choice {index} went on after its end")
        scores = parse_scores(choice.logprobs, self._offsets[index])
        self._offsets[index] += len(text)
        if text or extra is not None:
            self._chunk_count += 1
        finish = None
        if choice.finish_reason:
            finish = _FINISH_REASONS.get(choice.finish_reason)
            if finish is None:
                raise make_replica_lost(f"a choice ended for the reason {choice.finish_reason[:40]!r}, which is no end")
            self._unfinished.discard(index)
        self.has_begun = True
        return TextDelta(index, text, finish, scores, extra)

    def _raise_reported_error(self, data: bytes) -> None:
        """Raises the error that an event reports, if it reports one."""
        try:
            error = parse_error(msgspec.json.decode(data))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return
        if error is not None:
            raise self._make_failure(error)

    def _make_failure(self, error: ServerError) -> MaitredError:
        """Makes the error for a reported one.

        The request may be at fault only while nothing has come; afterwards, the answer has broken off.
        """
        if self.has_begun:
            return make_replica_lost(f"it reported an error: {error.message[:200]}")
        return make_failure(self._server, error.status or 502, error, None)


def _merge_usages(usages: Sequence[Usage], samples: int) -> Usage:
    """Merges the usages of all choices: a prompt counts once, however many answers it has.

    The prompt tokens that no answer had to compute count as cached.
    """
    prompt_tokens = sum(usage.prompt_tokens for usage in usages) // samples
    computed = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    return Usage(prompt_tokens, sum(usage.completion_tokens for usage in usages), max(0, prompt_tokens - computed))


def make_replica_lost(reason: str, error_class: type[ReplicaLost] = ReplicaLost) -> ReplicaLost:
    """Makes the error of an answer that failed; the caller learns that it failed, and the log gets the reason."""
    failure = error_class()
    failure.add_note(reason)
    return failure


def failure_details(failure: BaseException) -> str:
    """Returns the reasons that are noted on an error, for the log."""
    notes: Sequence[str] = getattr(failure, "__notes__", ())
    return "; ".join(notes) or str(failure)
