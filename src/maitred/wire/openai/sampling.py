"""OpenAI's sampling fields as the engine's."""

from maitred.core.request import SamplingParams
from maitred.wire.openai.requests import ChatRequest, CompletionRequest


def sampling_of(request: ChatRequest | CompletionRequest, *, max_tokens: int, seed: int) -> SamplingParams:
    """How the request wants its tokens chosen.

    Args:
        request: A decoded request.
        max_tokens: The limit that holds after the context window had its say.
        seed: The request's own, or one drawn for it.
    """
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        # Clients write "all" as 0 or as -1.
        top_k=0 if request.top_k is None or request.top_k < 0 else request.top_k,
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()} if request.logit_bias else {},
        top_logprobs=_top_logprobs(request),
        min_tokens=request.min_tokens or 0,
        ignore_eos=request.ignore_eos is True,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        n=request.choices,
    )


def left_open(request: ChatRequest | CompletionRequest, fields: frozenset[str]) -> frozenset[str]:
    """Those of some fields that the request does not name."""
    return fields.difference(request.sent)


def _top_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None
