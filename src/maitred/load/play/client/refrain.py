"""Streams repeat themselves: most events differ from the one before in their text alone.

Once an event has been read as JSON, what stands before and after its text is known to the byte. The next event is then
held against both ends, which takes a fifth of the time of reading it: the difference between three and five thousand
streams on one core. Whatever does not fit to the byte, or whose text has a quotation mark in it, is read as before.
"""

import msgspec

TRIES = 8
"""A server whose events differ in more than their text (a time stamp, a running count) is given up after so many."""


class EventFrame:
    """The two ends of a stream's events, as they were last seen."""

    __slots__ = ("_after", "_after_length", "_before", "_before_length", "_tries")

    def __init__(self) -> None:
        self._before = b""
        self._before_length = 0
        self._after = b""
        self._after_length = 0
        """0: nothing is known, and nothing ends at its own length."""
        self._tries = TRIES

    def repeats(self, data: bytes) -> bool:
        """Whether this is one whole event that differs from the known one in its text alone, which is not empty."""
        text_end = len(data) - self._after_length
        return (
            data.find(b'"', self._before_length) == text_end > self._before_length
            and data.startswith(self._before)
            and data.endswith(self._after)
        )

    def learn(self, event: bytes, text: str) -> None:
        """Remembers an event with this text, given without ``data:``, if the text stands in it once and as it is."""
        if not self._tries:
            return
        self._tries -= 1
        quoted = msgspec.json.encode(text)
        before, found, after = event.partition(quoted)
        if found and quoted not in after:
            self._before = b"data: " + before + b'"'
            self._after = b'"' + after + b"\n\n"
            self._before_length, self._after_length = len(self._before), len(self._after)
