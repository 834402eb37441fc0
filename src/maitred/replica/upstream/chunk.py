"""Structs of the chunks of OpenAI's streams, with the fields that the gateway uses."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from maitred.core.inference import TokenLogprob, TokenScore
from maitred.core.request import MOST_TOKENS, Usage


class PromptDetails(msgspec.Struct):
    """Details of the prompt tokens, as in OpenAI's `prompt_tokens_details`."""

    cached_tokens: int | None = None


class ReportedUsage(msgspec.Struct):
    """Usage as the server reports it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    def to_usage(self) -> Usage | None:
        """Converts it into a `Usage`; None if the numbers are missing or out of range."""
        prompt, completion, details = self.prompt_tokens, self.completion_tokens, self.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        if prompt is None or completion is None or cached < 0:
            return None
        if not (0 <= prompt <= MOST_TOKENS and 0 <= completion <= MOST_TOKENS):
            return None
        return Usage(prompt, completion, min(cached, prompt))


class ChunkDelta(msgspec.Struct):
    """OpenAI's `delta`: an addition to the message."""

    content: Any = None
    tool_calls: Any = None
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCallDelta(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _FunctionDelta | None = None


def are_tool_calls(pieces: Any) -> bool:  # noqa: ANN401 - whatever JSON can be
    """Returns whether the value is a list of tool call deltas with valid types."""
    try:
        msgspec.convert(pieces, list[_ToolCallDelta])
    except msgspec.ValidationError:
        return False
    return True


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]] | None = None

    def to_logprob(self) -> TokenLogprob:
        return TokenLogprob(
            self.token, bytes(self.bytes) if self.bytes is not None else self.token.encode(), self.logprob
        )


class _TokenLogprobs(_TopLogprob):
    top_logprobs: list[_TopLogprob] | None = None


class Logprobs(msgspec.Struct):
    """Log-probabilities: of a chat chunk in `content`, of a completions chunk in the other fields."""

    content: list[_TokenLogprobs] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class ChunkChoice(msgspec.Struct):
    """OpenAI's `choices[]`: an addition to one choice."""

    index: int = 0
    delta: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    """What ended the choice, in vLLM: a stop string, or the number of a stop token."""
    matched_stop: Any = None
    """The same in SGLang."""
    logprobs: Logprobs | None = None


class UpstreamChunk(msgspec.Struct):
    """Data of one server-sent event: a chunk of the stream."""

    choices: list[ChunkChoice] | None = None
    usage: ReportedUsage | None = None

    def plain_text(self) -> str | None:
        """Returns the text if the chunk has only text of one choice, the common case; else None."""
        choices = self.choices
        if choices is None or len(choices) != 1:
            return None
        choice = choices[0]
        if choice.index or choice.finish_reason or choice.logprobs is not None:
            return None
        text: object = choice.text
        if (delta := choice.delta) is not None:
            if delta.tool_calls or delta.refusal or delta.reasoning_content or delta.reasoning:
                return None
            text = delta.content if text is None else text
        return text if isinstance(text, str) and text else None


_chunk_decoder = msgspec.json.Decoder(UpstreamChunk)


def parse_chunk(data: bytes) -> UpstreamChunk | None:
    """Parses one chunk; returns None if the data is not a chunk.

    Invalid UTF-8 is replaced, as the specification of event streams requires.
    """
    try:
        try:
            return _chunk_decoder.decode(data)
        except UnicodeDecodeError:
            return _chunk_decoder.decode(data.decode("utf-8", "replace"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def parse_chunks(events: Sequence[bytes]) -> list[UpstreamChunk] | None:
    """Parses several events with one call of the JSON decoder; a ``[DONE]`` at the end is skipped.

    It joins the events with line breaks; if every break is between ``}`` and ``{`` and there are as many values as
    events, each event is one value. Otherwise it returns None, and the caller must parse the events one by one.
    """
    if len(events) == 1:
        try:
            return [_chunk_decoder.decode(events[0])]
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
    chunk_count = len(events) - (events[-1] == b"[DONE]")
    lines = b"\n".join(events[:chunk_count])
    if lines.count(b"}\n{") != chunk_count - 1 or lines.count(b"\n") != chunk_count - 1:
        return None
    try:
        chunks = _chunk_decoder.decode_lines(lines)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return chunks if len(chunks) == chunk_count else None


def parse_scores(logprobs: Logprobs | None, offset: int) -> list[TokenScore] | None:
    """Returns the log-probabilities of each token; None if the chunk has none.

    Args:
        logprobs: Log-probabilities of a chunk.
        offset: Number of characters of the choice's text before this chunk.
    """
    if logprobs is None:
        return None
    scores: list[TokenScore] = []
    if logprobs.content is not None:
        for token in logprobs.content:
            scores.append(
                TokenScore(token.to_logprob(), [top.to_logprob() for top in token.top_logprobs or ()], offset)
            )
            offset += len(token.token)
        return scores
    if logprobs.tokens is None:
        return None
    token_logprobs, tops = logprobs.token_logprobs or (), logprobs.top_logprobs or ()
    offsets = logprobs.text_offset or ()
    for position, text in enumerate(logprobs.tokens):
        value = token_logprobs[position] if position < len(token_logprobs) else None
        top = (tops[position] if position < len(tops) else None) or {}
        scores.append(
            TokenScore(
                # The first token of an echoed prompt has no log-probability, but `TokenLogprob` requires one: use 0.
                TokenLogprob(text, text.encode(), 0.0 if value is None else value),
                [TokenLogprob(other, other.encode(), logprob) for other, logprob in top.items()],
                offsets[position] if position < len(offsets) else offset,
            )
        )
        offset += len(text)
    return scores
