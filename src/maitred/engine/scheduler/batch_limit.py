"""How many sequences may run together, so that the time between two tokens keeps its objective.

Every running sequence makes each step a little longer for all others. The limit follows what readers really see:

* When the 95th percentile of the gaps between tokens is above the objective in two windows in a row, the limit falls by
  a step. Two, because now and then a window is bad by chance. When even the median is above it, chance is no excuse,
  and the limit falls at once, in proportion.
* When the percentile is well below, the batch is full and somebody waits, the limit rises by a step. Without that
  evidence it stays where it is: a batch that is not full says nothing about a fuller one.
* In between nothing happens.

A gap counts without the prefill beside it, as far as the step-time model can tell the two apart. Prefill is cut to fit
the objective anyway (`step_times`), so full gaps are always close to it, whatever the batch.

The scheme is additive increase and multiplicative decrease, with one thing added against swinging: each rise that had
to be taken back doubles the time until the next attempt. So around its best value the limit tries ever more rarely.

A fall ends nobody. Until as many have ended by themselves as are too many, no gap counts.
"""

from collections.abc import Iterable

_WINDOW_STEPS = 64
_SHARE = 0.95
_HIGH = 0.95
_LOW = 0.8
"""Of the objective. Between them all is well; what is above `_LOW` leaves little time for prefill."""
_OWN = 0.5
"""A batch whose median is not even so much of the objective does not cause a bad tail, and fewer would not cure it."""
_STRONGEST = 0.5
_PARTS = 8
"""A step is one part in so many, at least one sequence."""
_LONGEST_WAIT = 64


class BatchLimit:
    """Adapts the limit once per window of steps. O(1) per step but for sorting a window at its end.

    Args:
        objective_s: For the time between two tokens; None: the limit is `most`.
        least: The limit never falls below it; at least 1.
        most: Nor rises above it; at least `least`. It starts here.
    """

    def __init__(self, objective_s: float | None, *, least: int, most: int) -> None:
        if not 1 <= least <= most:
            raise ValueError("A batch limit needs 1 <= least <= most.")
        self.limit = most
        self._objective_s = objective_s
        self._least = least
        self._most = most
        self._gaps: list[tuple[float, int]] = []
        self._peak = 0
        self._wanted = False
        self._suspicious = False
        self._rose = False
        """Since it last fell."""
        self._fell_from = most
        self._patience = 1
        """Windows to wait after a fall..."""
        self._wait = 0
        """...and those that are left of them."""

    def record(self, seconds: float, decodes: int, *, prefill_s: float, running: int, waiting: int) -> None:
        """A step was measured.

        Args:
            seconds: From one plan to the next: the gap that its decodes' readers see.
            decodes: How many these are. A step without any is ignored.
            prefill_s: What the prefill in it took, as predicted.
            running: Sequences in the batch, those that the step has ended not included.
            waiting: Sequences that would be admitted if the limit allowed it.
        """
        if self._objective_s is None or not decodes:
            return
        if running > self.limit:  # the last fall has yet to show: it ends nobody
            self._gaps.clear()
            return
        self._gaps.append((max(0.0, seconds - prefill_s), decodes))
        self._peak = max(self._peak, running, decodes)
        self._wanted = self._wanted or (waiting > 0 and max(running, decodes) >= self.limit)
        if len(self._gaps) == _WINDOW_STEPS:
            self._adapt(
                _quantile(self._gaps, 0.5) / self._objective_s, _quantile(self._gaps, _SHARE) / self._objective_s
            )
            self._gaps.clear()
            self._peak = 0
            self._wanted = False

    def _adapt(self, median: float, tail: float) -> None:
        """One window is over; its percentiles count in objectives."""
        self._wait = max(0, self._wait - 1)
        # From what really ran: a limit that nobody has reached did not cause this.
        running = min(self.limit, self._peak)
        step = max(1, running // _PARTS)
        bad = tail > _HIGH and median > _OWN
        if median > _HIGH:
            self._fall(running, min(running - step, int(running * max(_STRONGEST, _HIGH / median))))
        elif bad and self._suspicious:
            self._fall(running, running - step)
        elif tail < _LOW and self._wanted and not self._wait:
            if self.limit > self._fell_from:  # to come back to where it fell is no proof yet
                self._patience = max(1, self._patience // 2)
            self.limit = min(self._most, self.limit + step)
            self._rose = True
        self._suspicious = bad and not self._suspicious

    def _fall(self, running: int, limit: int) -> None:
        if self._rose:
            self._patience = min(_LONGEST_WAIT, 2 * self._patience)
        self.limit = max(self._least, limit)
        self._fell_from = running
        self._rose = False
        self._wait = self._patience


def _quantile(weighted: Iterable[tuple[float, int]], share: float) -> float:
    ordered = sorted(weighted)
    left = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]
