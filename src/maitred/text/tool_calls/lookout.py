"""Text up to a marker: what can be shown of it, and what has to wait."""

from maitred.text.special_tokens import tail_of


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
        shown = len(whole[: tail_of(whole, (self._marker,))].rstrip())
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """What was held back, as no marker came."""
        held, self._held = self._held, ""
        return held
