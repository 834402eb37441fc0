"""Output of a server that speaks the Responses API itself, for a client of the same API.

Its events are passed on with their items and ids, and the items are kept as they are so far: a response that breaks off
or is cut has what came of them, and the next request gets them as the server wrote them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from maitred.api.responses.replay import item_events
from maitred.core.inference import TextDelta
from maitred.wire.openai.responses import REASONING_FIELDS, score_entries
from maitred.wire.responses.answer import CALL_EVENTS, TEXT_EVENTS
from maitred.wire.responses.outbound import ORIGIN

_DECIDED = frozenset(
    {
        *("id", "object", "created_at", "completed_at", "status", "background", "error", "instructions", "model"),
        *("max_output_tokens", "output", "previous_response_id", "conversation", "store", "usage", "metadata"),
        *("billing", "user", "tools"),
    }
)
"""Members of a response that the gateway decides."""
_PLAIN_PLACE = {"type", "item_id", "output_index", "content_index"}
_PARTS = {
    "response.content_part": ("content", "content_index"),
    "response.reasoning_summary_part": ("summary", "summary_index"),
}
"""Beginning of the names of events about a part -> the member of its item that has it, and the number of the part."""
_WRITTEN: Mapping[str, str] = {
    "response.function_call_arguments.delta": "arguments",
    "response.mcp_call_arguments.delta": "arguments",
    "response.code_interpreter_call_code.delta": "code",
    "response.custom_tool_call_input.delta": "input",
}
"""Type of an event with a piece of a call -> the member of its item that has the whole."""


class PassthroughOutput:
    """Output of one response: the events of its server, and its items so far.

    Args:
        with_encrypted_reasoning: Whether the client asked for the reasoning for its next request.

    Attributes:
        members: Members of the response that its server decides.
        plain_place: Item, output index and content index of the latest text, if it has no other members; else None.
    """

    def __init__(self, *, with_encrypted_reasoning: bool) -> None:
        self.members: dict[str, Any] = {}
        self.plain_place: tuple[str, int, int] | None = None
        self._with_encrypted_reasoning = with_encrypted_reasoning
        self._items: dict[int, dict[str, Any]] = {}
        self._whole: set[int] = set()
        """Indexes of the items that are whole."""
        self._places: dict[object, Mapping[str, Any]] = {}
        """Text or call -> the place of its last piece."""
        self._pieces: dict[tuple[object, ...], list[str]] = {}
        """Place of a text in an item that is not whole -> its pieces."""

    def read(self, part: TextDelta) -> Iterator[dict[str, Any]]:
        """Yields the events of a delta, without numbers and without those that begin and end the response."""
        event = part.block
        kind = "" if event is None else event["type"]
        if event is not None and "response" in event and kind in ("response.completed", "response.incomplete"):
            yield from self._read_end(event["response"])
        elif event is not None and kind not in TEXT_EVENTS and kind not in CALL_EVENTS:
            self._note(kind, event)
            item = event.get("item")
            yield {**event, "item": self._to_client(item)} if isinstance(item, dict) else event
        else:
            if event is not None:
                self._move(kind, event)
            yield from self._texts(part)
        if part.finish is not None:
            yield from self.close()

    def add_text(self, text: str) -> None:
        """Adds a text at `plain_place`."""
        self._piece(self._places["content"], text)

    def close(self) -> Iterator[dict[str, Any]]:
        """Marks the items that are not whole as incomplete, and yields the events that end them."""
        for index in sorted(self._items.keys() - self._whole):
            item = self._items[index] = {**self._current(index), "status": "incomplete"}
            self._whole.add(index)
            yield {"type": "response.output_item.done", "output_index": index, "item": self._to_client(item)}

    def items(self) -> list[dict[str, Any]]:
        """Returns the items as their server wrote them so far."""
        return [self._current(index) for index in sorted(self._items)]

    def shown_items(self) -> list[dict[str, Any]]:
        """Returns the items as the client gets them."""
        return list(map(self._to_client, self.items()))

    def _to_client(self, item: dict[str, Any]) -> dict[str, Any]:
        if item.get("type") != "reasoning" or self._with_encrypted_reasoning:
            return item
        return {name: value for name, value in item.items() if name not in ("encrypted_content", ORIGIN)}

    def _read_end(self, response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Takes the whole response, and yields the events of the items that have not come before."""
        self.members = {name: value for name, value in response.items() if name not in _DECIDED}
        for index, item in enumerate(response["output"]):
            if index not in self._items:
                yield from item_events(index, self._to_client(item))
            self._items[index] = item
            self._whole.add(index)

    def _note(self, kind: str, event: Mapping[str, Any]) -> None:
        """Takes what an event says of an item."""
        index, item = event.get("output_index"), event.get("item")
        if not isinstance(index, int):
            return
        if isinstance(item, dict):
            self._items[index] = item
            if kind.endswith(".done"):
                self._whole.add(index)
                self._pieces = {place: pieces for place, pieces in self._pieces.items() if place[0] != index}
            return
        stem, _, state = kind.rpartition(".")
        if stem in _PARTS and state == "added" and index in self._items:
            member, number = _PARTS[stem]
            begun = self._items[index]
            self._items[index] = {**begun, member: [*(begun.get(member) or ())[: event.get(number)], event.get("part")]}

    def _move(self, kind: str, place: Mapping[str, Any]) -> None:
        """Takes the place of a text or a call."""
        if kind in CALL_EVENTS:
            self._places[CALL_EVENTS[kind][0], place.get("output_index") or 0] = place
            return
        self._places[TEXT_EVENTS[kind]] = place
        if kind == "response.output_text.delta":
            is_plain = place.keys() == _PLAIN_PLACE
            self.plain_place = None
            match place:
                case {"item_id": str() as item_id, "output_index": int() as index, "content_index": int() as part}:
                    self.plain_place = (item_id, index, part) if is_plain else None

    def _texts(self, part: TextDelta) -> Iterator[dict[str, Any]]:
        """Yields an event for each text of a delta, at the place of the text before it."""
        extra = part.extra or {}
        if part.text or part.scores:
            scores = score_entries(part.scores) if part.scores else []
            yield {**self._piece(self._places.get("content", {}), part.text), "logprobs": scores}
        for name in (REASONING_FIELDS[0], "refusal"):
            if extra.get(name):
                yield self._piece(self._places.get(name, {}), extra[name])
        for call in extra.get("tool_calls", ()):
            for name, member in set(CALL_EVENTS.values()):
                if name in call and (text := call[name].get(member)):
                    yield self._piece(self._places.get((name, call.get("index") or 0), {}), text)

    def _piece(self, place: Mapping[str, Any], text: str) -> dict[str, Any]:
        """Keeps a piece of a text, and returns its event."""
        kind = place.get("type", "")
        index = place.get("output_index")
        if kind in _WRITTEN:
            where: tuple[object, ...] = index, _WRITTEN[kind]
        elif kind == "response.reasoning_summary_text.delta":
            where = index, "summary", place.get("summary_index"), "text"
        else:
            member = "refusal" if kind == "response.refusal.delta" else "text"
            where = index, "content", place.get("content_index"), member
        self._pieces.setdefault(where, []).append(text)
        return {**place, "delta": text}

    def _current(self, index: int) -> dict[str, Any]:
        """Returns an item with the texts that have come so far."""
        item = self._items[index]
        if index in self._whole:
            return item
        for (number, member, *inner), pieces in self._pieces.items():
            if number != index:
                continue
            text = "".join(pieces)
            match inner:
                case [int() as part, str() as name] if part < len(parts := item.get(str(member)) or ()) and isinstance(
                    parts[part], dict
                ):
                    item = {**item, str(member): [*parts[:part], {**parts[part], name: text}, *parts[part + 1 :]]}
                case []:
                    item = {**item, str(member): text}
        return item
