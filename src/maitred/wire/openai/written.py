"""Passes requests and messages on between a client and a server that speak the same API.

A forwarded request gets only the fields that the client sent, because an added null or an explicit default can have a
meaning for the server. An answer keeps every member that its server sent: what the gateway decides is laid over it.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from maitred.wire.openai.requests import ChatRequest, CompletionRequest

_UNJOINED = frozenset({"id", "type", "index", "role", "format", "mime_type", "url", "signature", "thought_signature"})
"""Members whose texts replace one another."""
_TEXTS = frozenset(
    {
        *("content", "refusal", "reasoning_content", "reasoning", "thinking", "text", "summary", "transcript"),
        *("arguments", "input", "data"),
    }
)
"""Members whose texts are pieces of one text. That of another member may be said again with each delta."""
_PIECEWISE = frozenset({"tool_calls", "reasoning_details"})
"""Lists whose entries come in pieces; those of other lists are whole."""


def request_fields(request: ChatRequest | CompletionRequest) -> Mapping[str, Any]:
    """Returns the fields of a decoded request, as plain JSON values.

    The field `cache` is left out: it is about the caches of this gateway. Members of messages that are null are left
    out, too: clients send back the whole message of an answer, and some servers refuse members that they do not know.
    """
    sent = request.sent
    if request.cache is not None:
        sent = {name: value for name, value in sent.items() if name != "cache"}
    if "enable_thinking" not in sent and not any(map(_has_nulls, sent.get("messages", ()))):
        return sent
    fields = {**sent}
    if "messages" in fields:
        fields["messages"] = [_without_nulls(message) for message in fields["messages"]]
    if "enable_thinking" in fields:
        enable_thinking = fields.pop("enable_thinking")
        fields["chat_template_kwargs"] = {
            "enable_thinking": enable_thinking,
            **fields.get("chat_template_kwargs", {}),
        }
    return fields


def _has_nulls(message: Mapping[str, Any]) -> bool:
    return None in message.values()


def thinking_blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the signed blocks of the reasoning in a message or a delta; whatever has another form is skipped."""
    blocks = message.get("thinking_blocks")
    return [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []


def whole_thinking_blocks(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the signed and the encrypted blocks that come in these entries.

    The text of one may come in several entries, of which the last has the signature.
    """
    blocks: list[dict[str, Any]] = []
    text = ""
    for entry in entries:
        match entry:
            case {"type": "redacted_thinking", "data": str()}:
                blocks.append({**entry})
            case {"thinking": str() as thought, **rest}:
                text += thought
                signature = rest.get("signature")
                if isinstance(signature, str) and signature:
                    blocks.append({**entry, "thinking": text})
                    text = ""
    return blocks


def _without_nulls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def overlay(sent: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members that a server sent, under those that the gateway decides; nested objects likewise."""
    merged = {**sent}
    for name, value in decided.items():
        nested = merged.get(name)
        merged[name] = overlay(nested, value) if isinstance(nested, dict) and isinstance(value, dict) else value
    return merged


def merge_metadata(sent: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the members around several deltas into those around the whole: later ones replace earlier ones.

    Objects are merged. A list of numbers is continued, since each delta has its own tokens; other lists are repeated
    with what they had before.
    """
    merged: dict[str, Any] = {}
    for members in sent:
        for name, value in members.items():
            before = merged.get(name)
            match before, value:
                case dict(), dict():
                    merged[name] = _continue_lists(before, value) if name == "logprobs" else overlay(before, value)
                case [int(), *_], list():
                    merged[name] = before + value
                case _:
                    merged[name] = value
    return merged


def _continue_lists(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Joins the log-probabilities of two deltas, which are told of each token once."""
    joined = {**first}
    for name, value in second.items():
        before = joined.get(name)
        joined[name] = before + value if isinstance(before, list) and isinstance(value, list) else value
    return joined


def merge_deltas(deltas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges deltas in their order into the fields of a message.

    Texts are joined, lists are continued, and objects are merged. Tool calls with the same `index` are pieces of one
    call: first its id and its name, then the parts of its arguments.
    """
    message: dict[str, Any] = {}
    for delta in _join_runs(deltas):
        for name, value in delta.items():
            message[name] = _join(name, message[name], value) if name in message else _copy(name, value)
    if "tool_calls" in message:
        message["tool_calls"] = [_whole_call(call) for call in message["tool_calls"]]
    return message


def _join_runs(deltas: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Joins neighbours that only go on with the same texts, or with the arguments of the same call.

    An answer has as many deltas as tokens: joined one by one, its time would grow with the square of its length.
    """
    for kind, run in groupby(deltas, key=_text_kind):
        match kind:
            case None:
                yield from run
            case ("tool_calls", index, field, written):
                text = "".join([delta["tool_calls"][0][field][written] for delta in run])
                yield {"tool_calls": [{"index": index, field: {written: text}}]}
            case names:
                several = [*run]
                yield {name: "".join([delta[name] for delta in several]) for name in names}


def _text_kind(delta: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Returns what a delta goes on with, if it has nothing but texts; None: it has something else."""
    match delta:
        case {"tool_calls": [{"index": int() as index, **body}], **rest} if not rest and len(body) == 1:
            ((field, piece),) = body.items()
            written = {"function": "arguments", "custom": "input"}.get(str(field), "")
            if isinstance(piece, dict) and piece.keys() == {written} and isinstance(piece[written], str):
                return "tool_calls", index, field, written
            return None
    if all(name in _TEXTS and isinstance(value, str) for name, value in delta.items()):
        return tuple(delta)
    return None


def _copy(name: str, value: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    """Returns a value whose lists can be continued without a change of the delta; merges entries of a list."""
    return _join_lists(name, [], value) if isinstance(value, list) else value


def _join(name: str, first: Any, second: Any) -> Any:  # noqa: ANN401 - whatever JSON can be
    """Joins two values of a member that came one after the other."""
    match first, second:
        case str(), str() if name in _TEXTS or not (name in _UNJOINED or first == second):
            return first + second
        case list(), list():
            return _join_lists(name, first, second)
        case dict(), dict():
            return _join_objects(name, first, second)
        case _, None:
            return first
    return second


def _join_objects(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    joined = {**first}
    for member, value in second.items():
        if name == "audio" and member == "data" and isinstance(value, str) and isinstance(first.get(member), str):
            joined[member] = _join_base64(first[member], value)
        else:
            joined[member] = _join(member, first[member], value) if member in first else value
    return joined


def _join_lists(name: str, first: list[Any], second: list[Any]) -> list[Any]:
    if first and isinstance(first[0], dict | str) and second[: len(first)] == first:
        return second  # some servers send the whole list so far with each chunk
    joined = [*first]
    for entry in second:
        place = _place_of(entry, joined) if name in _PIECEWISE else None
        if place is None:
            joined.append(entry)
        else:
            joined[place] = _join_objects(name, joined[place], entry)
    return joined


def _place_of(entry: Any, entries: Sequence[Any]) -> int | None:  # noqa: ANN401 - whatever JSON can be
    """Returns the place of the entry whose next piece this is; None: it is the first piece of another entry."""
    if not isinstance(entry, dict) or not isinstance(entry.get("index"), int):
        return None
    return next(
        (
            place
            for place, other in enumerate(entries)
            if isinstance(other, dict)
            and other.get("index") == entry["index"]
            and entry.get("type") in (None, other.get("type"))
        ),
        None,
    )


def _join_base64(first: str, second: str) -> str:
    """Joins two pieces of base64, each of which may end in padding."""
    if not first.endswith("="):
        return first + second
    try:
        return base64.b64encode(base64.b64decode(first) + base64.b64decode(second)).decode()
    except (binascii.Error, ValueError):
        return first + second


def _whole_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call with the members that each call of its type has, and without its index in the stream."""
    whole: dict[str, Any] = {"id": "", "type": "custom" if "custom" in call else "function"}
    whole |= {name: value for name, value in call.items() if name != "index" and value is not None}
    field, written = ("custom", "input") if whole["type"] == "custom" else ("function", "arguments")
    whole[field] = {"name": "", written: "", **whole.get(field, {})}
    return whole
