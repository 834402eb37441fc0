"""Items of responses and conversations as they are stored and listed.

The id of an item has the digits of the response or conversation that it was made for, so it can be found by its id.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import to_builtins

from maitred.api.large_body import check_count
from maitred.core.errors import InvalidRequest
from maitred.wire.responses.fields import check_includes, ignored_includes
from maitred.wire.responses.requests import InputItem, ServerItem, encode_thoughts, tag_items, untag_item
from maitred.wire.responses.resource import ItemList

_DEFAULT_PAGE = 20
_MAX_PAGE = 100
_FIT_ID = re.compile(r"[A-Za-z0-9_-]{1,63}")
"""Ids of clients that are kept as they are; the database has this much room."""
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}


def written_items(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Returns items as their client wrote them, as far as they were read."""
    return list(map(untag_item, map(to_builtins, items)))


def with_ids(items: Iterable[dict[str, Any]], suffix: str) -> list[dict[str, Any]]:
    """Returns items as they are stored: each with an id, a status and its content as a list.

    Args:
        items: The items as they were written, each with its type.
        suffix: End of the ids, before a number; it is unique among all items.
    """
    stored = []
    for number, item in enumerate(items):
        kind = str(item["type"])
        item_id = item.get("id")
        if not has_fit_id(item):  # a provider's record can have any value
            item_id = f"{_ID_PREFIXES.get(kind, 'item')}_{suffix}{number}"
        stored.append({**item, "id": item_id})
        if item.get("status") is None and (kind in _ID_PREFIXES or item_id != item.get("id")):
            stored[-1]["status"] = "completed"
        if kind == "message" and isinstance(text := item["content"], str):
            is_answer = item["role"] == "assistant"
            part = {"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"}
            stored[-1]["content"] = [{**part, "text": text}]
    return stored


def foreign_ids(items: Iterable[Mapping[str, Any]], digits: str) -> tuple[str, ...]:
    """Returns the ids of items that do not have the digits of their response."""
    ids = dict.fromkeys(str(item["id"]) for item in items)
    return tuple(item_id for item_id in ids if f"_{digits}_" not in item_id)


def has_fit_id(item: Mapping[str, Any]) -> bool:
    """Returns whether an item has an id that the database has room for."""
    item_id = item.get("id")
    return isinstance(item_id, str) and _FIT_ID.fullmatch(item_id) is not None


def decode_items(stored: bytes) -> list[dict[str, Any]]:
    """Returns a stored list of items."""
    return msgspec.json.decode(stored, type=list[dict[str, Any]])


def to_input(entries: Sequence[Mapping[str, Any]]) -> list[InputItem]:
    """Returns stored items as those of an input; one that its server has written in another form is its record."""
    return list(map(_to_input_item, tag_items([*entries])))


def _to_input_item(tagged: dict[str, Any]) -> InputItem:
    try:
        item: InputItem = msgspec.convert(tagged, InputItem)
        return item
    except msgspec.ValidationError:
        return ServerItem(item=untag_item(tagged))


def read_history(stored: Sequence[bytes]) -> tuple[list[dict[str, Any]], list[InputItem]]:
    """Returns the items of stored lists, one after the other: as they are stored, and as those of an input.

    Raises:
        InvalidRequest: They have too many strings or values; see `check_count`.
    """
    for piece in stored:
        check_count(piece)
    entries = [item for piece in stored for item in decode_items(piece)]
    return entries, to_input(entries)


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> ItemList:
    """Returns the page of items that a query asks for by `limit`, `order` and `after`.

    Raises:
        InvalidRequest: A parameter is out of range.
    """
    limit, order, after = query.get("limit", ""), query.get("order", "desc"), query.get("after")
    if limit and not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MAX_PAGE):
        raise InvalidRequest(f"limit must be a number from 1 to {_MAX_PAGE}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest("after must be the id of one of these items.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    return list_of(ordered[: int(limit or _DEFAULT_PAGE)], len(ordered))


def read_includes(query: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the values of `include` in a query, which clients also call `include[]`.

    Raises:
        InvalidRequest: OpenAI does not know one of them.
    """
    names = [value for name, value in query if name in ("include", "include[]")]
    check_includes(names)
    return names


def include_parts(resource: dict[str, Any], kept: Sequence[Mapping[str, Any]], includes: Sequence[str]) -> list[str]:
    """Adds parts to the items of a response that its reader asks for, as far as they are known.

    Args:
        resource: The response, which is changed.
        kept: Its items as they are stored for the next request; empty while it runs.
        includes: What the reader asks for.

    Returns:
        What cannot be added, by its place in the request.
    """
    output = resource["output"]
    if "reasoning.encrypted_content" in includes:
        for index, item in enumerate(output):
            if item["type"] == "reasoning" and not item.get("encrypted_content"):
                thought = "\n\n".join(part["text"] for part in item["content"])
                stored = kept[index].get("encrypted_content") if kept else None
                item["encrypted_content"] = stored or encode_thoughts([{"type": "thinking", "thinking": thought}])
    texts = [
        part
        for item in output
        if item["type"] == "message"
        for part in item["content"]
        if part["type"] == "output_text" and part["text"]
    ]
    missing = ignored_includes(includes)
    if "message.output_text.logprobs" in includes and any(not part["logprobs"] for part in texts):
        missing.append("include (message.output_text.logprobs)")  # they can only be had when it is generated
    return missing


def list_of(page: list[dict[str, Any]], available: int) -> ItemList:
    """Returns a list of items of which `available` are there from its first one on."""
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(page) < available,
    )
