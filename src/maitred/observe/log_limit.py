"""What is said over and over is said a few times a second, and counted.

A server in trouble says the same thing for every request. That hides the one line that says why, fills disks, and
costs most when there is least to spare. Messages are alike that have the same text before values are put into it, from
the same place at the same level; so a new kind of message is never held back by others.
"""

from collections.abc import Iterator, Sequence

_WINDOW_S = 1.0
_MOST_KINDS = 1024
"""Kinds of messages that are counted at a time; of more, those that were counted first are told and forgotten."""

Kind = tuple[str, int, str]
"""Logger, level and text of a message, without its values."""


class _Window:
    """What came of one kind since somebody last looked."""

    __slots__ = ("admitted", "since_s", "suppressed")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.admitted = 0
        self.suppressed = 0


class LogRateLimiter:
    """Counts messages. Pure: the time of each is an argument.

    Args:
        per_s: Of one kind that pass in a second; 0: all.
    """

    def __init__(self, per_s: int) -> None:
        self._per_s = per_s
        self._windows: dict[Kind, _Window] = {}

    def passes(self, kind: Kind, now_s: float) -> bool:
        """Whether a message is to be written."""
        if not self._per_s:
            return True
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _Window(now_s)
        if window.admitted < self._per_s:
            window.admitted += 1
            return True
        window.suppressed += 1
        return False

    def over(self, now_s: float) -> Sequence[tuple[Kind, int]]:
        """The kinds whose second is over, with how many of each were not written; to be asked before `passes`."""
        return list(self._take(now_s - _WINDOW_S))

    def rest(self) -> Sequence[tuple[Kind, int]]:
        """The same for all kinds, because nothing more comes."""
        return list(self._take(float("inf")))

    def _take(self, until_s: float) -> Iterator[tuple[Kind, int]]:
        """Windows are in the order in which they began."""
        while self._windows:
            kind, window = next(iter(self._windows.items()))
            if window.since_s > until_s and len(self._windows) <= _MOST_KINDS:
                return
            del self._windows[kind]
            if window.suppressed:
                yield kind, window.suppressed
