"""Replica pool: the replicas of one model, which come and go at run time until there are as many as desired."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from maitred.core.clock import Clock
from maitred.dispatch.request import AnyEndpoint
from maitred.fleet.backend import ManagedEngine, ReplicaBackend

if TYPE_CHECKING:
    from maitred.scaling.autoscaler import ReplicaStatus
    from maitred.scaling.startup_times import StartupTimes


class DesiredReplicas(msgspec.Struct, frozen=True):
    """Desired numbers of replicas of one model."""

    serving: int
    asleep: int = 0
    """Replicas beyond those, which sleep and are woken before any other is started."""


class ReplicaPool:
    """Replicas of one model.

    Args:
        backend: Starts and stops the replicas.
        desired: The desired numbers at first.
        startup_times: Durations of starts; the pool adds each complete start.
        clock: The clock.

    Attributes:
        desired: The desired numbers.
        startup_times: Durations of starts by kind.
    """

    def __init__(
        self, backend: ReplicaBackend, desired: DesiredReplicas, startup_times: "StartupTimes", clock: Clock
    ) -> None:
        self.backend = backend
        self.desired = desired
        self.startup_times = startup_times
        self._clock = clock

    def set_desired(self, serving: int, asleep: int = 0) -> None:
        """Sets the desired numbers; replicas are started, woken, drained, put to sleep and stopped from now on."""
        raise NotImplementedError

    def replicas(self) -> list["ReplicaStatus"]:
        """Returns the status of each replica; times are on the monotonic clock."""
        raise NotImplementedError

    @property
    def engines(self) -> Mapping[str, ManagedEngine]:
        """Connected or connecting engines by replica. The mapping object is always the same."""
        raise NotImplementedError

    def endpoints(self) -> Sequence[AnyEndpoint]:
        """Returns the endpoints that dispatch chooses from; at least one, which lets requests wait if none serves."""
        raise NotImplementedError

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of the phase of a replica or of the desired numbers."""
        raise NotImplementedError
