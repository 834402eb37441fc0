"""Rate limit of log messages: repeated messages are written a few times a second, and counted.

A server in trouble logs the same message for every request. That hides the one line with the cause, fills disks, and
costs most when the server is busiest. Messages are of one kind if they have the same text before values are put into
it, the same logger and the same level; so a new kind of message is never suppressed because of others.
"""

from collections.abc import Iterator, Sequence

_WINDOW_S = 1.0
_MAX_KINDS = 1024
"""Most kinds of messages that are counted at a time; beyond that, the oldest kinds are reported and forgotten."""

MessageKind = tuple[str, int, str]
"""Kind of a message: its logger, level and text, without the values."""


class _Window:
    """Count of messages of one kind since its window began."""

    __slots__ = ("admitted", "since_s", "suppressed")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.admitted = 0
        self.suppressed = 0


class LogRateLimiter:
    """Rate limiter of log messages. Pure: the time of each message is an argument.

    Args:
        per_s: Messages of one kind that pass in a second; 0: all.
    """

    def __init__(self, per_s: int) -> None:
        self._per_s = per_s
        self._windows: dict[MessageKind, _Window] = {}

    def allow(self, kind: MessageKind, now_s: float) -> bool:
        """Counts a message and returns whether it is to be written."""
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

    def take_expired(self, now_s: float) -> Sequence[tuple[MessageKind, int]]:
        """Removes the windows that are over and returns how many messages each suppressed; must precede `allow`."""
        return list(self._take_until(now_s - _WINDOW_S))

    def take_all(self) -> Sequence[tuple[MessageKind, int]]:
        """Removes all windows and returns how many messages each suppressed, when logging ends."""
        return list(self._take_until(float("inf")))

    def _take_until(self, until_s: float) -> Iterator[tuple[MessageKind, int]]:
        """Removes windows up to a time; they are in the order in which they began."""
        while self._windows:
            kind, window = next(iter(self._windows.items()))
            if window.since_s > until_s and len(self._windows) <= _MAX_KINDS:
                return
            del self._windows[kind]
            if window.suppressed:
                yield kind, window.suppressed
