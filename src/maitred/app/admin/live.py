"""The live state of a gateway, composed from its parts for the console and `maitred top`."""

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from msgspec.structs import asdict

from maitred import __version__
from maitred.admission.admission import Admission
from maitred.api.in_flight import InFlightLimiter
from maitred.app.admin.caller_usage import limit_use_body
from maitred.app.admin.replicas import ReplicaAdmin
from maitred.console.pulse import LiveFeed
from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.metrics import DispatchSnapshot, TenantActivity
from maitred.observe.diagnosis.finding import DiagnosisFinding
from maitred.observe.live_diagnosis import LiveDiagnosis
from maitred.observe.metrics.engines import EngineState, EngineStates
from maitred.observe.recent import RecentTraffic, TenantTraffic
from maitred.wire.admin.live import (
    CreditBody,
    EngineBody,
    FindingBody,
    HeadcountBody,
    HeldBody,
    LiveBody,
    LiveReplicaBody,
    PathBody,
    PointBody,
    QueueBody,
    TenantUseBody,
    UseBody,
)

_MAX_TENANTS = 30
"""Most tenants that are shown, active ones first; the limits of each are read from the counters every second."""
_MAX_PER_QUEUE = 12
_ALL_TENANTS = "*"


class LiveState:
    """Composes the live state. Implements `maitred.api.admin.service.LiveService`.

    Args:
        in_flight: Counts the requests in flight.
        dispatchers: Model -> its dispatcher.
        engines: Returns the state of this gateway's engines.
        replicas: Lists the replicas of all models.
        recent: Recent traffic.
        admission: Knows how far limits are used.
        stores_up: Returns whether each store answers.
        diagnosis: Finds what delays requests.
        clock: The clock.
        max_viewers: Most viewers at one time.

    Attributes:
        feed: Sends the state to viewers; its `run` must be running.
    """

    def __init__(
        self,
        in_flight: InFlightLimiter,
        dispatchers: Mapping[str, Dispatcher],
        engines: Callable[[], EngineStates],
        replicas: ReplicaAdmin,
        recent: RecentTraffic,
        admission: Admission,
        stores_up: Callable[[], Mapping[str, bool]],
        diagnosis: LiveDiagnosis,
        clock: Clock,
        max_viewers: int,
    ) -> None:
        self._in_flight = in_flight
        self._dispatchers = dispatchers
        self._engines = engines
        self._replicas = replicas
        self._recent = recent
        self._admission = admission
        self._stores_up = stores_up
        self._diagnosis = diagnosis
        self._clock = clock
        self._started_s = clock.wall_s()
        self.feed = LiveFeed(self._tick, self._compose, clock, max_viewers)

    async def snapshot(self) -> LiveBody:
        """Returns the live state of now."""
        return await self.feed.now()

    def watching(self, key: str, *, is_operator: bool) -> AbstractContextManager[AsyncIterator[LiveBody]]:
        """Subscribes a viewer to the live state for as long as the context lasts."""
        return self.feed.watching(key, is_operator=is_operator)

    def history(self) -> Sequence[PointBody]:
        """Returns the points of the last seconds."""
        return list(self._recent.points)

    def _tick(self) -> PointBody:
        cores = [dispatcher.core for dispatcher in self._dispatchers.values()]
        return self._recent.tick(sum(core.waiting for core in cores), sum(core.running for core in cores))

    async def _compose(self) -> LiveBody:
        activities = {model: dispatcher.tenant_activity() for model, dispatcher in self._dispatchers.items()}
        states = {model: dispatcher.snapshot() for model, dispatcher in self._dispatchers.items()}
        waiting, prefilling, decoding = (
            _sum_counts([getattr(activity, stage) for activity in activities.values()])
            for stage in ("waiting", "prefilling", "decoding")
        )
        in_dispatch = waiting.total() + prefilling.total() + decoding.total()
        tenants, limits_known = await self._tenant_bodies(waiting, prefilling + decoding)
        queues = [_queue_body(model, state, activities[model]) for model, state in states.items()]
        findings = self._diagnosis.findings()
        return LiveBody(
            at=self._clock.wall_s(),
            started_at=self._started_s,
            version=__version__,
            draining=self._in_flight.draining,
            stores=dict(self._stores_up()),
            path=PathBody(
                # Requests of several prompts count once in both numbers; embeddings count several times in dispatch.
                arriving=max(0, self._in_flight.count - in_dispatch),
                queued=waiting.total(),
                prefilling=prefilling.total(),
                decoding=decoding.total(),
            ),
            point=self._recent.points[-1] if self._recent.points else self._tick(),
            queues=queues,
            engines=[
                _engine_body(
                    model, replica, state, activities[model].kv_tokens.get(replica, {}) if model in activities else {}
                )
                for (model, replica), state in self._engines().items()
            ],
            replicas=self._replica_bodies(states),
            tenants=tenants,
            refusals=list(reversed(self._recent.rejections.values())),
            cache=self._recent.cache_use,
            limits_known=limits_known,
            findings=None if findings is None else [_finding_body(finding) for finding in findings],
        )

    def _replica_bodies(self, states: Mapping[str, DispatchSnapshot]) -> list[LiveReplicaBody]:
        bodies = []
        for body in self._replicas.all():
            if body.model not in states:
                continue  # added since the snapshot
            credits_ = {
                resource: CreditBody(free=credit.free, total=credit.total)
                for (replica, resource), credit in states[body.model].credits.items()
                if replica == body.replica
            }
            bodies.append(LiveReplicaBody(**asdict(body), credits=credits_))
        return bodies

    async def _tenant_bodies(self, waiting: Counter[str], running: Counter[str]) -> tuple[list[TenantUseBody], bool]:
        """Returns active tenants first, then recent ones.

        A row for all tenants together stands before them if that is limited.
        """
        active = [name for name, _ in (waiting + running).most_common(_MAX_TENANTS)]
        recent = [name for name in reversed(self._recent.tenants) if name not in active]
        names = (active + recent)[:_MAX_TENANTS]
        subjects = [_ALL_TENANTS, *(f"tenant:{name}" for name in names)]
        limits_known = True
        try:
            uses = await self._admission.uses(subjects)
        except StoreUnavailable:
            uses, limits_known = [], False
        uses_by_subject: dict[str, list[UseBody]] = {}
        for use in uses:
            uses_by_subject.setdefault(use.subject, []).append(limit_use_body(use))
        rows = [
            _tenant_body(
                name,
                self._recent.tenants.get(name, TenantTraffic()),
                waiting[name],
                running[name],
                uses_by_subject.get(subject, []),
            )
            for name, subject in zip(names, subjects[1:], strict=True)
        ]
        if _ALL_TENANTS in uses_by_subject:
            rows.insert(
                0,
                _tenant_body(
                    _ALL_TENANTS, TenantTraffic(), waiting.total(), running.total(), uses_by_subject[_ALL_TENANTS]
                ),
            )
        return rows, limits_known


def _finding_body(finding: DiagnosisFinding) -> FindingBody:
    return FindingBody(**{**asdict(finding), "evidence": list(finding.evidence)})


def _sum_counts(counts: Sequence[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for count in counts:
        total.update(count)
    return total


def _queue_body(model: str, state: DispatchSnapshot, activity: TenantActivity) -> QueueBody:
    running = Counter(activity.prefilling)
    running.update(activity.decoding)
    requests = Counter(activity.waiting)
    requests.update(running)
    return QueueBody(
        model=model,
        waiting=dict(state.waiting),
        predicted_wait_s=dict(state.predicted_wait_s),
        running=state.running,
        tenants=[
            HeadcountBody(tenant=tenant, waiting=activity.waiting.get(tenant, 0), running=running[tenant])
            for tenant, _ in requests.most_common(_MAX_PER_QUEUE)
        ],
    )


def _engine_body(model: str, replica: str, state: EngineState, held: Mapping[str, int]) -> EngineBody:
    load, card = state.load, state.card
    largest = heapq.nlargest(_MAX_PER_QUEUE, held.items(), key=lambda entry: entry[1])
    return EngineBody(
        model=model,
        replica=replica,
        up=state.up,
        asleep=load.asleep,
        running=load.running,
        waiting=load.waiting,
        paused=load.paused,
        free_sequences=load.free_sequences,
        step_tokens=load.step_tokens,
        blocks=load.total_blocks,
        block_tokens=card.kv_capacity_tokens // load.total_blocks if card is not None and load.total_blocks else 0,
        used_blocks=load.total_blocks - load.free_blocks,
        cached_blocks=load.cached_blocks,
        pinned_blocks=load.pinned_blocks,
        held=[HeldBody(tenant=tenant, tokens=tokens) for tenant, tokens in largest],
        preemptions=load.preemptions,
        steps=load.steps,
        step_s=load.step_s,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        output_tokens=load.output_tokens,
    )


def _tenant_body(name: str, traffic: TenantTraffic, waiting: int, running: int, limits: list[UseBody]) -> TenantUseBody:
    return TenantUseBody(
        tenant=name,
        waiting=waiting,
        running=running,
        requests=traffic.requests,
        refused=traffic.rejected,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
        limits=limits,
    )
