"""What a parser finds in an answer."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from maitred.text.special_tokens import partial_tail


@dataclass(frozen=True, slots=True)
class TextEvent:
    """Text for the caller."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. The last one has ended with it."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of the call that has begun last, as JSON text."""

    arguments: str


Event = TextEvent | ToolCallStart | ToolCallArguments


class CallParser(Protocol):
    """Reads the answer of one choice.

    However the text is cut into pieces, the events are the same once neighbours of a kind are joined. What turns out to
    be no call is text, whole and in its place. A call is taken for one as soon as its name is that of a tool and its
    arguments begin; if it breaks after that, or is cut off, what there is of it has been given, and what follows where
    it breaks is text.
    """

    def push(self, text: str) -> list[Event]:
        """Takes more text."""
        ...

    def flush(self) -> list[Event]:
        """The answer is over: what was held back."""
        ...


def joined(events: Iterable[Event]) -> list[Event]:
    """The same with neighbours of a kind put together, and nothing that is empty."""
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
    """Lets text pass until the marker comes.

    White space before the marker is left out, so the end of what has come waits: white space, and what may be the
    marker's beginning.

    Args:
        marker: What ends the text.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""

    def push(self, text: str, start: int = 0) -> tuple[str, int | None]:
        """Takes more text.

        Returns:
            What can be shown, and where in `text` it goes on behind the marker; None: it has not come.
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
        """What was held back, as no marker came."""
        held, self._held = self._held, ""
        return held
