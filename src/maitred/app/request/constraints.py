"""Constraints on an answer: the form that its caller wants, and calls of tools as they are declared."""

from collections.abc import Sequence

from msgspec.structs import replace

from maitred.admission.grammars.validator import GrammarValidator
from maitred.app.request.prompts import NO_TOOLS
from maitred.core.answer import Conversation, InferenceRequest
from maitred.core.errors import InvalidRequest, Unsupported
from maitred.core.grammar import Constraint, Grammar
from maitred.core.tools import Tool, ToolRules
from maitred.routing.catalog import ServedModel
from maitred.text.answer_format import AnswerFormat
from maitred.text.answer_grammar import answer_grammar
from maitred.wire.openai.tools import TOOL_FIELDS

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
    said = None if constraint is None else await validator.validate(organisation, constraint)
    grammar = said
    if isinstance(request.prompts[0], Conversation):  # there is but one
        answers, inside = model.answer_format, model.answer_format.opens_thought(model.tokenizer, prompts[0])
        arguments = {tool.name: await _arguments(validator, organisation, tool) for tool in _callable(answers, rules)}
        grammar = answer_grammar(answers, inside=inside, said=said, tools=rules, arguments=arguments)
        if grammar is not None and grammar is not said:
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
