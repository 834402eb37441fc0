"""All replicas of all models, as an operator sees them, and what he can tell them.

What is said holds for this gateway, until it is said otherwise or the gateway is started again: another gateway that
sends to the same engine or server is told by itself.
"""

import logging
from collections.abc import Callable, Mapping

from maitred.core.admin_state import AdminState
from maitred.core.clock import Clock
from maitred.core.errors import InvalidRequest, ResourceNotFound
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.endpoint import EndpointState
from maitred.wire.admin.responses import ReplicaBody

_log = logging.getLogger(__name__)


class ReplicaAdmin:
    """Implements `maitred.api.admin.replicas.ReplicaService`.

    Args:
        dispatchers: Each model's queue, which knows its replicas.
        clock: The time.
    """

    def __init__(self, dispatchers: Mapping[str, Dispatcher], clock: Clock) -> None:
        self._dispatchers = dispatchers
        self._clock = clock

    def all(self) -> list[ReplicaBody]:
        """Every replica, by model."""
        now_s = self._clock.monotonic_s()
        for dispatcher in self._dispatchers.values():
            dispatcher.floor.refresh(now_s)
        return [
            _body(model, station)
            for model, dispatcher in self._dispatchers.items()
            for station in dispatcher.floor.stations
        ]

    def drain(self, replica: str, model: str | None) -> ReplicaBody:
        """Nothing new; what runs ends, and then the replica is in maintenance."""
        return self._tell(replica, model, AdminState.drain, "is drained")

    def maintain(self, replica: str, model: str | None) -> ReplicaBody:
        """Nothing new, and nobody waits for what runs."""
        return self._tell(replica, model, AdminState.maintain, "is in maintenance")

    def resume(self, replica: str, model: str | None) -> ReplicaBody:
        """It serves again."""
        now_s = self._clock.monotonic_s()
        return self._tell(replica, model, lambda duty: duty.serve(now_s), "serves again")

    def _tell(self, replica: str, model: str | None, order: Callable[[AdminState], None], what: str) -> ReplicaBody:
        """Raises ResourceNotFound, or InvalidRequest where the name alone does not say which one is meant."""
        found = [
            (name, dispatcher, station)
            for name, dispatcher in self._dispatchers.items()
            for station in dispatcher.floor.stations
            if station.post.name == replica and model in (None, name)
        ]
        if not found:
            raise ResourceNotFound(
                f"There is no replica {replica[:200]!r}{'' if model is None else f' of {model[:200]!r}'}. GET "
                "/admin/v1/replicas lists them.",
                param="replica",
            )
        if len(found) > 1:
            models = ", ".join(name for name, _, _ in found)
            raise InvalidRequest(f"{replica[:200]!r} is a replica of {models}. Say of which one.", param="model")
        ((name, dispatcher, station),) = found
        order(station.post.duty)
        _log.info("The replica %s of %s %s.", replica, name, what)
        dispatcher.turn()
        return _body(name, station)


def _body(model: str, station: EndpointState) -> ReplicaBody:
    duty, load = station.post.duty, station.load
    reports = load.total_blocks > 0
    return ReplicaBody(
        model=model,
        replica=station.post.name,
        kind="engine" if station.post.exact else "upstream",
        state=duty.state,
        ready=station.ready,
        outage=None if station.outage is None else station.outage.message,
        requests=duty.running,
        sequences=load.running if reports else None,
        waiting_sequences=load.waiting if reports else None,
        kv_free=load.free_blocks / load.total_blocks if reports else None,
        weight=station.weight,
    )
