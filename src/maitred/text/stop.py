"""Stop strings: a text that arrives in pieces is cut before the first stop string.

Text that was sent cannot be revoked, so text that may be the beginning of a stop string is held back. The module holds
back only the minimum: the longest suffix of the text that is a prefix of a stop string.

The first complete stop string counts, as if the text arrived character by character; if two stop strings end at the
same character, the longer one counts. The result therefore does not depend on how the text was split.
"""

import re
from collections.abc import Sequence


class StopWindow:
    """Streaming search for stop strings in the text of one choice.

    Each push costs one search for the first characters of all stop strings. Only if a first character is found, or text
    is held back, a push also costs one search per stop string over the new text and the held-back text, which is
    shorter than the longest stop string.

    Args:
        stops: Strings that end the text; each has at least one character. If the sequence is empty, all text passes.
        includes_stop: Whether the text ends with the stop string; otherwise it ends before it.

    Attributes:
        stop: Stop string that ended the text, or None if there was none.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._includes_stop = includes_stop
        firsts = {re.escape(stop[0]) for stop in self._stops}
        self._first = re.compile(f"[{''.join(sorted(firsts))}]" if firsts else "(?!)")
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Searches more text and returns the text that can be sent.

        Returns:
            The text that can be sent now, and whether a stop string is complete. If the stop string is complete, the
            text ends there, and all later pushes return no text.
        """
        if self.stop is not None:
            return "", True
        if not self._held and not self._first.search(text):
            return text, False
        text = self._held + text
        if found := [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]:
            end, at = min(found)
            self._held, self.stop = "", text[at:end]
            return text[: end if self._includes_stop else at], True
        shown = min(self._begins_at(stop, text) for stop in self._stops)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """Returns the held-back text, because the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begins_at(stop: str, text: str) -> int:
        """Returns the start of the longest suffix of the text that is a prefix of `stop`.

        If there is no such suffix, the result is the length of the text.
        """
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                return at
            at = text.find(stop[0], at + 1)
        return len(text)
