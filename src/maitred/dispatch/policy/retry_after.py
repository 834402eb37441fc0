"""When those who are refused should come back.

Alone, a refused caller would be served after the wait that was predicted for it. Where a crowd is refused, all of it
would hear the same time, come back together, and all but one would be refused again. So each gets a turn behind those
that were refused before it and share the same part of the service, one after the other at the rate at which that part
is served. A turn is advice and holds nothing.
"""

from collections.abc import Hashable

_LONGEST_S = 60.0
"""Nobody is put off by more than this for others, because they may never come back."""
_MANY = 1024
"""From so many flows on, those whose turns have passed are forgotten."""
_JITTER = 0.1


class RetryAfterTurns:
    """The last turn that was given, for each flow."""

    def __init__(self) -> None:
        self._last_s: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._last_s)

    def take(self, flow: Hashable, alone_s: float, takes_s: float, now_s: float, draw: float) -> float:
        """Takes the next turn to come back, and returns its time.

        Args:
            flow: Whose share will serve it.
            alone_s: Time until that share would serve it if nobody else had been refused.
            takes_s: How long that share takes to serve it.
            now_s: Monotonic.
            draw: From 0 to 1, for the jitter.

        Returns:
            Seconds until the turn, at most a tenth later for the jitter, and never less than a tenth of a second.
        """
        first_s = now_s + alone_s
        last_s = self._last_s.get(flow)
        turn_s = first_s if last_s is None else max(first_s, last_s + takes_s)
        turn_s = min(turn_s, first_s + _LONGEST_S)
        if len(self._last_s) >= _MANY:
            self._last_s = {key: last_s for key, last_s in self._last_s.items() if last_s > now_s}
        self._last_s[flow] = turn_s
        return max(0.1, turn_s - now_s) * (1.0 + _JITTER * draw)
