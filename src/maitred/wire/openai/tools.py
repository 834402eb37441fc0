"""Reads and checks the tools of a chat request, for a model of this gateway's engines.

This is no part of decoding: a request that is sent on to another server may declare tools that only that server knows.
"""

import re
from collections.abc import Iterable
from typing import Any

from maitred.core.errors import InvalidRequest
from maitred.core.tools import Tool, ToolRules
from maitred.wire.openai.faults import format_value
from maitred.wire.openai.requests import ChatRequest, TokenizeRequest

TOOL_FIELDS = frozenset({"tools", "tool_choice", "functions", "function_call"})
"""The fields of a request that this module reads."""
MAX_TOOLS = 128
"""Most tools of a request, as in OpenAI's API."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def to_tool_rules(request: ChatRequest) -> ToolRules | None:
    """Returns which tools the model may or must call; None: the request brings no tools.

    Raises:
        InvalidRequest: A tool or the choice among them is malformed; `param` says where.
    """
    legacy = not request.tools and bool(request.functions)
    field = "functions" if legacy else "tools"
    tools = tuple(_parse_tools(request.functions if legacy else request.tools, field, wrapped=not legacy))
    choice_field = "function_call" if legacy else "tool_choice"
    choice = request.function_call if legacy else request.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest(f"{choice_field} needs tools. Send tools, or remove it.", param=choice_field)
        return None
    _check_names(tools, field)
    # The older fields allow one call for each answer.
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
                    f"{choice_field} names {format_value(name)}, which is none of {field}. Declare it there.",
                    param=choice_field,
                )
            return ToolRules(tools, must=True, only=name, parallel=False)
        case _:
            known = "none, auto" if legacy else "none, auto, required"
            raise InvalidRequest(
                f"{choice_field} must be {known} or name a function; got {format_value(choice)}.", param=choice_field
            )


def declared_tools(request: TokenizeRequest) -> list[dict[str, Any]]:
    """Returns the tools that the template writes into a conversation that is to be tokenised.

    Raises:
        InvalidRequest: A tool is malformed.
    """
    return [tool.declared for tool in _parse_tools(request.tools, "tools", wrapped=True)]


def _parse_tools(declared: Any, field: str, *, wrapped: bool) -> Iterable[Tool]:  # noqa: ANN401 - as it was sent
    if declared is None:
        return
    if not isinstance(declared, list):
        raise InvalidRequest(f"{field} must be a list; got {format_value(declared)}.", param=field)
    if len(declared) > MAX_TOOLS:
        raise InvalidRequest(f"{field} must hold at most {MAX_TOOLS}; got {len(declared)}.", param=field)
    for position, entry in enumerate(declared):
        path = f"{field}[{position}]"
        if not wrapped:
            yield _parse_tool(path, entry)
            continue
        match entry:
            case {"type": "function", "function": dict() as function}:
                yield _parse_tool(f"{path}.function", function)
            case {"type": str() as kind} if kind != "function":
                raise InvalidRequest(
                    f"{path} is of the type {format_value(kind)}. This model calls tools of the type function only.",
                    param=f"{path}.type",
                )
            case _:
                raise InvalidRequest(f"{path} must be an object with type and function.", param=path)


def _parse_tool(path: str, function: object) -> Tool:
    match function:
        case {"name": str() as name, **rest}:
            pass
        case _:
            raise InvalidRequest(f"{path}.name is required.", param=f"{path}.name")
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.name must be 1 to 128 letters, digits, _, - or .; got {format_value(name)}.", param=f"{path}.name"
        )
    parameters = rest.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(
            f"{path}.parameters must be a JSON Schema, an object; got {format_value(parameters)}.",
            param=f"{path}.parameters",
        )
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{path}.parameters must be the schema of an object: its type must be 'object'.",
            param=f"{path}.parameters",
        )
    # Templates write a function in this order: the name comes first, and its parameters are always there.
    definition = {"name": name, **rest, "parameters": parameters or _NO_PARAMETERS}
    return Tool(
        name,
        f"{path}.parameters",
        {"type": "function", "function": definition},
        parameters or None,
        strict=rest.get("strict") is True,
    )


_NO_PARAMETERS = {"type": "object", "properties": {}}


def _check_names(tools: Iterable[Tool], field: str) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InvalidRequest(
                f"{field} declares {format_value(tool.name)} twice. Each needs a name of its own.", param=field
            )
        seen.add(tool.name)
