"""Incremental scanner of one JSON value, which finds its end or the first invalid character."""

import re
from collections.abc import Callable

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WHITE = " \t\n\r"
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPED = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"


class JsonScan:
    """Pushdown automaton over characters (RFC 8259) that scans one JSON value in linear time.

    Attributes:
        done: Whether the value is complete. A number is complete only after a following character that does not belong
            to it.
        broken: Whether no JSON value can begin with the text so far.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._open: list[str] = []
        self._state: Callable[[str, int], int] = self._value
        self._number = ""
        self._left = ""
        """Characters of the current literal that must still follow."""
        self._hex_left = 0
        self._is_key = False

    def push(self, text: str, start: int = 0) -> int:
        """Scans more text and returns the stop position.

        This is the end of the text, or the position of the first character after the value or the first invalid
        character.
        """
        at = start
        while at < len(text) and not (self.done or self.broken):
            at = self._state(text, at)
        return at

    def _value(self, text: str, at: int) -> int:
        character = text[at]
        if character in _WHITE:
            return at + 1
        if character in "{[":
            self._open.append(character)
            self._state = self._first_key if character == "{" else self._first_entry
        elif character == '"':
            self._begin_string(is_key=False)
        elif character in _LITERALS:
            self._left, self._state = _LITERALS[character], self._literal
        elif character in "-0123456789":
            self._number, self._state = character, self._digits
        else:
            return self._break(at)
        return at + 1

    def _first_entry(self, text: str, at: int) -> int:
        if text[at] == "]":
            return self._close(at)
        if text[at] not in _WHITE:
            self._state = self._value
            return at
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        return self._close(at) if text[at] == "}" else self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._begin_string(is_key=True)
        elif text[at] not in _WHITE:
            return self._break(at)
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._state = self._value
        elif text[at] not in _WHITE:
            return self._break(at)
        return at + 1

    def _after(self, text: str, at: int) -> int:
        character = text[at]
        if character == ",":
            self._state = self._key if self._open[-1] == "{" else self._value
        elif character == ("}" if self._open[-1] == "{" else "]"):
            return self._close(at)
        elif character not in _WHITE:
            return self._break(at)
        return at + 1

    def _begin_string(self, *, is_key: bool) -> None:
        self._is_key, self._state = is_key, self._string

    def _string(self, text: str, at: int) -> int:
        match = _STRING_RUN.match(text, at)
        assert match is not None
        at = match.end()
        if at == len(text):
            return at
        if text[at] == '"':
            if self._is_key:
                self._state = self._colon
            else:
                self._end_value()
        elif text[at] == "\\":
            self._state = self._escape
        else:
            return self._break(at)
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._hex_left, self._state = 4, self._hex
        elif text[at] in _ESCAPED:
            self._state = self._string
        else:
            return self._break(at)
        return at + 1

    def _hex(self, text: str, at: int) -> int:
        if text[at] not in _HEX:
            return self._break(at)
        self._hex_left -= 1
        if not self._hex_left:
            self._state = self._string
        return at + 1

    def _literal(self, text: str, at: int) -> int:
        if text[at] != self._left[0]:
            return self._break(at)
        self._left = self._left[1:]
        if not self._left:
            self._end_value()
        return at + 1

    def _digits(self, text: str, at: int) -> int:
        if text[at] in "0123456789+-.eE":
            self._number += text[at]
            return at + 1
        if not _NUMBER.fullmatch(self._number):
            return self._break(at)
        self._end_value()
        return at

    def _close(self, at: int) -> int:
        self._open.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._state = self._after
        self.done = not self._open

    def _break(self, at: int) -> int:
        self.broken = True
        return at
