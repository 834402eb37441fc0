"""Scaler of one model: once a second it decides how many replicas the model needs, and tells the pool.

::

    dispatch --demand--> ModelScaler --decide--> Autoscaler (pure)
    engines --step times-->  |   ^
    pool --replicas----------'   `-- lease --> database
                             `--desired--> ReplicaPool

Only the owner of the pool's lease decides, and only what was written with its epoch is carried out. While the database
is away, or another gateway decides, the scaler goes on to observe the demand, so that it can decide at once later.
"""

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from maitred.app.scaling.forecast_file import ForecastFile
from maitred.app.scaling.lease import LeaseClaim
from maitred.app.scaling.shared_demand import SharedDemand
from maitred.app.scaling.ttft_outcome import TTFTRecorder
from maitred.core.clock import Clock
from maitred.core.errors import ReplicaUnavailable
from maitred.core.replica import ModelCard
from maitred.dispatch.dispatcher import Dispatcher
from maitred.dispatch.load_estimator import late_s
from maitred.fleet.pool import ReplicaPool
from maitred.scaling.autoscaler import Autoscaler, ScalingOverride
from maitred.scaling.capacity import CapacityEstimator, ReplicaCapacity
from maitred.scaling.config import AutoscalingConfig
from maitred.scaling.decision import ScalingDecision, ScalingReason
from maitred.scaling.demand import Demand
from maitred.scaling.forecast import DemandForecast
from maitred.scaling.replica_status import ReplicaPhase, ReplicaStatus
from maitred.scaling.slot_overhead import SlotOverhead

_INTERVAL_S = 1.0
"""Time between two decisions."""
_MIN_INTERVAL_S = 0.2
"""Shortest time between two decisions, where requests begin to wait again and again."""
_KEEP_INTERVAL_S = 60.0
"""Time between two writes of the forecast."""
_STALE_S = 5.0
"""A report that is late by more does not count for the capacity."""
_KEPT_DECISIONS = 300
_USABLE_AVERAGE_S = 60.0
"""Time constant of the mean of the share of the slots that tenants can use."""

_log = logging.getLogger(__name__)


class RecordedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Decision with its time and with what became of it."""

    at_s: float
    """Wall time."""
    epoch: int
    decision: ScalingDecision
    is_change: bool = True
    """Whether it changes the desired numbers, so that it was written."""


class ModelScaler:
    """Scaler of one model.

    Args:
        pool: The replicas of the model.
        dispatcher: Its queue.
        lease: Lease of the pool.
        config: Objectives and limits.
        clock: The clock.
        shared: Demand of all gateways of the pool; None: it belongs to this gateway alone.
        forecast_file: Keeps the forecast from one run of the gateway to the next; None: it is lost.

    Attributes:
        model: The model.
        pool: The pool.
        lease: Its lease.
        shared: Demand of all its gateways; None: it belongs to this one alone.
        config: Objectives and limits.
        autoscaler: What decides.
        outcomes: Predicted and measured times to first token.
        decisions: The last decisions, oldest first, also those that changed nothing.
        counts: Number of decisions by reason, since the start.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        dispatcher: Dispatcher,
        lease: LeaseClaim,
        config: AutoscalingConfig,
        clock: Clock,
        *,
        shared: SharedDemand | None = None,
        forecast_file: ForecastFile | None = None,
    ) -> None:
        now_s = clock.monotonic_s()
        self.model = dispatcher.model
        self.pool = pool
        self.lease = lease
        self.config = config
        self.outcomes = TTFTRecorder(now_s)
        self.decisions: deque[RecordedDecision] = deque(maxlen=_KEPT_DECISIONS)
        self.counts: Counter[ScalingReason] = Counter()
        forecast = DemandForecast(start_s=clock.wall_s() - now_s) if forecast_file is None else forecast_file.read()
        self.autoscaler = Autoscaler(config.objectives, pool.startup_times, forecast)
        self.shared = shared
        self._forecast_file = forecast_file
        self._forecast_kept_s = now_s
        self._dispatcher = dispatcher
        self._clock = clock
        self._estimator = CapacityEstimator(warm_up_s=config.warm_up_s)
        self._overhead = SlotOverhead()
        self._known: set[str] = set()
        self._card: ModelCard | None = None
        self._step_tokens = 0
        self._usable_share, self._usable_s = 1.0, now_s
        """Mean share of the slots that tenants can use, and until when it was observed."""
        self._wanted = asyncio.Event()
        """Set when a decision is due before its time."""
        self._acted: tuple[int, int, int] | None = None
        """Epoch and desired numbers of the last decision that was carried out."""
        pool.let_requests_wait()
        self._meter = dispatcher.meter_demand(self._wanted.set)
        self._notify_first_token = dispatcher.notify_first_token
        dispatcher.notify_first_token = self._on_first_token

    def reconfigure(self, config: AutoscalingConfig) -> None:
        """Applies other objectives and limits from the next decision on."""
        self.config = config
        self._wanted.set()

    @property
    def last(self) -> RecordedDecision | None:
        """The last decision of this gateway; None: there is none."""
        return self.decisions[-1] if self.decisions else None

    async def refresh(self) -> None:
        """Reads the lease again, because an operator has changed the override, and has a decision made at once."""
        await self.lease.refresh()
        self._wanted.set()

    async def run(self) -> None:
        """Decides until the task is cancelled, and keeps the forecast."""
        try:
            await self._run()
        finally:
            # Here, because nothing waits for a thread of a task that ends.
            if self._forecast_file is not None:
                self._forecast_file.write(self.autoscaler.forecast.snapshot())

    async def _run(self) -> None:
        while True:
            began_s = self._clock.monotonic_s()
            self._wanted.clear()
            try:
                await self.step()
            except Exception:
                _log.exception("No decision could be made on the replicas of %s, which stay as they are.", self.model)
            await self._keep_forecast()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, _INTERVAL_S - (self._clock.monotonic_s() - began_s))):
                    await self._wanted.wait()
            await asyncio.sleep(max(0.0, _MIN_INTERVAL_S - (self._clock.monotonic_s() - began_s)))

    async def _keep_forecast(self) -> None:
        """Writes what the forecast has learnt into its file, now and then."""
        now_s = self._clock.monotonic_s()
        if self._forecast_file is not None and now_s - self._forecast_kept_s >= _KEEP_INTERVAL_S:
            self._forecast_kept_s = now_s
            await asyncio.to_thread(self._forecast_file.write, self.autoscaler.forecast.snapshot())

    async def step(self) -> None:
        """Makes one decision, if this gateway decides."""
        is_held = await self.lease.hold()
        own = self._meter.read_own(self._clock.monotonic_s())
        demand = self._meter.add_replicas(own if self.shared is None else await self.shared.add_others(own))
        now_s = self._clock.monotonic_s()
        replicas = [replica for replica in self.pool.replicas() if replica.is_own]
        capacity = self._learn(replicas, self._usable(demand, now_s), now_s)
        self._observe_overhead(capacity, own, demand)
        if not is_held:
            self.autoscaler.forecast.observe(demand.window)
            return
        facts = self.pool.backend.facts
        self.autoscaler.start_kind = facts.start_kind
        objectives = self.config.objectives
        self.autoscaler.objectives = replace(
            objectives,
            usd_per_hour=objectives.usd_per_hour or facts.usd_per_hour,
            gpus_per_replica=objectives.gpus_per_replica or facts.gpus_per_replica,
        )
        self.autoscaler.override = self._override(now_s)
        await self._act(self.autoscaler.decide(demand, replicas, capacity, now_s))

    def _usable(self, demand: Demand, now_s: float) -> float:
        """Returns the share of a replica's slots and KV cache that the present mix of tenants can use.

        It changes slowly, so that the number of replicas is steady; but where requests wait, what they can use now
        counts.
        """
        if demand.waiting or demand.running:
            weight = 1 - math.exp((self._usable_s - now_s) / _USABLE_AVERAGE_S)
            self._usable_share += weight * (demand.usable_share - self._usable_share)
        self._usable_s = now_s
        return min(self._usable_share, demand.usable_share) if demand.waiting else self._usable_share

    def _learn(self, replicas: Sequence[ReplicaStatus], usable_share: float, now_s: float) -> ReplicaCapacity | None:
        """Learns from the reports of the replicas that serve; returns the usable capacity of one."""
        endpoint_states = {state.endpoint.name: state for state in self._dispatcher.core.endpoint_states}
        for replica in replicas:
            state = endpoint_states.get(replica.name)
            if state is None or replica.phase is not ReplicaPhase.SERVING:
                continue
            with suppress(ReplicaUnavailable):
                self._card = state.endpoint.replica.card()
            self._step_tokens = max(self._step_tokens, state.load.step_tokens)
            self._estimator.observe(
                replica.name,
                state.load.times,
                serving_for_s=now_s - replica.since_s,
                is_draining=not state.endpoint.admin_state.serving,
                is_stale=late_s(state, now_s) > _STALE_S,
            )
        names = {replica.name for replica in replicas}
        for name in self._known - names:
            self._estimator.forget(name)
        self._known = names
        card = self._card
        if card is None or not self._step_tokens:
            return None
        return self._estimator.capacity(
            max_sequences=usable_share * card.max_sequences,
            kv_tokens=usable_share * card.kv_capacity_tokens,
            step_tokens=self._step_tokens,
            overhead_s=self._overhead.mean_s,
        )

    def _observe_overhead(self, capacity: ReplicaCapacity | None, own: Demand, demand: Demand) -> None:
        """Compares what the requests of this gateway took with the steps of the replicas, which compute for all."""
        finished, mix = self._meter.take_finished(), self.autoscaler.forecast.mix
        core = self._dispatcher.core
        running = [state.load.running for state in core.endpoint_states if state.ready and state.region == core.region]
        requests = finished.requests + demand.window.requests - own.window.requests
        if capacity is not None and mix is not None and running:
            self._overhead.observe(
                finished,
                capacity,
                mix,
                running=sum(running) / len(running),
                requests_per_s=requests / own.window.length_s / len(running),
            )

    def _override(self, now_s: float) -> ScalingOverride | None:
        lease = self.lease.lease
        if lease.override_replicas is None or lease.override_until_s is None:
            return None
        remaining_s = lease.override_until_s - self._clock.wall_s()
        return (
            None if remaining_s <= 0 else ScalingOverride(replicas=lease.override_replicas, until_s=now_s + remaining_s)
        )

    async def _act(self, decision: ScalingDecision) -> None:
        """Writes a decision that changes something and carries it out; keeps every decision."""
        wall_s, epoch = self._clock.wall_s(), self.lease.lease.epoch
        self.counts[decision.reason] += 1
        self.outcomes.on_decision(decision.evidence.ttft_s, decision.at_s, wall_s)
        numbers = epoch, decision.desired, decision.asleep
        made = RecordedDecision(at_s=wall_s, epoch=epoch, decision=decision, is_change=numbers != self._acted)
        if made.is_change:
            if not await self.lease.decide(decision.desired, decision.asleep, msgspec.msgpack.encode(made)):
                return
            self._acted = numbers
            self.pool.set_desired(decision.desired, decision.asleep, counted_s=decision.at_s)
        self.decisions.append(made)

    def _on_first_token(self, after_s: float) -> None:
        self.outcomes.on_first_token(after_s)
        if self._notify_first_token is not None:
            self._notify_first_token(after_s)
