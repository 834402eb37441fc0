"""Answers and the events of streams, cut out once.

Nearly all that a stream says is the same in each of its events: ids, names, a time, the order of the fields. Only the
text is new. So an event is encoded twice by whoever knows its fields, with two texts of one letter; where the two
differ stands the text, and what is around it is around every other text, too.

Whole answers differ in more places, but most of them in the same few. One is encoded with a mark in each of these.
"""

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

encode_text = msgspec.json.Encoder().encode
"""A text as a JSON string."""


class EventTemplate:
    """Writes events that differ in one text.

    Args:
        event: Writes one in full, as a function of its text alone, which stands in it once and as a JSON string.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, event: Callable[[str], bytes]) -> None:
        one, other = event("a"), event("b")
        letter = next(place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        self._before, self._after = one[: letter - 1], one[letter + 2 :]  # without the quotes

    def event(self, text: str) -> bytes:
        """The event that says this."""
        return self._before + encode_text(text) + self._after


class EventTemplates:
    """One for each choice of an answer, cut when it is needed."""

    __slots__ = ("_cut",)

    def __init__(self) -> None:
        self._cut: dict[int, EventTemplate] = {}

    def event(self, index: int, text: str, full: Callable[[int, str], bytes]) -> bytes:
        """The event that adds text to a choice.

        Args:
            index: The choice.
            text: The text.
            full: Writes such an event in full; the same each time. It is not kept: nothing but the garbage collector
                would free whoever is kept by what it keeps.
        """
        stencil = self._cut.get(index)
        if stencil is None:
            stencil = self._cut[index] = EventTemplate(partial(full, index))
        return stencil.event(text)


class JsonForm:
    """Writes answers that differ in some places.

    Args:
        answer: One of them, by whoever knows its fields, with a mark in each of these places.
        marks: What stands in it once, each, in the order of the places: whole numbers, and texts; those of JSON with
            their quotes.

    Attributes:
        fill: Writes an answer with these in the places of the marks, in the order of the places.
    """

    __slots__ = ("fill",)

    def __init__(self, answer: bytes, marks: Iterable[bytes]) -> None:
        form = answer.replace(b"%", b"%%")
        for mark in marks:
            if form.count(mark) != 1:
                raise ValueError(f"The mark {mark!r} does not stand exactly once in {answer!r}.")
            form = form.replace(mark, b"%d" if mark.isdigit() else b"%b")
        self.fill = form.__mod__
