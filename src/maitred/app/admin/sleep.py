"""Admin of models whose engines can sleep: lists them, puts them to sleep and wakes them.

Pools of replicas do both. A model that is loaded on demand sleeps by a decision of its manager: other models may use
the memory that it frees, and its waking waits for memory as a load does. The replicas of a resident model sleep
together, and wake when a request waits for the model.
"""

import asyncio
import logging
from collections.abc import Mapping
from functools import partial

from maitred.app.admin.on_demand import OnDemandModelAdmin
from maitred.dispatch.dispatcher import Dispatcher
from maitred.fleet.backend import ManagedEngine, engines_memory_bytes
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.sleepable_replica import SleepableReplica
from maitred.replica.engine.client import EngineClient
from maitred.wire.admin.responses import LoadableBody, LoadableState, SleeperBody, SleepState

_log = logging.getLogger(__name__)

_STATES: Mapping[LoadableState, SleepState] = {
    LoadableState.SERVING: SleepState.AWAKE,
    LoadableState.DRAINING: SleepState.DRAINING,
    LoadableState.ASLEEP: SleepState.ASLEEP,
    LoadableState.WAKING: SleepState.WAKING,
    LoadableState.WAITING: SleepState.WAKING,
    LoadableState.LOADING: SleepState.WAKING,
}


class SleepableModelAdmin:
    """Manages models that can sleep. Implements `maitred.api.admin.service.SleepableModels`.

    Args:
        on_demand: The models that are loaded on demand.
        resident: The queue and the pool of each resident model that runs on this gateway's own engines.

    Attributes:
        on_demand: The models that are loaded on demand.
    """

    def __init__(self, on_demand: OnDemandModelAdmin, resident: Mapping[str, tuple[Dispatcher, ReplicaPool]]) -> None:
        self.on_demand = on_demand
        self._resident = resident
        self._watched: set[str] = set()
        """Models whose queues are watched, since a request that waits wakes them."""
        for model, (_, pool) in resident.items():
            pool.on_change(partial(self._check, model))
            pool.on_engine(partial(self._watch_engine, model))

    def all(self) -> list[SleeperBody]:
        """Lists every model that can sleep."""
        return [
            *(self._resident_body(name) for name in self._resident),
            *(_loadable_body(loadable) for loadable in self.on_demand.all().data),
        ]

    def sleep(self, model: str) -> SleeperBody:
        """Puts a model to sleep once its responses have ended: its memory is freed, and its process stays."""
        if model not in self._resident:
            return _loadable_body(self.on_demand.sleep(model))
        self._resident[model][1].rest()
        return self._finish_command(model, "is to sleep")

    def wake(self, model: str) -> SleeperBody:
        """Wakes a model, so that it serves again."""
        if model not in self._resident:
            return _loadable_body(self.on_demand.load(model))
        self._resident[model][1].wake()
        return self._finish_command(model, "is to wake")

    def on_wanted(self, model: str) -> None:
        """Wakes a resident model after a request was rejected that could not wait for the waking."""
        if model in self._resident:
            self._wake_soon(self._resident[model][1])

    def _finish_command(self, model: str, action: str) -> SleeperBody:
        _log.info("The model %s %s.", model, action)
        self._resident[model][0].refresh_and_dispatch()
        return self._resident_body(model)

    # --- waking on demand ---

    def _watch_engine(self, model: str, name: str, engine: ManagedEngine) -> None:
        engine.client.on_change(partial(self._on_report, model, engine.client))

    def _on_report(self, model: str, client: EngineClient) -> None:
        """Checks a model after a report of an engine that sleeps, which another gateway may have told to."""
        if client.is_asleep or model in self._watched:
            self._check(model)

    def _check(self, model: str) -> None:
        """Wakes a model that sleeps if requests wait for it.

        While it sleeps this is checked after every dispatch, too. So a model that is awake costs requests nothing.
        """
        dispatcher, pool = self._resident[model]
        replicas = _sleepable(pool)
        if pool.rests or any(replica.client.is_asleep for replica in replicas):
            if model not in self._watched:
                self._watched.add(model)
                dispatcher.set_dispatch_listener(partial(self._check, model))
            if dispatcher.core.waiting:
                self._wake_soon(pool)
        elif model in self._watched:
            self._watched.remove(model)
            dispatcher.set_dispatch_listener(None)

    def _wake_soon(self, pool: ReplicaPool) -> None:
        asyncio.get_running_loop().call_soon(pool.wake)  # not within a dispatch pass: it changes the endpoints

    def _resident_body(self, name: str) -> SleeperBody:
        pool = self._resident[name][1]
        replicas = _sleepable(pool)
        connected = [replica for replica in replicas if replica.client.is_ready]
        state = SleepState.AWAKE
        if not connected:
            state = SleepState.AWAY
        elif any(replica.is_waking for replica in connected):
            state = SleepState.WAKING
        elif all(replica.client.is_asleep for replica in connected):
            state = SleepState.ASLEEP
        elif pool.rests:
            state = SleepState.DRAINING
        return SleeperBody(
            model=name,
            state=state,
            engines=len(replicas),
            measured_bytes=engines_memory_bytes(pool.engines.values()),
            wakes_in_s=round(max((replica.client.wakes_in_s for replica in connected), default=0.0), 3),
        )


def _sleepable(pool: ReplicaPool) -> list[SleepableReplica]:
    """Returns the replicas of a pool, except those that it keeps asleep beside others that serve."""
    replicas = (endpoint.replica for endpoint in pool.endpoints())
    return [
        replica
        for replica in replicas
        if isinstance(replica, SleepableReplica) and (pool.rests or not replica.is_reserved)
    ]


def _loadable_body(loadable: LoadableBody) -> SleeperBody:
    return SleeperBody(
        model=loadable.model,
        state=_STATES.get(loadable.state, SleepState.AWAY),
        engines=1,
        measured_bytes=loadable.measured_bytes,
        wakes_in_s=loadable.predicted_load_s,
    )
