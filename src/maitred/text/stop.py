"""Stop strings: a text is cut before the first stop string, though the text arrives in pieces.

Text that was sent cannot be revoked, so text that may be the beginning of a stop string is held back. No more than
necessary is held back: the longest suffix of the text that is a prefix of some stop string.

The stop string that counts is the one that is complete first, as if the text arrived character by character; of two
that end at the same character, the longer one. So the result does not depend on how the text was split.
"""

import re
from collections.abc import Sequence


class StopWindow:
    """Streaming search for stop strings in the text of one choice.

    A push costs one search for the first characters of all stop strings. Only if one is found, or text is held back, it
    costs one search per stop string over the new text and the text held back, which is shorter than the longest stop
    string.

    Args:
        stops: Strings that end the text, none of them empty. Without strings, all text passes.

    Attributes:
        stop: The stop string that ended the text; None: none has.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        firsts = {re.escape(stop[0]) for stop in self._stops}
        self._first = re.compile(f"[{''.join(sorted(firsts))}]" if firsts else "(?!)")
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Searches more text and returns the text that can be sent.

        Returns:
            The text that can be sent now, and whether a stop string is complete. If so, the text ends here, before that
            string, and all later pushes return no text.
        """
        if self.stop is not None:
            return "", True
        if not self._held and not self._first.search(text):
            return text, False
        text = self._held + text
        if found := [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]:
            end, at = min(found)
            self._held, self.stop = "", text[at:end]
            return text[:at], True
        shown = min(self._begins_at(stop, text) for stop in self._stops)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        """Returns the text that was held back, since the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begins_at(stop: str, text: str) -> int:
        """Returns the start of the longest suffix of the text that is a prefix of `stop`, or its length."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                return at
            at = text.find(stop[0], at + 1)
        return len(text)
