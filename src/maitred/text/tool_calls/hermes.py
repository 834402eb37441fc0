"""Parser of calls as Hermes and Qwen write them: ``<tool_call>{"name": "f", "arguments": {…}}</tool_call>``.

Text may stand before, between and after calls; white space next to a call does not belong to the text. A call without a
closing tag is still a call, because its JSON object has a clear end.
"""

from collections.abc import Set

from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls.call_object import CallObject
from maitred.text.tool_calls.events import Event, MarkerScanner, TextEvent

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """Streaming parser of Hermes calls; implements `maitred.text.tool_calls.events.CallParser`.

    Args:
        names: Names of the tools.
        marks: Markers of the model.
    """

    def __init__(self, names: Set[str], marks: SpecialTokenText) -> None:
        self._names = names
        self._open, self._close = marks[OPEN], marks[CLOSE]
        self._text = MarkerScanner(self._open)
        self._call: CallObject | None = None
        self._closing: str | None = None
        """Received part of the closing tag, if the parser expects the tag."""
        self._called = False

    def push(self, text: str) -> list[Event]:
        """Parses more text of the answer and returns the new events."""
        events: list[Event] = []
        at = 0
        while at < len(text):
            if self._call is not None:
                at = self._read_call(self._call, text, at, events)
            elif self._closing is not None:
                text, at = self._read_closing(self._closing, text[at:])
            else:
                at = self._read_text(text, at, events)
        return events

    def flush(self) -> list[Event]:
        """Ends the answer and returns events for the text that was held back."""
        if self._call is not None:
            return [] if self._call.begun else [TextEvent(self._open + self._call.raw)]
        held = self._text.flush() if self._closing is None else ""
        # White space after a call is dropped if no text follows.
        return [] if self._called and held.isspace() else [TextEvent(held)]

    def _read_text(self, text: str, at: int, events: list[Event]) -> int:
        shown, behind = self._text.push(text, at)
        events.append(TextEvent(shown))
        if behind is None:
            return len(text)
        self._call = CallObject(self._names)
        return behind

    def _read_call(self, call: CallObject, text: str, at: int, events: list[Event]) -> int:
        at = call.push(text, at, events)
        if call.done:
            self._closing, self._called = "", True
        elif call.broken:
            if call.begun:
                self._called = True
            else:
                events.append(TextEvent(self._open + call.raw))
        else:
            return at
        self._call = None
        return at

    def _read_closing(self, before: str, rest: str) -> tuple[str, int]:
        """Skips the closing tag and the white space before it; returns the text to read and its start."""
        whole = before + rest
        tag = whole.lstrip()
        if self._close.startswith(tag):
            self._closing = None if tag == self._close else whole
            return "", 0
        self._closing = None
        return (tag, len(self._close)) if tag.startswith(self._close) else (whole, 0)
