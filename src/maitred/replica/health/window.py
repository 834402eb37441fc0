"""Sliding window of a replica's recent outcomes: requests, failures and latencies."""

import math
from collections import deque
from dataclasses import dataclass

_BUCKET_COUNT = 10
"""Number of buckets: the window moves in steps of a tenth, and its memory does not depend on traffic."""
_MIN_LATENCY_S = 1e-4
"""Minimum of a recorded latency; smaller ones are rounded up, because 0 has no logarithm."""


@dataclass(slots=True)
class _Bucket:
    number: int
    ended: int = 0
    failed: int = 0
    latency_count: int = 0
    log_latency_sum: float = 0.0


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Statistics of the outcomes in a window."""

    ended: int
    failed: int
    latency_count: int
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
        self._buckets: deque[_Bucket] = deque()
        self._bucket_s = length_s / _BUCKET_COUNT

    def reconfigure(self, length_s: float) -> None:
        """Sets the length; a change of the length clears the window."""
        bucket_s = length_s / _BUCKET_COUNT
        if bucket_s != self._bucket_s:
            self.clear()
        self._bucket_s = bucket_s

    def record_outcome(self, now_s: float, *, failed: bool) -> None:
        """Counts a request that has ended."""
        current = self._current_bucket(now_s)
        current.ended += 1
        current.failed += failed

    def record_latency(self, now_s: float, seconds: float) -> None:
        """Records the time to first token of a request."""
        current = self._current_bucket(now_s)
        current.latency_count += 1
        current.log_latency_sum += math.log(max(seconds, _MIN_LATENCY_S))

    def stats(self, now_s: float) -> WindowStats:
        """Returns the statistics of the window at this time."""
        self._advance(now_s)
        latency_count = sum(bucket.latency_count for bucket in self._buckets)
        log_latency_sum = sum(bucket.log_latency_sum for bucket in self._buckets)
        return WindowStats(
            sum(bucket.ended for bucket in self._buckets),
            sum(bucket.failed for bucket in self._buckets),
            latency_count,
            math.exp(log_latency_sum / latency_count) if latency_count else 0.0,
        )

    def clear(self) -> None:
        """Deletes all outcomes, so that only later ones count."""
        self._buckets.clear()

    def _current_bucket(self, now_s: float) -> _Bucket:
        number = self._advance(now_s)
        if not self._buckets or self._buckets[-1].number < number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1]

    def _advance(self, now_s: float) -> int:
        number = int(now_s / self._bucket_s)
        while self._buckets and self._buckets[0].number <= number - _BUCKET_COUNT:
            self._buckets.popleft()
        return number
