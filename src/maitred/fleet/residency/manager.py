"""Manager of models that are loaded on demand: passes on the decisions of `fleet.policy.residency` to replica pools.

::

    queues --demand--> policy --desired numbers--> pools
                         ^                           |
                         `----loaded, asleep, gone---'

Each model has a pool of one replica. To load a model is to desire one replica that serves; to put it to sleep, one that
sleeps; to unload it, none. The pools start, drain and stop. Decisions are made again whenever a queue has dispatched,
whenever a pool has changed, and at intervals for turns that end by themselves.
"""

import asyncio
import logging
from functools import partial

from maitred.core.backoff import BackoffCeiling
from maitred.core.clock import Clock
from maitred.core.errors import ModelHeld, ModelLoadFailed, ModelLoading, ReplicaUnavailable
from maitred.dispatch.dispatcher import Dispatcher
from maitred.fleet.backend import engine_pids
from maitred.fleet.policy.load_eta import ready_in_s
from maitred.fleet.policy.model_residency import ModelDemand, ResidencyPhase
from maitred.fleet.policy.residency import ResidencyPolicy
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.process import process_memory_bytes
from maitred.fleet.residency.footprint import format_mebibytes
from maitred.scaling.replica_status import ReplicaPhase

_TICK_S = 0.1
"""Longest delay in noticing the end of a turn for which a request waits."""
_IDLE_TICK_S = 1.0
_MEASURE_S = 5.0
"""Interval between measurements of the processes' memory."""
_RETRY = BackoffCeiling(first_s=2.0, most_s=300.0)
"""Waits before a failed load is tried again.

A load may take memory from other models, so it is retried less often than a dead engine is restarted.
"""
_HELD_RETRY_S = 10.0
"""`Retry-After` of a held model: the time of its release is unknown, so callers should come back rarely."""

_log = logging.getLogger(__name__)


class OnDemandModel:
    """Model that is loaded on demand.

    Args:
        name: The name that requests use.
        pool: Pool of its one replica; the manager opens it and sets its desired numbers.
        dispatcher: Its queue.

    Attributes:
        measured_bytes: Measured memory of its process; 0 without one.
        loads: Number of loads...
        total_load_s: ...and the time that they took together.
        unloads: Number of unloads.
        failures: Loads that failed...
        failures_in_a_row: ...and those since the last one that succeeded.
        failure: Why it is being unloaded, if its load has just failed.
        sleeps: How often it fell asleep...
        wakes: ...and woke.
    """

    def __init__(self, name: str, pool: ReplicaPool, dispatcher: Dispatcher) -> None:
        self.name = name
        self.pool = pool
        self.dispatcher = dispatcher
        self.measured_bytes = 0
        self.loads = self.unloads = self.failures = self.failures_in_a_row = self.sleeps = self.wakes = 0
        self.total_load_s = 0.0
        self.failure = ""

    @property
    def demand(self) -> ModelDemand:
        """Present demand for it."""
        return ModelDemand(self.dispatcher.core.waiting, self.dispatcher.core.running)

    @property
    def pids(self) -> list[int]:
        """Id of its process; none without one."""
        return engine_pids(self.pool.engines.values())


class ModelManager:
    """Manager of the models of one machine that are loaded on demand.

    Args:
        policy: Decides which models are in memory.
        clock: The clock.

    Attributes:
        policy: See above.
        models: The models by name.
    """

    def __init__(self, policy: ResidencyPolicy, clock: Clock) -> None:
        self.policy = policy
        self.models: dict[str, OnDemandModel] = {}
        self._clock = clock
        self._changed = asyncio.Event()
        self._too_large: set[str] = set()
        """Models that could not be loaded at the last decision."""

    def add_model(self, model: OnDemandModel) -> None:
        """Adds a model, which is loaded when requests wait in its queue. Call it once for each model, before `run`."""
        self.models[model.name] = model
        model.dispatcher.set_dispatch_listener(partial(self._check_queue, model))
        model.pool.on_change(partial(self._observe, model))
        model.pool.backend.on_change(partial(self._observe, model))  # the pool does not tell when a process is gone

    def _check_queue(self, model: OnDemandModel) -> None:
        """Checks the queue of a model after a change."""
        if model.dispatcher.core.waiting:
            self.policy.mark_needed(model.name, self._clock.monotonic_s())
        self._changed.set()

    def mark_wanted(self, name: str) -> None:
        """Records that a caller will retry for this model."""
        self.policy.mark_wanted(name, self._clock.monotonic_s())
        self._changed.set()

    def ready_in_s(self, name: str) -> float:
        """Returns in how many seconds a model would be loaded if requests waited for it from now on."""
        return ready_in_s(self.policy, name, self._clock.monotonic_s(), self._demands())

    def refusal(self, name: str) -> ReplicaUnavailable:
        """Returns what callers of a model are told while its replica does not serve.

        They wait for one that is being loaded or whose engine was lost, but not for one that is held, does not fit or
        has just failed to load.
        """
        residency = self.policy[name]
        if residency.is_held:
            return ModelHeld(retry_after_s=_HELD_RETRY_S)
        if self._is_too_large(name):
            return ModelLoadFailed(self._excess(name, residency.memory_bytes), retry_after_s=_HELD_RETRY_S)
        failed_for_s = residency.not_before_s - self._clock.monotonic_s()
        if failed_for_s > 0:
            return ModelLoadFailed(retry_after_s=failed_for_s)
        return ModelLoading(retry_after_s=self.ready_in_s(name) or self.models[name].pool.ready_in_s())

    def check_process(self, name: str, pid: int) -> None:
        """Checks the memory of a model that has just been loaded, before it gets a request.

        Raises:
            ReplicaUnavailable: It takes more than there could ever be for it.
        """
        measured_bytes = process_memory_bytes(pid)
        if measured_bytes > self.policy.available_bytes_for(name):
            raise ReplicaUnavailable(self._excess(name, measured_bytes))

    def _is_too_large(self, name: str) -> bool:
        """Whether a model is not loaded, and cannot be."""
        is_away = self.policy[name].phase in (ResidencyPhase.UNLOADED, ResidencyPhase.UNLOADING)
        return is_away and not self.policy.could_fit(name)

    def _excess(self, name: str, needed_bytes: int) -> str:
        """Returns the reason why a model that needs so much memory is not loaded."""
        return (
            f"It takes {format_mebibytes(needed_bytes)}, and residency.memory_bytes leaves "
            f"{format_mebibytes(self.policy.available_bytes_for(name))} for it. Raise that, or lower its "
            "engine.kv_memory_bytes."
        )

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
        self.models[name].dispatcher.refresh_and_dispatch()
        self._changed.set()

    # --- decisions ---

    async def run(self) -> None:
        """Opens the pools and sets their desired numbers until it is cancelled; then every engine is ended."""
        pools = [model.pool for model in self.models.values()]
        try:
            for pool in pools:
                await pool.__aenter__()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._measure(), name="memory of models")
                while True:
                    try:
                        self._decide()
                    except Exception:  # whatever it is, models that are loaded must not end for it
                        _log.exception("The decision which models are loaded has failed, and is made again.")
                        await asyncio.sleep(_IDLE_TICK_S)
                        continue
                    self._changed.clear()
                    needed = any(model.needed_since_s is not None for model in self.policy.models.values())
                    try:
                        async with asyncio.timeout(_TICK_S if needed else _IDLE_TICK_S):
                            await self._changed.wait()
                    except TimeoutError:
                        pass
        finally:
            await asyncio.gather(*(pool.__aexit__(None, None, None) for pool in pools))

    def _demands(self) -> dict[str, ModelDemand]:
        return {name: model.demand for name, model in self.models.items()}

    def _decide(self) -> None:
        for name, desired in self.policy.decide(self._clock.monotonic_s(), self._demands()).items():
            pool = self.models[name].pool
            if desired != pool.desired or not pool.is_scaled:
                pool.set_desired(desired.serving, desired.asleep)
        too_large = set(filter(self._is_too_large, self.models))
        changed, self._too_large = too_large ^ self._too_large, too_large
        for name in changed:
            if name in too_large:
                _log.error("%s is not loaded any more: %s", name, self._excess(name, self.policy[name].memory_bytes))
            self.models[name].dispatcher.refresh_and_dispatch()  # requests that wait for it get the error

    # --- what has become of them ---

    def _observe(self, model: OnDemandModel) -> None:
        """Tells the policy what has become of the replica of a model; an error must not reach its pool or engine."""
        try:
            self._tell_policy(model)
        except Exception:
            _log.exception("What has become of %s could not be recorded.", model.name)
        self._changed.set()

    def _tell_policy(self, model: OnDemandModel) -> None:
        residency, now_s = self.policy[model.name], self._clock.monotonic_s()
        phase = next((replica.phase for replica in model.pool.replicas()), None)
        process = next(iter(model.pool.backend.replicas().values()), None)
        match residency.phase:
            case ResidencyPhase.LOADING if process is not None and process.phase is ReplicaPhase.FAILED:
                model.failure = process.failure
                self.policy.order_unload(model.name, hold=residency.is_held)
                self.policy.on_leaving(model.name, now_s)
            case ResidencyPhase.LOADING if phase is ReplicaPhase.SERVING:
                self._on_serving(model)
            case ResidencyPhase.LOADED if phase in (None, ReplicaPhase.ASLEEP):
                self.policy.on_leaving(model.name, now_s)  # its last answer has ended since the last decision
                self._tell_policy(model)
            case ResidencyPhase.UNLOADING if process is None:
                self._on_gone(model)
            case ResidencyPhase.UNLOADING if phase is ReplicaPhase.ASLEEP:
                self._on_asleep(model)
            case ResidencyPhase.UNLOADING if process is not None and process.phase is ReplicaPhase.FAILED:
                self.policy.order_unload(model.name, hold=residency.is_held)  # it was to sleep
            case ResidencyPhase.UNLOADED if residency.is_asleep and phase is not ReplicaPhase.ASLEEP:
                # Its engine was lost, and would take the memory of an awake one when it is back.
                self.policy.order_unload(model.name, hold=residency.is_held)

    def _on_serving(self, model: OnDemandModel) -> None:
        name, now_s, measured_bytes = model.name, self._clock.monotonic_s(), _memory_bytes(model.pids)
        was_asleep, took_s = self.policy[name].is_asleep, now_s - self.policy[name].phase_since_s
        self.policy.on_loaded(name, now_s, measured_bytes)
        model.measured_bytes, model.failures_in_a_row = measured_bytes, 0
        if was_asleep:
            model.wakes += 1
        else:
            model.loads += 1
            model.total_load_s += took_s
        verb = "woke" if was_asleep else "was loaded"
        _log.info("%s %s in %.1f s and takes %s.", name, verb, took_s, format_mebibytes(measured_bytes))

    def _on_gone(self, model: OnDemandModel) -> None:
        name, now_s = model.name, self._clock.monotonic_s()
        model.measured_bytes = 0
        if model.failure:
            model.failures += 1
            model.failures_in_a_row += 1
            retry_in_s = _RETRY.after(model.failures_in_a_row)
            self.policy.on_load_failed(name, now_s, retry_in_s)
            _log.error(
                "%s was not loaded: %s\nIt is tried again in %.0f s at the earliest.", name, model.failure, retry_in_s
            )
            model.failure = ""
            model.dispatcher.refresh_and_dispatch()  # requests that wait for it get the error
        else:
            model.unloads += 1
            self.policy.on_unloaded(name, now_s)
            _log.info("%s was unloaded.", name)

    def _on_asleep(self, model: OnDemandModel) -> None:
        model.sleeps += 1
        model.measured_bytes = _memory_bytes(model.pids)
        (engine,) = model.pool.engines.values()
        now_s = self._clock.monotonic_s()
        self.policy.on_asleep(model.name, now_s, model.measured_bytes, engine.client.wakes_in_s)
        _log.info("%s sleeps and takes %s.", model.name, format_mebibytes(model.measured_bytes))

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(_MEASURE_S)
            for name, model in self.models.items():
                try:
                    measured_bytes = await asyncio.to_thread(_memory_bytes, model.pids)
                except Exception:  # the next one may succeed
                    _log.exception("The memory of %s could not be measured.", name)
                    continue
                if self.policy[name].phase is ResidencyPhase.LOADED and measured_bytes:
                    model.measured_bytes = measured_bytes
                    self.policy[name].on_measured(measured_bytes, self._clock.monotonic_s())


def _memory_bytes(pids: list[int]) -> int:
    """Measures the memory of processes together; 0 without any."""
    return sum(map(process_memory_bytes, pids))
