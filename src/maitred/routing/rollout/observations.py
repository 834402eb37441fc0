"""Ordered observations: the trial gets requests of both versions in the order of their start times.

Slow requests end late: in the order of end times, a canary would look good until its first slow answer is complete.
Each request therefore has a position in the queue from its start, and waits there until all earlier requests have
ended. A request that takes too long delays the others only for `max_wait_s`; then the trial gets the observation at
that time. That rule holds for both versions, so the comparison stays fair.
"""

from collections import deque
from collections.abc import Callable

from maitred.core.rollout import RolloutVersion
from maitred.routing.rollout.trial import TrialObservation

OnObserved = Callable[[RolloutVersion, TrialObservation], None]


class PendingObservation:
    """Observation of a request that has not reached the trial.

    Args:
        version: Version that serves the request.
        started_s: Start of the request, monotonic.
        snapshot: Function that returns the observation of the running request at a given time.
    """

    __slots__ = ("has_ended", "observation", "snapshot", "started_s", "version")

    def __init__(
        self, version: RolloutVersion, started_s: float, snapshot: Callable[[float], TrialObservation]
    ) -> None:
        self.version = version
        self.started_s = started_s
        self.snapshot = snapshot
        self.has_ended = False
        self.observation: TrialObservation | None = None

    def end(self, observation: TrialObservation | None) -> None:
        """Ends the request with its observation; None means that it is no evidence about the version."""
        self.has_ended, self.observation = True, observation


class OrderedObservations:
    """Queue of the observations that have not reached the trial.

    Args:
        on_observed: Receives each observation in its order.
        max_wait_s: Longest time in seconds that one request may delay the others.
    """

    def __init__(self, on_observed: OnObserved, max_wait_s: float) -> None:
        self._on_observed = on_observed
        self._max_wait_s = max_wait_s
        self._waiting: deque[PendingObservation] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, pending: PendingObservation) -> None:
        """Adds a request that begins."""
        self._waiting.append(pending)

    def advance(self, now_s: float) -> int:
        """Passes on the observations that are next in order, and returns their number."""
        observed_count = 0
        while self._waiting:
            first = self._waiting[0]
            if not first.has_ended:
                if now_s - first.started_s < self._max_wait_s:
                    break
                first.observation = first.snapshot(now_s)
            self._waiting.popleft()
            if first.observation is not None:
                self._on_observed(first.version, first.observation)
                observed_count += 1
        return observed_count
