"""A chunk of a stream of OpenAI's API, as far as it is read here."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from maitred.core.answer import TokenLogprob, TokenScore
from maitred.core.request import MOST_TOKENS, Usage


class PromptDetails(msgspec.Struct):
    """What is told of a prompt's tokens."""

    cached_tokens: int | None = None


class ReportedUsage(msgspec.Struct):
    """What a server says that it has counted."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    def usage(self) -> Usage | None:
        """The same as we say it; None: it cannot be."""
        prompt, completion, details = self.prompt_tokens, self.completion_tokens, self.prompt_tokens_details
        cached = (details.cached_tokens if details else None) or 0
        if prompt is None or completion is None or cached < 0:
            return None
        if not (0 <= prompt <= MOST_TOKENS and 0 <= completion <= MOST_TOKENS):
            return None
        return Usage(prompt, completion, min(cached, prompt))


class ChunkDelta(msgspec.Struct):
    """What is new of a message."""

    content: Any = None
    tool_calls: Any = None
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPiece(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


def are_calls(pieces: Any) -> bool:  # noqa: ANN401 - whatever JSON can be
    """Whether these are pieces of tool calls, as whoever puts them together takes them."""
    try:
        msgspec.convert(pieces, list[_CallPiece])
    except msgspec.ValidationError:
        return False
    return True


class _Top(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]] | None = None

    def score(self) -> TokenLogprob:
        return TokenLogprob(
            self.token, bytes(self.bytes) if self.bytes is not None else self.token.encode(), self.logprob
        )


class _Token(_Top):
    top_logprobs: list[_Top] | None = None


class Logprobs(msgspec.Struct):
    """Of a chat chunk (`content`) or of a text chunk (the others, one entry per token)."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class ChunkChoice(msgspec.Struct):
    """What is new of a choice."""

    index: int = 0
    delta: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class UpstreamChunk(msgspec.Struct):
    """An event's data."""

    choices: list[ChunkChoice] | None = None
    usage: ReportedUsage | None = None

    def plain_text(self) -> str | None:
        """The text of a chunk that has nothing else of an answer, as most have; None of any other."""
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
    """Reads a chunk; None if it is none. What in it is no UTF-8 is replaced, as in every stream of events."""
    try:
        try:
            return _decoder.decode(data)
        except UnicodeDecodeError:
            return _decoder.decode(data.decode("utf-8", "replace"))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def parse_chunks(events: Sequence[bytes]) -> list[UpstreamChunk] | None:
    """Reads events in one call, a line each; without ``[DONE]``, if that is the last of several.

    Where a line begins with ``{`` and the one before ends with ``}``, no value can go on from one to the next, and with
    as many values as lines each has its own. None: they are not like that, and have to be looked at one by one.
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
    """One score per token; None if there are none.

    Args:
        logprobs: What a chunk had.
        offset: Characters of the choice's text before the chunk.
    """
    if logprobs is None:
        return None
    scores: list[TokenScore] = []
    if logprobs.content is not None:
        for token in logprobs.content:
            scores.append(TokenScore(token.score(), [top.score() for top in token.top_logprobs or ()], offset))
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
                # The first token of an echoed prompt has none; our own shape has no place for that.
                TokenLogprob(text, text.encode(), 0.0 if value is None else value),
                [TokenLogprob(other, other.encode(), logprob) for other, logprob in top.items()],
                offsets[position] if position < len(offsets) else offset,
            )
        )
        offset += len(text)
    return scores
