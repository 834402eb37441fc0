"""How fast places come free in a full house, from those that came free lately.

The mean time between two departures is what has passed over how many left in it. It counts from the moment at which
there was somebody to leave, and over the last seconds only: a quiet hour says nothing of the rush after it.
"""

from collections import deque

_WINDOW_S = 10.0
_MOST = 256
"""Departures that are remembered: more would not make the mean better."""
_UNKNOWN_S = 1.0
"""Before anybody has left. At this pace a client finds a place soon without hammering."""


class SlotReleaseRate:
    """The last departures. Pure: times are arguments, monotonic."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._times: deque[float] = deque()

    def opened(self, now_s: float) -> None:
        """Somebody came into an empty house: what was before does not count."""
        self._since_s = now_s
        self._times.clear()

    def left(self, now_s: float) -> None:
        """A place has come free."""
        if len(self._times) == _MOST:
            self._since_s = self._times.popleft()
        self._times.append(now_s)

    def gap_s(self, now_s: float) -> float:
        """Seconds from one place that comes free to the next; while none does, at least as long as that has lasted."""
        times = self._times
        while times and times[0] < now_s - _WINDOW_S:
            self._since_s = times.popleft()
        if not times:
            return max(_UNKNOWN_S, now_s - self._since_s)
        return (now_s - self._since_s) / len(times)
