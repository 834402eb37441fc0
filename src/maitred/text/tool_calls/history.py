"""Adaptation of earlier tool calls in a conversation to what a chat template can write.

Some templates reject what OpenAI's API allows, though the same history can be written in another way:

* Llama 3's templates write one call per message. Several calls become several messages, each before its result.
* Mistral's templates require ids of nine letters or digits. Other ids are replaced.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

_ONE_CALL = re.compile(r"tool_calls\s*\|\s*length\s*!=\s*1|single tool-calls")
_SHORT_IDS = re.compile(r"length\s*!=\s*9")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_Message = Mapping[str, Any]


class ToolHistory:
    """Adapter of a conversation's earlier tool calls to one chat template.

    Args:
        template: Source of the template.
    """

    def __init__(self, template: str) -> None:
        self._one_call = _ONE_CALL.search(template) is not None
        self._short_ids = _SHORT_IDS.search(template) is not None

    def shaped(self, messages: Sequence[_Message]) -> Sequence[_Message]:
        """Returns the messages in the form that the template accepts."""
        if self._one_call:
            messages = list(_one_by_one(messages))
        if self._short_ids:
            messages = [_with_short_ids(message) for message in messages]
        return messages


def _one_by_one(messages: Sequence[_Message]) -> Iterator[_Message]:
    results: list[_Message] = []
    """Results of the calls before, which have been written right behind their calls."""
    for position, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) > 1:
            results = []
            for later in messages[position + 1 :]:
                if later.get("role") != "tool":
                    break
                results.append(later)
            yield from _told(message, calls, results)
        elif not any(message is told for told in results):
            yield message


def _told(message: _Message, calls: Sequence[_Message], results: Sequence[_Message]) -> Iterator[_Message]:
    """Yields every call with its result; results without a call come last."""
    left = list(results)
    for number, call in enumerate(calls):
        yield {**message, "content": "" if number else message.get("content", ""), "tool_calls": [call]}
        for result in [one for one in left if one.get("tool_call_id") == call.get("id")]:
            left = [one for one in left if one is not result]
            yield result
    yield from left


def _with_short_ids(message: _Message) -> _Message:
    changes: dict[str, Any] = {}
    if isinstance(message.get("tool_call_id"), str):
        changes["tool_call_id"] = _short(message["tool_call_id"])
    if calls := message.get("tool_calls"):
        changes["tool_calls"] = [{**call, "id": _short(call.get("id") or "")} for call in calls]
    return {**message, **changes} if changes else message


def _short(id_: str) -> str:
    """Returns nine characters that represent an id: the id itself, if it is valid."""
    if _SHORT_ID.fullmatch(id_):
        return id_
    number = int.from_bytes(blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    return "".join(_ALPHABET[number // len(_ALPHABET) ** place % len(_ALPHABET)] for place in range(9))
