"""The live state of a gateway, put together from its parts for whoever watches."""

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from msgspec.structs import asdict

from maitred import __version__
from maitred.admission.admission import Admission
from maitred.api.in_flight import InFlightLimiter
from maitred.app.admin.caller_usage import limit_use
from maitred.app.admin.replicas import ReplicaAdmin
from maitred.console.pulse import LiveFeed
from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.metrics import DispatchSnapshot, TenantActivity
from maitred.observe.diagnosis.finding import DiagnosisFinding
from maitred.observe.live_diagnosis import LiveDiagnosis
from maitred.observe.metrics.engines import Engines, EngineState
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

_MOST_TENANTS = 30
"""Shown, of those that are here or were lately; each one's limits are read from the counters every second."""
_MOST_AT_QUEUE = 12
_EVERYBODY = "*"


class LiveState:
    """Composes it. Implements `maitred.api.admin.live.LiveService`.

    Args:
        gate: Who is inside.
        dispatchers: Each model's queue.
        engines: Our own engines.
        replicas: Where models run.
        recent: What happened.
        admission: How far limits are used.
        stores_up: Whether each store answers.
        rounds: What holds requests up.
        clock: The time.
        most_viewers: Who may watch at one time.

    Attributes:
        pulse: Its `run` must be running.
    """

    def __init__(
        self,
        gate: InFlightLimiter,
        dispatchers: Mapping[str, Dispatcher],
        engines: Callable[[], Engines],
        replicas: ReplicaAdmin,
        recent: RecentTraffic,
        admission: Admission,
        stores_up: Callable[[], Mapping[str, bool]],
        rounds: LiveDiagnosis,
        clock: Clock,
        most_viewers: int,
    ) -> None:
        self._gate = gate
        self._dispatchers = dispatchers
        self._engines = engines
        self._replicas = replicas
        self._recent = recent
        self._admission = admission
        self._stores_up = stores_up
        self._rounds = rounds
        self._clock = clock
        self._started_s = clock.wall_s()
        self.pulse = LiveFeed(self._beat, self._compose, clock, most_viewers)

    async def now(self) -> LiveBody:
        """See `Live.now`."""
        return await self.pulse.now()

    def watching(self) -> AbstractContextManager[AsyncIterator[LiveBody]]:
        """See `Live.watching`."""
        return self.pulse.watching()

    def history(self) -> Sequence[PointBody]:
        """See `Live.history`."""
        return list(self._recent.points)

    def _beat(self) -> PointBody:
        floors = [dispatcher.floor for dispatcher in self._dispatchers.values()]
        return self._recent.tick(sum(floor.waiting for floor in floors), sum(floor.running for floor in floors))

    async def _compose(self) -> LiveBody:
        crowds = {model: dispatcher.crowd() for model, dispatcher in self._dispatchers.items()}
        states = {model: dispatcher.state() for model, dispatcher in self._dispatchers.items()}
        waiting, prefilling, decoding = (
            _sum([getattr(crowd, stage) for crowd in crowds.values()])
            for stage in ("waiting", "prefilling", "decoding")
        )
        in_dispatch = waiting.total() + prefilling.total() + decoding.total()
        tenants, limits_known = await self._tenants(waiting, prefilling + decoding)
        queues = [_queue(model, state, crowds[model]) for model, state in states.items()]
        findings = self._rounds.findings()
        return LiveBody(
            at=self._clock.wall_s(),
            started_at=self._started_s,
            version=__version__,
            draining=self._gate.draining,
            stores=dict(self._stores_up()),
            path=PathBody(
                # A request of several prompts is one here and one there; embeddings are several in dispatch.
                arriving=max(0, self._gate.inside - in_dispatch),
                queued=waiting.total(),
                prefilling=prefilling.total(),
                decoding=decoding.total(),
            ),
            point=self._recent.points[-1] if self._recent.points else self._beat(),
            queues=queues,
            engines=[
                _engine(model, replica, state, crowds[model].kv_tokens.get(replica, {}) if model in crowds else {})
                for (model, replica), state in self._engines().items()
            ],
            replicas=self._with_credits(states),
            tenants=tenants,
            refusals=list(reversed(self._recent.refusals.values())),
            limits_known=limits_known,
            findings=None if findings is None else [_finding(finding) for finding in findings],
        )

    def _with_credits(self, states: Mapping[str, DispatchSnapshot]) -> list[LiveReplicaBody]:
        shown = []
        for body in self._replicas.all():
            if body.model not in states:
                continue  # it has come since
            credits_ = {
                resource: CreditBody(free=credit.free, total=credit.total)
                for (replica, resource), credit in states[body.model].credits.items()
                if replica == body.replica
            }
            shown.append(LiveReplicaBody(**asdict(body), credits=credits_))
        return shown

    async def _tenants(self, waiting: Counter[str], running: Counter[str]) -> tuple[list[TenantUseBody], bool]:
        """Who is here first, then who was here last; before them everybody together, where that is limited."""
        here = [name for name, _ in (waiting + running).most_common(_MOST_TENANTS)]
        lately = [name for name in reversed(self._recent.tenants) if name not in here]
        names = (here + lately)[:_MOST_TENANTS]
        subjects = [_EVERYBODY, *(f"tenant:{name}" for name in names)]
        known = True
        try:
            uses = await self._admission.uses(subjects)
        except StoreUnavailable:
            uses, known = [], False
        of: dict[str, list[UseBody]] = {}
        for use in uses:
            of.setdefault(use.subject, []).append(limit_use(use))
        rows = [
            _tenant(
                name, self._recent.tenants.get(name, TenantTraffic()), waiting[name], running[name], of.get(subject, [])
            )
            for name, subject in zip(names, subjects[1:], strict=True)
        ]
        if _EVERYBODY in of:
            rows.insert(0, _tenant(_EVERYBODY, TenantTraffic(), waiting.total(), running.total(), of[_EVERYBODY]))
        return rows, known


def _finding(finding: DiagnosisFinding) -> FindingBody:
    return FindingBody(**{**asdict(finding), "evidence": list(finding.evidence)})


def _sum(counts: Sequence[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return total


def _queue(model: str, state: DispatchSnapshot, crowd: TenantActivity) -> QueueBody:
    running = Counter(crowd.prefilling)
    running.update(crowd.decoding)
    here = Counter(crowd.waiting)
    here.update(running)
    return QueueBody(
        model=model,
        waiting=dict(state.waiting),
        predicted_wait_s=dict(state.predicted_wait_s),
        running=state.running,
        tenants=[
            HeadcountBody(tenant=tenant, waiting=crowd.waiting.get(tenant, 0), running=running[tenant])
            for tenant, _ in here.most_common(_MOST_AT_QUEUE)
        ],
    )


def _engine(model: str, replica: str, state: EngineState, held: Mapping[str, int]) -> EngineBody:
    load, card = state.load, state.card
    most = heapq.nlargest(_MOST_AT_QUEUE, held.items(), key=lambda entry: entry[1])
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
        held=[HeldBody(tenant=tenant, tokens=tokens) for tenant, tokens in most],
        preemptions=load.preemptions,
        steps=load.steps,
        step_s=load.step_s,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        output_tokens=load.output_tokens,
    )


def _tenant(name: str, traffic: TenantTraffic, waiting: int, running: int, limits: list[UseBody]) -> TenantUseBody:
    return TenantUseBody(
        tenant=name,
        waiting=waiting,
        running=running,
        requests=traffic.requests,
        refused=traffic.refused,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
        limits=limits,
    )
