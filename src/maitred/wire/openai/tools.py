"""The tools of a chat request, read and checked for a model of our own.

Not a part of decoding: what is sent on to another server may declare what only that one knows.
"""

import re
from collections.abc import Iterable
from typing import Any

from maitred.core.errors import InvalidRequest
from maitred.core.tools import Tool, ToolRules
from maitred.wire.openai.faults import shown
from maitred.wire.openai.requests import ChatRequest, TokenizeRequest

TOOL_FIELDS = frozenset({"tools", "tool_choice", "functions", "function_call"})
"""The fields of a request that this module reads."""
MOST_TOOLS = 128
"""As in OpenAI's API."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def tool_rules_of(request: ChatRequest) -> ToolRules | None:
    """What the model may call; None: the request brings no tools.

    Raises:
        InvalidRequest: A tool or the choice among them is malformed; `param` says where.
    """
    legacy = not request.tools and bool(request.functions)
    field = "functions" if legacy else "tools"
    tools = tuple(_tools(request.functions if legacy else request.tools, field, wrapped=not legacy))
    choice_field = "function_call" if legacy else "tool_choice"
    choice = request.function_call if legacy else request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"{choice_field} needs tools. Send tools, or remove it.", param=choice_field)
        return None
    _check_names(tools, field)
    # The older fields know one call for each answer.
    parallel = request.parallel_tool_calls is not False and not legacy
    match choice:
        case None | "auto":
            return ToolRules(tools, parallel=parallel)
        case "none":
            return ToolRules(tools, may=False)
        case "required" if not legacy:
            return ToolRules(tools, must=True, parallel=parallel)
        case {"type": "function", "function": {"name": str() as name}} | {"name": str() as name} if legacy is (
            "name" in choice
        ):
            if name not in {tool.name for tool in tools}:
                raise InvalidRequest(
                    f"{choice_field} names {shown(name)}, which is none of {field}. Declare it there.",
                    param=choice_field,
                )
            return ToolRules(tools, must=True, only=name, parallel=False)
        case _:
            known = "none, auto" if legacy else "none, auto, required"
            raise InvalidRequest(
                f"{choice_field} must be {known} or name a function; got {shown(choice)}.", param=choice_field
            )


def declared_in(request: TokenizeRequest) -> list[dict[str, Any]]:
    """The tools that a model reads of in a conversation that is to be tokenised.

    Raises:
        InvalidRequest: One is malformed.
    """
    return [tool.declared for tool in _tools(request.tools, "tools", wrapped=True)]


def _tools(declared: Any, field: str, *, wrapped: bool) -> Iterable[Tool]:  # noqa: ANN401 - as it was sent
    if declared is None:
        return
    if not isinstance(declared, list):
        raise InvalidRequest(f"{field} must be a list; got {shown(declared)}.", param=field)
    if len(declared) > MOST_TOOLS:
        raise InvalidRequest(f"{field} must hold at most {MOST_TOOLS}; got {len(declared)}.", param=field)
    for position, entry in enumerate(declared):
        path = f"{field}[{position}]"
        if not wrapped:
            yield _tool(path, entry)
            continue
        match entry:
            case {"type": "function", "function": dict() as function}:
                yield _tool(f"{path}.function", function)
            case {"type": str() as kind} if kind != "function":
                raise InvalidRequest(
                    f"{path} is of the type {shown(kind)}. This model calls tools of the type function only.",
                    param=f"{path}.type",
                )
            case _:
                raise InvalidRequest(f"{path} must be an object with type and function.", param=path)


def _tool(path: str, function: object) -> Tool:
    match function:
        case {"name": str() as name, **rest}:
            pass
        case _:
            raise InvalidRequest(f"{path}.name is required.", param=f"{path}.name")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.name must be 1 to 128 letters, digits, _, - or .; got {shown(name)}.", param=f"{path}.name"
        )
    parameters = rest.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{path}.parameters must be a JSON Schema, an object; got {shown(parameters)}.", param=f"{path}.parameters"
        )
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{path}.parameters must be the schema of an object: its type must be 'object'.",
            param=f"{path}.parameters",
        )
    # Templates show a function as it is written here: the name comes first, and what it takes is always said.
    shown_so = {"name": name, **rest, "parameters": parameters or _NO_PARAMETERS}
    return Tool(
        name,
        f"{path}.parameters",
        {"type": "function", "function": shown_so},
        parameters or None,
        strict=rest.get("strict") is True,
    )


_NO_PARAMETERS = {"type": "object", "properties": {}}


def _check_names(tools: Iterable[Tool], field: str) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InvalidRequest(
                f"{field} declares {shown(tool.name)} twice. Each needs a name of its own.", param=field
            )
        seen.add(tool.name)
