"""What happened at one replica lately: how many requests, how many failed, how long the others took."""

import math
from collections import deque
from dataclasses import dataclass

_SLICES = 10
"""The window moves by a tenth of itself: exact to that, and ten small sums of memory whatever the traffic."""
_SHORTEST_S = 1e-4
"""Times are compared by their logarithm; nothing is faster than this."""


@dataclass(slots=True)
class _Slice:
    number: int
    ended: int = 0
    failed: int = 0
    timed: int = 0
    log_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WindowSums:
    """The sums of a window."""

    ended: int
    failed: int
    timed: int
    typical_s: float
    """Geometric mean of the times, which one slow request in twenty hardly moves; 0 where there are none."""

    @property
    def error_rate(self) -> float:
        """The part that failed; 0 where nothing has ended."""
        return self.failed / self.ended if self.ended else 0.0


class OutcomeWindow:
    """Counts the outcomes of the last `length_s` seconds.

    Args:
        length_s: Its length.
    """

    def __init__(self, length_s: float) -> None:
        self._slices: deque[_Slice] = deque()
        self._slice_s = length_s / _SLICES

    def reconfigure(self, length_s: float) -> None:
        """It is so long from now on; where that is another length, what it holds is forgotten."""
        slice_s = length_s / _SLICES
        if slice_s != self._slice_s:
            self.clear()
        self._slice_s = slice_s

    def on_end(self, now_s: float, *, failed: bool) -> None:
        """A request has ended."""
        latest = self._latest(now_s)
        latest.ended += 1
        latest.failed += failed

    def record_latency(self, now_s: float, seconds: float) -> None:
        """A request took so long to its first token."""
        latest = self._latest(now_s)
        latest.timed += 1
        latest.log_s += math.log(max(seconds, _SHORTEST_S))

    def recent(self, now_s: float) -> WindowSums:
        """What is in it now."""
        self._forget(now_s)
        timed = sum(each.timed for each in self._slices)
        log_s = sum(each.log_s for each in self._slices)
        return WindowSums(
            sum(each.ended for each in self._slices),
            sum(each.failed for each in self._slices),
            timed,
            math.exp(log_s / timed) if timed else 0.0,
        )

    def clear(self) -> None:
        """Forgets all: what comes now is judged by itself."""
        self._slices.clear()

    def _latest(self, now_s: float) -> _Slice:
        number = self._forget(now_s)
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(_Slice(number))
        return self._slices[-1]

    def _forget(self, now_s: float) -> int:
        number = int(now_s / self._slice_s)
        while self._slices and self._slices[0].number <= number - _SLICES:
            self._slices.popleft()
        return number
