"""Admin of replicas: lists them, drains them, takes them into maintenance, resumes them and sets how many there are.

A command holds for this gateway until the next command or until the gateway is restarted. Another gateway that sends to
the same engine or server needs a command of its own.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Mapping

from maitred.app.admin.scaling import ScalingAdmin, pooled_replicas
from maitred.app.scaling.lease import LeaseClaim
from maitred.core.clock import Clock
from maitred.core.errors import Conflict, InvalidRequest, ResourceNotFound
from maitred.core.replica import AdminState
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.endpoint import EndpointState
from maitred.fleet.agent.machine_backend import MachineBackend
from maitred.fleet.pool import ReplicaPool
from maitred.fleet.pool_member import NextReplica
from maitred.wire.admin.responses import AgentBody, PoolBody, ReplicaBody

_CLAIM_ATTEMPTS = 20
_CLAIM_PAUSE_S = 0.2
"""Time between two attempts; together they are longer than a new gateway gives no orders."""

_log = logging.getLogger(__name__)


class ReplicaAdmin:
    """Manages the replicas of all models. Implements `maitred.api.admin.service.ReplicaService`.

    Args:
        dispatchers: Model -> its queue, which knows the replicas.
        pools: Model -> the pool of its replicas, if it has one.
        clock: The clock.
        scaling: Admin of the models whose number of replicas follows the demand.
        on_demand: The models that are loaded on demand.

    Attributes:
        scaling: See above.
        claims: Model -> the lease of its pool, where one gateway of several decides on it.
    """

    def __init__(
        self,
        dispatchers: Mapping[str, Dispatcher],
        pools: Mapping[str, ReplicaPool],
        clock: Clock,
        scaling: ScalingAdmin,
        on_demand: Container[str] = (),
    ) -> None:
        self.scaling = scaling
        self.claims: dict[str, LeaseClaim] = {}
        self._dispatchers = dispatchers
        self._pools = pools
        self._clock = clock
        self._on_demand = on_demand

    def all(self) -> list[ReplicaBody]:
        """Lists every replica, by model."""
        now_s = self._clock.monotonic_s()
        for dispatcher in self._dispatchers.values():
            dispatcher.core.refresh(now_s)
        return [
            _body(model, endpoint_state)
            for model, dispatcher in self._dispatchers.items()
            for endpoint_state in dispatcher.core.endpoint_states
            if not isinstance(endpoint_state.endpoint.replica, NextReplica)
        ]

    def pools(self) -> list[PoolBody]:
        """Lists the pools, with their replicas."""
        return [self._pool_body(model, pool) for model, pool in self._pools.items()]

    def agents(self) -> list[AgentBody]:
        """Lists the agents that own replicas on other machines, also those that may not take part."""
        return [
            AgentBody(
                model=model,
                agent=status.name,
                address=status.address or None,
                region=status.region,
                zone=status.zone,
                connected=status.is_connected,
                takes_orders=status.takes_orders,
                fault=status.fault or None,
                gpus=status.gpus,
                replicas=status.replicas,
                max_replicas=status.max_replicas,
                pending_orders=status.pending_orders,
            )
            for model, pool in self._pools.items()
            if isinstance(pool.backend, MachineBackend)
            for status in pool.backend.agents()
        ]

    async def claim(self, model: str) -> None:
        """Has this gateway decide on the replicas of a model that it shares with others, where an operator does.

        It asks who has the lease, since another gateway may have taken it from this one just now. It waits for a
        gateway that has just started, and tries again if the holder of the lease renews it meanwhile.
        """
        pool, claim = self._pools.get(model), self.claims.get(model)
        if pool is None or claim is None or model in self.scaling.models:
            return
        for _ in range(_CLAIM_ATTEMPTS):
            await claim.refresh()
            if not claim.is_held and not claim.is_away:
                await claim.seize()
            if claim.is_away or not pool.backend.facts.follows:
                return
            await asyncio.sleep(_CLAIM_PAUSE_S)

    def scale(self, model: str, serving: int, asleep: int) -> PoolBody:
        """Sets how many replicas of a model serve and how many sleep.

        Raises:
            ResourceNotFound: The model has no pool.
            Conflict: The number of its replicas follows the demand, is fixed elsewhere, or follows from what is in
                memory.
            InvalidRequest: Its replicas cannot sleep.
        """
        if model not in self._pools:
            raise ResourceNotFound(
                f"The number of replicas of {model[:200]!r} cannot be set. GET /admin/v1/replicas/pools lists models "
                "whose replicas this gateway starts.",
                param="model",
            )
        if model in self.scaling.models:
            raise Conflict(
                f"The number of replicas of {model[:200]!r} follows the demand (model.autoscaling), which would change "
                "it again. POST /admin/v1/scaling/override sets it for a time."
            )
        if model in self._on_demand:
            raise Conflict(
                f"{model[:200]!r} is loaded on demand, with one replica. POST /admin/v1/models/load and "
                "/admin/v1/models/unload load and unload it."
            )
        facts = self._pools[model].backend.facts
        if facts.follows:
            raise Conflict(
                f"This gateway cannot decide on the replicas of {model[:200]!r} now: it has just started, or the "
                "database is away. Try again in a few seconds."
            )
        if not facts.can_scale:
            raise Conflict(
                f"The number of replicas of {model[:200]!r} is fixed: its Ray Serve application takes no targets from "
                "gateways. Deploy it with `external_scaler_enabled: true`."
            )
        if asleep and not facts.can_sleep:
            raise InvalidRequest(
                f"The replicas of {model[:200]!r} cannot sleep: only engines that this gateway or agents start can. "
                "Leave out asleep.",
                param="asleep",
            )
        self._pools[model].set_desired(serving, asleep)
        return self._pool_body(model, self._pools[model])

    def _pool_body(self, model: str, pool: ReplicaPool) -> PoolBody:
        return PoolBody(
            model=model,
            serving=pool.desired.serving,
            asleep=pool.desired.asleep,
            ready_in_s=round(0.0 if pool.is_ready else pool.ready_in_s(), 3),
            replicas=pooled_replicas(pool, self._clock.monotonic_s()),
        )

    def drain(self, replica: str, model: str | None) -> ReplicaBody:
        """Sends a replica no new requests; it is in maintenance once its requests have ended."""
        return self._apply(replica, model, AdminState.drain, "is drained")

    def maintain(self, replica: str, model: str | None) -> ReplicaBody:
        """Takes a replica into maintenance at once, without waiting for its requests."""
        return self._apply(replica, model, AdminState.maintain, "is in maintenance")

    def resume(self, replica: str, model: str | None) -> ReplicaBody:
        """Lets a replica take requests again."""
        now_s = self._clock.monotonic_s()
        return self._apply(replica, model, lambda admin_state: admin_state.serve(now_s), "serves again")

    def _apply(self, replica: str, model: str | None, order: Callable[[AdminState], None], action: str) -> ReplicaBody:
        """Applies a command to one replica.

        Raises:
            ResourceNotFound: There is no such replica.
            InvalidRequest: Several models have a replica of that name.
        """
        found = [
            (name, dispatcher, endpoint_state)
            for name, dispatcher in self._dispatchers.items()
            for endpoint_state in dispatcher.core.endpoint_states
            if endpoint_state.endpoint.name == replica and model in (None, name)
            if not isinstance(endpoint_state.endpoint.replica, NextReplica)
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
        ((name, dispatcher, endpoint_state),) = found
        order(endpoint_state.endpoint.admin_state)
        _log.info("The replica %s of %s %s.", replica, name, action)
        dispatcher.refresh_and_dispatch()
        if name in self._pools:
            self._pools[name].refresh()
        return _body(name, endpoint_state)


def _body(model: str, endpoint_state: EndpointState) -> ReplicaBody:
    admin_state, load = endpoint_state.endpoint.admin_state, endpoint_state.load
    reports = load.total_blocks > 0
    return ReplicaBody(
        model=model,
        replica=endpoint_state.endpoint.name,
        kind="engine" if endpoint_state.endpoint.reports_capacity else "upstream",
        state=admin_state.state,
        ready=endpoint_state.ready,
        outage=None if endpoint_state.outage is None else endpoint_state.outage.message,
        requests=admin_state.running,
        sequences=load.running if reports else None,
        waiting_sequences=load.waiting if reports else None,
        kv_free=load.free_blocks / load.total_blocks if reports else None,
        weight=endpoint_state.weight,
        region=endpoint_state.region,
        round_trip_ms=_round_trip_ms(endpoint_state),
    )


def _round_trip_ms(endpoint_state: EndpointState) -> float | None:
    measured = endpoint_state.endpoint.round_trip_s
    seconds = None if measured is None else measured()
    return None if seconds is None else round(seconds * 1000, 3)
