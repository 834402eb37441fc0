"""Limit of the running sequences that keeps the inter-token latency within its objective.

Every running sequence makes each step a little longer for all others. The limit follows the inter-token gaps that
clients measure:

* When the 95th percentile of the gaps between tokens is above the objective in two windows in a row, the limit falls by
  a step. Two windows are needed, because a single window is sometimes bad by chance. When even the median is above the
  objective, the limit falls at once, in proportion to the excess.
* When the percentile is well below the objective, the batch is full and sequences wait, the limit rises by a step. It
  rises only then, because a partly empty batch says nothing about a fuller one.
* Between the two thresholds the limit stays unchanged.

A gap counts without the prefill time in its step, as far as the step-time model can separate them. Prefill is sized to
fill the objective (`step_times`), so gaps with prefill are always close to it for any batch.

The scheme is additive increase and multiplicative decrease, with backoff against oscillation: each rise that had to be
reversed doubles the time until the next attempt. So near its best value the limit tries to rise less and less often.

A lower limit ends no running sequence. While more sequences run than the limit allows, no gap counts.
"""

from collections.abc import Iterable

_WINDOW_STEPS = 64
_SHARE = 0.95
_HIGH = 0.95
_LOW = 0.8
"""Upper and lower thresholds as shares of the objective. Values between them are acceptable; a value above `_LOW`
leaves little time for prefill."""
_OWN = 0.5
"""If the median is below this share of the objective, the batch size is not the cause of a bad tail."""
_STRONGEST = 0.5
_PARTS = 8
"""Divisor of the running sequences that gives a step of the limit, at least one sequence."""
_LONGEST_WAIT = 64


class BatchLimit:
    """Limit of running sequences, adapted once per window of steps.

    It costs O(1) per step, except that a window is sorted at its end.

    Args:
        objective_s: Objective for the inter-token latency in seconds; None: the limit is `most`.
        least: Minimum of the limit; at least 1.
        most: Maximum and initial value of the limit; at least `least`.
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
        """Whether the limit has risen since its last fall."""
        self._fell_from = most
        self._patience = 1
        """Windows to wait after a fall..."""
        self._wait = 0
        """...and those that are left of them."""

    def record(self, seconds: float, decodes: int, *, prefill_s: float, running: int, waiting: int) -> None:
        """Records a measured step.

        Args:
            seconds: Time from one plan to the next: the inter-token gap of the decoding sequences.
            decodes: Number of decoding sequences; a step without any is ignored.
            prefill_s: Predicted seconds of the prefill in the step.
            running: Sequences in the batch, without those that ended in the step.
            waiting: Sequences that would be admitted if the limit allowed it.
        """
        if self._objective_s is None or not decodes:
            return
        if running > self.limit:  # the last fall has no effect yet, because it ends no sequence
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
        """Adapts the limit at the end of a window; the percentiles are multiples of the objective."""
        self._wait = max(0, self._wait - 1)
        # The new limit starts from the real batch size, because a limit that was not reached is not the cause.
        running = min(self.limit, self._peak)
        step = max(1, running // _PARTS)
        bad = tail > _HIGH and median > _OWN
        if median > _HIGH:
            self._fall(running, min(running - step, int(running * max(_STRONGEST, _HIGH / median))))
        elif bad and self._suspicious:
            self._fall(running, running - step)
        elif tail < _LOW and self._wanted and not self._wait:
            if self.limit > self._fell_from:  # a return to the value before the fall is no proof yet
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
