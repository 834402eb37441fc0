"""A request that brings tools: what a model may call, and what it reads of them."""

from msgspec.structs import replace

from maitred.app.prompts import NO_TOOLS
from maitred.core.answer import Conversation, InferenceRequest
from maitred.core.errors import Unsupported
from maitred.core.tools import ToolRules
from maitred.routing.catalog import ServedModel
from maitred.wire.openai.tools import TOOL_FIELDS


def rules_for(model: ServedModel, ask: InferenceRequest) -> ToolRules | None:
    """What a model of our own may call; None: the request brings no tools.

    Raises:
        InvalidRequest: A tool is malformed.
        Unsupported: The model knows no tools.
    """
    rules = None if ask.tools is None else ask.tools()
    if rules is not None and model.format.calls is None:
        raise Unsupported(NO_TOOLS.format(name=model.name), param="tools")
    return rules


def with_tools(ask: InferenceRequest, rules: ToolRules | None) -> InferenceRequest:
    """The request with its tools in the prompt, which leaves less that is asked beyond text."""
    if rules is None:
        return ask
    prompts = [
        replace(prompt, tools=rules.declared) if isinstance(prompt, Conversation) else prompt for prompt in ask.prompts
    ]
    return replace(ask, prompts=prompts, needs=tuple(need for need in ask.needs if need not in TOOL_FIELDS))
