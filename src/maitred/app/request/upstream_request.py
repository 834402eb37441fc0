"""Request for an upstream server: its text, and its counted or estimated size in tokens.

If the model's tokenizer is configured here, tokens are counted. Otherwise they are estimated, and only a request that
certainly does not fit is rejected; the server decides on the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any, overload

from msgspec import Struct

from maitred.app.request.tokenized import NamedTokenizer, PromptTruncation, TokenizedRequest, tokenize_prompts
from maitred.app.request.validation import check_sampling, max_output_tokens, prompt_truncation, with_tools
from maitred.core.errors import ContextLengthExceeded, InvalidRequest
from maitred.core.inference import Conversation, InferenceRequest, Prompt
from maitred.core.replica import ModelCard
from maitred.core.service import PromptTokens
from maitred.core.tenancy import Principal
from maitred.routing.catalog import TextModel
from maitred.text.estimate import estimate, estimate_conversation, estimate_media

_PREFIX_CHARACTERS = 512
_MIN_TOKEN_SHARE = 0.5
"""Share of an estimate that is a safe lower bound of the true count."""


class TruncatedPrompt(Sequence[int]):
    """Prompt of which only the first token ids are known.

    Args:
        head: The known token ids.
        tokens: Number of tokens of the whole prompt.
    """

    def __init__(self, head: Sequence[int], tokens: int) -> None:
        self.head = head
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        return self.head[place]


class PseudoTokens(TruncatedPrompt):
    """Substitute for the token ids of a prompt without a tokenizer, for prefix-aware routing.

    They are as many as is estimated, with equal ids for equal prefixes of the text.

    Args:
        prompt: The prompt; its prefix is encoded on first access, which only models with several replicas need.
        tokens: Estimated number of tokens.
    """

    def __init__(self, prompt: Prompt, tokens: int) -> None:
        super().__init__((), tokens)
        self._prompt = prompt

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if not self.head:
            data = _prompt_prefix(self._prompt)[:_PREFIX_CHARACTERS].encode("utf-8", "surrogatepass")
            self.head = memoryview(data + bytes(-len(data) % 4)).cast("I").tolist()
        return self.head[place]


class UpstreamRequest(Struct, frozen=True):
    """Request for an upstream server, sized and checked."""

    model: TextModel
    """The model."""
    card: ModelCard
    """Model card."""
    request: InferenceRequest
    """The request."""
    fields: Mapping[str, Any]
    """The request as fields of the OpenAI API."""
    prompts: Sequence[Sequence[int]]
    """Token ids, or substitutes; at least one prompt."""
    available_tokens: Sequence[int]
    """For each prompt the most tokens that a choice may have."""
    prompt_tokens: int
    """Prompt tokens of all prompts."""
    choice_count: int
    """Number of choices of all prompts."""
    estimated: float | None
    """Raw estimate of the prompt tokens, before the learned ratio; None: they were counted."""


PreparedRequest = TokenizedRequest | UpstreamRequest
"""A request for an engine (tokens), or for an upstream server (text)."""


async def prepare_upstream_request(
    model: TextModel, request: InferenceRequest, max_choices: int, principal: Principal
) -> UpstreamRequest:
    """Prepares a request: counts its tokens if the tokenizer is available, and estimates them otherwise.

    Raises:
        InvalidRequest: It came through an API that this model cannot be asked in, or asks for too many choices.
        ContextLengthExceeded: It cannot fit the model's window.
        ReplicaUnavailable: The model has no card yet.
    """
    if model.tokenizer is not None:
        card, fields = _check(model, request, max_choices)
        truncation = prompt_truncation(card, request)
        if (tokens := await _tokenize(model, request, principal, truncation)) is not None:
            available_tokens = max_output_tokens(card, tokens, request)
            prompt_tokens = sum(map(len, tokens)) + round(estimate_media(fields.get("messages", ())))
            return UpstreamRequest(
                model=model,
                card=card,
                request=request,
                fields=fields,
                prompts=tokens,
                available_tokens=available_tokens,
                prompt_tokens=prompt_tokens,
                choice_count=len(tokens) * request.sampling.n,
                estimated=None,
            )
    return estimate_upstream_request(model, request, max_choices)


def estimate_upstream_request(model: TextModel, request: InferenceRequest, max_choices: int) -> UpstreamRequest:
    """Prepares a request with estimated token counts; raises as `prepare_upstream_request` does."""
    card, fields = _check(model, request, max_choices)
    tools = fields.get("tools")
    ratio = model.prompt_ratio.value
    substitute_prompts: list[PseudoTokens] = []
    available_tokens = []
    estimated, prompt_tokens = 0.0, 0
    truncation = prompt_truncation(card, request)
    for prompt in request.prompts:
        raw_estimate = _estimate_prompt(prompt, tools) + estimate_media(fields.get("messages", ()))
        if truncation is not None:
            raw_estimate = min(raw_estimate, truncation.max_tokens / ratio)
        corrected = max(1, round(raw_estimate * ratio))
        substitute_prompts.append(PseudoTokens(prompt, corrected))
        available_tokens.append(_available_tokens(card, corrected, request))
        estimated += raw_estimate
        prompt_tokens += corrected
    choices = len(substitute_prompts) * request.sampling.n
    return UpstreamRequest(
        model=model,
        card=card,
        request=request,
        fields=fields,
        prompts=substitute_prompts,
        available_tokens=available_tokens,
        prompt_tokens=prompt_tokens,
        choice_count=choices,
        estimated=estimated,
    )


async def count_upstream_tokens(
    model: TextModel, server_model: str | None, request: InferenceRequest, principal: Principal
) -> PromptTokens:
    """Counts the tokens of the prompts of a request: at a server that speaks the client's API, here, or by estimate.

    Args:
        model: The model.
        server_model: Its name at the servers; None: the configured name.
        request: The request.
        principal: The caller.

    Raises:
        InvalidRequest: A server says that the request is at fault.
    """
    if request.native is not None:
        for replica in model.replicas:
            reported = await replica.count_tokens(request.native, server_model)
            if reported is not None:
                return PromptTokens(reported["input_tokens"], reported=reported)
    if model.tokenizer is not None and (tokens := await _tokenize(model, request, principal)) is not None:
        return PromptTokens(sum(map(len, tokens)))
    fields = {} if request.to_openai is None else request.to_openai()
    tools = fields.get("tools")
    estimated = sum(_estimate_prompt(prompt, tools) for prompt in request.prompts)
    estimated += estimate_media(fields.get("messages", ()))
    return PromptTokens(max(1, round(estimated * model.prompt_ratio.value)), estimated=True)


def _check(model: TextModel, request: InferenceRequest, max_choices: int) -> tuple[ModelCard, Mapping[str, Any]]:
    """Checks the request against the model card; returns the card and the fields of the OpenAI API."""
    card = model.card()
    if request.to_openai is None:
        raise InvalidRequest(
            f"The model {model.name!r} is served by another server, which takes requests of OpenAI's API only. Use "
            "/v1/chat/completions.",
            param="model",
        )
    check_sampling(card, request, max_choices)
    return card, request.to_openai()


async def _tokenize(
    model: TextModel, request: InferenceRequest, principal: Principal, truncation: PromptTruncation | None = None
) -> list[list[int]] | None:
    """Tokenises the prompts; None: the tokenizer has no chat template, or cannot render the request."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    for prompt in request.prompts:
        # Only the server runs the template of a request.
        if isinstance(prompt, Conversation) and (tokenizer.chat_template is None or prompt.chat_template is not None):
            return None
    try:
        request_with_tools = with_tools(request, None if request.tools is None else request.tools())
        named_tokenizer = NamedTokenizer(model.name, tokenizer)
        return await tokenize_prompts(
            named_tokenizer, request_with_tools.prompts, truncation=truncation, principal=principal
        )
    except InvalidRequest:
        # The upstream server may support other tools or another template, so leave the decision to it.
        if not request.needs:
            raise
        return None


def _estimate_prompt(prompt: Prompt, tools: object) -> float:
    match prompt:
        case Conversation():
            return estimate_conversation(prompt.messages, tools)
        case str():
            return estimate(prompt)
        case list():
            return float(len(prompt))


def _prompt_prefix(prompt: Prompt) -> str:
    match prompt:
        case Conversation():
            return "".join(
                f"{message['role']}\n{message['content'][:_PREFIX_CHARACTERS]}" for message in prompt.messages[:4]
            )
        case str():
            return prompt
        case list():
            return repr(prompt[:_PREFIX_CHARACTERS])


def _available_tokens(card: ModelCard, tokens: int, request: InferenceRequest) -> int:
    """Returns the most output tokens by the estimate; raises if the prompt certainly does not fit."""
    window = card.context_tokens
    min_prompt_tokens = int(tokens * _MIN_TOKEN_SHARE)
    if min_prompt_tokens + (request.max_tokens or 1) > window:
        raise ContextLengthExceeded(
            f"The prompt has about {tokens:,} tokens{_max_tokens_clause(request)}, but prompt and answer together "
            f"may have {window:,}. Shorten the prompt, or ask for a shorter answer.",
            param=request.prompt_param,
            window=window,
            prompt_tokens=tokens,
            max_tokens=request.max_tokens,
        )
    available = max(1, window - tokens)
    return available if request.max_tokens is None else request.max_tokens


def _max_tokens_clause(request: InferenceRequest) -> str:
    return "" if request.max_tokens is None else f" and {request.max_tokens_param} asks for {request.max_tokens:,} more"
