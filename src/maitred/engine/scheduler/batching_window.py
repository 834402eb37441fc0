"""Batching window: holds waiting sequences back briefly, so that more can join the first step.

A window is seldom useful. A sequence that comes a moment later joins the running batch at its next step anyway. So no
sequence is held back while any sequence runs, and by default there is no window. A window gives one full first step
instead of several nearly empty ones. This saves machine time, and the next arrivals wait for one long step less. It is
useful for requests without tight latency, and if other requests will arrive soon. So a window holds only

* while nothing runs, and fewer sequences wait than make a batch,
* until the waiting sequence with the earliest limit has waited as long as its class allows,
* and as long as the recent arrivals predict another arrival before that limit.
"""

from collections.abc import Mapping

from maitred.core.flow import PriorityClass

_WEIGHT = 0.2
"""Weight of the latest gap between two arrivals in the running mean."""


class BatchingWindow:
    """Decision when a new batch may begin. O(1).

    Args:
        windows_s: How long a request of each class may be held back; 0 for those that are not named.
        sequences: Number of waiting sequences that form a batch at once.
    """

    def __init__(self, windows_s: Mapping[PriorityClass, float], sequences: int) -> None:
        self._windows_s = {name: window_s for name, window_s in windows_s.items() if window_s > 0}
        self._sequences = sequences
        self._closes_s: float | None = None
        """Time at which the first waiting sequence has to start; None: no sequence is held back."""
        self._arrived_s: float | None = None
        self._gap_s: float | None = None
        """Running mean of the seconds between two arrivals."""

    def on_join(self, priority: PriorityClass, now_s: float) -> None:
        """Notes that a new request waits."""
        if not self._windows_s:
            return
        if self._arrived_s is not None:
            gap_s = now_s - self._arrived_s
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + _WEIGHT * (gap_s - self._gap_s)
        self._arrived_s = now_s
        closes_s = now_s + self._windows_s.get(priority, 0.0)
        self._closes_s = closes_s if self._closes_s is None else min(closes_s, self._closes_s)

    def hold_s(self, now_s: float, *, running: int, waiting: int) -> float:
        """Returns the seconds for which no sequence should be admitted yet; 0: the batch may begin.

        Call it before every step while any sequence waits. Call it again after that time, or when another sequence has
        joined.

        Args:
            now_s: The time.
            running: Sequences in the batch.
            waiting: Sequences that wait.
        """
        if self._closes_s is None:
            return 0.0
        left_s = self._closes_s - now_s
        if running or waiting >= self._sequences or left_s <= 0 or not self._expects_another():
            self._closes_s = None
            return 0.0
        return left_s

    def _expects_another(self) -> bool:
        """Returns whether another arrival is expected before the window closes.

        The answer is true while no gap was measured, so that gaps are measured.
        """
        if self._gap_s is None or self._arrived_s is None or self._closes_s is None:
            return True
        return self._arrived_s + self._gap_s <= self._closes_s
