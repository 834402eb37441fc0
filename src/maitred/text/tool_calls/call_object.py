"""Streaming parser of a call written as a JSON object: ``{"name": "look", "arguments": {"at": "sky"}}``."""

import json
from collections.abc import Callable, Set

from maitred.text.json_scan import JsonScan
from maitred.text.tool_calls.events import Event, ToolCallArguments, ToolCallStart

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = _ARGUMENTS | {"name", "type", "id"}
"""Keys that a call may have; an object with any other key is plain text."""
_WHITE = " \t\n\r"
_State = Callable[[str, int], int]
"""State of the parser: reads at a position of a text and returns the next position."""


class CallObject:
    """Streaming parser of one call.

    After the name is known, the arguments are emitted as they arrive. Some models write the arguments as a string that
    contains JSON, which the parser accepts; it also accepts null for empty arguments.

    Args:
        names: Names of the tools; an object with another name is not a call.
        bare: Whether the object has no marker before it. An object without a marker and without arguments is not a
            call.

    Attributes:
        raw: All text that the parser has read.
        begun: Whether the object has been recognised as a call.
        done: Whether the call is complete.
        broken: Whether the object is not a call, or has invalid JSON.
    """

    def __init__(self, names: Set[str], *, bare: bool = False) -> None:
        self.raw = ""
        self.begun = self.done = self.broken = False
        self._names = names
        self._bare = bare
        self._state: _State = self._opening
        self._scan = JsonScan()
        self._token = ""
        """Text of the current key or value."""
        self._key = ""
        self._name: str | None = None
        self._held: str | None = None
        """Arguments that came before the name, or in a form other than an object."""
        self._streams = False
        self._events: list[Event] = []

    def push(self, text: str, start: int, events: list[Event]) -> int:
        """Reads more text and appends the events found; returns the position of the end or error."""
        self._events = events
        at = start
        while at < len(text) and not (self.done or self.broken):
            at = self._state(text, at)
        self.raw += text[start:at]
        return at

    def _opening(self, text: str, at: int) -> int:
        return self._expect(text, at, "{", self._first_key)

    def _first_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._finish(at)
        return self._key_begins(text, at)

    def _key_begins(self, text: str, at: int) -> int:
        if text[at] in _WHITE:
            return at + 1
        if text[at] != '"':
            return self._break(at)
        self._begin(self._reading_key)
        return at

    def _reading_key(self, text: str, at: int) -> int:
        end = self._scan.push(text, at)
        self._token += text[at:end]
        if self._scan.done:
            self._key = json.loads(self._token)
            if self._key not in _KEYS:
                return self._break(end)
            self._state = self._colon
        return self._break(end) if self._scan.broken else end

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", self._value_begins)

    def _value_begins(self, text: str, at: int) -> int:
        if text[at] in _WHITE:
            return at + 1
        self._streams = self._key in _ARGUMENTS and self._name is not None and text[at] == "{" and not self.begun
        if self._streams:
            self._begin_call()
        self._begin(self._reading_value)
        return at

    def _reading_value(self, text: str, at: int) -> int:
        end = self._scan.push(text, at)
        if self._streams:
            self._events.append(ToolCallArguments(text[at:end]))
        else:
            self._token += text[at:end]
        if self._scan.broken:
            return self._break(end)
        if self._scan.done:
            self._state = self._after
            if not (self._streams or self._take_value()):
                return self._break(end)
        return end

    def _after(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._finish(at)
        return self._expect(text, at, ",", self._key_begins)

    def _take_value(self) -> bool:
        """Stores a value; returns False if the value cannot belong to a call."""
        if self._key == "name":
            self._name = json.loads(self._token)
            if self._name not in self._names or self.begun:
                return False
            if self._held is not None:
                self._begin_call()
                self._events.append(ToolCallArguments(self._held))
        elif self._key in _ARGUMENTS:
            self._held = _object_in(self._token)
            if self._held is None or self.begun:
                return False
            if self._name is not None:
                self._begin_call()
                self._events.append(ToolCallArguments(self._held))
        return True

    def _finish(self, at: int) -> int:
        if not self.begun:
            if self._name is None or self._bare:
                return self._break(at)
            self._begin_call()
            self._events.append(ToolCallArguments("{}"))
        self.done = True
        return at + 1

    def _begin_call(self) -> None:
        assert self._name is not None
        self.begun = True
        self._events.append(ToolCallStart(self._name))

    def _begin(self, state: _State) -> None:
        self._scan, self._token, self._state = JsonScan(), "", state

    def _expect(self, text: str, at: int, character: str, then: _State) -> int:
        if text[at] == character:
            self._state = then
        elif text[at] not in _WHITE:
            return self._break(at)
        return at + 1

    def _break(self, at: int) -> int:
        self.broken = True
        return at


def _object_in(token: str) -> str | None:
    """Returns the arguments in a value that is not a plain object after the name, or None.

    None means that the value has no arguments.
    """
    if token == "null":
        return "{}"
    match _load_token(token):
        case dict():
            return token
        case str() as text if isinstance(_load_token(text), dict):
            return text
        case _:
            return None


def _load_token(token: str) -> object:
    try:
        return json.loads(token)
    except (ValueError, RecursionError):
        return None
