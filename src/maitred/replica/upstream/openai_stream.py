"""Parser of OpenAI's event streams, which also detects incomplete responses. It does no I/O: bytes in, deltas out.

Servers abort streams in many ways, and most of them look like a regular end. So a response is complete only if it has a
finish reason for every choice and then ``[DONE]`` (in a dialect without it, the usage and the end of the body).
Everything else is a failure: data that is no event, an event that is no JSON, an error event, output after the finish
reason of a choice, an unknown choice, more chunks than tokens (duplicates), or an end without ``[DONE]``.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from maitred.core.errors import MaitredError
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
from maitred.replica.upstream.errors import ReportedError, make_replica_lost, make_response_error, parse_error
from maitred.wire.sse import SSESplitter

MAX_EVENT_BYTES = 8 << 20
"""Maximum size of an event. The largest valid events have log-probabilities of many tokens."""
_EXTRA_FIELDS: Mapping[str, Callable[[object], bool]] = {
    "tool_calls": are_tool_calls,
    **dict.fromkeys(("refusal", "reasoning_content", "reasoning"), lambda value: isinstance(value, str)),
}
"""Fields of a delta that are forwarded unchanged, each with a function that checks its type."""
_FINISH_REASONS: Mapping[str, FinishReason] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "stop_sequence", "end_turn"), FinishReason.STOP),
    **dict.fromkeys(("length", "max_tokens", "model_length"), FinishReason.LENGTH),
    **dict.fromkeys(("tool_calls", "function_call"), FinishReason.TOOL_CALLS),
    "content_filter": FinishReason.CONTENT_FILTER,
}
"""Finish reason by the value of `finish_reason`.

Other values, such as ``abort`` and ``error``, mean that the response is incomplete.
"""


_EMPTY_DELTA = ChunkDelta()


class OpenAIStreamParser:
    """Parser of one stream of OpenAI's API. Implements `StreamParser` of `maitred.replica.upstream.stream`.

    Args:
        server: Name of the server, for log messages.
        choice_count: Number of requested choices, of all prompts together.
        dialect: Dialect of the server.
        choices_per_prompt: Number of choices of each prompt (`n`).

    Attributes:
        has_begun: Whether any part of the response was received; a role alone does not count.
        is_complete: Whether the whole response was received.
    """

    def __init__(self, server: str, choice_count: int, dialect: UpstreamDialect, choices_per_prompt: int = 1) -> None:
        self.has_begun = False
        self.is_complete = False
        self._server_name = server
        self._dialect = dialect
        self._splitter = SSESplitter()
        self._unfinished_choices = set(range(choice_count))
        self._choice_count = choice_count
        self._choices_per_prompt = choices_per_prompt
        self._text_offsets = [0] * choice_count
        self._chunk_count = 0
        self._usage_before_output: Usage | None = None
        """Usage that was received before the first delta."""
        self._has_usage = False
        self._choice_usages: list[Usage] = []
        """Usages of the single choices, in a dialect with `has_usage_per_choice`."""
        self._incomplete_event_bytes = 0

    def feed(self, data: bytes) -> TextBatch | None:
        """Parses data and returns a batch of new deltas; None if there are none.

        Before the first delta it returns None even if there is a usage, because a usage alone is no output.

        Raises:
            ReplicaLost: The response is invalid or incomplete.
            MaitredError: The stream begins with an error event; see `errors`.
        """
        events = self._splitter.feed(data)
        if len(events) == 1 and (batch := self._parse_text_event(events[0])) is not None:
            return batch
        self._incomplete_event_bytes = 0 if events else self._incomplete_event_bytes + len(data)
        if self._incomplete_event_bytes > MAX_EVENT_BYTES:
            raise make_replica_lost("it sent an event without an end")
        deltas: list[TextDelta] = []
        usage, self._usage_before_output = self._usage_before_output, None
        chunks_before = self._chunk_count
        chunks = parse_chunks(events) if events and not self.is_complete else None
        if chunks is None:
            usage = self._parse_events(events, deltas) or usage
        else:
            usage = self._process_chunks(chunks, events, deltas) or usage
            if len(chunks) < len(events):
                self._on_done()
        if not self.has_begun:
            self._usage_before_output = usage
            return None
        if not deltas and usage is None:
            return None
        return TextBatch(deltas, usage, self._chunk_count - chunks_before, self.is_complete)

    def on_end(self) -> None:
        """Handles the end of the HTTP body.

        Raises:
            ReplicaLost: The response is incomplete.
        """
        if not self._dialect.sends_done and self.has_begun and not self._unfinished_choices and self._has_usage:
            self.is_complete = True
        if not self.is_complete:
            raise make_replica_lost("the body ended before [DONE]" if self.has_begun else "the body was empty")

    def _on_done(self) -> None:
        """Handles ``[DONE]``; raises ReplicaLost if a choice is unfinished."""
        if self._unfinished_choices:
            raise make_replica_lost(
                f"it ended with {len(self._unfinished_choices)} of {self._choice_count} choices unfinished"
            )
        self.is_complete = True

    def _parse_text_event(self, event: bytes) -> TextBatch | None:
        """Parses an event that only adds text to the only choice, the common case; else returns None."""
        if not self.has_begun or self._choice_count != 1 or not self._unfinished_choices:
            return None
        chunk = parse_chunk(event)
        text = None if chunk is None else chunk.plain_text()
        if chunk is None or text is None:
            return None
        self._chunk_count += 1
        self._text_offsets[0] += len(text)
        self._incomplete_event_bytes = 0
        reported_usage = None if chunk.usage is None else chunk.usage.to_usage()
        usage = None if reported_usage is None else self._total_usage(reported_usage, running=True)
        return TextBatch([TextDelta(0, text)], usage, 1)

    def _parse_events(self, events: Sequence[bytes], deltas: list[TextDelta]) -> Usage | None:
        """Parses events one by one, appends their deltas and returns the last usage."""
        usage = None
        for event in events:
            if self.is_complete:
                break
            if event.strip() == b"[DONE]":
                self._on_done()
            elif event.strip() != b"null":  # llama.cpp starts the streams of /v1/completions with a meaningless null
                usage = self._process_chunk(parse_chunk(event), event, deltas) or usage
        return usage

    def _process_chunks(
        self, chunks: Sequence[UpstreamChunk], events: Sequence[bytes], deltas: list[TextDelta]
    ) -> Usage | None:
        """Processes chunks that arrived together; merges consecutive text of a single choice into one delta."""
        usage: Usage | None = None
        texts: list[str] = []
        single_choice = self._choice_count == 1
        for chunk, event in zip(chunks, events, strict=False):
            text = chunk.plain_text() if single_choice and self._unfinished_choices else None
            if text is None:
                if texts:
                    self._append_text_delta(texts, deltas)
                    texts = []
                usage = self._process_chunk(chunk, event, deltas) or usage
                continue
            texts.append(text)
            self.has_begun = True
            self._chunk_count += 1
            if chunk.usage is not None and (reported_usage := chunk.usage.to_usage()) is not None:
                usage = self._total_usage(reported_usage, running=True) or usage
        if texts:
            self._append_text_delta(texts, deltas)
        return usage

    def _append_text_delta(self, texts: Sequence[str], deltas: list[TextDelta]) -> None:
        """Appends one delta with the joined texts."""
        text = "".join(texts)
        deltas.append(TextDelta(0, text))
        self._text_offsets[0] += len(text)

    def _process_chunk(self, chunk: UpstreamChunk | None, data: bytes, deltas: list[TextDelta]) -> Usage | None:
        """Processes one chunk: appends its deltas and returns its usage."""
        if chunk is None:
            self._raise_reported_error(data)
            raise make_replica_lost("it sent an event that is no chunk of an answer")
        if chunk.choices is None:
            self._raise_reported_error(data)
            if chunk.usage is None:
                raise make_replica_lost("it sent an event that is no chunk of an answer")
        usage = chunk.usage.to_usage() if chunk.usage is not None else None
        for choice in chunk.choices or ():
            delta = self._make_delta(choice)
            if delta is not None:
                deltas.append(delta)
        return usage and self._total_usage(usage, running=bool(chunk.choices))

    def _total_usage(self, usage: Usage, *, running: bool) -> Usage | None:
        """Returns the usage of the whole response; None if the reported usage covers only one choice.

        Args:
            usage: The reported usage.
            running: Whether its chunk also has a choice; if the response has several, the usage is only of that one.
        """
        if self._choice_count > 1 and self._dialect.has_usage_per_choice:
            self._choice_usages.append(usage)
            if len(self._choice_usages) < self._choice_count:
                return None
            usage = _merge_usages(self._choice_usages, self._choices_per_prompt)
        elif self._choice_count > 1 and running:
            return None
        if self._dialect.has_token_per_chunk and usage.completion_tokens < self._chunk_count:
            raise make_replica_lost(
                f"{self._chunk_count} chunks have {usage.completion_tokens} tokens: some came twice"
            )
        self._has_usage = True
        return usage

    def _make_delta(self, choice: ChunkChoice) -> TextDelta | None:
        index, delta = choice.index, choice.delta or _EMPTY_DELTA
        if not 0 <= index < self._choice_count:
            raise make_replica_lost(f"it sent a choice {index} of {self._choice_count}")
        text = choice.text if choice.text is not None else delta.content
        text = text if isinstance(text, str) else ""
        extra = None
        if delta.tool_calls or delta.refusal or delta.reasoning_content or delta.reasoning:
            extra = {name: value for name in _EXTRA_FIELDS if (value := getattr(delta, name))}
            if not all(_EXTRA_FIELDS[name](value) for name, value in extra.items()):
                raise make_replica_lost("it sent a delta whose members have other types than OpenAI's")
        if not text and extra is None and not choice.finish_reason:
            return None
        if index not in self._unfinished_choices:
            raise make_replica_lost(f"choice {index} went on after its end")
        logprobs = parse_scores(choice.logprobs, self._text_offsets[index])
        self._text_offsets[index] += len(text)
        if text or extra is not None:
            self._chunk_count += 1
        finish_reason = None
        if choice.finish_reason:
            finish_reason = _FINISH_REASONS.get(choice.finish_reason)
            if finish_reason is None:
                raise make_replica_lost(f"a choice ended for the reason {choice.finish_reason[:40]!r}, which is no end")
            self._unfinished_choices.discard(index)
        self.has_begun = True
        stop = None
        if finish_reason is FinishReason.STOP:
            stop = next((stop for stop in (choice.stop_reason, choice.matched_stop) if isinstance(stop, str)), None)
        return TextDelta(index, text, finish=finish_reason, scores=logprobs, extra=extra, stop=stop)

    def _raise_reported_error(self, data: bytes) -> None:
        """Raises an exception if the event is an error event."""
        try:
            error = parse_error(msgspec.json.decode(data))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return
        if error is not None:
            raise self._make_error(error)

    def _make_error(self, error: ReportedError) -> MaitredError:
        """Makes the exception for an error event.

        An error after the first output is always ReplicaLost, because the request was valid.
        """
        if self.has_begun:
            return make_replica_lost(f"it reported an error: {error.message[:200]}")
        return make_response_error(self._server_name, error.status or 502, error, None)


def _merge_usages(usages: Sequence[Usage], choices_per_prompt: int) -> Usage:
    """Merges the usages of all choices; each prompt is counted once, not once per choice.

    The cached tokens are the prompt tokens that were not computed for any choice.
    """
    prompt_tokens = sum(usage.prompt_tokens for usage in usages) // choices_per_prompt
    computed_tokens = sum(usage.prompt_tokens - usage.cached_tokens for usage in usages)
    return Usage(
        prompt_tokens, sum(usage.completion_tokens for usage in usages), max(0, prompt_tokens - computed_tokens)
    )
