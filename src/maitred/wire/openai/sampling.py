"""OpenAI's sampling fields as the engine's."""

from typing import Any

from maitred.core.request import SamplingParams
from maitred.wire.openai.requests import ChatRequest, CompletionRequest

_ALIKE = frozenset(
    {
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("min_tokens", "ignore_eos", "n"),
    }
)
"""Fields that mean the same by the same name, and are as they are by default where they are left out."""
_FIELDS = _ALIKE | {"top_k", "logit_bias", "logprobs", "stop_token_ids"}
_OPEN = SamplingParams(0, 0)
"""Of all who leave everything open, with what is settled later."""


def sampling_of(request: ChatRequest | CompletionRequest, *, max_tokens: int, seed: int) -> SamplingParams:
    """How the request wants its tokens chosen.

    Args:
        request: A decoded request.
        max_tokens: The limit that holds after the context window had its say.
        seed: The request's own, or one drawn for it.
    """
    sent = request.sent
    if _FIELDS.isdisjoint(sent):
        return _OPEN if max_tokens == seed == 0 else SamplingParams(max_tokens, seed)
    alike: dict[str, Any] = {field: sent[field] for field in _ALIKE.intersection(sent)}
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        # Clients write "all" as 0 or as -1.
        top_k=0 if request.top_k is None or request.top_k < 0 else request.top_k,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()} if request.logit_bias else {},
        top_logprobs=_top_logprobs(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        **alike,
    )


def left_open(request: ChatRequest | CompletionRequest, fields: frozenset[str]) -> frozenset[str]:
    """Those of some fields that the request does not name."""
    return fields if fields.isdisjoint(request.sent) else fields.difference(request.sent)


def _top_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None
