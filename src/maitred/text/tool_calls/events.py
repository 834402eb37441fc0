"""Events of a tool-call parser, the parser's protocol, and a scanner for markers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from maitred.text.special_tokens import partial_tail


@dataclass(frozen=True, slots=True)
class TextEvent:
    """Text of the answer for the caller."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Start of a call, which is also the end of the previous call."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """Further JSON text of the arguments of the latest call."""

    arguments: str


Event = TextEvent | ToolCallStart | ToolCallArguments


class CallParser(Protocol):
    """Streaming parser that finds the tool calls in the answer of one choice.

    The events do not depend on how the text is split, if adjacent events of the same kind are merged. Text that turns
    out not to be a call is emitted completely, at its own position. A call is recognised as soon as its name is the
    name of a tool and its arguments begin. If the call becomes invalid after that, or is cut off, its earlier events
    remain valid, and the text after the error is plain text.
    """

    def push(self, text: str) -> list[Event]:
        """Parses more text of the answer and returns the new events."""
        ...

    def flush(self) -> list[Event]:
        """Ends the answer and returns events for the text that was held back."""
        ...


def merge_events(events: Iterable[Event]) -> list[Event]:
    """Merges adjacent events of the same kind, and drops empty events."""
    result: list[Event] = []
    for event in events:
        match event, result[-1] if result else None:
            case ((TextEvent("") | ToolCallArguments("")), _):
                pass
            case TextEvent(text), TextEvent(before):
                result[-1] = TextEvent(before + text)
            case ToolCallArguments(piece), ToolCallArguments(before):
                result[-1] = ToolCallArguments(before + piece)
            case _:
                result.append(event)
    return result


class MarkerScanner:
    """Streaming scanner that returns text until a marker comes.

    The scanner drops white space before the marker. It therefore holds back the end of the text: white space, and a
    possible beginning of the marker.

    Args:
        marker: Marker that ends the text.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str, start: int = 0) -> tuple[str, int | None]:
        """Scans more text for the marker.

        Returns:
            The text that can be shown, and the position in `text` after the marker, or None if the marker has not come.
        """
        held = len(self._held)
        whole = self._held + text[start:]
        found = whole.find(self._marker)
        if found >= 0:
            self._held = ""
            return whole[:found].rstrip(), start + found + len(self._marker) - held
        shown = len(whole[: partial_tail(whole, (self._marker,))].rstrip())
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """Returns the held-back text, because no marker came."""
        held, self._held = self._held, ""
        return held
