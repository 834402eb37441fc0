"""Carries out what `fleet.policy.residents` decides: starts engines, ends them, and tells the queues who is there.

Decisions are made again whenever a queue has had its turn, whenever a load or an unload is complete, and now and then
for turns that end by themselves.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from maitred.core.clock import Clock
from maitred.core.errors import ReplicaUnavailable
from maitred.fleet.policy.load_eta import ready_in_s
from maitred.fleet.policy.model_residency import ModelDemand, ResidencyPhase
from maitred.fleet.policy.residency import ResidencyPolicy
from maitred.fleet.residency.footprint import mebibytes
from maitred.fleet.residency.on_demand_replica import OnDemandReplica

_TICK_S = 0.1
"""How late the end of a turn may be noticed while somebody waits for it."""
_IDLE_TICK_S = 1.0
_MEASURE_S = 5.0
"""Between two looks at what the processes take."""

_log = logging.getLogger(__name__)


class QueueView(Protocol):
    """The queue of one model, as far as it matters here."""

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        ...

    @property
    def running(self) -> int:
        """Requests that were released and have not left."""
        ...


class ModelManager:
    """The models of one machine that come and go.

    Args:
        policy: Decides.
        clock: The time.
        learn: Keeps how long the next load of a model should take; called after each.
    """

    def __init__(
        self, residents: ResidencyPolicy, clock: Clock, learn: Callable[[str, float], None] = lambda name, seconds: None
    ) -> None:
        self.policy = residents
        self.replicas: dict[str, OnDemandReplica] = {}
        self.measured_bytes: dict[str, int] = {}
        self._clock = clock
        self._learn = learn
        self._lines: dict[str, QueueView] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def attend(self, replica: OnDemandReplica, line: QueueView) -> None:
        """From now on a model comes when requests wait in this line. To be called once for each, before `run`."""
        self.replicas[replica.name] = replica
        self._lines[replica.name] = line

    def check(self, name: str) -> None:
        """Something has changed in the line of a model."""
        if self._lines[name].waiting:
            self.policy.asked(name, self._clock.monotonic_s())
        self._changed.set()

    def line(self, name: str) -> QueueView:
        """The queue of a model."""
        return self._lines[name]

    def want(self, name: str) -> None:
        """Somebody will come back for this model."""
        self.policy.want(name, self._clock.monotonic_s())
        self._changed.set()

    def ready_in_s(self, name: str) -> float:
        """When a model would be there, if requests waited for it from now on."""
        return ready_in_s(self.policy, name, self._clock.monotonic_s(), self._demands())

    # --- what the operator says; see `ResidencyPolicy` ---

    def order_load(self, name: str) -> None:
        """It is loaded as if somebody waited for it."""
        self.policy.order_load(name, self._clock.monotonic_s())
        self._on_order(name)

    def order_unload(self, name: str, *, hold: bool) -> None:
        """It goes when its answers have ended; held, who waits for it is told so."""
        self.policy.order_unload(name, hold=hold)
        self._on_order(name)

    def order_sleep(self, name: str) -> None:
        """It gives its memory back when its answers have ended, and keeps its process."""
        self.policy.order_sleep(name)
        self._on_order(name)

    def pin(self, name: str) -> None:
        """It is loaded, and stays."""
        self.policy.pin(name, self._clock.monotonic_s())
        self._on_order(name)

    def unpin(self, name: str) -> None:
        """It stays until others need its room."""
        self.policy.unpin(name)
        self._on_order(name)

    def _on_order(self, name: str) -> None:
        self.replicas[name].hold(self.policy[name].held)
        self._changed.set()

    # --- how ---

    async def run(self) -> None:
        """Until it is cancelled; then every engine is ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._measure(), name="memory of models")
                while True:
                    self._reconcile(tasks)
                    self._changed.clear()
                    needed = any(one.asked_s is not None for one in self.policy.all.values())
                    try:
                        async with asyncio.timeout(_TICK_S if needed else _IDLE_TICK_S):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
        finally:
            await asyncio.gather(*(replica.unload() for replica in self.replicas.values()))

    def _demands(self) -> dict[str, ModelDemand]:
        return {name: ModelDemand(line.waiting, line.running) for name, line in self._lines.items()}

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        orders = self.policy.decide(self._clock.monotonic_s(), self._demands())
        for name, replica in self.replicas.items():
            replica.admit(self.policy[name].phase is ResidencyPhase.IN and name not in orders.closed)
        for name in orders.unload:
            tasks.create_task(self._unload(self.replicas[name]), name=f"unload of {name}")
        for name in orders.sleep:
            tasks.create_task(self._sleep(self.replicas[name]), name=f"sleep of {name}")
        if orders.load is not None:
            tasks.create_task(self._load(self.replicas[orders.load]), name=f"load of {orders.load}")

    async def _load(self, replica: OnDemandReplica) -> None:
        name, began_s = replica.name, self._clock.monotonic_s()
        woken = self.policy[name].asleep
        try:
            measured_bytes = await replica.load_in()
            most_bytes = self.policy.available_bytes_for(name)
            if measured_bytes > most_bytes:
                await replica.unload()
                raise ReplicaUnavailable(
                    f"It takes {mebibytes(measured_bytes)}, and residency.memory_bytes leaves "
                    f"{mebibytes(most_bytes)} for it. Raise that, or lower its engine.kv_memory_bytes."
                )
        except ReplicaUnavailable as failure:
            again_in_s = replica.fail()
            self.policy.failed(name, self._clock.monotonic_s(), again_in_s)
            _log.error("%s was not loaded: %s\nIt is tried again in %.0f s at the earliest.", name, failure, again_in_s)
        else:
            self.policy.loaded(name, self._clock.monotonic_s(), measured_bytes)
            if not woken:
                self._learn(name, self.policy[name].load.seconds)
            self.measured_bytes[name] = measured_bytes
            replica.loaded(self._clock.monotonic_s() - began_s, woken=woken)
            took_s, what = self._clock.monotonic_s() - began_s, "woke" if woken else "was loaded"
            _log.info("%s %s in %.1f s and takes %s.", name, what, took_s, mebibytes(measured_bytes))
        self._changed.set()

    async def _unload(self, replica: OnDemandReplica) -> None:
        await replica.unload()
        self.measured_bytes.pop(replica.name, None)
        replica.unloads += 1
        self.policy.unloaded(replica.name, self._clock.monotonic_s())
        _log.info("%s was unloaded.", replica.name)
        self._changed.set()

    async def _sleep(self, replica: OnDemandReplica) -> None:
        name = replica.name
        try:
            measured_bytes = await replica.sleep()
        except ReplicaUnavailable as failure:
            _log.error("%s was to sleep and was unloaded: %s", name, failure)
            self.measured_bytes.pop(name, None)
            self.policy.unloaded(name, self._clock.monotonic_s())
        else:
            self.measured_bytes[name] = measured_bytes
            self.policy.fell_asleep(name, self._clock.monotonic_s(), measured_bytes, replica.wakes_in_s)
            _log.info("%s sleeps and takes %s.", name, mebibytes(measured_bytes))
        self._changed.set()

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(_MEASURE_S)
            for name, replica in self.replicas.items():
                measured_bytes = await asyncio.to_thread(replica.measured_bytes)
                one = self.policy[name]
                if one.phase is ResidencyPhase.IN and measured_bytes:
                    self.measured_bytes[name] = measured_bytes
                    self.policy.grew(name, measured_bytes)
                elif one.phase is ResidencyPhase.OUT and one.asleep and replica.restarted:
                    self.policy.order_unload(name, hold=one.held)
