"""Calls as Llama 3 writes them: ``{"name": "look", "parameters": {"at": "sky"}}``, several separated by ``;``.

Nothing has to mark them, so an answer is read as calls if it begins with an object that is one, as Meta's prompt
formats have it; ``<|python_tag|>`` begins them wherever it stands.
"""

from collections.abc import Set

from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls.call_object import CallObject
from maitred.text.tool_calls.events import Event, MarkerScanner, TextEvent

TAG = "<|python_tag|>"


class Llama3Parser:
    """Implements `maitred.text.tool_calls.events.CallParser`; see `HermesParser`."""

    def __init__(self, names: Set[str], marks: SpecialTokenText) -> None:
        self._names = names
        self._tag = marks[TAG]
        self._text = MarkerScanner(self._tag)
        self._call: CallObject | None = None
        self._before: str | None = ""
        """What has come where a call may begin, which is nothing but what leads to one; None: it may not."""
        self._called = False

    def push(self, text: str) -> list[Event]:
        """See `CallParser.push`."""
        events: list[Event] = []
        at = 0
        while at < len(text):
            if self._call is not None:
                at = self._read_call(self._call, text, at, events)
            elif self._before is not None:
                text, at = self._read_before(self._before + text[at:], events), 0
            else:
                at = self._read_text(text, at, events)
        return events

    def flush(self) -> list[Event]:
        """See `CallParser.flush`."""
        if self._call is not None:
            return [] if self._call.begun else [TextEvent((self._before or "") + self._call.raw)]
        held = self._text.flush() if self._before is None else self._before
        return [] if self._called and not held.strip("; \n\r\t") else [TextEvent(held)]

    def _read_before(self, whole: str, events: list[Event]) -> str:
        """Goes on where a call may begin; returns what is to be read on."""
        rest = whole.lstrip()
        separated = not self._called
        if not separated and rest.startswith(";"):
            rest, separated = rest[1:].lstrip(), True
        if rest.startswith(self._tag):
            rest, separated = rest[len(self._tag) :].lstrip(), True
        if separated and rest.startswith("{"):
            self._before = whole[: len(whole) - len(rest)]
            self._call = CallObject(self._names, bare=self._tag not in self._before)
            return rest
        if not rest or self._tag.startswith(rest):
            self._before = whole
            return ""
        self._before = None
        events.append(TextEvent(whole[: len(whole) - len(rest)]))
        return rest

    def _read_call(self, call: CallObject, text: str, at: int, events: list[Event]) -> int:
        at = call.push(text, at, events)
        if call.done:
            self._called, self._before = True, ""
        elif call.broken:
            if call.begun:
                self._called = True
            else:
                events.append(TextEvent((self._before or "") + call.raw))
            self._before = None
        else:
            return at
        self._call = None
        return at

    def _read_text(self, text: str, at: int, events: list[Event]) -> int:
        shown, behind = self._text.push(text, at)
        events.append(TextEvent(shown))
        if behind is None:
            return len(text)
        self._before = self._tag
        return behind
