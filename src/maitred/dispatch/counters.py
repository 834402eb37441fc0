"""Counters and histograms of one queue, written by the queue and read at a scrape."""

from bisect import bisect_left
from collections.abc import Mapping

from maitred.core.flow import PriorityClass


class WaitHistogram:
    """A histogram of seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(QUEUE_BUCKETS_S) + 1)
        """Not cumulative; the last one is for all that is longer."""
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Adds one wait, in seconds."""
        self.counts[bisect_left(QUEUE_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class DispatchCounters:
    """Counters of one queue since the start."""

    def __init__(self) -> None:
        self.queue_s: dict[tuple[str, str], WaitHistogram] = {}
        """Class and cause -> how long requests waited for it before they were released."""
        self._at_once: dict[PriorityClass, WaitHistogram] = {}
        """Of these, those of requests that did not wait."""
        self.rejections: dict[str, int] = {}
        """By the code of the error, whether before or after they waited."""
        self.left_waiting = 0
        """Requests whose callers left while they waited."""
        self.moved = 0
        """Requests that were sent to another model while they waited."""
        self.wasted_tokens = 0
        """Output tokens of requests that did not come to their end."""

    def on_dispatch(self, priority: PriorityClass, waited_ms: Mapping[str, float]) -> None:
        """A request has got its place."""
        if not waited_ms:
            if (at_once := self._at_once.get(priority)) is None:
                at_once = self._at_once[priority] = self._histogram(priority, NO_CAUSE)
            at_once.counts[0] += 1
            return
        for cause, milliseconds in waited_ms.items():
            self._histogram(priority, cause).add(milliseconds / 1e3)

    def _histogram(self, priority: PriorityClass, cause: str) -> WaitHistogram:
        key = priority.value, cause
        buckets = self.queue_s.get(key)
        if buckets is None:
            buckets = self.queue_s[key] = WaitHistogram()
        return buckets

    def on_rejection(self, reason: str) -> None:
        """A request was turned away."""
        self.rejections[reason] = self.rejections.get(reason, 0) + 1


QUEUE_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)


NO_CAUSE = "none"
"""For requests that did not wait."""
