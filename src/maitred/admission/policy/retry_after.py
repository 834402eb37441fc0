"""Turns for those whom a rate has refused.

A counter knows when one request would find room if nobody else came. Where a crowd waits, all of it would hear the same
time, come back together, and all but one would be refused again, for as long as the crowd lasts. So each one who is
refused gets a turn behind the turns that were given before. A turn is advice and holds nothing: who comes late, or
never, leaves room for whoever comes then.
"""

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
