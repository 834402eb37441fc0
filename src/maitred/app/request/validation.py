"""Validation of a request against its model: abilities, sizes, and the constraints on its answer.

Constraints are the form that the caller wants, and calls of tools as they are declared.
"""

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from maitred.admission.grammars.validator import GrammarValidator
from maitred.app.request.tokenized import NO_TOOLS, text_characters
from maitred.core.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from maitred.core.grammar import Constraint, Grammar
from maitred.core.inference import Conversation, InferenceRequest
from maitred.core.replica import ModelCard
from maitred.core.tools import Tool, ToolRules
from maitred.routing.catalog import ServedModel
from maitred.text.answer_format import AnswerFormat
from maitred.text.answer_grammar import answer_grammar
from maitred.text.tokenizer import Tokenizer
from maitred.wire.openai.sampling import CONSTRAINT_FIELDS as STRUCTURED_FIELDS
from maitred.wire.openai.sampling import TOOL_FIELDS

_MOST_CHOICES = 2_048
"""In one request, so that none can fill the engine's queue alone."""


def check_needs(request: InferenceRequest) -> None:
    """Raises InvalidRequest if it asks for more than our engine can: an answer without it would be a broken promise."""
    for field in request.needs:
        if field not in STRUCTURED_FIELDS:
            raise Unsupported(f"{field} is not supported by this server yet. Remove it.", param=field)


def check_sampling(card: ModelCard, request: InferenceRequest, max_choices: int) -> None:
    """Raises InvalidRequest if the sampling parameters ask for more choices or other tokens than there are."""
    sampling = request.sampling
    max_choices = min(card.max_choices, max_choices)
    if sampling.n > max_choices:
        raise InvalidRequest(f"n must be at most {max_choices} for this model; got {sampling.n}.", param="n")
    if len(request.prompts) * sampling.n > _MOST_CHOICES:
        raise InvalidRequest(
            f"{len(request.prompts):,} prompts with n={sampling.n} are more than {_MOST_CHOICES:,} choices. Send them "
            "in several requests.",
            param=request.prompt_param,
        )
    _check_tokens(card, sampling.logit_bias, "logit_bias")
    _check_tokens(card, sampling.stop_token_ids, "stop_token_ids")


def check_size(card: ModelCard, tokenizer: Tokenizer, request: InferenceRequest) -> None:
    """Refuses text that is too long whatever it says, before seconds are spent on tokenising it.

    Raises:
        ContextLengthExceeded: A prompt cannot fit the model's window.
    """
    fewest = tokenizer.fewest_tokens(max(map(text_characters, request.prompts)))
    window = _window(card)
    if fewest >= window:
        raise ContextLengthExceeded(
            f"The prompt has at least {fewest:,} tokens, but prompt and answer together may have {window:,}. "
            f"Shorten the prompt to at most {window - 1:,} tokens.",
            param=request.prompt_param,
        )


def check_generates(card: ModelCard, name: str) -> None:
    """Raises InvalidRequest if the model answers with vectors."""
    if card.embedding_dimensions:
        raise InvalidRequest(
            f"The model {name!r} computes embeddings and generates no text. Send texts to /v1/embeddings, or name "
            "another model.",
            param="model",
        )


def check_embeds(card: ModelCard, name: str, dimensions: int | None) -> None:
    """Raises InvalidRequest unless the model answers with vectors, of at least so many dimensions."""
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


def check_text(card: ModelCard, text: list[int], param: str) -> None:
    """Whether an encoder can read a text.

    Raises:
        ContextLengthExceeded: It is too long.
        InvalidRequest: It is empty, or not made of this model's tokens.
    """
    if not text:
        raise InvalidRequest(f"{param} has no tokens. Give the model at least one.", param=param)
    _check_tokens(card, text, param)
    window = _window(card)
    if len(text) > window:
        raise ContextLengthExceeded(
            f"{param} has {len(text):,} tokens, but the model reads at most {window:,}. Shorten it, or split it into "
            "several.",
            param=param,
        )


def check_fits(card: ModelCard, prompt: list[int], request: InferenceRequest) -> int:
    """How many tokens may be generated for this prompt.

    Raises:
        ContextLengthExceeded: Prompt and answer are longer than the model's window.
        InvalidRequest: The prompt is empty or not made of this model's tokens, or `min_tokens` cannot be reached.
    """
    if not prompt:
        raise InvalidRequest("The prompt has no tokens. Give the model at least one.", param=request.prompt_param)
    _check_tokens(card, prompt, request.prompt_param)
    window = _window(card)
    left = window - len(prompt)
    if left < 1:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt):,} tokens, but prompt and answer together may have {window:,}. "
            f"Shorten the prompt to at most {window - 1:,} tokens.",
            param=request.prompt_param,
        )
    max_tokens = left if request.max_tokens is None else request.max_tokens
    if max_tokens > left:
        raise ContextLengthExceeded(
            f"The prompt has {len(prompt):,} tokens and {request.max_tokens_param} asks for {max_tokens:,} more, but "
            f"together they may have {window:,}. Lower {request.max_tokens_param} to at most {left:,}, or shorten the "
            "prompt.",
            param=request.max_tokens_param,
        )
    if request.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.sampling.min_tokens:,}, but there is room for {max_tokens:,} tokens. Lower it.",
            param="min_tokens",
        )
    return max_tokens


def _window(card: ModelCard) -> int:
    """A KV cache smaller than the context window is the tighter of the two."""
    return min(card.context_tokens, card.kv_capacity_tokens)


def _check_tokens(card: ModelCard, tokens: Collection[int], param: str) -> None:
    if tokens and (max(tokens) >= card.vocab_size or min(tokens) < 0):
        raise InvalidRequest(f"{param}: this model's token ids run from 0 to {card.vocab_size - 1}.", param=param)


_SPACE = " ?"
"""Between the tokens of arguments: models write them with a space behind commas and colons, as their templates do."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


async def constrain(
    validator: GrammarValidator,
    organisation: str,
    model: ServedModel,
    request: InferenceRequest,
    rules: ToolRules | None,
    prompts: Sequence[list[int]],
) -> InferenceRequest:
    """The request with the grammar that its answers are held to, if there is one.

    Args:
        validator: Tries grammars.
        organisation: Whose request it is.
        model: Who is to answer.
        request: The request.
        rules: What it may call; None: nothing.
        prompts: In tokens.

    Raises:
        InvalidRequest: A form, or the schema of a tool, is faulty or cannot be had; `param` says which.
    """
    constraint = None if request.constraint is None else request.constraint()
    if constraint is None and rules is None:
        return request
    grammar_of_constraint = None if constraint is None else await validator.validate(organisation, constraint)
    grammar = grammar_of_constraint
    if isinstance(request.prompts[0], Conversation):  # there is but one
        answers, inside = model.answer_format, model.answer_format.opens_thought(model.tokenizer, prompts[0])
        arguments = {tool.name: await _arguments(validator, organisation, tool) for tool in _callable(answers, rules)}
        grammar = answer_grammar(answers, inside=inside, said=grammar_of_constraint, tools=rules, arguments=arguments)
        if grammar is not None and grammar is not grammar_of_constraint:
            param = "tools" if constraint is None else constraint.param
            grammar = await validator.validate(organisation, Constraint("lark", grammar.text, param))
    return replace(request, sampling=replace(request.sampling, grammar=grammar))


def _callable(answers: AnswerFormat, rules: ToolRules | None) -> Sequence[Tool]:
    return () if rules is None or answers.calls is None else rules.callable


async def _arguments(validator: GrammarValidator, organisation: str, tool: Tool) -> Grammar:
    """Returns the schema of a tool's arguments."""
    schema = tool.parameters or _NO_ARGUMENTS
    # A schema that says nothing of a type would take anything; arguments are an object.
    constraint = Constraint("json_schema", {"type": "object", **schema}, tool.param, tool.strict, _SPACE)
    try:
        return await validator.validate(organisation, constraint)
    except InvalidRequest as error:
        raise InvalidRequest(f"The tool {tool.name!r} cannot be called. {error}", param=tool.param) from error


def rules_for(model: ServedModel, request: InferenceRequest) -> ToolRules | None:
    """Returns what an own model may call; None: the request brings no tools.

    Raises:
        InvalidRequest: A tool is malformed.
        Unsupported: The model knows no tools.
    """
    rules = None if request.tools is None else request.tools()
    if rules is not None and model.answer_format.calls is None:
        raise Unsupported(NO_TOOLS.format(name=model.name), param="tools")
    return rules


def with_tools(request: InferenceRequest, rules: ToolRules | None) -> InferenceRequest:
    """The request with its tools in the prompt, which leaves less that is asked beyond text."""
    if rules is None:
        return request
    prompts = [
        replace(prompt, tools=rules.declared) if isinstance(prompt, Conversation) else prompt
        for prompt in request.prompts
    ]
    return replace(request, prompts=prompts, needs=tuple(need for need in request.needs if need not in TOOL_FIELDS))


def with_scores(request: InferenceRequest) -> InferenceRequest:
    """Returns the request for an own model: with log-probabilities, if a check reads them."""
    if not request.scored or request.sampling.top_logprobs is not None:
        return request
    return replace(request, sampling=replace(request.sampling, top_logprobs=0))
