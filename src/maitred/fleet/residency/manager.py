"""Manager of models that are loaded on demand: carries out the decisions of `fleet.policy.residency`.

It starts and stops engines, and tells the queues which models are loaded. Decisions are made again whenever a queue has
dispatched, whenever a load or an unload is complete, and at intervals for turns that end by themselves.
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
from maitred.fleet.residency.footprint import format_mebibytes
from maitred.fleet.residency.on_demand_replica import OnDemandReplica

_TICK_S = 0.1
"""Longest delay in noticing the end of a turn for which a request waits."""
_IDLE_TICK_S = 1.0
_MEASURE_S = 5.0
"""Interval between measurements of the processes' memory."""

_log = logging.getLogger(__name__)


class QueueView(Protocol):
    """View of one model's queue, as far as the manager needs it."""

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        ...

    @property
    def running(self) -> int:
        """Number of requests that were dispatched and have not ended."""
        ...


class ModelManager:
    """Manager of the models of one machine that are loaded on demand.

    Args:
        policy: Decides which models are in memory.
        clock: The clock.
        record_load_time: Records the expected time of a model's next load; called after each load.
    """

    def __init__(
        self,
        policy: ResidencyPolicy,
        clock: Clock,
        record_load_time: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        self.policy = policy
        self.replicas: dict[str, OnDemandReplica] = {}
        self.measured_bytes: dict[str, int] = {}
        self._clock = clock
        self._record_load_time = record_load_time
        self._queues: dict[str, QueueView] = {}
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def add_model(self, replica: OnDemandReplica, queue: QueueView) -> None:
        """Adds a model, which is loaded when requests wait in its queue. Call it once for each model, before `run`."""
        self.replicas[replica.name] = replica
        self._queues[replica.name] = queue

    def check(self, name: str) -> None:
        """Checks the queue of a model after a change."""
        if self._queues[name].waiting:
            self.policy.mark_needed(name, self._clock.monotonic_s())
        self._changed.set()

    def queue(self, name: str) -> QueueView:
        """Returns the queue of a model."""
        return self._queues[name]

    def mark_wanted(self, name: str) -> None:
        """Records that a caller will retry for this model."""
        self.policy.mark_wanted(name, self._clock.monotonic_s())
        self._changed.set()

    def ready_in_s(self, name: str) -> float:
        """Returns in how many seconds a model would be loaded if requests waited for it from now on."""
        return ready_in_s(self.policy, name, self._clock.monotonic_s(), self._demands())

    # --- orders of the operator; see `ResidencyPolicy` ---

    def order_load(self, name: str) -> None:
        """Orders a load as if a request waited for it."""
        self.policy.order_load(name, self._clock.monotonic_s())
        self._on_order(name)

    def order_unload(self, name: str, *, hold: bool) -> None:
        """Orders an unload after the running answers; with `hold`, requests that wait for the model are rejected."""
        self.policy.order_unload(name, hold=hold)
        self._on_order(name)

    def order_sleep(self, name: str) -> None:
        """Orders the model to free its memory after the running answers and to keep its process."""
        self.policy.order_sleep(name)
        self._on_order(name)

    def pin(self, name: str) -> None:
        """Pins the model: it is loaded and never unloaded."""
        self.policy.pin(name, self._clock.monotonic_s())
        self._on_order(name)

    def unpin(self, name: str) -> None:
        """Unpins the model: it stays loaded until others need its memory."""
        self.policy.unpin(name)
        self._on_order(name)

    def _on_order(self, name: str) -> None:
        self.replicas[name].set_held(self.policy[name].is_held)
        self._changed.set()

    # --- reconciliation ---

    async def run(self) -> None:
        """Reconciles the engines with the policy's decisions until it is cancelled; then every engine is ended."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._measure(), name="memory of models")
                while True:
                    self._reconcile(tasks)
                    self._changed.clear()
                    needed = any(model.needed_since_s is not None for model in self.policy.models.values())
                    try:
                        async with asyncio.timeout(_TICK_S if needed else _IDLE_TICK_S):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
        finally:
            await asyncio.gather(*(replica.unload() for replica in self.replicas.values()))

    def _demands(self) -> dict[str, ModelDemand]:
        return {name: ModelDemand(queue.waiting, queue.running) for name, queue in self._queues.items()}

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        actions = self.policy.decide(self._clock.monotonic_s(), self._demands())
        for name, replica in self.replicas.items():
            replica.set_open(self.policy[name].phase is ResidencyPhase.LOADED and name not in actions.draining)
        for name in actions.unload:
            tasks.create_task(self._unload(self.replicas[name]), name=f"unload of {name}")
        for name in actions.sleep:
            tasks.create_task(self._sleep(self.replicas[name]), name=f"sleep of {name}")
        if actions.load is not None:
            tasks.create_task(self._load(self.replicas[actions.load]), name=f"load of {actions.load}")

    async def _load(self, replica: OnDemandReplica) -> None:
        name, started_s = replica.name, self._clock.monotonic_s()
        was_asleep = self.policy[name].is_asleep
        try:
            measured_bytes = await replica.load_model()
            available_bytes = self.policy.available_bytes_for(name)
            if measured_bytes > available_bytes:
                await replica.unload()
                raise ReplicaUnavailable(
                    f"It takes {format_mebibytes(measured_bytes)}, and residency.memory_bytes leaves "
                    f"{format_mebibytes(available_bytes)} for it. Raise that, or lower its engine.kv_memory_bytes."
                )
        except ReplicaUnavailable as failure:
            retry_in_s = replica.on_load_failed()
            self.policy.on_load_failed(name, self._clock.monotonic_s(), retry_in_s)
            _log.error("%s was not loaded: %s\nIt is tried again in %.0f s at the earliest.", name, failure, retry_in_s)
        else:
            self.policy.on_loaded(name, self._clock.monotonic_s(), measured_bytes)
            if not was_asleep:
                self._record_load_time(name, self.policy[name].load_time.seconds)
            self.measured_bytes[name] = measured_bytes
            replica.on_loaded(self._clock.monotonic_s() - started_s, was_asleep=was_asleep)
            took_s, verb = self._clock.monotonic_s() - started_s, "woke" if was_asleep else "was loaded"
            _log.info("%s %s in %.1f s and takes %s.", name, verb, took_s, format_mebibytes(measured_bytes))
        self._changed.set()

    async def _unload(self, replica: OnDemandReplica) -> None:
        await replica.unload()
        self.measured_bytes.pop(replica.name, None)
        replica.unloads += 1
        self.policy.on_unloaded(replica.name, self._clock.monotonic_s())
        _log.info("%s was unloaded.", replica.name)
        self._changed.set()

    async def _sleep(self, replica: OnDemandReplica) -> None:
        name = replica.name
        try:
            measured_bytes = await replica.sleep()
        except ReplicaUnavailable as failure:
            _log.error("%s was to sleep and was unloaded: %s", name, failure)
            self.measured_bytes.pop(name, None)
            self.policy.on_unloaded(name, self._clock.monotonic_s())
        else:
            self.measured_bytes[name] = measured_bytes
            self.policy.on_asleep(name, self._clock.monotonic_s(), measured_bytes, replica.wakes_in_s)
            _log.info("%s sleeps and takes %s.", name, format_mebibytes(measured_bytes))
        self._changed.set()

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(_MEASURE_S)
            for name, replica in self.replicas.items():
                measured_bytes = await asyncio.to_thread(replica.measure_bytes)
                model = self.policy[name]
                if model.phase is ResidencyPhase.LOADED and measured_bytes:
                    self.measured_bytes[name] = measured_bytes
                    self.policy.on_measured(name, measured_bytes)
                elif model.phase is ResidencyPhase.UNLOADED and model.is_asleep and replica.has_restarted:
                    self.policy.order_unload(name, hold=model.is_held)
