"""Sliding window of a replica's recent outcomes: requests, failures and latencies."""

import math
from collections import deque
from dataclasses import dataclass

_SLICES = 10
"""Slices of the window, which moves by a tenth of itself: exact to that, with ten small sums whatever the traffic."""
_MIN_LATENCY_S = 1e-4
"""Least latency that is told apart, because latencies are compared by their logarithm."""


@dataclass(slots=True)
class _Slice:
    number: int
    ended: int = 0
    failed: int = 0
    timed: int = 0
    log_latency_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class WindowSums:
    """Sums of the outcomes in a window."""

    ended: int
    failed: int
    timed: int
    mean_latency_s: float
    """Geometric mean of the latencies, which one slow request in twenty hardly moves; 0 where there are none."""

    @property
    def error_rate(self) -> float:
        """Share of the requests that failed; 0 where no request has ended."""
        return self.failed / self.ended if self.ended else 0.0


class OutcomeWindow:
    """Sliding window that counts the outcomes of the last `length_s` seconds.

    Args:
        length_s: Length of the window.
    """

    def __init__(self, length_s: float) -> None:
        self._slices: deque[_Slice] = deque()
        self._slice_s = length_s / _SLICES

    def reconfigure(self, length_s: float) -> None:
        """Sets the length; a window whose length changes forgets what it holds."""
        slice_s = length_s / _SLICES
        if slice_s != self._slice_s:
            self.clear()
        self._slice_s = slice_s

    def record_outcome(self, now_s: float, *, failed: bool) -> None:
        """Counts a request that has ended."""
        current = self._current_slice(now_s)
        current.ended += 1
        current.failed += failed

    def record_latency(self, now_s: float, seconds: float) -> None:
        """Records the time to first token of a request."""
        current = self._current_slice(now_s)
        current.timed += 1
        current.log_latency_sum += math.log(max(seconds, _MIN_LATENCY_S))

    def sums(self, now_s: float) -> WindowSums:
        """Returns the sums of what is in the window now."""
        self._drop_old_slices(now_s)
        timed = sum(slice_.timed for slice_ in self._slices)
        log_latency_sum = sum(slice_.log_latency_sum for slice_ in self._slices)
        return WindowSums(
            sum(slice_.ended for slice_ in self._slices),
            sum(slice_.failed for slice_ in self._slices),
            timed,
            math.exp(log_latency_sum / timed) if timed else 0.0,
        )

    def clear(self) -> None:
        """Forgets all outcomes, so that only later ones count."""
        self._slices.clear()

    def _current_slice(self, now_s: float) -> _Slice:
        number = self._drop_old_slices(now_s)
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(_Slice(number))
        return self._slices[-1]

    def _drop_old_slices(self, now_s: float) -> int:
        number = int(now_s / self._slice_s)
        while self._slices and self._slices[0].number <= number - _SLICES:
            self._slices.popleft()
        return number
