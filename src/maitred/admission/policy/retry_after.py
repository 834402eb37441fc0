"""Turns for those whom a rate has refused.

A counter knows when one request would find room if nobody else came. Where a crowd waits, all of it would hear the same
time, come back together, and all but one would be refused again, for as long as the crowd lasts. So each one who is
refused gets a turn behind the turns that were given before. A turn is advice and holds nothing: who comes late, or
never, leaves room for whoever comes then.
"""

from collections import deque

from maitred.core.counters import LimitClaim

_LONGEST_S = 30.0
"""Nobody is put off by more than this for others, because they may never come. Official clients follow advice of up to
a minute."""
_MANY = 1024
"""From so many counters on, those whose turns have passed are forgotten."""


class RetryTurns:
    """The last turn that was given, for each counter."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._last_s)

    def take(self, claim: LimitClaim, amount: int, alone_s: float, now_s: float) -> float:
        """Gives a turn behind all others.

        Args:
            claim: On a rate.
            amount: What was denied.
            alone_s: Time until there is room for it if nobody else comes.
            now_s: Monotonic.

        Returns:
            Time until the turn.
        """
        room_s = now_s + alone_s
        last_s = self._last_s.get(claim.counter)
        turn_s = room_s if last_s is None else max(room_s, last_s + amount / claim.refill_per_s)
        turn_s = min(turn_s, room_s + _LONGEST_S)
        if len(self._last_s) >= _MANY:
            self._last_s = {counter: last_s for counter, last_s in self._last_s.items() if last_s > now_s}
        self._last_s[claim.counter] = turn_s
        return turn_s - now_s


_WINDOW_S = 10.0
_MOST = 256
"""Departures that are remembered: more would not make the mean better."""
_UNKNOWN_S = 1.0
"""Before anybody has left. At this pace a client finds a place soon without hammering."""


class SlotReleaseRate:
    """The last departures. Pure: times are arguments, monotonic.

    The mean time between two releases is the time passed over the number of releases in it. It counts from the moment
    at which a request could leave, and over the last seconds only: a quiet hour says nothing of the rush after it.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._times: deque[float] = deque()

    def opened(self, now_s: float) -> None:
        """Somebody came into an empty house: what was before does not count."""
        self._since_s = now_s
        self._times.clear()

    def on_release(self, now_s: float) -> None:
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
