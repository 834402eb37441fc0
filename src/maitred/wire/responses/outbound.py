"""Adapts a client's request for a response to a server that speaks the Responses API itself.

The request goes out as it was written, with all items of its conversation in ``input``: the gateway keeps the state,
and the server stores nothing. Only what such a server refuses of other models' answers is changed. Reasoning is
encrypted for the server that made it, so each item of it has the name of its model in ``maitred``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from maitred.wire.responses.fields import HONOURED_FIELDS
from maitred.wire.responses.requests import decode_thoughts

GATEWAY_FIELDS = frozenset(
    {
        *("model", "stream", "stream_options", "store", "background", "previous_response_id", "conversation"),
        *("metadata", "max_output_tokens", "priority", "context_management", "cache"),
    }
)
"""Fields that a server does not get as they came, because the gateway honours them or sets them anew."""
_PARAMETERS = HONOURED_FIELDS - GATEWAY_FIELDS
"""Names of the parameters of a server that it gets in a request of this API."""
ORIGIN = "maitred"
"""Member of an item of reasoning that names the model which made it."""
ENCRYPTED_REASONING = "reasoning.encrypted_content"
"""Part of an answer that a later request needs, where the server keeps nothing."""
_OWN_ID = re.compile(r"[a-z]+_[0-9A-Za-z.:]+_(?:in)?\d+")
"""Pattern of the ids that this gateway gives to items. Those of servers have one underscore."""
_MEMBERS: Mapping[str, Sequence[str]] = {
    "message": ("type", "role", "content", "phase"),
    "function_call": ("type", "call_id", "name", "arguments", "namespace"),
    "custom_tool_call": ("type", "call_id", "name", "input", "namespace"),
}
"""Members of items that other models have made, by the type of the item."""


def native_fields(
    sent: Mapping[str, Any], items: Sequence[Mapping[str, Any]], *, keeps_state: bool
) -> Mapping[str, Any]:
    """Returns the fields of a request for servers that speak its API.

    Args:
        sent: The request as it was written.
        items: All items of its conversation, its own among them.
        keeps_state: Whether the gateway keeps the response for a later request; it becomes `store`.
    """
    return {**sent, "input": items, "store": keeps_state}


def keep_latest_turns(items: Sequence[Mapping[str, Any]], turns: int) -> list[Mapping[str, Any]]:
    """Returns items without the oldest turns of their conversation.

    A turn begins with a message of the user. What stands before the first one stays.

    Args:
        items: All items of a conversation.
        turns: Number of the turns that stay.
    """
    starts = [position for position, item in enumerate(items) if item.get("role") == "user"]
    if not 0 < turns < len(starts):
        return [*items]
    return [*items[: starts[0]], *items[starts[-turns] :]]


def native_body(
    fields: Mapping[str, Any], parameters: Mapping[str, Any], *, model: str, reads_thoughts: bool, reasons: bool
) -> tuple[dict[str, Any], list[str]]:
    """Returns the body for a server, and what of the request it does not get.

    Args:
        fields: See `native_fields`.
        parameters: Default fields of the server; those of chat completions do not count.
        model: Name of the model here, whose own reasoning goes back to it.
        reads_thoughts: Whether the server reads reasoning that is not encrypted.
        reasons: Whether the model is known to reason.
    """
    items, ignored = adapt_history(fields["input"], model, reads_thoughts=reads_thoughts)
    body = {name: value for name, value in parameters.items() if name in _PARAMETERS}
    body |= {name: value for name, value in fields.items() if name not in GATEWAY_FIELDS}
    body |= {"input": items, "store": False, "stream": True}
    reasons = reasons or "reasoning" in body or any(item.get("type") == "reasoning" for item in items)
    included = body.get("include") or []
    if fields["store"] and reasons and ENCRYPTED_REASONING not in included:
        body["include"] = [*included, ENCRYPTED_REASONING]  # the next request needs it, also if its client does not
    options = fields.get("stream_options")
    return body, [*ignored, *(f"stream_options.{name}" for name in (options if isinstance(options, dict) else ()))]


def adapt_history(
    items: Sequence[Mapping[str, Any]], model: str, *, reads_thoughts: bool
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Returns items without what a server refuses of other models' answers, and the paths of what is left out.

    Reasoning of another model is left out, and so are the members and ids that this gateway has given to items. All
    other items stay as they were written.

    Args:
        items: Items as they were written.
        model: Name of the model here.
        reads_thoughts: Whether the server reads reasoning that is not encrypted.
    """
    adapted: list[Mapping[str, Any]] = []
    ignored: list[str] = []
    for item in items:
        if item.get("type") == "reasoning":
            reasoning = _adapt_reasoning(item, model, reads_thoughts=reads_thoughts)
            if reasoning is None:
                ignored = ["input (reasoning)"]
            else:
                adapted.append(reasoning)
        else:
            adapted.append(_adapt_item(item))
    return adapted, ignored


def _adapt_reasoning(item: Mapping[str, Any], model: str, *, reads_thoughts: bool) -> Mapping[str, Any] | None:
    """Returns an item of reasoning as the server takes it; None: it cannot read it."""
    origin = item.get(ORIGIN)
    written = {name: value for name, value in item.items() if name != ORIGIN}
    encrypted = item.get("encrypted_content")
    if encrypted and (origin == {"model": model} or (origin is None and not decode_thoughts(encrypted))):
        return written  # the client's own, if it has no name
    texts = item.get("content") or [
        {"type": "reasoning_text", "text": block["thinking"]}
        for block in decode_thoughts(encrypted)
        if block.get("thinking")
    ]
    if not (reads_thoughts and texts):
        return None
    return {"type": "reasoning", "summary": item.get("summary") or [], "content": texts}


def _adapt_item(item: Mapping[str, Any]) -> Mapping[str, Any]:
    item_id, kind = item.get("id"), item.get("type")
    if not (isinstance(item_id, str) and _OWN_ID.fullmatch(item_id)):
        return item
    if not (isinstance(kind, str) and kind in _MEMBERS):
        return {name: value for name, value in item.items() if name not in ("id", "status")}
    adapted = {name: item[name] for name in _MEMBERS[kind] if name in item}
    if item.get("role") == "assistant" and isinstance(parts := item.get("content"), list):
        adapted["content"] = list(map(_adapt_part, parts))
    return adapted


def _adapt_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a part of another model's message without its log-probabilities and annotations."""
    if part.get("type") != "output_text":
        return part
    return {"type": "output_text", "text": part["text"], "annotations": []}
