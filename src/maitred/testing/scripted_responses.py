"""Scripted server of OpenAI's Responses API on a real socket, with all possible faults.

It answers as `ScriptedAnthropic` does, with the events that this module makes::

    async with ScriptedResponses([Reply(stream(message("Hello")))]) as server:
        ...  # ask server.url
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from maitred.testing.scripted_anthropic import Event, ReceivedRequest, Reply, ScriptedAnthropic

Item = dict[str, Any]

_ENDS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


def message(*pieces: str, id: str = "msg_1", **members: object) -> Item:  # noqa: A002 - the API's word
    """Makes a message; its stream has an event for each piece of the text."""
    part = {"type": "output_text", "text": "".join(pieces), "annotations": [], "logprobs": [], **members}
    written = {"id": id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {**written, "pieces": pieces}


def reasoning(*pieces: str, encrypted: str | None = None, id: str = "rs_1") -> Item:  # noqa: A002
    """Makes an item of reasoning whose summary comes in these pieces."""
    summary = [{"type": "summary_text", "text": "".join(pieces)}] if pieces else []
    hidden = {} if encrypted is None else {"encrypted_content": encrypted}
    return {"id": id, "type": "reasoning", "summary": summary, **hidden, "pieces": pieces}


def call(name: str, *pieces: str, id: str = "fc_1", call_id: str = "call_1") -> Item:  # noqa: A002
    """Makes the call of a function, with its arguments in pieces."""
    written = {"id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": "".join(pieces)}
    return {**written, "status": "completed", "pieces": pieces}


def response(*items: Item, status: str = "completed", output_tokens: int = 5, **members: object) -> dict[str, Any]:
    """Makes a whole response."""
    output = [{name: value for name, value in item.items() if name != "pieces"} for item in items]
    usage = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 10 + output_tokens,
    }
    told = {"id": "resp_theirs", "object": "response", "created_at": 1, "status": status, "model": "theirs"}
    decided = {"error": None, "incomplete_details": None, "store": False, "previous_response_id": None}
    return {**told, **decided, "output": output, "usage": usage, **members}


def stream(*items: Item, status: str = "completed", output_tokens: int = 5, **members: object) -> list[Event]:
    """Makes the events of a response."""
    begun = response(status="in_progress", usage=None)
    events: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for index, item in enumerate(items):
        events += _item_events(index, item)
    ended = response(*items, status=status, output_tokens=output_tokens, **members)
    events.append({"type": _ENDS[status], "response": ended})
    return [{**event, "sequence_number": 100 + number} for number, event in enumerate(events)]


def _item_events(index: int, item: Item) -> Iterator[dict[str, Any]]:
    pieces = item.get("pieces", ())
    whole = {name: value for name, value in item.items() if name != "pieces"}
    place = {"item_id": item["id"], "output_index": index}
    empty: dict[str, Any] = {}
    begin: list[dict[str, Any]] = []
    end: list[dict[str, Any]] = []
    deltas: tuple[str, dict[str, Any]] = ("", {})
    match item["type"]:
        case "message":
            (part,) = item["content"]
            here = {**place, "content_index": 0}
            empty = {"content": []}
            begin = [{"type": "response.content_part.added", **here, "part": {**part, "text": "", "annotations": []}}]
            deltas = ("response.output_text.delta", {**here, "logprobs": []})
            end = [
                {"type": "response.output_text.done", **here, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **here, "part": part},
            ]
        case "reasoning" if item["summary"]:
            here = {**place, "summary_index": 0}
            empty = {"summary": []}
            part = {"type": "summary_text", "text": ""}
            begin = [{"type": "response.reasoning_summary_part.added", **here, "part": part}]
            deltas = ("response.reasoning_summary_text.delta", here)
            end = [{"type": "response.reasoning_summary_part.done", **here, "part": item["summary"][0]}]
        case "function_call":
            empty = {"arguments": ""}
            deltas = ("response.function_call_arguments.delta", place)
            end = [{"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}]
        case "reasoning":
            pass
        case kind:
            begin = [{"type": f"response.{kind}.in_progress", **place}]
    yield {"type": "response.output_item.added", "output_index": index, "item": {**whole, **empty}}
    yield from begin
    for piece in pieces:
        name, here = deltas
        yield {"type": name, **here, "delta": piece, "obfuscation": "x" * 9}
    yield from end
    yield {"type": "response.output_item.done", "output_index": index, "item": whole}


class ScriptedResponses(ScriptedAnthropic):
    """Scripted server that knows no path but that of responses; see `ScriptedAnthropic`."""

    async def _answer(self, asked: ReceivedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if asked.method == "POST" and not asked.path.endswith("/responses"):
            replies, self._replies = self._replies, [Reply(status=404)]
            try:
                return await super()._answer(asked, reader, writer)
            finally:
                self._replies = replies
        return await super()._answer(asked, reader, writer)


def cut_after(events: list[Event], count: int, **members: Any) -> Reply:  # noqa: ANN401 - those of `Reply`
    """Makes a reply that ends after so many events."""
    return replace(Reply(events[:count]), **members)


def failure(code: str, text: str) -> Mapping[str, Any]:
    """Makes the event that ends a response with an error."""
    failed = response(status="failed", error={"code": code, "message": text}, usage=None)
    return {"type": "response.failed", "sequence_number": 7, "response": failed}
