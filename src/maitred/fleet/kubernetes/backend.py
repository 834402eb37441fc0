"""Backend of engines that run in the pods of a Kubernetes Deployment.

::

    order --> scale of the Deployment --ReplicaSet--> pod --kubelet--> engine
                                                       |                 |
    replicas <---- watch: address, phase, why not -----'                 |
             <---- connection: ready, lost ------------------------------'

Kubernetes names the pods, so a replica that is ordered has a provisional name until its pod is there. Which pod goes is
said by its deletion cost, which is lowered as soon as the replica drains; other gateways read that, too, and send it
nothing new. Then the scale is lowered. The engine of a pod that ends gives the answers that run first.

Only the gateway that holds the lease of the pool gives orders. Before each change of the scale it reads the scale and
then the lease. The change holds only if the Deployment is still as it was read, so it cannot follow a change of whoever
has the lease since: a gateway that was suspended changes nothing. While the API server does not answer, everything
stays as it is.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from maitred.core.backoff import BackoffCeiling
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid, ReplicaUnavailable
from maitred.fleet.backend import BackendFacts, BackendReplica, StartPhase
from maitred.fleet.kubernetes.api import DELETION_COST, KubernetesApi, Pod, PodEvent, ResourceConflict, WatchExpired
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.remote import RemoteEngine, RemoteReplica
from maitred.scaling.replica_status import ReplicaPhase
from maitred.wire.address import TcpAddress

MARK_S = 1.0
"""Time from the lowering of a deletion cost until the scale is lowered: controllers read both, in any order."""
END_S = 10.0
"""Time after which a pod that was to go, and is still there, counts again: Kubernetes has ended another one."""
NO_POD_S = 30.0
"""Time without a pod after which a replica that was ordered says so."""
LEAVING_COST, ENDING_COST = "-1000", "-2000"
"""Deletion cost of a pod that is to go, and of one that goes now, before those that still give answers."""
_POLL_S = 0.2
"""Interval of looks while an order waits for its time."""
_RETRY = BackoffCeiling(first_s=0.5, most_s=15.0)
"""Back-off of an API server that does not answer."""
_BROKEN = frozenset(
    {
        "CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "CreateContainerConfigError",
        "CreateContainerError", "RunContainerError",
    }
)  # fmt: skip
"""Reasons of a waiting container that somebody has to look at."""

_log = logging.getLogger(__name__)


class KubernetesBackend:
    """Backend of the engines of one Deployment. Implements `ReplicaBackend`.

    Args:
        api: Client of the API server.
        make_engine: Makes the connection to the engine at an address.
        port: Port of the engine in each pod.
        lease: Name of the Lease of who scales the Deployment.
        facts: The facts, as the settings say.
        clock: The clock.

    Attributes:
        api: See above.
        epoch: Returns the epoch of the lease that this gateway holds; None: it holds none, and only follows.
        latest_epoch: 0: the cluster keeps none.
    """

    latest_epoch = 0

    def __init__(
        self,
        api: KubernetesApi,
        make_engine: Callable[[TcpAddress], RemoteEngine],
        *,
        port: int,
        lease: str,
        facts: BackendFacts,
        clock: Clock,
    ) -> None:
        self.epoch: Callable[[], int | None] = lambda: None
        self.api = api
        self._make_engine = make_engine
        self._port = port
        self._lease = lease
        self._facts = replace(facts, outlives_gateway=True, is_shared=True)
        self._clock = clock
        self._pods: dict[str, _PodReplica] = {}
        self._coming: dict[str, _PodOrder] = {}
        """Replicas that have no pod yet, by their provisional names, the oldest first."""
        self._target = 0
        """Replicas that the Deployment is to have, as it was last read or set."""
        self._selector = ""
        self._is_scale_known = False
        self._leaving: frozenset[str] | None = None
        """Pods that are to go; None: no pool has said so, and what another gateway has marked holds."""
        self._replicas: dict[str, BackendReplica] = {}
        self._listeners: list[Callable[[], None]] = []
        self._number = 0
        self._has_served = asyncio.Event()
        self._wake = asyncio.Event()
        self._ordered_before = False
        self._connections: set[asyncio.Task[None]] = set()
        """Tasks that keep connections, also those that are being closed."""
        self._tasks: list[asyncio.Task[None]] = []

    # --- what there is ---

    @property
    def facts(self) -> BackendFacts:
        """Facts about the backend. Implements `ReplicaBackend`."""
        return replace(self._facts, follows=self.epoch() is None)

    @property
    def desired(self) -> None:
        """Returns None, since the scale does not tell whether somebody has set it."""

    def replicas(self) -> Mapping[str, BackendReplica]:
        """Returns the replicas that exist or are to come, by name. Implements `ReplicaBackend`."""
        return self._replicas

    def name_of(self, number: int) -> str:
        """Returns a provisional name, which the replica has until its pod is there. Implements `ReplicaBackend`."""
        return f"pod-{self._number + number + 1}"

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change. Implements `ReplicaBackend`."""
        self._listeners.append(listener)

    def check_lease(self) -> None:
        """Follows the lease; to be called when it has been taken, renewed or lost."""
        orders_now = self.epoch() is not None
        if orders_now is self._ordered_before:
            return
        self._ordered_before = orders_now
        if not orders_now:
            for pod in self._pods.values():
                pod.forget_orders()
            self._coming = {name: coming for name, coming in self._coming.items() if coming.is_told}
            self._leaving = None
        self._update()
        self._notify()  # whether this gateway follows is a fact that has changed
        self._wake.set()

    # --- orders ---

    def keep_desired(self, desired: DesiredReplicas) -> None:
        """Does nothing: the Deployment keeps its scale. Implements `ReplicaBackend`."""

    def keep_leaving(self, names: Collection[str]) -> None:
        """Lowers the deletion cost of the pods that are to go, which other gateways read."""
        if self.epoch() is not None and (leaving := frozenset(names)) != self._leaving:
            self._leaving = leaving
            self._wake.set()

    def keep_asleep(self, names: Collection[str]) -> None:
        """Does nothing: engines in pods do not sleep. Implements `ReplicaBackend`."""

    def start(self, name: str) -> None:
        """Orders a replica. Implements `ReplicaBackend`."""
        if name not in self._replicas and self.epoch() is not None:
            self._number += 1
            self._coming[name] = _PodOrder(name, self._clock.monotonic_s(), is_told=False)
            self._update()
            self._wake.set()

    def stop(self, name: str) -> None:
        """Orders the end of a replica. Implements `ReplicaBackend`."""
        if self.epoch() is None:
            return
        if (coming := self._coming.get(name)) is not None:
            if coming.is_told:
                coming.is_stopping = True
            else:
                del self._coming[name]
        elif (pod := self._pods.get(name)) is not None:
            pod.is_stopping = True
            pod.close()
        self._update()
        self._wake.set()

    async def wait_started(self) -> None:
        """Waits until one replica has been ready. Implements `ReplicaBackend`."""
        await self._has_served.wait()

    # --- life ---

    async def __aenter__(self) -> Self:
        """Finds the Deployment, and takes over the pods that it has.

        Raises:
            ConfigInvalid: Nothing says where the API server is.
            ReplicaUnavailable: The API server does not answer, has no such Deployment, or refuses.
        """
        await self.api.__aenter__()
        try:
            await self._read_scale()
            since = await self._list()
        except BaseException:
            await self.api.__aexit__(None, None, None)
            raise
        _log.info("%s has %d of %d pods.", self.api.target, len(self._pods), self._target)
        self._tasks = [
            asyncio.create_task(self._watch(since), name="pods"),
            asyncio.create_task(self._order(), name="scale"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connections. The pods stay."""
        for task in self._tasks:
            task.cancel()
        for pod in self._pods.values():
            pod.close()
        await asyncio.wait({*self._tasks, *self._connections})
        await self.api.__aexit__(kind, error, trace)
        for task in self._tasks:
            if error is None and not task.cancelled():
                task.result()

    # --- what the cluster says ---

    async def _watch(self, since: str | None) -> None:
        """Follows the pods; whenever it is not known since when, they are listed."""
        failures = _FailureLog("Everything stays as it is until then.")
        while True:
            try:
                if since is None:
                    since = await self._list()
                    self._read_scale_again()
                async for event in self.api.watch(self._selector, since):
                    failures.on_success()
                    since = event.pod.metadata.resource_version
                    self._on_event(event)
                    self._update()
                failures.on_success()
            except WatchExpired:
                since = None
            except Exception as error:  # without this task, nothing would ever be found again
                since = None
                await asyncio.sleep(failures.on_failure(error))

    async def _list(self) -> str:
        """Takes over all pods as they are now; returns their resource version."""
        listed = await self.api.pods(self._selector)
        found = {pod.metadata.name: pod for pod in listed.items}
        for name in [name for name in self._pods if name not in found]:
            self._remove(name)
        for pod in found.values():
            self._take_over(pod)
        self._update()
        return listed.metadata.resource_version

    def _on_event(self, event: PodEvent) -> None:
        if event.type == "DELETED":
            self._remove(event.pod.metadata.name)
        elif event.type in ("ADDED", "MODIFIED"):
            self._take_over(event.pod)

    def _take_over(self, pod: Pod) -> None:
        """Takes over what the cluster says of a pod."""
        name, now_s = pod.metadata.name, self._clock.monotonic_s()
        known = self._pods.get(name)
        if known is not None and known.pod.metadata.uid != pod.metadata.uid:
            self._remove(name)
            known = None
        if known is None:
            if pod.is_going:
                return  # one that was there before, or has come and gone meanwhile
            told = [coming for coming in self._coming.values() if coming.is_told]
            ordered = min(told, key=lambda coming: coming.is_stopping, default=None)
            if ordered is not None:
                del self._coming[ordered.name]
            elif self._is_scale_known:
                self._read_scale_again()  # somebody else has changed it
            known = self._pods[name] = _PodReplica(pod, ordered, now_s)
        if pod.is_going and not known.pod.is_going and not known.is_told_to_end:
            self._on_other_end(known)
        known.pod = pod
        known.follow_phases(now_s)
        if pod.is_going or known.is_stopping or pod.status.pod_ip is None:
            return
        address = TcpAddress(pod.status.pod_ip, self._port)
        if known.engine is None:
            try:
                engine, known.fault = self._make_engine(address), ""
            except ConfigInvalid as error:
                known.fault = error.message
                return
            engine.on_transition = self._update
            connection = known.open(engine)
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)
        elif known.engine.client.address != address:
            known.engine.client.address = address

    def _remove(self, name: str) -> None:
        if (pod := self._pods.pop(name, None)) is not None:
            pod.close()
            if not pod.pod.is_going and not pod.is_told_to_end:
                self._on_other_end(pod)

    def _on_other_end(self, ended: "_PodReplica") -> None:
        """Handles the end of a pod that was not told to end: perhaps in place of one that was, which takes its part."""
        self._read_scale_again()
        chosen = next((pod for pod in self._pods.values() if pod.is_told_to_end and not pod.pod.is_going), None)
        if chosen is not None and ended.is_stopping:
            chosen.is_told_to_end = False  # it would have been next
        elif chosen is not None:
            self._let_go_on(chosen, is_leaving=self._is_leaving(ended))

    def _let_go_on(self, pod: "_PodReplica", *, is_leaving: bool) -> None:
        """Lets a pod go on that was told to end; it is to go in its turn if `is_leaving`."""
        name = pod.pod.metadata.name
        _log.warning("Kubernetes has ended another pod than %s, which goes on.", name)
        pod.forget_orders()
        self._leaving = (self._leaving or frozenset()) - {name} | ({name} if is_leaving else set())
        self._take_over(pod.pod)

    def _is_leaving(self, pod: "_PodReplica") -> bool:
        """Whether a pod is to go, as this gateway or, if it has not said so, another one has marked it."""
        return pod.pod.is_leaving if self._leaving is None else pod.pod.metadata.name in self._leaving

    def _read_scale_again(self) -> None:
        self._is_scale_known = False
        self._wake.set()

    async def _read_scale(self) -> None:
        scale = await self.api.scale()
        self._target, self._selector = scale.spec.replicas, scale.status.selector
        self._is_scale_known = True

    # --- orders to the cluster ---

    async def _order(self) -> None:
        failures = _FailureLog("The order is given again.")
        while True:
            self._wake.clear()
            try:
                if not self._is_scale_known:
                    await self._read_scale()
                    self._update()
                some_wait = await self._carry_out()
            except ResourceConflict:
                self._is_scale_known = False  # somebody else has changed the Deployment: read it again
                continue
            except Exception as error:  # without this task, nothing would ever be ordered again
                await asyncio.sleep(failures.on_failure(error))
                continue
            failures.on_success()
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S if some_wait else None):
                    await self._wake.wait()

    async def _carry_out(self) -> bool:
        """Gives the orders that are due; returns whether one waits for its time.

        Raises:
            ResourceConflict: The Deployment has changed meanwhile.
            ReplicaUnavailable: The API server does not answer or refuses, or another gateway has taken the lease.
        """
        if self.epoch() is None:
            return False
        await self._mark_pods()
        now_s = self._clock.monotonic_s()
        ending = [pod for pod in self._pods.values() if pod.is_told_to_end and not pod.pod.is_going]
        for pod in ending:
            if now_s - pod.told_s >= END_S:
                self._is_scale_known = False
                self._let_go_on(pod, is_leaving=False)
        starting = [coming for coming in self._coming.values() if not coming.is_told]
        # A ReplicaSet sees only the sum of what is added and lowered at a time, and would end no pod.
        if starting and not ending:
            await self._change_scale(len(starting))
            for coming in starting:
                coming.is_told = True
        elif not any(coming.is_awaited(now_s) for coming in self._coming.values()):
            await self._lower_scale(now_s)
        self._update()
        return any(pod.is_stopping and not pod.pod.is_going for pod in self._pods.values()) or any(
            coming.is_stopping or not coming.is_told for coming in self._coming.values()
        )

    async def _mark_pods(self) -> None:
        """Sets the deletion costs of the pods that leave, end, or serve again."""
        for pod in list(self._pods.values()):
            cost = ENDING_COST if pod.is_stopping else LEAVING_COST if self._is_leaving(pod) else None
            if not pod.pod.is_going and cost != pod.cost:
                await self.api.annotate(pod.pod, {DELETION_COST: cost})
                pod.cost, pod.marked_s = cost, self._clock.monotonic_s()

    async def _lower_scale(self, now_s: float) -> None:
        """Lowers the scale by pods whose cost has been low for long enough, and by those that are no longer to come."""
        due = [
            pod
            for pod in self._pods.values()
            if pod.is_stopping and not (pod.is_told_to_end or pod.pod.is_going) and now_s - pod.marked_s >= MARK_S
        ]
        cancelled = [coming for coming in self._coming.values() if coming.is_stopping]
        if due or cancelled:
            await self._change_scale(-len(due) - len(cancelled))
        for pod in due:
            pod.is_told_to_end, pod.told_s = True, self._clock.monotonic_s()
        for coming in cancelled:
            self._coming.pop(coming.name, None)

    async def _change_scale(self, change: int) -> None:
        """Changes the scale by a number.

        Raises:
            ResourceConflict: Somebody else has changed the Deployment in between.
            ReplicaUnavailable: Another gateway has taken the lease.
        """
        seen = await self.api.scale()
        lease = await self.api.lease(self._lease)
        if (epoch := self.epoch()) is None or lease is None or lease.spec.lease_transitions != epoch:
            raise ReplicaUnavailable(f"Another gateway has the Lease {self._lease}, and scales {self.api.target}.")
        wanted = max(0, seen.spec.replicas + change)
        _log.info("%s gets %d replicas in place of %d.", self.api.target, wanted, seen.spec.replicas)
        self._target = (await self.api.set_replicas(wanted, seen)).spec.replicas
        self._is_scale_known = True

    # --- what is shown ---

    def _update(self) -> None:
        """Brings the replicas up to date, and tells the listeners if they have changed."""
        now_s = self._clock.monotonic_s()
        self._match_coming(now_s)
        replicas = {
            name: pod.status(self._facts, now_s, is_leaving=self._is_leaving(pod)) for name, pod in self._pods.items()
        }
        replicas |= {name: coming.status(self._facts, now_s) for name, coming in self._coming.items()}
        if any(replica.phase is ReplicaPhase.SERVING for replica in replicas.values()):
            self._has_served.set()
        if replicas != self._replicas:
            self._replicas = replicas
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _match_coming(self, now_s: float) -> None:
        """Brings what is to come in line with the scale: what it lacks is on its way, whoever has ordered it."""
        if not self._is_scale_known:
            return
        there = sum(not (pod.pod.is_going or pod.is_told_to_end) for pod in self._pods.values())
        told = sorted(
            (coming for coming in self._coming.values() if coming.is_told), key=lambda coming: coming.is_stopping
        )
        missing = self._target - there
        for coming in told[max(0, missing) :]:
            del self._coming[coming.name]
        for _ in range(missing - len(told)):
            name = self.name_of(0)
            self._number += 1
            self._coming[name] = _PodOrder(name, now_s, is_told=True)


class _FailureLog:
    """Log of failures in a row: the first one, each fault of this gateway itself, and that they are over.

    Args:
        effect: What happens until then.
    """

    def __init__(self, effect: str) -> None:
        self._effect = effect
        self._failures = 0

    def on_failure(self, error: Exception) -> float:
        """Notes a failure; returns the seconds to wait before the next attempt."""
        self._failures += 1
        if not isinstance(error, ReplicaUnavailable):
            _log.error(
                "The Deployment cannot be followed, by a fault of this gateway. (%s)", self._effect, exc_info=error
            )
        elif self._failures == 1:
            _log.error("%s (%s)", error.message, self._effect)
        return _RETRY.after(self._failures)

    def on_success(self) -> None:
        """Notes that there is an answer."""
        if self._failures:
            _log.info("The Kubernetes API server answers again.")
        self._failures = 0


class _PodOrder:
    """Replica that is ordered and has no pod yet.

    Attributes:
        name: Its provisional name.
        ordered_s: When it was ordered.
        is_told: Whether the scale of the Deployment has it.
        is_stopping: Whether it is not wanted any more.
    """

    def __init__(self, name: str, ordered_s: float, *, is_told: bool) -> None:
        self.name = name
        self.ordered_s = ordered_s
        self.is_told = is_told
        self.is_stopping = False

    def is_awaited(self, now_s: float) -> bool:
        """Whether the Deployment is about to make its pod."""
        return self.is_told and not self.is_stopping and now_s - self.ordered_s < NO_POD_S

    def status(self, facts: BackendFacts, now_s: float) -> BackendReplica:
        """Returns what the pool sees."""
        late = self.is_told and now_s - self.ordered_s >= NO_POD_S
        return BackendReplica(
            name=self.name,
            phase=ReplicaPhase.DRAINING if self.is_stopping else ReplicaPhase.STARTING,
            since_s=self.ordered_s,
            start_kind=facts.start_kind,
            failure="The Deployment has made no pod yet; `kubectl describe replicaset` says why." if late else "",
        )


class _PodReplica(RemoteReplica):
    """Replica in a pod; its name is that of the pod.

    Attributes:
        pod: The pod as the cluster has told it last.
        fault: Why the settings allow no connection to its engine; empty: they do.
        is_stopping: Whether its end was ordered here.
        is_told_to_end: Whether the scale was lowered for it.
        told_s: When.
        cost: Its deletion cost, as it was last set or found; None: it has none.
        marked_s: When it was set.
    """

    def __init__(self, pod: Pod, ordered: _PodOrder | None, now_s: float) -> None:
        super().__init__(pod.metadata.name)
        self.pod = pod
        self.fault = ""
        self.is_stopping, self.is_told_to_end = ordered is not None and ordered.is_stopping, False
        self.told_s = 0.0
        self.cost, self.marked_s = pod.metadata.annotations.get(DELETION_COST), now_s
        self._ordered = ordered
        self._reached_s = {} if ordered is None else {"pod": now_s}
        """When a start that was ordered here reached each of its phases."""
        self._start_phases: tuple[StartPhase, ...] = ()
        self._shown: BackendReplica | None = None

    def forget_orders(self) -> None:
        """Forgets that it was to end."""
        self.is_stopping = self.is_told_to_end = False

    def follow_phases(self, now_s: float) -> None:
        """Notes when a start that was ordered here reaches its phases."""
        if not self._reached_s:
            return
        scheduled = self.pod.condition("PodScheduled")
        if scheduled is not None and scheduled.status == "True":
            self._reached_s.setdefault("scheduled", now_s)
        if self.pod.status.phase == "Running":
            self._reached_s.setdefault("running", now_s)

    def state(self) -> tuple[ReplicaPhase, str]:
        """Returns the phase, and why the replica does not run."""
        if self.pod.is_going or self.is_stopping:
            return ReplicaPhase.DRAINING, ""
        if self.engine is not None and self.engine.client.is_ready:
            return ReplicaPhase.SERVING, ""
        waiting = self.pod.waiting
        if waiting is not None and waiting.reason in _BROKEN:
            return ReplicaPhase.FAILED, f"{waiting.reason}: {waiting.message}"
        if self.fault:
            return ReplicaPhase.FAILED, self.fault
        if self.engine is not None and (reason := self.engine.failure_reason):
            # While a pod starts, nothing listens there yet.
            is_starting = self._shown is None or self._shown.phase is ReplicaPhase.STARTING
            if is_starting and not self.engine.client.is_rejected:
                return ReplicaPhase.STARTING, reason
            return ReplicaPhase.FAILED, reason
        scheduled = self.pod.condition("PodScheduled")
        if scheduled is not None and scheduled.status == "False":
            return ReplicaPhase.STARTING, f"{scheduled.reason}: {scheduled.message}"
        return ReplicaPhase.STARTING, ""

    def status(self, facts: BackendFacts, now_s: float, *, is_leaving: bool) -> BackendReplica:
        """Returns what the pool sees; the same object while nothing changes."""
        phase, failure = self.state()
        if phase is ReplicaPhase.SERVING:
            self._end_start(now_s)
        before = self._shown
        is_new_phase = before is None or before.phase is not phase
        shown = BackendReplica(
            name=self.pod.metadata.name,
            ordered_as="" if self._ordered is None else self._ordered.name,
            phase=phase,
            since_s=now_s if before is None or is_new_phase else before.since_s,
            engine=self.engine,
            start_kind=facts.start_kind,
            start_phases=self._start_phases,
            failure=failure,
            region=self.pod.metadata.labels.get("topology.kubernetes.io/region"),
            serves_others=phase is ReplicaPhase.SERVING,
            is_leaving=is_leaving,
        )
        if shown != before:
            self._shown = shown
        return shown if before is None or shown != before else before

    def _end_start(self, now_s: float) -> None:
        """Measures the parts of a start that was ordered here and is complete now."""
        if self._ordered is None or not self._reached_s or self.engine is None:
            return
        times = [
            self._ordered.ordered_s,
            *(self._reached_s.get(name, now_s) for name in ("pod", "scheduled", "running")),
        ]
        model_s = min(now_s - times[-1], self.engine.client.model_s)
        names = ("pod", "schedule", "image")
        self._start_phases = (
            *(
                StartPhase(name=name, seconds=max(0.0, after - before))
                for name, before, after in zip(names, times, times[1:], strict=False)
            ),
            StartPhase(name="process", seconds=now_s - times[-1] - model_s),
            StartPhase(name="model", seconds=model_s),
        )
        self._reached_s = {}
