"""Admin of scaling: shows how many replicas models have and why, and sets their number for a time."""

import math
from collections import Counter
from collections.abc import Collection, Mapping

import msgspec

from maitred.app.scaling.decision_text import explain_decision
from maitred.app.scaling.scaler import ModelScaler, RecordedDecision
from maitred.core.clock import Clock
from maitred.core.errors import InvalidRequest, ResourceNotFound
from maitred.fleet.pool import ReplicaPool
from maitred.observe.metrics.scaling import ScalingState
from maitred.scaling.decision import ScalingReason
from maitred.scaling.startup_times import StartKind
from maitred.wire.admin.responses import PooledReplicaBody
from maitred.wire.admin.scaling import (
    MAX_OVERRIDE_S,
    ForecastBody,
    ScalingBody,
    ScalingDecisionBody,
    ScalingDecisionList,
    ScalingHistoryQuery,
    ScalingObjectivesBody,
    ScalingOverrideBody,
    SetScalingOverride,
    StartTimesBody,
    TTFTOutcomeBody,
)
from maitred.wire.admin.times import to_iso


class ScalingAdmin:
    """Shows and overrides decisions on replicas. Implements `maitred.api.admin.service.ScalingService`.

    Args:
        scalers: Model -> its scaler.
        clock: The clock.
    """

    def __init__(self, scalers: Mapping[str, ModelScaler], clock: Clock) -> None:
        self._scalers = scalers
        self._clock = clock

    @property
    def models(self) -> Collection[str]:
        """The models whose number of replicas follows the demand."""
        return self._scalers.keys()

    def all(self) -> list[ScalingBody]:
        """Lists the scaled models, as they are now."""
        return [self._body(scaler) for scaler in self._scalers.values()]

    async def decisions(self, query: ScalingHistoryQuery) -> ScalingDecisionList:
        """Returns a page of decisions of one model; `after` is empty or a number.

        Raises:
            ResourceNotFound: The number of the model's replicas does not follow the demand.
            StoreUnavailable: The database is away.
        """
        scaler = self._scaler(query.model)
        if query.unchanged:
            made = [*scaler.decisions][: -query.limit - 1 : -1]
            return ScalingDecisionList(data=[decision_body(one) for one in made], has_more=False, next=None)
        found = await scaler.lease.leases.decisions(
            scaler.lease.lease.pool, before=int(query.after) if query.after else None, limit=query.limit + 1
        )
        data = [
            decision_body(msgspec.msgpack.decode(stored.decision, type=RecordedDecision))
            for stored in found[: query.limit]
        ]
        has_more = len(found) > query.limit
        return ScalingDecisionList(
            data=data, has_more=has_more, next=str(found[query.limit - 1].id) if has_more else None
        )

    async def set_override(self, wish: SetScalingOverride) -> ScalingBody:
        """Sets the number of a model's replicas for a time.

        Raises:
            ResourceNotFound: The number of the model's replicas does not follow the demand.
            InvalidRequest: The limits do not allow that number, or not for so long.
            StoreUnavailable: The database is away.
        """
        scaler = self._scaler(wish.model)
        least, most = scaler.config.min_replicas, scaler.config.max_replicas
        if not least <= wish.replicas <= most:
            raise InvalidRequest(
                f"replicas must be from {least} to {most}, which are min_replicas and max_replicas of the model; got "
                f"{wish.replicas}.",
                param="replicas",
            )
        if not 0 < wish.for_s <= MAX_OVERRIDE_S:
            raise InvalidRequest(
                f"for_s must be more than 0 and at most {MAX_OVERRIDE_S:,}, which is 30 days; got {wish.for_s:g}.",
                param="for_s",
            )
        until_s = self._clock.wall_s() + wish.for_s
        await scaler.lease.leases.set_override(scaler.lease.lease.pool, wish.replicas, until_s)
        await scaler.refresh()
        return self._body(scaler)

    async def end_override(self, model: str) -> ScalingBody:
        """Has the demand decide on the number of a model's replicas again.

        Raises:
            ResourceNotFound: The number of the model's replicas does not follow the demand.
            StoreUnavailable: The database is away.
        """
        scaler = self._scaler(model)
        await scaler.lease.leases.set_override(scaler.lease.lease.pool, None, None)
        await scaler.refresh()
        return self._body(scaler)

    def states(self) -> dict[str, ScalingState]:
        """Returns the state of each scaled model for metrics."""
        return {model: self._state(scaler) for model, scaler in self._scalers.items()}

    def _scaler(self, model: str) -> ModelScaler:
        scaler = self._scalers.get(model)
        if scaler is None:
            raise ResourceNotFound(
                f"There is no model {model[:200]!r} whose number of replicas follows the demand. "
                "GET /admin/v1/scaling lists them.",
                param="model",
            )
        return scaler

    def _body(self, scaler: ModelScaler) -> ScalingBody:
        lease, last, config, desired = scaler.lease.lease, scaler.last, scaler.config, scaler.pool.desired
        return ScalingBody(
            model=scaler.model,
            desired=desired.serving,
            asleep=desired.asleep,
            actual=Counter(replica.phase.value for replica in scaler.pool.replicas()),
            reachable=None if last is None else last.decision.reason is not ScalingReason.UNREACHABLE,
            override=self._override(scaler),
            objectives=ScalingObjectivesBody(
                ttft_s=config.ttft_s,
                itl_s=config.itl_s,
                min_replicas=config.min_replicas,
                max_replicas=config.max_replicas,
                sleeping_replicas=config.sleeping_replicas,
                target_utilisation=config.target_utilisation,
                gpus_per_replica=scaler.autoscaler.objectives.gpus_per_replica,
                max_gpus=config.max_gpus,
                usd_per_hour=scaler.autoscaler.objectives.usd_per_hour,
                max_usd_per_hour=config.max_usd_per_hour,
            ),
            decision=None if last is None else decision_body(last),
            deciding=scaler.lease.is_held,
            owner=lease.owner,
            epoch=lease.epoch,
            replicas=pooled_replicas(scaler.pool, self._clock.monotonic_s()),
            starts=[
                StartTimesBody(
                    kind=kind.value,
                    starts=count,
                    p50_s=scaler.pool.startup_times.quantile(kind, 0.5),
                    p90_s=scaler.pool.startup_times.quantile(kind, 0.9),
                )
                for kind in StartKind
                if (count := scaler.pool.startup_times.count(kind))
            ],
            outcomes=[
                TTFTOutcomeBody(
                    at=to_iso(outcome.at_s),
                    predicted_s=_finite(outcome.predicted_s),
                    measured_s=outcome.measured_s,
                    requests=outcome.requests,
                )
                for outcome in scaler.outcomes.last
            ],
        )

    def _override(self, scaler: ModelScaler) -> ScalingOverrideBody | None:
        lease = scaler.lease.lease
        if lease.override_replicas is None or (lease.override_until_s or 0.0) <= self._clock.wall_s():
            return None
        return ScalingOverrideBody(replicas=lease.override_replicas, until=to_iso(lease.override_until_s or 0.0))

    def _state(self, scaler: ModelScaler) -> ScalingState:
        last = scaler.last
        outcome = scaler.outcomes.last[-1] if scaler.outcomes.last else None
        evidence = None if last is None else last.decision.evidence
        times = scaler.pool.startup_times
        return ScalingState(
            desired=scaler.pool.desired.serving,
            desired_asleep=scaler.pool.desired.asleep,
            actual=Counter(replica.phase.value for replica in scaler.pool.replicas()),
            decisions={reason.value: count for reason, count in scaler.counts.items()},
            reachable=last is None or last.decision.reason is not ScalingReason.UNREACHABLE,
            override=self._override(scaler) is not None,
            deciding=scaler.lease.is_held,
            forecast=None
            if evidence is None
            else (evidence.requests_per_s.low, evidence.requests_per_s.mean, evidence.requests_per_s.high),
            coverage=None if evidence is None else evidence.forecast_coverage,
            predicted_ttft_s=None if evidence is None else evidence.ttft_s,
            measured_ttft_s=None if outcome is None else outcome.measured_s,
            start_s={kind.value: times.quantile(kind, 0.9) for kind in StartKind if times.count(kind)},
        )


def decision_body(made: RecordedDecision) -> ScalingDecisionBody:
    """Returns a decision as operators see it."""
    decision, evidence = made.decision, made.decision.evidence
    forecast = evidence.requests_per_s
    hold_until_s = evidence.hold_until_s
    return ScalingDecisionBody(
        at=to_iso(made.at_s),
        desired=decision.desired,
        asleep=decision.asleep,
        reason=decision.reason.value,
        text=explain_decision(decision),
        changed=made.is_change,
        epoch=made.epoch,
        ready=evidence.ready,
        coming=evidence.coming,
        waiting=evidence.waiting,
        running=evidence.running,
        predicted_ttft_s=_finite(evidence.ttft_s),
        predicted_ttft_with_one_less_s=_finite(evidence.ttft_with_one_less_s),
        predicted_itl_s=_finite(evidence.itl_s),
        utilisation=_finite(evidence.utilisation),
        replica_requests_per_s=_finite(evidence.replica_requests_per_s),
        forecast=ForecastBody(
            low=forecast.low, mean=forecast.mean, high=forecast.high, coverage=evidence.forecast_coverage
        ),
        lead_time_s=evidence.lead_time_s,
        hold_until=None if hold_until_s is None else to_iso(made.at_s - decision.at_s + hold_until_s),
        limits=[limit.value for limit in evidence.limits],
    )


def pooled_replicas(pool: ReplicaPool, now_s: float) -> list[PooledReplicaBody]:
    """Returns the replicas of a pool as operators see them."""
    backend = pool.backend.replicas()
    # The backend may have lost a replica before the pool has noticed.
    known = [(status, started) for status in pool.replicas() if (started := backend.get(status.name)) is not None]
    return [
        PooledReplicaBody(
            replica=status.name,
            phase=status.phase.value,
            since_s=round(now_s - status.since_s, 3),
            ready_in_s=None if status.ready_in_s is None else round(status.ready_in_s, 3),
            start_kind=status.start_kind.value,
            start_s={part.name: round(part.seconds, 3) for part in started.start_phases},
            failure=started.failure or None,
        )
        for status, started in known
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
