"""Converts OpenAI's sampling fields to the engine's parameters."""

from typing import Any

from maitred.core.request import SamplingParams
from maitred.wire.openai.requests import ChatRequest, CompletionRequest

_SAME_FIELDS = frozenset(
    {
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("min_tokens", "ignore_eos", "n"),
    }
)
"""Fields with the same name and meaning in both, and the same default."""
_SAMPLING_FIELDS = _SAME_FIELDS | {"top_k", "logit_bias", "logprobs", "stop_token_ids"}
_DEFAULT_PARAMS = SamplingParams(0, 0)
"""Parameters of requests that set no sampling field; token limit and seed are set later."""


def to_sampling_params(request: ChatRequest | CompletionRequest, *, max_tokens: int, seed: int) -> SamplingParams:
    """Builds the sampling parameters of a request.

    Args:
        request: A decoded request.
        max_tokens: Most output tokens, after the context window was applied.
        seed: The request's own seed, or one drawn for it.
    """
    sent = request.sent
    if _SAMPLING_FIELDS.isdisjoint(sent):
        return _DEFAULT_PARAMS if max_tokens == seed == 0 else SamplingParams(max_tokens, seed)
    same_fields: dict[str, Any] = {field: sent[field] for field in _SAME_FIELDS.intersection(sent)}
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        # Clients write "all" as 0 or as -1.
        top_k=0 if request.top_k is None or request.top_k < 0 else request.top_k,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()} if request.logit_bias else {},
        top_logprobs=_top_logprobs(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        **same_fields,
    )


def unset_fields(request: ChatRequest | CompletionRequest, fields: frozenset[str]) -> frozenset[str]:
    """Returns the fields, out of the given ones, that the request does not set."""
    return fields if fields.isdisjoint(request.sent) else fields.difference(request.sent)


def _top_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None
