"""Requests of both versions, told to the trial in the order in which they began. Pure.

The slow ones end late: in the order of their ends, a canary would look good until its first slow answer is complete.
So each request has its place in the lane from its beginning, and waits there until all before it have ended. One that
takes too long holds up the others only for so long; then it is told with what is seen of it by then. That goes for both
versions alike, so the comparison stays fair.
"""

from collections import deque
from collections.abc import Callable

from maitred.core.rollout import RolloutVersion
from maitred.routing.rollout.trial import TrialObservation

OnObserved = Callable[[RolloutVersion, TrialObservation], None]


class PendingObservation:
    """A request in the lane.

    Args:
        version: Who serves it.
        began_s: When it began, monotonic.
        so_far: What is seen of it at a time, while it lasts.
    """

    __slots__ = ("began_s", "over", "seen", "so_far", "version")

    def __init__(self, version: RolloutVersion, began_s: float, so_far: Callable[[float], TrialObservation]) -> None:
        self.version = version
        self.began_s = began_s
        self.so_far = so_far
        self.over = False
        self.seen: TrialObservation | None = None

    def end(self, seen: TrialObservation | None) -> None:
        """It has ended; None: it says nothing of the version."""
        self.over, self.seen = True, seen


class OrderedObservations:
    """The requests that have not been told yet.

    Args:
        tell: Takes an observation.
        patience_s: How long one may hold up the others.
    """

    def __init__(self, tell: OnObserved, patience_s: float) -> None:
        self._notify = tell
        self._patience_s = patience_s
        self._waiting: deque[PendingObservation] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, entry: PendingObservation) -> None:
        """It begins."""
        self._waiting.append(entry)

    def advance(self, now_s: float) -> int:
        """Tells those whose turn has come; returns how many were told."""
        told = 0
        while self._waiting:
            first = self._waiting[0]
            if not first.over:
                if now_s - first.began_s < self._patience_s:
                    break
                first.seen = first.so_far(now_s)
            self._waiting.popleft()
            if first.seen is not None:
                self._notify(first.version, first.seen)
                told += 1
        return told
