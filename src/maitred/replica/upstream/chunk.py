"""Structs of a stream chunk of OpenAI's API, with the fields that are used here."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from maitred.core.inference import TokenLogprob, TokenScore
from maitred.core.request import MOST_TOKENS, Usage


class PromptDetails(msgspec.Struct):
    """Details of the prompt tokens in a usage."""

    cached_tokens: int | None = None


class ReportedUsage(msgspec.Struct):
    """Usage as the server reports it."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    def to_usage(self) -> Usage | None:
        """Returns the usage as a `Usage`; None if the reported numbers cannot be right."""
        prompt, completion, details = self.prompt_tokens, self.completion_tokens, self.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        if prompt is None or completion is None or cached < 0:
            return None
        if not (0 <= prompt <= MOST_TOKENS and 0 <= completion <= MOST_TOKENS):
            return None
        return Usage(prompt, completion, min(cached, prompt))


class ChunkDelta(msgspec.Struct):
    """New part of a message."""

    content: Any = None
    tool_calls: Any = None
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCallPiece(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


def are_tool_calls(pieces: Any) -> bool:  # noqa: ANN401 - whatever JSON can be
    """Returns whether these are pieces of tool calls with the types that their consumers expect."""
    try:
        msgspec.convert(pieces, list[_ToolCallPiece])
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
    """Log-probabilities of a chat chunk (`content`) or of a text chunk (the other fields, one entry per token)."""

    content: list[_TokenLogprobs] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class ChunkChoice(msgspec.Struct):
    """New part of one choice."""

    index: int = 0
    delta: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class UpstreamChunk(msgspec.Struct):
    """Data of one event of the stream."""

    choices: list[ChunkChoice] | None = None
    usage: ReportedUsage | None = None

    def plain_text(self) -> str | None:
        """Returns the text of a chunk that has nothing else of an answer, as most have; None for any other chunk."""
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


_decoder = msgspec.json.Decoder(UpstreamChunk)


def parse_chunk(data: bytes) -> UpstreamChunk | None:
    """Parses one chunk; None if the data is no chunk.

    Bytes that are not UTF-8 are replaced, as in every event stream.
    """
    try:
        try:
            return _decoder.decode(data)
        except UnicodeDecodeError:
            return _decoder.decode(data.decode("utf-8", "replace"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def parse_chunks(events: Sequence[bytes]) -> list[UpstreamChunk] | None:
    """Parses events in one call, a line each; without ``[DONE]``, if that is the last of several.

    Where a line begins with ``{`` and the one before ends with ``}``, no value can go on from one line to the next, and
    with as many values as lines each line has its own. None: the events are not like that, and have to be parsed one by
    one.
    """
    if len(events) == 1:
        try:
            return [_decoder.decode(events[0])]
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
    count = len(events) - (events[-1] == b"[DONE]")
    lines = b"\n".join(events[:count])
    if lines.count(b"}\n{") != count - 1 or lines.count(b"\n") != count - 1:
        return None
    try:
        chunks = _decoder.decode_lines(lines)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return chunks if len(chunks) == count else None


def parse_scores(logprobs: Logprobs | None, offset: int) -> list[TokenScore] | None:
    """Returns one score per token; None if there are none.

    Args:
        logprobs: Log-probabilities of a chunk.
        offset: Characters of the choice's text before the chunk.
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
    values, tops = logprobs.token_logprobs or (), logprobs.top_logprobs or ()
    offsets = logprobs.text_offset or ()
    for position, text in enumerate(logprobs.tokens):
        value = values[position] if position < len(values) else None
        top = (tops[position] if position < len(tops) else None) or {}
        scores.append(
            TokenScore(
                # The first token of an echoed prompt has no log-probability; a `TokenLogprob` must have one.
                TokenLogprob(text, text.encode(), 0.0 if value is None else value),
                [TokenLogprob(other, other.encode(), logprob) for other, logprob in top.items()],
                offsets[position] if position < len(offsets) else offset,
            )
        )
        offset += len(text)
    return scores
