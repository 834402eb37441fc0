"""Whether to hold back what waits for a moment, so that more can join its first step.

It seldom pays. Who comes a moment later joins the running batch at its next step anyway; so while anything runs nobody
is held back, and without being told to nobody ever is. What a window buys is a full first step instead of several
nearly empty ones: less of the machine's time, and one long step less in the way of those who come right behind. That is
worth the wait to requests for which moments do not matter, and if others are about to come. So a window holds only

* while nothing runs, and fewer sequences wait than make a batch,
* until the most impatient of those that wait has waited as long as its class allows,
* and as long as the next arrival is expected before that, going by the recent ones.
"""

from collections.abc import Mapping

from maitred.core.flow import PriorityClass

_WEIGHT = 0.2
"""Of the latest gap between two arrivals in their running mean."""


class BatchingWindow:
    """Decides when a batch may begin. O(1).

    Args:
        windows_s: How long a request of each class may be held back; 0 for those that are not named.
        sequences: So many that wait make a batch.
    """

    def __init__(self, windows_s: Mapping[PriorityClass, float], sequences: int) -> None:
        self._windows_s = {name: window_s for name, window_s in windows_s.items() if window_s > 0}
        self._sequences = sequences
        self._closes_s: float | None = None
        """When the most impatient of those that wait has to start; None: nobody is held back."""
        self._arrived_s: float | None = None
        self._gap_s: float | None = None
        """The running mean of the time between arrivals."""

    def on_join(self, priority: PriorityClass, now_s: float) -> None:
        """A new request waits."""
        if not self._windows_s:
            return
        if self._arrived_s is not None:
            gap_s = now_s - self._arrived_s
            self._gap_s = gap_s if self._gap_s is None else self._gap_s + _WEIGHT * (gap_s - self._gap_s)
        self._arrived_s = now_s
        closes_s = now_s + self._windows_s.get(priority, 0.0)
        self._closes_s = closes_s if self._closes_s is None else min(closes_s, self._closes_s)

    def hold_s(self, now_s: float, *, running: int, waiting: int) -> float:
        """Seconds for which nothing should be admitted yet; 0: begin.

        To be asked before every step with something waiting. Ask again after that time, or when another one has joined.

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
        """Before the window closes. While nothing is known, yes: that is how it becomes known."""
        if self._gap_s is None or self._arrived_s is None or self._closes_s is None:
            return True
        return self._arrived_s + self._gap_s <= self._closes_s
