"""Parser of calls as Mistral writes them, in either of two styles, after the token ``[TOOL_CALLS]``.

Up to version 7 of Mistral's tokenizer a list follows: ``[TOOL_CALLS] [{"name": "look", "arguments": {"at": "sky"}}]``.
Since version 11 each call has a token of its own: ``[TOOL_CALLS]look[ARGS]{"at": "sky"}``, where an id may stand before
the arguments (``[CALL_ID]abc123def``).
"""

import re
from collections.abc import Set

from maitred.text.json_scan import JsonScan
from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls.call_object import CallObject
from maitred.text.tool_calls.events import Event, MarkerScanner, TextEvent, ToolCallArguments, ToolCallStart

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MOST_ID_CHARACTERS = 64
_AROUND_CHARACTERS = 32
"""Markers and white space between a name and its arguments."""


class MistralParser:
    """Streaming parser of Mistral's calls; implements `maitred.text.tool_calls.events.CallParser`."""

    def __init__(self, names: Set[str], marks: SpecialTokenText) -> None:
        self._names = names
        self._open = marks[OPEN]
        self._text = MarkerScanner(self._open)
        self._before: str | None = None
        """Text since a marker or a call of a list, or None if the latest event was neither."""
        self._in_list = False
        self._call: CallObject | None = None
        self._arguments: JsonScan | None = None
        self._called = False
        call_id, arguments = re.escape(marks[CALL_ID]), re.escape(marks[ARGUMENTS])
        self._head = re.compile(rf"\s*(\S+?)\s*(?:{call_id}\s*\w{{1,{_MOST_ID_CHARACTERS}}}\s*)?(?:{arguments}\s*)?")
        self._head_characters = max(map(len, names), default=0) + _MOST_ID_CHARACTERS + _AROUND_CHARACTERS

    def push(self, text: str) -> list[Event]:
        """Parses more text of the answer and returns the new events."""
        events: list[Event] = []
        at = 0
        while at < len(text):
            if self._arguments is not None:
                at = self._read_arguments(self._arguments, text, at, events)
            elif self._call is not None:
                at = self._read_object(self._call, text, at, events)
            elif self._before is not None:
                read = self._read_list if self._in_list else self._read_head
                text, at = read(self._before + text[at:], events), 0
            else:
                at = self._read_text(text, at, events)
        return events

    def flush(self) -> list[Event]:
        """Ends the answer and returns events for the text that was held back."""
        if self._call is not None:
            return [] if self._call.begun else [TextEvent((self._before or "") + self._call.raw)]
        held = self._text.flush() if self._before is None else self._before
        return [] if self._called and not held.strip(", \n\r\t") else [TextEvent(held)]

    def _read_text(self, text: str, at: int, events: list[Event]) -> int:
        shown, behind = self._text.push(text, at)
        events.append(TextEvent(shown))
        if behind is None:
            return len(text)
        self._before = self._open
        return behind

    def _read_head(self, whole: str, events: list[Event]) -> str:
        """Reads after the marker, where a list or a name may begin; returns the unread text."""
        rest = whole.removeprefix(self._open)
        if rest.lstrip().startswith("["):
            self._in_list = True
            return self._read_list(whole, events)
        brace = rest.find("{", 0, self._head_characters)
        if brace < 0 and len(rest) < self._head_characters:
            self._before = whole
            return ""
        self._before = None
        head = self._head.fullmatch(rest, 0, max(brace, 0))
        if head is None or head[1] not in self._names:
            events.append(TextEvent(self._open))
            return rest
        self._called, self._arguments = True, JsonScan()
        events.append(ToolCallStart(head[1]))
        return rest[brace:]

    def _read_list(self, whole: str, events: list[Event]) -> str:
        """Reads where an object of a list may begin or the list may end; returns the unread text."""
        begins = whole.startswith(self._open)
        rest = (whole.removeprefix(self._open).lstrip()[1:] if begins else whole).lstrip()
        separated = begins
        if not begins and rest.startswith(","):
            rest, separated = rest[1:].lstrip(), True
        before = whole[: len(whole) - len(rest)]
        if separated and rest.startswith("{"):
            self._before, self._call = before, CallObject(self._names)
            return rest
        if not rest:
            self._before = whole
            return ""
        self._in_list, self._before = False, None
        if rest.startswith("]") and not separated:
            return rest[1:]
        events.append(TextEvent(before))
        return rest

    def _read_object(self, call: CallObject, text: str, at: int, events: list[Event]) -> int:
        at = call.push(text, at, events)
        if call.done:
            self._called, self._before = True, ""
        elif call.broken:
            if call.begun:
                self._called = True
            else:
                events.append(TextEvent((self._before or "") + call.raw))
            self._in_list, self._before = False, None
        else:
            return at
        self._call = None
        return at

    def _read_arguments(self, scan: JsonScan, text: str, at: int, events: list[Event]) -> int:
        end = scan.push(text, at)
        events.append(ToolCallArguments(text[at:end]))
        if scan.done or scan.broken:
            self._arguments = None
        return end
