"""Templates of JSON answers and stream events: encode once, then insert only what differs.

Nearly all bytes of a stream event are the same in each event: ids, names, a time, the order of the fields. Only the
text
is new. So the caller, which knows the fields, encodes an event twice, with two texts of one letter; the text stands
where the two differ, and the bytes around it are the same for every other text.

Whole answers differ in more places, but most of them in the same few. One answer is encoded with a mark in each of
these
places.
"""

from collections.abc import Callable, Iterable
from functools import partial

import msgspec

encode_text = msgspec.json.Encoder().encode
"""Encodes a text as a JSON string."""


class EventTemplate:
    """Template of events that differ in one text.

    Args:
        encode_event: Encodes an event in full, as a function of its text alone, which stands in it once and as a JSON
            string.
    """

    __slots__ = ("_after", "_before")

    def __init__(self, encode_event: Callable[[str], bytes]) -> None:
        first, second = encode_event("a"), encode_event("b")
        offset = next(position for position, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
        self._before, self._after = first[: offset - 1], first[offset + 2 :]  # the text's quotes are cut off

    def encode(self, text: str) -> bytes:
        """Encodes the event with this text."""
        return self._before + encode_text(text) + self._after


class EventTemplates:
    """Templates of one answer, one for each choice, made on first use."""

    __slots__ = ("_templates",)

    def __init__(self) -> None:
        self._templates: dict[int, EventTemplate] = {}

    def encode(self, index: int, text: str, encode_full: Callable[[int, str], bytes]) -> bytes:
        """Encodes the event that adds text to a choice.

        Args:
            index: The choice.
            text: The text.
            encode_full: Encodes such an event in full; the same each time. It is not stored: a reference cycle through
                it would
                be freed by the garbage collector only.
        """
        template = self._templates.get(index)
        if template is None:
            template = self._templates[index] = EventTemplate(partial(encode_full, index))
        return template.encode(text)


class JsonTemplate:
    """Template of JSON answers that differ in some places.

    Args:
        answer: One encoded answer, with a mark in each of these places.
        marks: The marks in the order of the places, each of which stands in the answer once: whole numbers, and texts;
            texts of JSON with their quotes.

    Attributes:
        fill: Encodes an answer with these values in the places of the marks, in the order of the places.
    """

    __slots__ = ("fill",)

    def __init__(self, answer: bytes, marks: Iterable[bytes]) -> None:
        template = answer.replace(b"%", b"%%")
        for mark in marks:
            if template.count(mark) != 1:
                raise ValueError(f"The mark {mark!r} does not stand exactly once in {answer!r}.")
            template = template.replace(mark, b"%d" if mark.isdigit() else b"%b")
        self.fill = template.__mod__
