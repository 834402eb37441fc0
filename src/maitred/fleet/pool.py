"""Replica pool: the replicas of one model, which come and go at run time until there are as many as desired.

::

    desired, backend's replicas, requests --reconcile--> orders --> backend, engines, admin states
                       ^                                                       |
                       `------------------- changes ---------------------------'

The pool holds no plan: after each change it compares again. What dispatch sees are its endpoints. A replica that drains
stays among them until its last request has ended, and gets no new one.

As soon as somebody sets the desired numbers, requests wait in the queue while no replica serves: one more endpoint
stands for the replica that is to come, with the time until then. Until somebody does, the pool keeps the replicas that
it has, and does nothing for requests, steps and reports.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType

from maitred.core.clock import Clock
from maitred.core.errors import ModelLoading
from maitred.core.replica import LoadReport, ModelCard, TokenStream
from maitred.core.request import EngineRequest
from maitred.dispatch.request import AnyEndpoint, Endpoint
from maitred.fleet.backend import BackendReplica, ManagedEngine, ReplicaBackend
from maitred.fleet.policy.reconciler import (
    DesiredReplicas,
    OrderKind,
    PoolLimits,
    ReplicaOrder,
    ReplicaState,
    reconcile,
)
from maitred.fleet.sleepable_replica import SleepableReplica
from maitred.scaling.autoscaler import ReplicaPhase, ReplicaStatus
from maitred.scaling.startup_times import StartKind, StartupTimes

NEXT_REPLICA = "next"
"""Name of the endpoint that stands for the replica that is to come."""
_PROMISED_QUANTILE = 0.9
"""Share of the starts that are over within the time that callers are told."""
_OVERDUE_SHARE, _LATE_SHARE = 0.1, 0.5
"""Estimated rest of an overdue start: a part of its usual time plus a part of its delay, whose cause may go on."""
_COMING = "A replica of the model is being started, and requests wait for it. Try again after the time in Retry-After."

_log = logging.getLogger(__name__)


class NextReplica:
    """Replica that is to come: it never serves, and says when one will. Implements `maitred.core.replica.Replica`.

    Args:
        ready_in_s: Returns the seconds until a replica should serve.
    """

    weight = 1.0

    def __init__(self, ready_in_s: Callable[[], float]) -> None:
        self._ready_in_s = ready_in_s

    def card(self) -> ModelCard:
        """Raises ModelLoading with the time until a replica serves."""
        raise ModelLoading(_COMING, retry_after_s=self._ready_in_s())

    def load(self) -> LoadReport:
        """Returns an empty report."""
        return LoadReport()

    def count_unreported(self) -> int:
        """Returns 0: it gets no request."""
        return 0

    def on_change(self, listener: Callable[[], None]) -> None:
        """Does nothing: the pool changes the endpoints when a replica serves."""

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[TokenStream]:
        """Raises ModelLoading."""
        raise ModelLoading(_COMING, retry_after_s=self._ready_in_s())


@dataclass(slots=True, eq=False)
class _Member:
    """Replica of a pool whose engine is known."""

    backend: BackendReplica
    engine: ManagedEngine
    endpoint: Endpoint[SleepableReplica]
    since_s: float
    start_kind: StartKind
    ordered_s: float | None
    """When its start or its waking was ordered, until it is complete; None: it is, or nobody knows."""
    phase: ReplicaPhase = ReplicaPhase.STARTING
    is_leaving: bool = False
    watches_load: bool = False
    """Whether its load reports are watched, for the end of a waking."""

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def replica(self) -> SleepableReplica:
        return self.endpoint.replica

    def current_phase(self) -> ReplicaPhase:
        if self.replica.is_reserved:
            return ReplicaPhase.ASLEEP
        if self.is_leaving:
            return ReplicaPhase.DRAINING
        if self.backend.phase is ReplicaPhase.SERVING and self.engine.client.is_asleep:
            return ReplicaPhase.WAKING
        return self.backend.phase

    def state(self) -> ReplicaState:
        client = self.engine.client
        load = client.load()
        return ReplicaState(
            name=self.name,
            phase=self.phase,
            is_ready=client.is_ready,
            running=self.endpoint.admin_state.running,
            cached_blocks=load.cached_blocks + load.pinned_blocks,
        )


@dataclass(slots=True)
class _Listeners:
    change: list[Callable[[], None]] = field(default_factory=list)
    endpoints: list[Callable[[], None]] = field(default_factory=list)
    engines: list[Callable[[str, ManagedEngine], None]] = field(default_factory=list)


class ReplicaPool:
    """Replicas of one model. Entering opens the backend and starts the first replicas; leaving closes it.

    Args:
        backend: Starts and stops the replicas.
        desired: The desired numbers at first; those of the replicas that the backend has already come before them.
        startup_times: Durations of starts; the pool adds each complete start.
        clock: The clock.

    Attributes:
        desired: The desired numbers.
        startup_times: Durations of starts by kind.
        engines: Engines by replica. The mapping object is always the same.
        is_scaled: Whether somebody has set the desired numbers.
        past_output_tokens: Output tokens of the engines that are gone.
    """

    def __init__(
        self, backend: ReplicaBackend, desired: DesiredReplicas, startup_times: StartupTimes, clock: Clock
    ) -> None:
        self.backend = backend
        self.desired = desired
        self.startup_times = startup_times
        self.engines: dict[str, ManagedEngine] = {}
        self.is_scaled = False
        self.past_output_tokens = 0
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._ordered_s: dict[str, float] = {}
        """When the start of each replica was ordered whose engine is not known yet."""
        self._listeners = _Listeners()
        self._reconcile_scheduled = False
        self._is_open = False
        self._next_endpoint = Endpoint(NEXT_REPLICA, NextReplica(self.ready_in_s))
        self._endpoints: list[AnyEndpoint] = []
        backend.on_change(self._schedule)

    async def __aenter__(self) -> "ReplicaPool":
        await self.backend.__aenter__()
        self._is_open = True
        if found := len(self.backend.replicas()):
            self.desired = DesiredReplicas(found)
        else:
            now_s = self._clock.monotonic_s()
            for number in range(self.desired.serving):
                name = self.backend.name_of(number)
                self._ordered_s[name] = now_s
                self.backend.start(name)
        self._reconcile()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        await self.backend.__aexit__(kind, error, trace)

    async def wait_started(self) -> None:
        """Waits until one replica has been ready.

        Raises:
            ReplicaUnavailable: No replica can start; the message gives the reason.
        """
        await self.backend.wait_started()

    # --- what is desired ---

    def set_desired(self, serving: int, asleep: int = 0) -> None:
        """Sets the desired numbers; replicas are started, woken, drained, put to sleep and stopped from now on.

        Args:
            serving: Replicas that serve.
            asleep: Replicas that sleep, beyond those; none if the backend's engines cannot sleep.
        """
        desired = DesiredReplicas(serving, asleep)
        if desired != self.desired:
            _log.info("%d replicas are to serve and %d to sleep.", serving, asleep)
        self.desired, self.is_scaled = desired, True
        self._reconcile()
        for listener in self._listeners.change:
            listener()

    # --- what there is ---

    def replicas(self) -> list[ReplicaStatus]:
        """Returns the status of each replica that is not being stopped; times are on the monotonic clock."""
        now_s = self._clock.monotonic_s()
        statuses = [
            ReplicaStatus(
                name=member.name,
                phase=member.phase,
                since_s=member.since_s,
                ready_in_s=self._remaining_s(member.start_kind, member.ordered_s, now_s)
                if member.phase in (ReplicaPhase.STARTING, ReplicaPhase.WAKING)
                else None,
                start_kind=member.start_kind,
            )
            for member in self._members.values()
        ]
        return statuses + [
            ReplicaStatus(
                name=replica.name, phase=replica.phase, since_s=replica.since_s, start_kind=replica.start_kind
            )
            for replica in self._unknown()
        ]

    def failures(self) -> dict[str, str]:
        """Returns the reason of each replica that does not run."""
        return {name: replica.failure for name, replica in self.backend.replicas().items() if replica.failure}

    @property
    def is_ready(self) -> bool:
        """Whether any of the engines would take a request now."""
        return any(engine.client.is_ready for engine in self.engines.values())

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of all engines, those that are gone included."""
        return self.past_output_tokens + sum(engine.client.output_tokens for engine in self.engines.values())

    def endpoints(self) -> list[AnyEndpoint]:
        """Returns the endpoints for dispatch; at least one, which lets requests wait if none serves."""
        return list(self._endpoints)

    def ready_in_s(self) -> float:
        """Returns the seconds until a replica should serve: of the first that is on its way, or of one that would be.

        Nine of ten starts so far took no longer.
        """
        now_s = self._clock.monotonic_s()
        coming = [
            self._remaining_s(status.start_kind, self._ordered_at_s(status.name), now_s)
            for status in self.replicas()
            if status.phase in (ReplicaPhase.STARTING, ReplicaPhase.WAKING)
        ]
        if coming:
            return min(coming)
        asleep = any(member.phase is ReplicaPhase.ASLEEP for member in self._members.values())
        return self._remaining_s(StartKind.ASLEEP if asleep else self.backend.facts.start_kind, None, now_s)

    # --- listeners ---

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of the phase of a replica or of the desired numbers."""
        self._listeners.change.append(listener)

    def on_endpoints(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of `endpoints`; a removed replica is stopped after that."""
        self._listeners.endpoints.append(listener)

    def on_engine(self, listener: Callable[[str, ManagedEngine], None]) -> None:
        """Calls `listener` with the name and the engine of each replica, now and when one comes."""
        self._listeners.engines.append(listener)
        for name, engine in self.engines.items():
            listener(name, engine)

    # --- reconciliation ---

    def _schedule(self) -> None:
        """Schedules one reconciliation after the changes of this turn of the event loop."""
        if not self._reconcile_scheduled and self._is_open:
            self._reconcile_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        self._reconcile_scheduled = False
        if self._is_open:
            self._reconcile()

    def _reconcile(self) -> None:
        facts = self.backend.facts
        limits = PoolLimits(
            max_replicas=facts.max_replicas, max_starts=facts.max_starts, can_sleep=facts.can_sleep
        )
        changed = self._update_members()
        states = [member.state() for member in self._members.values()]
        states += [ReplicaState(name=replica.name, phase=replica.phase, is_ready=False) for replica in self._unknown()]
        leaving = sum(replica.phase is ReplicaPhase.DRAINING for replica in self.backend.replicas().values())
        limits = msgspec_replace(limits, max_replicas=limits.max_replicas - leaving)
        orders = reconcile(self.desired, states, limits)
        stopped = [self._obey(order) for order in orders]
        changed = self._update_members() or changed or bool(orders)
        self._update_endpoints()
        for name in filter(None, stopped):
            self.backend.stop(name)
        if changed:
            for listener in self._listeners.change:
                listener()
