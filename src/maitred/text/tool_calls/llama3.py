"""Parser of calls as Llama 3 writes them: ``{"name": "f", "parameters": {…}}``, several separated by ``;``.

A marker is optional, so an answer is parsed as calls if it begins with an object that is a call, as in Meta's prompt
formats. ``<|python_tag|>`` begins calls anywhere in the answer.
"""

from collections.abc import Set

from maitred.text.special_tokens import SpecialTokenText
from maitred.text.tool_calls.call_object import CallObject
from maitred.text.tool_calls.events import Event, MarkerScanner, TextEvent

TAG = "<|python_tag|>"


class Llama3Parser:
    """Streaming parser of Llama 3's calls; implements `maitred.text.tool_calls.events.CallParser`."""

    def __init__(self, names: Set[str], marks: SpecialTokenText) -> None:
        self._names = names
        self._tag = marks[TAG]
        self._text = MarkerScanner(self._tag)
        self._call: CallObject | None = None
        self._before: str | None = ""
        """Text before a possible call: white space, separators and the tag.

        The value is None if no call may begin here.
        """
        self._called = False

    def push(self, text: str) -> list[Event]:
        """Parses more text of the answer and returns the new events."""
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
        """Ends the answer and returns events for the text that was held back."""
        if self._call is not None:
            return [] if self._call.begun else [TextEvent((self._before or "") + self._call.raw)]
        held = self._text.flush() if self._before is None else self._before
        return [] if self._called and not held.strip("; \n\r\t") else [TextEvent(held)]

    def _read_before(self, whole: str, events: list[Event]) -> str:
        """Reads text where a call may begin; returns the text that remains to be read."""
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
