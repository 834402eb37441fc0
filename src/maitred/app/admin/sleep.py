"""The models whose engines can sleep, as an operator sees them, and what he can tell them.

There are two kinds. A model that is loaded on demand sleeps where it lives: what it frees others may have, and its
waking waits for room as a load does. The engines of a model that is always there sleep together, and wake when a
request waits for the model.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from maitred.app.admin.on_demand import OnDemandModelAdmin
from maitred.core.errors import ReplicaUnavailable
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.endpoint import EndpointState
from maitred.fleet.engines import Engine
from maitred.fleet.local import LocalEngine
from maitred.fleet.residency.on_demand_replica import memory_of
from maitred.fleet.sleepable import SleepableReplica
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
    """Implements `maitred.api.admin.models.SleepableModels`.

    Args:
        loadables: The models that are loaded on demand.
        always: The queues of the models that are always there and run on our own engines, and these engines.

    Attributes:
        loadables: The models that are loaded on demand.
    """

    def __init__(
        self, loadables: OnDemandModelAdmin, always: Mapping[str, tuple[Dispatcher, Iterable[Engine]]]
    ) -> None:
        self.loadables = loadables
        self._always = always
        self._sleepers = {name: _sleepers_of(dispatcher) for name, (dispatcher, _) in always.items()}
        for name, (dispatcher, _) in always.items():
            look = partial(_look, dispatcher, self._sleepers[name])
            dispatcher.after_turn(look)
            for _, sleeper in self._sleepers[name]:
                sleeper.watch(partial(_heard, sleeper, look))

    def all(self) -> list[SleeperBody]:
        """Every model that can sleep."""
        return [
            *(self._of_engines(name) for name in self._always),
            *(_of_loadable(one) for one in self.loadables.all().data),
        ]

    def sleep(self, model: str) -> SleeperBody:
        """Lets its answers end, and gives its memory back but for its process."""
        if model not in self._always:
            return _of_loadable(self.loadables.sleep(model))
        for _, sleeper in self._sleepers[model]:
            with suppress(ReplicaUnavailable):  # it is not there: nothing to give back
                sleeper.sleep()
        return self._told(model, "is to sleep")

    def wake(self, model: str) -> SleeperBody:
        """Has it serve again."""
        if model not in self._always:
            return _of_loadable(self.loadables.load(model))
        self.wanted(model)
        return self._told(model, "is to wake")

    def wanted(self, model: str) -> None:
        """A request for it was refused that could not wait until it wakes."""
        if model in self._always:
            for _, sleeper in self._sleepers[model]:
                sleeper.wake()

    def _told(self, model: str, what: str) -> SleeperBody:
        _log.info("The model %s %s.", model, what)
        self._always[model][0].turn()
        return self._of_engines(model)

    def _of_engines(self, name: str) -> SleeperBody:
        sleepers = [sleeper for _, sleeper in self._sleepers[name]]
        there = [sleeper for sleeper in sleepers if sleeper.link.ready]
        state = SleepState.AWAKE
        if not there:
            state = SleepState.AWAY
        elif any(sleeper.draining for sleeper in there):
            state = SleepState.DRAINING
        elif any(sleeper.waking for sleeper in there):
            state = SleepState.WAKING
        elif all(sleeper.link.asleep for sleeper in there):
            state = SleepState.ASLEEP
        pids = [engine.pid for engine in self._always[name][1] if isinstance(engine, LocalEngine)]
        return SleeperBody(
            model=name,
            state=state,
            engines=len(sleepers),
            measured_bytes=sum(memory_of(pid) for pid in pids if pid is not None) if pids else None,
            wakes_in_s=round(max((sleeper.link.wakes_in_s for sleeper in there), default=0.0), 3),
        )


def _sleepers_of(dispatcher: Dispatcher) -> list[tuple[EndpointState, SleepableReplica]]:
    stations = dispatcher.floor.stations
    return [
        (station, station.post.replica) for station in stations if isinstance(station.post.replica, SleepableReplica)
    ]


def _look(dispatcher: Dispatcher, sleepers: Iterable[tuple[EndpointState, SleepableReplica]]) -> None:
    waiting = dispatcher.floor.waiting
    for station, sleeper in sleepers:
        sleeper.look(running=station.post.duty.running, waiting=waiting)


def _heard(sleeper: SleepableReplica, look: Callable[[], None]) -> None:
    """Of an engine; where nobody waits no turn follows that would look."""
    if not sleeper.settled:
        look()


def _of_loadable(one: LoadableBody) -> SleeperBody:
    return SleeperBody(
        model=one.model,
        state=_STATES.get(one.state, SleepState.AWAY),
        engines=1,
        measured_bytes=one.measured_bytes,
        wakes_in_s=one.predicted_load_s,
    )
