"""Sliding window of a replica's recent outcomes: requests, failures and latencies."""

import math
from collections import deque
from dataclasses import dataclass

_BUCKET_COUNT = 10
"""Number of slices: the window moves in steps of a tenth, and its memory does not depend on traffic."""
_MIN_LATENCY_S = 1e-4
"""Minimum of a recorded latency; smaller ones are rounded up, because 0 has no logarithm."""


@dataclass(slots=True)
class _Bucket:
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
    """Geometric mean of the latencies, which is robust against single slow requests; 0 if there are none."""

    @property
    def error_rate(self) -> float:
        """Share of the ended requests that failed; 0 if no request has ended."""
        return self.failed / self.ended if self.ended else 0.0


class OutcomeWindow:
    """Sliding window of the outcomes of the last `length_s` seconds.

    Args:
        length_s: Length of the window.
    """

    def __init__(self, length_s: float) -> None:
        self._slices: deque[_Bucket] = deque()
        self._slice_s = length_s / _BUCKET_COUNT

    def reconfigure(self, length_s: float) -> None:
        """Sets the length; a change of the length clears the window."""
        slice_s = length_s / _BUCKET_COUNT
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
        """Returns the sums of the outcomes in the window at this time."""
        self._advance(now_s)
        latency_count = sum(slice_.timed for slice_ in self._slices)
        log_latency_sum = sum(slice_.log_latency_sum for slice_ in self._slices)
        return WindowSums(
            sum(slice_.ended for slice_ in self._slices),
            sum(slice_.failed for slice_ in self._slices),
            latency_count,
            math.exp(log_latency_sum / latency_count) if latency_count else 0.0,
        )

    def clear(self) -> None:
        """Deletes all outcomes, so that only later ones count."""
        self._slices.clear()

    def _current_slice(self, now_s: float) -> _Bucket:
        number = self._advance(now_s)
        if not self._slices or self._slices[-1].number < number:
            self._slices.append(_Bucket(number))
        return self._slices[-1]

    def _advance(self, now_s: float) -> int:
        number = int(now_s / self._slice_s)
        while self._slices and self._slices[0].number <= number - _BUCKET_COUNT:
            self._slices.popleft()
        return number
