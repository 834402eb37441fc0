"""Validation of a request against its model: abilities, sizes, and the constraints on its answer.

Constraints are the form that the caller wants, and calls of tools as they are declared.
"""

from collections.abc import Callable, Collection, Sequence

from msgspec.structs import replace

from maitred.admission.grammars.validator import GrammarValidator
from maitred.app.request.prompt_scores import count_prompt_logprobs
from maitred.app.request.tokenized import NO_TOOLS, PromptTruncation, begun_answer, count_characters
from maitred.core.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from maitred.core.grammar import Constraint, Grammar
from maitred.core.inference import Conversation, InferenceRequest
from maitred.core.replica import ModelCard
from maitred.core.request import SamplingParams
from maitred.core.tenancy import Principal
from maitred.core.text_replica import CHAT, PATHS, ModelMode
from maitred.core.tools import Tool, ToolRules
from maitred.routing.catalog import AnyModel, ServedModel, TextModel
from maitred.text.answer_format import AnswerFormat
from maitred.text.answer_grammar import answer_grammar
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer
from maitred.wire.openai.fields import refuse
from maitred.wire.openai.sampling import CONSTRAINT_FIELDS as STRUCTURED_FIELDS
from maitred.wire.openai.sampling import MAX_TOP_LOGPROBS, TOOL_FIELDS, WHOLE_VOCABULARY

_API_DEFAULTS = SamplingParams(max_tokens=0, seed=0)
_MAX_CHOICES = 2_048
"""Most choices of one request, so that one request cannot fill the engine's queue."""
_MAX_BAD_WORD_TOKENS = 1_024
"""Most tokens of all words that a request bans, as in vLLM."""
_MAX_ALLOWED_TOKENS = 1 << 20
"""Most allowed tokens of all prompts together, because the engine gets them with each prompt."""


def check_beyond_chat(request: InferenceRequest) -> None:
    """Raises Unsupported if only a server that speaks the API of the client can be asked all of the request."""
    if request.native is not None and request.native.beyond_chat is not None:
        raise request.native.beyond_chat


def check_supported(needs: Sequence[str]) -> None:
    """Raises Unsupported if one of these fields is not supported by the engine."""
    for field in needs:
        if field not in STRUCTURED_FIELDS:
            raise refuse(field, "is not supported by this server yet")


def check_sampling(card: ModelCard, request: InferenceRequest, max_choices: int) -> None:
    """Raises InvalidRequest for too many choices or unknown token ids."""
    sampling = request.sampling
    max_choices = min(card.max_choices, max_choices)
    if sampling.n > max_choices:
        raise InvalidRequest(f"n must be at most {max_choices} for this model; got {sampling.n}.", param="n")
    if len(request.prompts) * sampling.n > _MAX_CHOICES:
        raise InvalidRequest(
            f"{len(request.prompts):,} prompts with n={sampling.n} are more than {_MAX_CHOICES:,} choices. Send them "
            "in several requests.",
            param=request.prompt_param,
        )
    _check_tokens(card, sampling.logit_bias, "logit_bias")
    _check_tokens(card, sampling.stop_token_ids, "stop_token_ids")
    _check_tokens(card, request.allowed_token_ids, "allowed_token_ids")


def refuse_whole_vocabulary(card: ModelCard, sampling: SamplingParams) -> InvalidRequest:
    """Makes the error for a request that asks an engine for the log-probabilities of the whole vocabulary."""
    field = "top_logprobs" if sampling.top_logprobs == WHOLE_VOCABULARY else "prompt_logprobs"
    return InvalidRequest(
        f"{field} is -1, which asks for all {card.vocab_size:,} tokens of the vocabulary. Send at most "
        f"{MAX_TOP_LOGPROBS}.",
        param=field,
    )


def check_prompt_logprobs(request: InferenceRequest, prompts: Sequence[list[int]], most: int) -> None:
    """Raises InvalidRequest for more log-probabilities of prompt tokens than an answer may have."""
    if (count := count_prompt_logprobs(request, prompts)) > most:
        field = "logprobs" if request.sampling.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(
            f"The answer would have {count:,} log-probabilities of prompt tokens, and {most:,} are allowed. Send the "
            f"prompts in several requests, or lower {field} or n.",
            param=field,
        )


def check_size(card: ModelCard, tokenizer: Tokenizer, request: InferenceRequest) -> None:
    """Rejects text that cannot fit, before it is tokenised. A prompt that will be cut fits.

    Raises:
        ContextLengthExceeded: A prompt cannot fit the model's window.
    """
    if request.truncate_prompt_tokens is not None:
        return
    min_prompt_tokens = tokenizer.fewest_tokens(max(map(count_characters, request.prompts)))
    window = card.max_sequence_tokens
    if min_prompt_tokens + _least_output(request) > window:
        raise ContextLengthExceeded(
            f"The prompt has at least {min_prompt_tokens:,} tokens, but prompt and answer together may have "
            f"{window:,}. Shorten the prompt to at most {window - _least_output(request):,} tokens.",
            param=request.prompt_param,
            window=window,
            prompt_tokens=min_prompt_tokens,
        )


def prompt_truncation(card: ModelCard, request: InferenceRequest) -> PromptTruncation | None:
    """Returns the limit to which longer prompts of a request are cut; None: they are refused.

    Raises:
        ContextLengthExceeded: The limit and the answer do not fit the model's window.
        InvalidRequest: Nothing of the prompt would be kept.
    """
    limit = request.truncate_prompt_tokens
    if limit is None:
        return None
    if limit == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens leaves no tokens of the prompt. Send at least 1, or -1 for as many as fit.",
            param="truncate_prompt_tokens",
        )
    window = card.max_sequence_tokens
    # An answer without a limit has one token at least, and a vector is none.
    least_answer = 0 if card.embedding_dimensions else 1
    rest = window - (least_answer if request.max_tokens is None else request.max_tokens)
    if max(limit, 1) > rest:
        raise ContextLengthExceeded(
            f"truncate_prompt_tokens keeps {max(limit, 1):,} tokens of the prompt, but the window of {window:,} has "
            f"only {max(rest, 0):,} beside the answer. Lower it or {request.max_tokens_param}.",
            param="truncate_prompt_tokens",
            window=window,
            max_tokens=request.max_tokens,
        )
    return PromptTruncation(rest if limit == -1 else limit, request.truncation_side)


def check_generates(card: ModelCard, name: str) -> None:
    """Raises InvalidRequest if the model is an encoder."""
    if card.embedding_dimensions:
        raise InvalidRequest(
            f"The model {name!r} computes embeddings and generates no text. Send texts to /v1/embeddings, or name "
            "another model.",
            param="model",
        )


def check_mode(model: AnyModel, mode: ModelMode) -> None:
    """Raises InvalidRequest unless the model is one that requests of this mode can be sent to."""
    own = model.mode if isinstance(model, TextModel) else CHAT
    if own != mode:
        paths = " or ".join(f"/v1/{path}" for path in PATHS[own])
        raise InvalidRequest(
            f"The model {model.name!r} is not for this path: its mode is `{own}`. Send its requests to {paths}, or "
            f"name a model whose mode is `{mode}`.",
            param="model",
        )


def check_embeds(card: ModelCard, name: str, dimensions: int | None) -> None:
    """Raises InvalidRequest unless the model is an encoder with at least `dimensions` dimensions."""
    if not card.embedding_dimensions:
        raise InvalidRequest(
            f"The model {name!r} generates text and computes no embeddings. Name an encoder: GET /v1/models lists what "
            "is served.",
            param="model",
        )
    if dimensions is not None and dimensions > card.embedding_dimensions:
        raise InvalidRequest(
            f"dimensions must be at most {card.embedding_dimensions} for this model; got {dimensions}.",
            param="dimensions",
        )


def check_input_tokens(card: ModelCard, text: list[int], param: str) -> None:
    """Checks the tokens of one embedding input.

    Raises:
        ContextLengthExceeded: It is too long.
        InvalidRequest: It is empty, or not made of this model's tokens.
    """
    if not text:
        raise InvalidRequest(f"{param} has no tokens. Give the model at least one.", param=param)
    _check_tokens(card, text, param)
    window = card.max_sequence_tokens
    if len(text) > window:
        raise ContextLengthExceeded(
            f"{param} has {len(text):,} tokens, but the model reads at most {window:,}. Shorten it, or split it into "
            "several.",
            param=param,
            window=window,
            prompt_tokens=len(text),
        )


def max_output_tokens(card: ModelCard, prompts: Sequence[list[int]], request: InferenceRequest) -> list[int]:
    """Returns the most output tokens of a choice, for each prompt.

    Raises:
        ContextLengthExceeded: Prompt and answer are longer than the model's window.
        InvalidRequest: A prompt is empty or not made of this model's tokens, or `min_tokens` cannot be reached.
    """
    window, longest_outputs = card.max_sequence_tokens, []
    for prompt in prompts:
        if not prompt:
            raise InvalidRequest("The prompt has no tokens. Give the model at least one.", param=request.prompt_param)
        _check_tokens(card, prompt, request.prompt_param)
        available = window - len(prompt)
        if available < _least_output(request):
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt):,} tokens, but prompt and answer together may have {window:,}. "
                f"Shorten the prompt to at most {window - _least_output(request):,} tokens.",
                param=request.prompt_param,
                window=window,
                prompt_tokens=len(prompt),
            )
        max_tokens = available if request.max_tokens is None else request.max_tokens
        if max_tokens > available:
            raise ContextLengthExceeded(
                f"The prompt has {len(prompt):,} tokens and {request.max_tokens_param} asks for {max_tokens:,} more, "
                f"but together they may have {window:,}. Lower {request.max_tokens_param} to at most {available:,}, "
                "or shorten the prompt.",
                param=request.max_tokens_param,
                window=window,
                prompt_tokens=len(prompt),
                max_tokens=max_tokens,
            )
        if request.sampling.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens is {request.sampling.min_tokens:,}, but there is room for {max_tokens:,} tokens. "
                "Lower it.",
                param="min_tokens",
            )
        longest_outputs.append(max_tokens)
    return longest_outputs


def _least_output(request: InferenceRequest) -> int:
    """Returns the fewest output tokens for which there must be room: none for a prompt that is only scored."""
    return 0 if request.max_tokens == 0 else 1


def _check_tokens(card: ModelCard, tokens: Collection[int], param: str) -> None:
    if tokens and (max(tokens) >= card.vocab_size or min(tokens) < 0):
        raise InvalidRequest(f"{param}: this model's token ids run from 0 to {card.vocab_size - 1}.", param=param)


_ARGUMENT_SEPARATOR = " ?"
"""Separator pattern in JSON arguments: models write an optional space after commas and colons."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


async def with_grammar(
    validator: GrammarValidator,
    principal: Principal,
    model: ServedModel,
    request: InferenceRequest,
    rules: ToolRules | None,
    prompts: Sequence[list[int]],
    relaxed: list[str],
) -> InferenceRequest:
    """Returns the request with the grammar that constrains its answers.

    Only a request with a constraint or with tools has one.

    Args:
        validator: Validates grammars.
        principal: Sender of the request.
        model: The model.
        request: The request.
        rules: Tools that may be called; None: none.
        prompts: Token ids of the prompts.
        relaxed: Is extended by the keywords of schemas that the grammar does not enforce.

    Raises:
        InvalidRequest: The response format or a tool schema is invalid or unsupported; `param` names it.
    """
    constraint = None if request.constraint is None else request.constraint()
    if constraint is None and rules is None:
        return request
    text_grammar = None if constraint is None else await validator.validate(principal, constraint, relaxed)
    grammar = text_grammar
    if isinstance(request.prompts[0], Conversation):  # a conversation is the only prompt
        answer_format, begun = model.answer_format, begun_answer(request.prompts[0])
        inside = answer_format.opens_thought(model.tokenizer, prompts[0], begun)
        arguments = {
            tool.name: await _arguments_grammar(validator, principal, tool, relaxed)
            for tool in _callable_tools(answer_format, rules)
        }
        grammar = answer_grammar(answer_format, inside=inside, said=text_grammar, tools=rules, arguments=arguments)
        if grammar is not None and grammar is not text_grammar:
            param = "tools" if constraint is None else constraint.param
            grammar = await validator.validate(principal, Constraint("lark", grammar.text, param))
    return replace(request, sampling=replace(request.sampling, grammar=grammar))


def _callable_tools(answers: AnswerFormat, rules: ToolRules | None) -> Sequence[Tool]:
    return () if rules is None or answers.calls is None else rules.callable


async def _arguments_grammar(
    validator: GrammarValidator, principal: Principal, tool: Tool, relaxed: list[str]
) -> Grammar:
    """Returns the grammar of a tool's arguments."""
    schema = tool.parameters or _NO_ARGUMENTS
    # A schema without a type would allow any JSON; arguments must be an object.
    constraint = Constraint(
        form="json_schema",
        content={"type": "object", **schema},
        param=tool.param,
        strict=tool.strict,
        whitespace=_ARGUMENT_SEPARATOR,
    )
    try:
        return await validator.validate(principal, constraint, relaxed)
    except InvalidRequest as error:
        raise InvalidRequest(f"The tool {tool.name!r} cannot be called. {error}", param=tool.param) from error


def rules_for(model: ServedModel, tools: Callable[[], ToolRules | None]) -> ToolRules | None:
    """Returns the tool rules of a request with tools; None: it may call none.

    Raises:
        InvalidRequest: A tool is malformed.
        Unsupported: The model does not support tools.
    """
    rules = tools()
    if rules is not None and model.answer_format.calls is None:
        raise Unsupported(NO_TOOLS.format(name=model.name), param="tools")
    return rules


def with_tools(request: InferenceRequest, rules: ToolRules | None) -> InferenceRequest:
    """Returns the request with its tools in the prompts and the tool fields removed from `needs`."""
    if rules is None:
        return request
    prompts = [
        replace(prompt, tools=rules.declared) if isinstance(prompt, Conversation) else prompt
        for prompt in request.prompts
    ]
    return replace(request, prompts=prompts, needs=tuple(need for need in request.needs if need not in TOOL_FIELDS))


def with_token_masks(tokenizer: Tokenizer, request: InferenceRequest) -> InferenceRequest:
    """Returns the request with the tokens that its choices may have, and may not, in its sampling parameters.

    A word is banned as it is written at the beginning of a text, and behind a space if it is then as many other
    tokens, as in vLLM.

    Raises:
        InvalidRequest: The words have too many tokens, or too many tokens are allowed for so many prompts.
    """
    if len(request.prompts) * len(request.allowed_token_ids) > _MAX_ALLOWED_TOKENS:
        raise InvalidRequest(
            f"{len(request.prompts):,} prompts with {len(request.allowed_token_ids):,} allowed_token_ids are more than "
            f"{_MAX_ALLOWED_TOKENS:,} together. Send them in several requests.",
            param="allowed_token_ids",
        )
    banned: dict[tuple[int, ...], None] = {}
    for word in request.bad_words:
        plain, spaced = (
            tuple(tokenizer.encode(space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
        if not plain:
            raise InvalidRequest(f"bad_words: {word!r} has no tokens in this model. Remove it.", param="bad_words")
        banned[plain] = None
        if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            banned[spaced] = None
    if (tokens := sum(map(len, banned))) > _MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"bad_words must have at most {_MAX_BAD_WORD_TOKENS:,} tokens; got {tokens:,}. Remove some.",
            param="bad_words",
        )
    sampling = replace(request.sampling, allowed_token_ids=request.allowed_token_ids, bad_words_token_ids=tuple(banned))
    return replace(request, sampling=sampling)


def with_defaults(request: InferenceRequest, defaults: GenerationDefaults) -> InferenceRequest:
    """Returns the request with the model's sampling defaults in the fields that the caller has not set.

    They may hold the defaults of another model, which the request was prepared for before.
    """
    changed: dict[str, float | int] = {}
    for field in request.unset_fields:
        value = getattr(defaults, field)
        if value is None:
            value = getattr(_API_DEFAULTS, field)
        if getattr(request.sampling, field) != value:
            changed[field] = value
    return replace(request, sampling=replace(request.sampling, **changed)) if changed else request


def with_logprobs(request: InferenceRequest) -> InferenceRequest:
    """Returns the request with log-probabilities enabled, for the check of an escalation."""
    if request.sampling.top_logprobs is not None:
        return request
    return replace(request, sampling=replace(request.sampling, top_logprobs=0))
