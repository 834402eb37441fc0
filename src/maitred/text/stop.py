"""Stop strings: cutting a text before the first one, though the text comes in pieces.

What was shown cannot be taken back, so a piece that may be the beginning of a stop string has to wait. Not longer than
needed: only the longest end of the text that is a beginning of some stop string is held back.

The stop that counts is the one that is complete first, as if the text came character by character; of two that end at
the same character, the longer. So the result does not depend on how the text was cut into pieces.
"""

import re
from collections.abc import Sequence


class StopWindow:
    """Watches the text of one choice.

    Cost of a push: one search for the first characters of all stop strings; only if something is found or held back,
    one search per stop string over the new text and what was held back, which is shorter than the longest stop string.

    Args:
        stops: Strings that end the text, none of them empty. No strings: everything passes.

    Attributes:
        stop: The string that ended the text; None while none has.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        firsts = {re.escape(stop[0]) for stop in self._stops}
        self._first = re.compile(f"[{''.join(sorted(firsts))}]" if firsts else "(?!)")
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text.

        Returns:
            What can be shown now, and whether a stop string is complete. If so, the text ends here, cut before that
            string, and all later pushes give nothing.
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
        """What was held back; to be shown after all, since the text ended without a stop string."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begins_at(stop: str, text: str) -> int:
        """Where the longest end of the text begins that begins the stop string, or the text's length."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0:
            if stop.startswith(text[at:]):
                return at
            at = text.find(stop[0], at + 1)
        return len(text)
