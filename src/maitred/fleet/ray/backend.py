"""Backend of engines that replicas of Ray Serve own.

::

    order --> target of a deployment --Serve--> actor --> engine
                                                  |          |
    replicas <---- REST: address, message --------'          |
             <---- connection: ready, lost ------------------'

Serve says where an actor runs and why it does not; whether an engine serves, and that it has died, is known of its
connection alone, and at once. Orders are carried out by one task, which then asks Serve what there is: often while
something starts or stops, and seldom otherwise. While the dashboard does not answer, everything stays as it is.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from maitred.core.backoff import BackoffCeiling
from maitred.core.clock import Clock
from maitred.core.errors import ConfigInvalid, ReplicaUnavailable
from maitred.core.replica import ModelCard
from maitred.fleet.backend import BackendFacts, BackendReplica, StartPhase
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.ray.config import SLOT_PREFIX, RayConfig
from maitred.fleet.ray.serve_api import ServeApi, ServeApplication, ServeDeployment, ServeRefusal
from maitred.fleet.remote import RemoteReplica, make_remote_engine
from maitred.scaling.replica_status import ReplicaPhase
from maitred.wire.address import TcpAddress
from maitred.wire.link.config import LinkConfig

BUSY_POLL_S = 0.2
"""Interval of the questions to Serve while a replica starts or stops."""
IDLE_POLL_S = 5.0
"""Interval otherwise; it is how long another gateway's order or a moved replica may go unnoticed."""
REDEPLOY_AFTER_S = 30.0
"""Time without the application after which it is deployed again; a controller that starts has none for a moment."""
_RETRY = BackoffCeiling(first_s=5.0, most_s=60.0)
"""Back-off of a deployment that Serve has given up, and of a dashboard that does not answer."""
_DEPLOYMENT = re.compile(rf"{SLOT_PREFIX}\d+")

_log = logging.getLogger(__name__)


class RayBackend:
    """Backend of the engines of one Serve application. Implements `ReplicaBackend`.

    Args:
        config: The `ray` section.
        link: Settings of the connections to the engines.
        check_card: Raises ReplicaUnavailable if an engine runs a model that may not be used.
        settings: Settings of the engines, where the application is deployed from here; secrets are references.
        facts: The facts, where Serve does not know them.
        clock: The clock.
    """

    def __init__(
        self,
        config: RayConfig,
        link: LinkConfig,
        check_card: Callable[[ModelCard], None],
        settings: Mapping[str, Any],
        facts: BackendFacts,
        clock: Clock,
    ) -> None:
        self._config = config
        self._link = link
        self._check_card = check_card
        self._settings = settings
        self._facts = replace(facts, outlives_gateway=True, is_shared=True, max_replicas=config.replica.max_replicas)
        self._clock = clock
        self._api = ServeApi(config)
        self._slots: dict[str, _Slot] = {}
        self._replicas: dict[str, BackendReplica] = {}
        self._orders: dict[str, int] = {}
        """Targets that Serve has not been told yet."""
        self._absent_since_s: float | None = None
        """Since when the cluster has not had the application."""
        self._restores = False
        """Whether the targets have to be set again, because the cluster did not have the application."""
        self._listeners: list[Callable[[], None]] = []
        self._has_served = False
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._watch_task: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        """Tasks that keep connections, also those that are being closed."""

    @property
    def facts(self) -> BackendFacts:
        """Facts about the backend. Implements `ReplicaBackend`."""
        return self._facts

    @property
    def desired(self) -> None:
        """Returns None, since the target of the application does not tell whether somebody has set it."""

    def keep_desired(self, desired: DesiredReplicas) -> None:
        """Does nothing: the application keeps its target. Implements `ReplicaBackend`."""

    def keep_leaving(self, names: Collection[str]) -> None:
        """Does nothing: a target of 0 tells other gateways, and the engine gives their answers first."""

    def keep_asleep(self, names: Collection[str]) -> None:
        """Does nothing: replicas of Ray Serve do not sleep. Implements `ReplicaBackend`."""

    def replicas(self) -> Mapping[str, BackendReplica]:
        """Returns the replicas that exist, by name. Implements `ReplicaBackend`."""
        return self._replicas

    def name_of(self, number: int) -> str:
        """Returns the name of the replica of this number, which is that of its deployment."""
        return f"{SLOT_PREFIX}{number}"

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change. Implements `ReplicaBackend`."""
        self._listeners.append(listener)

    # --- orders ---

    def start(self, name: str) -> None:
        """Orders a replica. Implements `ReplicaBackend`."""
        if name in self._slots:
            return
        slot = self._slots[name] = _Slot(name)
        slot.ordered_s = self._clock.monotonic_s()
        self._order(slot, 1)

    def stop(self, name: str) -> None:
        """Orders the end of a replica. Implements `ReplicaBackend`."""
        slot = self._slots.get(name)
        if slot is not None and not slot.is_stopping:
            slot.is_stopping = True
            slot.close()
            self._order(slot, 0)

    def _order(self, slot: "_Slot", target: int) -> None:
        self._orders[slot.name] = target
        slot.refusals, slot.order_at_s = 0, 0.0
        self._wake.set()
        self._show(slot)

    async def wait_started(self) -> None:
        """Waits until one replica has been ready. Implements `ReplicaBackend`.

        Raises:
            ReplicaUnavailable: Serve has given up all of them, or the settings allow no connection to them.
        """
        while not self._has_served:
            if self._slots and all(slot.given_up or slot.fault for slot in self._slots.values()):
                reason = next(slot.fault or slot.message for slot in self._slots.values())
                raise ReplicaUnavailable(f"No engine can start on Ray: {reason}")
            self._changed.clear()
            await self._changed.wait()

    # --- life ---

    async def __aenter__(self) -> Self:
        """Finds the application, deploys it if the cluster does not have it, and takes over the replicas that run.

        Raises:
            ReplicaUnavailable: The cluster does not answer, or has no such application, or one without engines.
        """
        await self._api.__aenter__()
        try:
            await self._find_application()
        except BaseException:
            await self._api.__aexit__()
            raise
        self._watch_task = asyncio.create_task(self._watch(), name="ray serve")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the connections. The replicas stay."""
        assert self._watch_task is not None
        self._watch_task.cancel()
        for slot in self._slots.values():
            slot.close()
        await asyncio.wait({self._watch_task, *self._connections})
        await self._api.__aexit__()
        if error is None and not self._watch_task.cancelled():
            self._watch_task.result()

    async def _find_application(self) -> None:
        application = await self._api.application()
        if application is None and self._config.deploys:
            await self._api.deploy(self._arguments())
        while application is None or not any(map(_DEPLOYMENT.fullmatch, application.deployments)):
            if application is None and not self._config.deploys:
                raise ReplicaUnavailable(
                    f"The Ray cluster at {self._config.address} has no application {self._config.application}. Deploy "
                    "it with `serve run maitred.fleet.ray.application:app`, or set ray.deploys."
                )
            if application is not None and application.status == "DEPLOY_FAILED":
                raise ReplicaUnavailable(f"Ray Serve cannot deploy the engines: {application.message}")
            if application is not None and application.status in ("RUNNING", "UNHEALTHY"):
                raise ReplicaUnavailable(
                    f"The application {self._config.application} at {self._config.address} is another one: it has no "
                    f"deployment {self.name_of(0)}. Name that of the engines in ray.application."
                )
            await asyncio.sleep(BUSY_POLL_S)
            application = await self._api.application()
        self._update(application)
        if not self._facts.can_scale and not self._slots:
            raise ReplicaUnavailable(
                f"The application {self._config.application} has a fixed size and no replica. Deploy it with "
                "`external_scaler_enabled: true`, or with the argument `replicas`."
            )

    def _arguments(self) -> dict[str, Any]:
        replica = self._config.replica
        return {
            **{name: getattr(replica, name) for name in replica.__struct_fields__},
            "settings": dict(self._settings),
        }

    # --- what Serve says ---

    async def _watch(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            try:
                self._update(await self._api.application())
                if await self._carry_out():
                    self._update(await self._api.application())
            except ReplicaUnavailable as failure:
                failures += 1
                if failures == 1:
                    _log.error("%s (Everything stays as it is until then.)", failure.message)
                pause_s = _RETRY.after(failures)
            except Exception:  # without this task, nothing would ever be ordered or found again
                failures += 1
                if failures == 1:
                    _log.exception("The replicas on Ray cannot be brought up to date; this is tried again.")
                pause_s = _RETRY.after(failures)
            else:
                if failures:
                    _log.info("Ray's dashboard at %s does again what it is told.", self._config.address)
                failures = 0
                pause_s = BUSY_POLL_S if any(slot.is_changing for slot in self._slots.values()) else IDLE_POLL_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _carry_out(self) -> bool:
        """Tells Serve what is due: targets, or the application if it has been missing for long, as with a new head.

        Returns:
            Whether anything was due.
        """
        now_s = self._clock.monotonic_s()
        if self._absent_since_s is not None:
            if not self._config.deploys or now_s - self._absent_since_s < REDEPLOY_AFTER_S:
                return False
            _log.error("The cluster has no application %s any more; it is deployed again.", self._config.application)
            self._absent_since_s = now_s
            await self._api.deploy(self._arguments())
            return True
        told = False
        for slot in list(self._slots.values()):
            if slot.given_up and not slot.is_stopping and now_s >= slot.retry_at_s:
                # Serve tries again as soon as the target changes. The target of 1 is due whatever becomes of this one.
                self._orders.setdefault(slot.name, 1)
                slot.given_up = False
                await self._tell(slot.name, 0, now_s)
        for name, target in list(self._orders.items()):
            if name in self._slots and now_s < self._slots[name].order_at_s:
                continue
            told = True
            if await self._tell(name, target, now_s) and self._orders.get(name) == target:
                del self._orders[name]
        return told

    async def _tell(self, name: str, target: int, now_s: float) -> bool:
        """Tells Serve a target; returns whether the order is done, and not refused and due again."""
        try:
            await self._api.scale(name, target)
        except ServeRefusal as refusal:
            if (slot := self._slots.get(name)) is not None:
                slot.on_refusal(refusal, now_s)
                return False
        return True

    def _update(self, found: ServeApplication | None) -> None:
        """Takes over what Serve says; an order that it has not been told yet stands above its target."""
        if found is None and self._absent_since_s is None:
            self._absent_since_s = self._clock.monotonic_s()
            self._restores = True
        elif found is not None:
            self._absent_since_s = None
        deployments = {} if found is None else found.deployments
        deployments = {name: d for name, d in deployments.items() if _DEPLOYMENT.fullmatch(name)}
        if not deployments:
            return  # it is gone, or its new configuration is being read: nobody has ordered another number
        if self._restores:
            # Whoever has deployed it anew: its targets are not orders, and those of before still hold.
            self._restores = False
            for slot in self._slots.values():
                anew = deployments.get(slot.name)
                if anew and not (slot.is_stopping or slot.is_going or anew.target_num_replicas):
                    self._orders.setdefault(slot.name, 1)
        can_scale = found is not None and found.takes_targets(self._config.replica.scaling)
        if (len(deployments), can_scale) != (self._facts.max_replicas, self._facts.can_scale):
            self._facts = replace(self._facts, max_replicas=len(deployments), can_scale=can_scale)
        if not can_scale:
            self._orders.clear()
            for slot in self._slots.values():
                slot.is_stopping = False  # it goes on, and is connected again
        for name in {**self._slots, **deployments}:
            deployment = deployments.get(name)
            target = self._orders.get(name, 0 if deployment is None else deployment.target_num_replicas)
            living = [] if deployment is None else deployment.replicas
            if not target and not living:
                self._remove(name)
                continue
            slot = self._slots.get(name) or self._slots.setdefault(name, _Slot(name))
            slot.is_going = not target
            if deployment is not None:
                self._update_slot(slot, deployment)
            self._show(slot)

    def _update_slot(self, slot: "_Slot", deployment: ServeDeployment) -> None:
        now_s = self._clock.monotonic_s()
        given_up = deployment.status == "DEPLOY_FAILED"
        if given_up and not slot.given_up:
            slot.failures += 1
            slot.retry_at_s = now_s + _RETRY.after(slot.failures)
        slot.given_up, slot.message = given_up, deployment.message
        if slot.is_stopping:
            return
        for actor in deployment.replicas:
            if actor.is_going or actor.node_ip is None or deployment.port is None:
                continue
            slot.actor_s = slot.actor_s or now_s
            address = TcpAddress(actor.node_ip, deployment.port)
            if slot.engine is None:
                try:
                    engine, slot.fault = make_remote_engine(address, self._link, self._check_card), ""
                except ConfigInvalid as error:
                    slot.fault = error.message
                    return
                engine.on_transition = lambda: self._on_transition(slot)
                connection = slot.open(engine)
                self._connections.add(connection)
                connection.add_done_callback(self._connections.discard)
            elif slot.engine.client.address != address:
                _log.info("Ray has moved %s to %s.", slot.name, address)
                slot.engine.client.address = address

    def _on_transition(self, slot: "_Slot") -> None:
        if slot.is_serving:
            slot.failures = 0
        else:
            self._wake.set()  # Ray may know where it is next
        self._show(slot)

    def _remove(self, name: str) -> None:
        if slot := self._slots.pop(name, None):
            slot.close()
            del self._replicas[name]
            self._notify()

    def _show(self, slot: "_Slot") -> None:
        """Shows the state of a slot to listeners, if it has changed."""
        phase, failure = slot.state()
        shown = self._replicas.get(slot.name)
        if shown is not None and (shown.phase, shown.failure, shown.engine) == (phase, failure, slot.engine):
            return
        now_s = self._clock.monotonic_s()
        is_new_phase = shown is None or shown.phase is not phase
        if phase is ReplicaPhase.SERVING:
            self._has_served = True
            slot.end_start(now_s)
        self._replicas[slot.name] = BackendReplica(
            name=slot.name,
            phase=phase,
            since_s=now_s if shown is None or is_new_phase else shown.since_s,
            engine=slot.engine,
            start_kind=self._facts.start_kind,
            start_phases=slot.start_phases,
            failure=failure,
            serves_others=slot.is_serving,
        )
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        for listener in self._listeners:
            listener()


class _Slot(RemoteReplica):
    """Replica that is ordered or that Serve has.

    Attributes:
        ordered_s: When its start was ordered; None: it was found, or that start is complete.
        actor_s: When its actor was seen to run.
        start_phases: Measured parts of its last complete start.
        is_stopping: Whether its end was ordered here.
        is_going: Whether its target is 0.
        given_up: Whether Serve tries no more to start it.
        failures: How often in a row that happened.
        retry_at_s: When it is ordered again.
        refusals: How often in a row Serve has refused the present order.
        order_at_s: When that order is given again.
        message: What Serve says about it.
        fault: Why the settings allow no connection to its engine; empty: they do.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ordered_s: float | None = None
        self.actor_s: float | None = None
        self.start_phases: tuple[StartPhase, ...] = ()
        self.is_stopping = self.is_going = self.given_up = False
        self.failures = self.refusals = 0
        self.retry_at_s = self.order_at_s = 0.0
        self.message = self.fault = ""

    @property
    def is_changing(self) -> bool:
        """Whether Serve is asked about it often."""
        return self.state()[0] is not ReplicaPhase.SERVING

    @property
    def is_serving(self) -> bool:
        """Whether its engine is connected."""
        return self.engine is not None and self.engine.client.is_ready

    def state(self) -> tuple[ReplicaPhase, str]:
        """Returns the phase, and why the replica does not run."""
        if self.is_stopping or self.is_going:
            return ReplicaPhase.DRAINING, ""
        if self.is_serving:
            return ReplicaPhase.SERVING, ""
        if self.given_up:
            return ReplicaPhase.FAILED, self.message
        if self.fault:
            return ReplicaPhase.FAILED, self.fault
        if self.engine is not None and self.engine.failure_reason:
            return ReplicaPhase.FAILED, self.engine.failure_reason
        return ReplicaPhase.STARTING, self.message

    def on_refusal(self, refusal: ServeRefusal, now_s: float) -> None:
        """Handles the refusal of the present order, which is given again later."""
        self.refusals += 1
        self.order_at_s = now_s + _RETRY.after(self.refusals)
        if self.refusals == 1:
            _log.error("The order to %s is given again later: %s", self.name, refusal.message)

    def end_start(self, ready_s: float) -> None:
        """Measures the parts of a start that was ordered here and is complete now."""
        if self.ordered_s is not None and self.actor_s is not None and self.engine is not None:
            engine_s = ready_s - self.actor_s
            model_s = min(engine_s, self.engine.client.model_s)
            self.start_phases = (
                StartPhase(name="actor", seconds=self.actor_s - self.ordered_s),
                StartPhase(name="process", seconds=engine_s - model_s),
                StartPhase(name="model", seconds=model_s),
            )
        self.ordered_s = None
