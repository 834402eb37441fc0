"""Log-probabilities as servers send them, in either of OpenAI's two shapes, as `TokenScore`."""

from typing import Annotated

import msgspec

from maitred.core.answer import TokenLogprob, TokenScore


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


def scores_of(logprobs: Logprobs | None, offset: int) -> list[TokenScore] | None:
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
