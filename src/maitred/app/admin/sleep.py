"""Admin of models whose engines can sleep: lists them, puts them to sleep and wakes them.

There are two kinds. A model that is loaded on demand is put to sleep by its manager: other models may use the memory
that it frees, and its waking waits for memory as a load does. The engines of a resident model sleep together, and wake
when a request waits for the model.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from maitred.app.admin.on_demand import OnDemandModelAdmin
from maitred.core.errors import ReplicaUnavailable
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.endpoint import EndpointState
from maitred.fleet.backend import engines_memory_bytes
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.sleepable_replica import SleepableReplica
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
        self._watched: dict[str, set[SleepableReplica]] = {model: set() for model in resident}
        for model, (_, pool) in resident.items():
            pool.on_endpoints(partial(self._watch, model))
            self._watch(model)

    def _watch(self, model: str) -> None:
        """Watches the replicas of a model that have come."""
        sleepables = {sleepable for _, sleepable in self._all_sleepable(model)}
        for sleepable in sleepables - self._watched[model]:
            sleepable.on_change(partial(self._on_report, model, sleepable))
        self._watched[model] = sleepables

    def _all_sleepable(self, model: str) -> list[tuple[EndpointState, SleepableReplica]]:
        endpoint_states = self._resident[model][0].core.endpoint_states
        return [
            (endpoint_state, endpoint_state.endpoint.replica)
            for endpoint_state in endpoint_states
            if isinstance(endpoint_state.endpoint.replica, SleepableReplica)
        ]

    def _sleepable(self, model: str) -> list[tuple[EndpointState, SleepableReplica]]:
        """Returns the replicas of a resident model, except those that their pool keeps asleep."""
        return [(state, sleepable) for state, sleepable in self._all_sleepable(model) if not sleepable.is_reserved]

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
        for _, sleepable in self._sleepable(model):
            with suppress(ReplicaUnavailable):  # an engine that is away has no memory to free
                sleepable.sleep()
        return self._finish_command(model, "is to sleep")

    def wake(self, model: str) -> SleeperBody:
        """Wakes a model, so that it serves again."""
        if model not in self._resident:
            return _loadable_body(self.on_demand.load(model))
        self.on_wanted(model)
        return self._finish_command(model, "is to wake")

    def on_wanted(self, model: str) -> None:
        """Wakes a resident model after a request was rejected that could not wait for the waking."""
        if model in self._resident:
            for _, sleepable in self._sleepable(model):
                sleepable.wake()

    def _finish_command(self, model: str, action: str) -> SleeperBody:
        _log.info("The model %s %s.", model, action)
        for _, sleepable in self._sleepable(model):
            self._on_report(model, sleepable)
        self._resident[model][0].refresh_and_dispatch()
        return self._resident_body(model)

    def _on_report(self, model: str, sleepable: SleepableReplica) -> None:
        """Checks the engines of a model after a report of one or an order to it, if it needs that.

        They are then checked after every dispatch too, until none needs it. So an engine that is awake and has no order
        costs requests nothing.
        """
        if sleepable.needs_check:
            self._resident[model][0].set_dispatch_listener(partial(self._check, model))
            self._check(model)

    def _check(self, model: str) -> None:
        dispatcher = self._resident[model][0]
        waiting = dispatcher.core.waiting
        for endpoint_state, sleepable in self._sleepable(model):
            sleepable.check(running=endpoint_state.endpoint.admin_state.running, waiting=waiting)
        if not any(sleepable.needs_check for _, sleepable in self._sleepable(model)):
            dispatcher.set_dispatch_listener(None)

    def _resident_body(self, name: str) -> SleeperBody:
        sleepables = [sleepable for _, sleepable in self._sleepable(name)]
        connected = [sleepable for sleepable in sleepables if sleepable.client.is_ready]
        state = SleepState.AWAKE
        if not connected:
            state = SleepState.AWAY
        elif any(sleepable.is_draining for sleepable in connected):
            state = SleepState.DRAINING
        elif any(sleepable.is_waking for sleepable in connected):
            state = SleepState.WAKING
        elif all(sleepable.client.is_asleep for sleepable in connected):
            state = SleepState.ASLEEP
        return SleeperBody(
            model=name,
            state=state,
            engines=len(sleepables),
            measured_bytes=engines_memory_bytes(self._resident[name][1].engines.values()),
            wakes_in_s=round(max((sleepable.client.wakes_in_s for sleepable in connected), default=0.0), 3),
        )


def _loadable_body(loadable: LoadableBody) -> SleeperBody:
    return SleeperBody(
        model=loadable.model,
        state=_STATES.get(loadable.state, SleepState.AWAY),
        engines=1,
        measured_bytes=loadable.measured_bytes,
        wakes_in_s=loadable.predicted_load_s,
    )
