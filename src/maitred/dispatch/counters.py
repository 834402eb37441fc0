"""Counters and histograms of one queue, read by the metrics endpoint."""

from bisect import bisect_left
from collections.abc import Mapping

from maitred.core.flow import PriorityClass


class WaitHistogram:
    """Histogram of wait times in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(QUEUE_BUCKETS_S) + 1)
        """Counts per bucket, not cumulative; the last bucket has no upper bound."""
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Adds one wait, in seconds."""
        self.counts[bisect_left(QUEUE_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class DispatchCounters:
    """Counters of one queue since the process started."""

    def __init__(self) -> None:
        self.queue_s: dict[tuple[str, str], WaitHistogram] = {}
        """(Class, cause) -> histogram of waits with that cause."""
        self._no_wait_histograms: dict[PriorityClass, WaitHistogram] = {}
        """Histograms of requests that did not wait, by class; also in `queue_s`."""
        self.rejections: dict[str, int] = {}
        """Rejected and failed requests by error code."""
        self.left_waiting = 0
        """Requests whose caller was cancelled while they waited."""
        self.moved = 0
        """Requests that moved to another model while they waited."""
        self.wasted_tokens = 0
        """Output tokens of requests that did not complete."""

    def on_dispatch(self, priority: PriorityClass, waited_ms: Mapping[str, float]) -> None:
        """Records the waits of a dispatched request."""
        if not waited_ms:
            if (at_once := self._no_wait_histograms.get(priority)) is None:
                at_once = self._no_wait_histograms[priority] = self._histogram(priority, NO_CAUSE)
            at_once.counts[0] += 1
            return
        for cause, milliseconds in waited_ms.items():
            self._histogram(priority, cause).add(milliseconds / 1e3)

    def _histogram(self, priority: PriorityClass, cause: str) -> WaitHistogram:
        key = priority.value, cause
        histogram = self.queue_s.get(key)
        if histogram is None:
            histogram = self.queue_s[key] = WaitHistogram()
        return histogram

    def on_rejection(self, reason: str) -> None:
        """Counts a rejected or failed request."""
        self.rejections[reason] = self.rejections.get(reason, 0) + 1


QUEUE_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)


NO_CAUSE = "none"
"""Cause label of requests that did not wait."""
