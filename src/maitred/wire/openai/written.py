"""Passes requests and messages on between a client and a server that speak the same API.

A forwarded request gets only the fields that the client sent, because an added null or an explicit default can have a
meaning for the server.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from maitred.wire.openai.requests import ChatRequest, CompletionRequest


def request_fields(request: ChatRequest | CompletionRequest) -> Mapping[str, Any]:
    """Returns the fields of a decoded request, as plain JSON values."""
    sent = request.sent
    if "enable_thinking" not in sent:
        return sent
    fields = {**sent}
    enable_thinking = fields.pop("enable_thinking")
    fields["chat_template_kwargs"] = {"enable_thinking": enable_thinking, **fields.get("chat_template_kwargs", {})}
    return fields


def thinking_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the signed blocks of the reasoning in a message or a delta; whatever has another form is skipped."""
    blocks = message.get("thinking_blocks")
    return [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []


def merge_deltas(deltas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges deltas in their order into the fields of a message: joins texts and tool calls.

    A tool call comes in pieces with the same `index`: first its id and its name, then the parts of its arguments.
    """
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name, value in delta.items():
            if name == "tool_calls":
                for piece in value:
                    _merge_tool_call(calls, piece)
            elif isinstance(value, list):
                message[name] = [*message.get(name, ()), *value]
            else:
                message[name] = message.get(name, "") + value
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def _merge_tool_call(calls: dict[int, dict[str, Any]], piece: Mapping[str, Any]) -> None:
    index = len(calls) if piece.get("index") is None else piece["index"]
    call = calls.setdefault(index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] = piece.get("id") or call["id"]
    function = piece.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""
