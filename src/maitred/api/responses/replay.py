"""Events of a response whose stream is not recorded any more, made again from what is stored of it.

They have the order of a live stream, the same ids and the same last event with its number. Texts come whole, so there
are fewer events, and one between the first and the last can have another number than the live stream gave it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from maitred.core.stored_response import StoredResponse
from maitred.wire.responses.resource import decode_item, encode
from maitred.wire.sse import encode_event

_BEFORE_END: Mapping[str, Any] = {
    "status": "in_progress",
    "output": [],
    "usage": None,
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
}
_LAST_EVENTS = {"completed": "response.completed", "failed": "response.failed"}
"""Status -> type of the last event, where it is not `response.incomplete`."""
_TEXTS = {"output_text": "text", "reasoning_text": "text", "refusal": "refusal"}
"""Type of a part -> its member with the text."""


def replay(stored: StoredResponse, starting_after: int | None) -> bytes:
    """Returns the events of a response that has ended, with the mark of the stream's end left out.

    Args:
        stored: The response.
        starting_after: Number of the event after which the reader goes on; None: it gets all events. A reader that goes
            on with a live stream gets the last event alone, which has the whole response: the numbers of those before
            it are not known any more.
    """
    resource = decode_item(stored.resource)
    events = list(_events(resource))
    last = {"type": _LAST_EVENTS.get(resource["status"], "response.incomplete"), "response": resource}
    after = -1 if starting_after is None else starting_after
    if stored.last_event is not None:
        last_number, is_live = max(len(events), stored.last_event), True
    else:
        # One that was lost with its gateway was live, and nobody has seen its end.
        is_live = resource["background"]
        last_number = max(len(events), after + 1) if is_live else len(events)
    if starting_after is not None and is_live:
        events = []
    numbered = [*enumerate(events), (last_number, last)]
    return b"".join(_encode(number, event) for number, event in numbered if number > after)


def _encode(number: int, event: Mapping[str, Any]) -> bytes:
    kind: str = event["type"]
    return encode_event(encode({"type": kind, "sequence_number": number, **event}), kind.encode("ascii"))


def _events(resource: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the events before the last one."""
    begun = {**resource, **_BEFORE_END}
    for name in ("created", "in_progress"):
        yield {"type": f"response.{name}", "response": begun}
    for index, item in enumerate(resource["output"]):
        yield from item_events(index, item)


def item_events(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the events of one whole item, without numbers.

    Args:
        index: Its index in the output.
        item: The item.
    """
    empty: dict[str, Any]
    match item["type"]:
        case "compaction":
            for name in ("added", "done"):
                yield {"type": f"response.output_item.{name}", "output_index": index, "item": item}
            return
        case "function_call":
            empty = {"arguments": ""}
        case "custom_tool_call":
            empty = {"input": ""}
        case _:
            empty = {"content": []} if item.get("content") else {}
    yield {
        "type": "response.output_item.added",
        "output_index": index,
        "item": {**item, **empty, "status": "in_progress"},
    }
    place = {"item_id": item.get("id"), "output_index": index}
    match item:
        case {"content": list() as parts}:
            for number, part in enumerate(parts):
                if isinstance(part, dict):
                    yield from _events_of_part({**place, "content_index": number}, part)
        case {"type": "function_call", "arguments": str() as arguments, "name": name}:
            kind = "response.function_call_arguments"
            if arguments:
                yield {"type": f"{kind}.delta", **place, "delta": arguments}
            yield {"type": f"{kind}.done", **place, "name": name, "arguments": arguments}
        case {"type": "custom_tool_call", "input": str() as text}:
            kind = "response.custom_tool_call_input"
            if text:
                yield {"type": f"{kind}.delta", **place, "delta": text}
            yield {"type": f"{kind}.done", **place, "input": text}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _events_of_part(place: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the events of one part of a message or of reasoning."""
    kind = part.get("type")
    member = _TEXTS.get(str(kind), "")
    if not isinstance(part.get(member), str):  # a part that only its server knows
        yield {"type": "response.content_part.added", **place, "part": part}
        yield {"type": "response.content_part.done", **place, "part": part}
        return
    # Only texts of the answer have log-probabilities and annotations.
    logprobs = {"logprobs": part.get("logprobs") or []} if kind == "output_text" else {}
    empty: dict[str, Any] = {"logprobs": [], "annotations": []} if kind == "output_text" else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, member: "", **empty}}
    if part[member]:
        yield {"type": f"response.{kind}.delta", **place, "delta": part[member], **logprobs}
    for number, annotation in enumerate(part.get("annotations", ())):
        yield {
            "type": "response.output_text.annotation.added",
            **place,
            "annotation": annotation,
            "annotation_index": number,
        }
    yield {"type": f"response.{kind}.done", **place, member: part[member], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}


class ResumeFilter:
    """Removes the first events of a stream that comes in pieces.

    Each event has the number of those before it, and ends with an empty line, which occurs nowhere else.

    Args:
        starting_after: Number of the last event that is removed; -1: none is.
    """

    def __init__(self, starting_after: int) -> None:
        self._left = starting_after + 1
        self._cut = False
        """Whether the last piece ended with half of the end of an event."""

    def feed(self, piece: bytes) -> bytes:
        """Returns what is left of the next piece."""
        if self._left and self._cut and piece.startswith(b"\n"):
            self._left -= 1
            piece = piece[1:]
        while self._left:
            end = piece.find(b"\n\n")
            if end < 0:
                self._cut = piece.endswith(b"\n")
                return b""
            piece = piece[end + 2 :]
            self._left -= 1
        return piece
