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
        residents: Decides.
        clock: The time.
        learn: Keeps how long the next load of a model should take; called after each.
    """

    def __init__(
        self, residents: ResidencyPolicy, clock: Clock, learn: Callable[[str, float], None] = lambda name, seconds: None
    ) -> None:
        self.residents = residents
        self.lodgers: dict[str, OnDemandReplica] = {}
        self.measured_bytes: dict[str, int] = {}
        self._clock = clock
        self._learn = learn
        self._lines: dict[str, QueueView] = {}
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def attend(self, lodger: OnDemandReplica, line: QueueView) -> None:
        """From now on a model comes when requests wait in this line. To be called once for each, before `run`."""
        self.lodgers[lodger.name] = lodger
        self._lines[lodger.name] = line

    def look(self, name: str) -> None:
        """Something has changed in the line of a model."""
        if self._lines[name].waiting:
            self.residents.asked(name, self._clock.monotonic_s())
        self._news.set()

    def line(self, name: str) -> QueueView:
        """The queue of a model."""
        return self._lines[name]

    def want(self, name: str) -> None:
        """Somebody will come back for this model."""
        self.residents.want(name, self._clock.monotonic_s())
        self._news.set()

    def ready_in_s(self, name: str) -> float:
        """When a model would be there, if requests waited for it from now on."""
        return ready_in_s(self.residents, name, self._clock.monotonic_s(), self._demands())

    # --- what the operator says; see `ResidencyPolicy` ---

    def order_load(self, name: str) -> None:
        """It is loaded as if somebody waited for it."""
        self.residents.order_load(name, self._clock.monotonic_s())
        self._told(name)

    def order_unload(self, name: str, *, hold: bool) -> None:
        """It goes when its answers have ended; held, who waits for it is told so."""
        self.residents.order_unload(name, hold=hold)
        self._told(name)

    def order_sleep(self, name: str) -> None:
        """It gives its memory back when its answers have ended, and keeps its process."""
        self.residents.order_sleep(name)
        self._told(name)

    def pin(self, name: str) -> None:
        """It is loaded, and stays."""
        self.residents.pin(name, self._clock.monotonic_s())
        self._told(name)

    def unpin(self, name: str) -> None:
        """It stays until others need its room."""
        self.residents.unpin(name)
        self._told(name)

    def _told(self, name: str) -> None:
        self.lodgers[name].hold(self.residents[name].held)
        self._news.set()

    # --- how ---

    async def run(self) -> None:
        """Until it is cancelled; then every engine is ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._measure(), name="memory of models")
                while True:
                    self._turn(tasks)
                    self._news.clear()
                    needed = any(one.asked_s is not None for one in self.residents.all.values())
                    try:
                        async with asyncio.timeout(_TICK_S if needed else _IDLE_TICK_S):
                            await self._news.wait()
                    except TimeoutError:
                        pass
        finally:
            await asyncio.gather(*(lodger.unload() for lodger in self.lodgers.values()))

    def _demands(self) -> dict[str, ModelDemand]:
        return {name: ModelDemand(line.waiting, line.running) for name, line in self._lines.items()}

    def _turn(self, tasks: asyncio.TaskGroup) -> None:
        orders = self.residents.decide(self._clock.monotonic_s(), self._demands())
        for name, lodger in self.lodgers.items():
            lodger.admit(self.residents[name].phase is ResidencyPhase.IN and name not in orders.closed)
        for name in orders.unload:
            tasks.create_task(self._unload(self.lodgers[name]), name=f"unload of {name}")
        for name in orders.sleep:
            tasks.create_task(self._sleep(self.lodgers[name]), name=f"sleep of {name}")
        if orders.load is not None:
            tasks.create_task(self._load(self.lodgers[orders.load]), name=f"load of {orders.load}")

    async def _load(self, lodger: OnDemandReplica) -> None:
        name, began_s = lodger.name, self._clock.monotonic_s()
        woken = self.residents[name].asleep
        try:
            measured_bytes = await lodger.load_in()
            most_bytes = self.residents.room_for(name)
            if measured_bytes > most_bytes:
                await lodger.unload()
                raise ReplicaUnavailable(
                    f"It takes {mebibytes(measured_bytes)}, and residency.memory_bytes leaves "
                    f"{mebibytes(most_bytes)} for it. Raise that, or lower its engine.kv_memory_bytes."
                )
        except ReplicaUnavailable as failure:
            again_in_s = lodger.fail()
            self.residents.failed(name, self._clock.monotonic_s(), again_in_s)
            _log.error("%s was not loaded: %s\nIt is tried again in %.0f s at the earliest.", name, failure, again_in_s)
        else:
            self.residents.loaded(name, self._clock.monotonic_s(), measured_bytes)
            if not woken:
                self._learn(name, self.residents[name].load.seconds)
            self.measured_bytes[name] = measured_bytes
            lodger.loaded(self._clock.monotonic_s() - began_s, woken=woken)
            took_s, what = self._clock.monotonic_s() - began_s, "woke" if woken else "was loaded"
            _log.info("%s %s in %.1f s and takes %s.", name, what, took_s, mebibytes(measured_bytes))
        self._news.set()

    async def _unload(self, lodger: OnDemandReplica) -> None:
        await lodger.unload()
        self.measured_bytes.pop(lodger.name, None)
        lodger.unloads += 1
        self.residents.unloaded(lodger.name, self._clock.monotonic_s())
        _log.info("%s was unloaded.", lodger.name)
        self._news.set()

    async def _sleep(self, lodger: OnDemandReplica) -> None:
        name = lodger.name
        try:
            measured_bytes = await lodger.sleep()
        except ReplicaUnavailable as failure:
            _log.error("%s was to sleep and was unloaded: %s", name, failure)
            self.measured_bytes.pop(name, None)
            self.residents.unloaded(name, self._clock.monotonic_s())
        else:
            self.measured_bytes[name] = measured_bytes
            self.residents.fell_asleep(name, self._clock.monotonic_s(), measured_bytes, lodger.wakes_in_s)
            _log.info("%s sleeps and takes %s.", name, mebibytes(measured_bytes))
        self._news.set()

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(_MEASURE_S)
            for name, lodger in self.lodgers.items():
                measured_bytes = await asyncio.to_thread(lodger.measured_bytes)
                one = self.residents[name]
                if one.phase is ResidencyPhase.IN and measured_bytes:
                    self.measured_bytes[name] = measured_bytes
                    self.residents.grew(name, measured_bytes)
                elif one.phase is ResidencyPhase.OUT and one.asleep and lodger.restarted:
                    self.residents.order_unload(name, hold=one.held)
