"""Forecasts of waits for queued and new requests, cached until the state changes."""

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from msgspec import Struct

from maitred.core.flow import Flow, FlowLevel, QueuePosition
from maitred.dispatch.capacity import CapacityAllocator
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.prediction import AT_ONCE, PredictedWait
from maitred.dispatch.policy.simulation import (
    MAX_AHEAD,
    MAX_TENANTS,
    PredictedTurn,
    SimulatedTenant,
    simulate_dispatch,
)
from maitred.dispatch.predictor import LatencyPredictor, RunningWork
from maitred.dispatch.queue import QueuedRequest, QuotaQueue
from maitred.dispatch.selector import ReplicaSelector, free_slot_share
from maitred.fairness.entry import WorkAhead
from maitred.fairness.vtc import PATIENCE_S

_NO_WORK_AHEAD = WorkAhead(0, 0.0)
_RATE_TIME_CONSTANT_S = 10.0
"""Time constant of the arrival rates: an arrival of this age counts 37 %."""
_FORECAST_TTL_S = 0.005
"""A forecast may be reused for this long if nothing has changed."""

_Part = tuple[int, ...]
"""Identities of the replicas of a forecast; empty: all replicas."""


class ArrivalRates:
    """Arrival rate of each tenant, as an exponential moving average."""

    def __init__(self) -> None:
        self._counts_by_tenant: dict[str, tuple[float, float, Flow]] = {}

    def __len__(self) -> int:
        return len(self._counts_by_tenant)

    def __iter__(self) -> Iterator[tuple[str, Flow]]:
        """Iterates over the tenants and their last flows, the latest one last."""
        return ((tenant, flow) for tenant, (_, _, flow) in self._counts_by_tenant.items())

    def observe(self, flow: Flow, now_s: float) -> None:
        """Counts one arrival of a tenant."""
        tenant, count = flow.path[0].id, 1.0
        known = self._counts_by_tenant.pop(tenant, None)
        if known is not None:
            count += known[0] * math.exp((known[1] - now_s) / _RATE_TIME_CONSTANT_S)
        elif len(self._counts_by_tenant) >= 2 * MAX_TENANTS:
            del self._counts_by_tenant[next(iter(self._counts_by_tenant))]
        self._counts_by_tenant[tenant] = (count, now_s, flow)

    def per_s(self, tenant: str, now_s: float) -> float:
        """Returns a tenant's arrival rate now."""
        known = self._counts_by_tenant.get(tenant)
        if known is None:
            return 0.0
        count, seen_s, _ = known
        return count * math.exp(-(now_s - seen_s) / _RATE_TIME_CONSTANT_S) / _RATE_TIME_CONSTANT_S


class Forecast(Struct, frozen=True):
    """Forecast of one request, without the correction factors."""

    ahead: WorkAhead
    wait: PredictedWait
    prefill_s: float
    cold_s: float = 0.0
    """Seconds until a replica is ready, as it reports itself; never corrected."""
    ample: bool = False
    """Whether the only replica certainly has credits for any tenant and no request is ahead."""
    round_trip_s: float = 0.0
    """Measured round-trip time to the replica; never corrected."""


class _CachedForecast(Struct, frozen=True):
    """Last forecast, with its entry and endpoints."""

    queued: QueuedRequest
    ready: Sequence[EndpointState]
    now_s: float
    forecast: Forecast


class ForecastCache:
    """Computes forecasts and caches their shared parts until the state changes.

    Args:
        endpoint_states: All replicas.
        running_requests: Dispatched requests that have not ended; the caller calls `invalidate` after each change.
        allocator: Capacity of the replicas.
        predictor: Predictor of waits and prefill times.
        selector: Selector that knows the cached prompt tokens of each replica.
        simulates_queues: Whether the queue order is fair between tenants, so that waits need a simulation.
    """

    def __init__(
        self,
        endpoint_states: Sequence[EndpointState],
        running_requests: Collection[QueuedRequest],
        allocator: CapacityAllocator,
        predictor: LatencyPredictor,
        selector: ReplicaSelector,
        *,
        simulates_queues: bool,
    ) -> None:
        self._running_requests = running_requests
        self._endpoint_states = endpoint_states
        self._allocator = allocator
        self._predictor = predictor
        self._selector = selector
        self._simulates_queues = simulates_queues
        self.joins = ArrivalRates()
        """Arrival rates by tenant; call `invalidate` after each change."""
        self.is_regional = False
        """Whether forecasts may be for a part of the replicas, because they are in several regions."""
        self._running_work: dict[_Part, RunningWork] = {}
        self._simulations: dict[tuple[QuotaQueue, _Part], QueueSimulation] = {}
        self._last_served: EndpointState | None = None
        """Endpoint that was ready at the last forecast and may be gone: the next one will be as large and as fast."""
        self.last: _CachedForecast | None = None
        """Last forecast; None: the state has changed since."""

    def reconfigure(self, *, simulates_queues: bool) -> None:
        """Sets whether waits are simulated, and drops all cached forecasts."""
        self._simulates_queues = simulates_queues
        self.invalidate()

    def invalidate(self) -> None:
        """Drops all cached forecasts because the state has changed."""
        self.last = None
        if self._running_work:
            self._running_work.clear()
        if self._simulations:
            self._simulations.clear()

    def on_join(self, flow: Flow, now_s: float) -> None:
        """Records that a request of a flow joined the queue."""
        self.joins.observe(flow, now_s)
        self.last = None
        if self._simulations:
            self._simulations.clear()

    def cached_for(self, queued: QueuedRequest, now_s: float) -> _CachedForecast | None:
        """Returns the cached forecast of this entry; None: there is none that still holds."""
        last = self.last
        return last if last is not None and last.queued is queued and now_s - last.now_s <= _FORECAST_TTL_S else None

    def forecast_and_store(self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> Forecast:
        """Forecasts an entry as if it joined now, or takes the cached forecast, and stores the result in both."""
        last = self.last
        same = last is not None and (last.queued is queued or last.queued.request == queued.request)
        if last is None or not same or now_s - last.now_s > _FORECAST_TTL_S or last.ready != ready:
            last = self.last = _CachedForecast(queued, ready, now_s, self.forecast(queued, ready, now_s))
        forecast = last.forecast
        queued.raw_wait_s, queued.prefill_s = forecast.wait.seconds, forecast.prefill_s
        queued.predicted_position = self.position(forecast, now_s)
        return forecast

    def predict(self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> QueuePosition:
        """Returns the corrected queue position and times of an entry as if only these endpoints were there."""
        return self.position(self.forecast(queued, ready, now_s), now_s)

    def position(self, forecast: Forecast, now_s: float) -> QueuePosition:
        """Returns the corrected queue position and times for the caller."""
        cold_s, round_trip_s = forecast.cold_s, forecast.round_trip_s
        position = self._predictor.position(forecast.ahead.entries, forecast.wait.seconds, forecast.prefill_s, now_s)
        if not cold_s and not round_trip_s:
            return position
        return QueuePosition(
            position.position, position.wait_s + cold_s, ttft_s=position.ttft_s + cold_s + round_trip_s
        )

    def forecast(
        self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float, *, compares: bool = True
    ) -> Forecast:
        """Forecasts the work ahead of an entry, its wait, its prefill time and the round trip.

        Args:
            queued: The entry.
            ready: The endpoints for which it may wait.
            now_s: Now.
            compares: Whether the nearest region is also forecast alone, where only one far away can take it now.
        """
        if compares and self.is_regional and ready:
            return self._forecast_nearest(queued, ready, now_s)
        queue = queued.queue
        ahead = queue.fair_queue.ahead(queued, now_s) if queue.waiting else _NO_WORK_AHEAD
        if not ready:
            return self._cold_start_forecast(queued, ahead, now_s)
        self._last_served = ready[0]
        allocator = self._allocator
        if not ahead.entries and allocator.is_ample(queued.cost, ready):
            prefill_s = self._selector.prefill_s(queued, ready[0], 0, now_s)
            return Forecast(ahead, AT_ONCE, prefill_s, ample=True)
        above_share = allocator.above_share(queued, queued.queue.quota, ready, now_s)
        free = allocator.free_capacity(queued, ready, above_share=above_share)
        wait = AT_ONCE
        may_go_first = not ahead.entries or (allocator.headroom > 0 and allocator.may_lead(queued))
        if not may_go_first or not queued.cost.within(free):
            running_work = self._running_work_at(ready)
            free = allocator.without_overcommit(free, ready)
            turn = self._simulate(queued, ahead, ready, running_work, free.slots, now_s)
            turn_s = None if turn is None else self._predictor.turn_s(turn, ready, running_work, now_s)
            if turn is None or turn.steps or queued.cost.blocks > free.blocks:
                wait = _widened_wait(
                    ahead, ready, self._predictor.wait(queued, ahead, free, ready, running_work, turn_s)
                )
        endpoint_state = max(ready, key=free_slot_share)
        round_trip_s = _round_trip_s(queued, ready, at_once=wait.at_once) if self.is_regional else 0.0
        if wait.at_once:
            prefill_s = self._selector.prefill_s(queued, endpoint_state, ahead.entries, now_s)
            return Forecast(ahead, wait, prefill_s, round_trip_s=round_trip_s)
        # Slots become free with a load report, and an engine step begins at the same time.
        prefill_s = self._selector.prefill_s(queued, endpoint_state, 0, now_s, dispatched_s=endpoint_state.step_began_s)
        return Forecast(ahead, wait, prefill_s, round_trip_s=round_trip_s)

    def _forecast_nearest(self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> Forecast:
        """Forecasts an entry at all of these endpoints, or at those of the nearest region, if that is sooner."""
        forecast = self.forecast(queued, ready, now_s, compares=False)
        nearest = min(ready, key=_distance_s)
        near = [endpoint_state for endpoint_state in ready if endpoint_state.region == nearest.region]
        if forecast.round_trip_s <= nearest.round_trip_s or not self._predictor.is_rate_known(near):
            return forecast
        there = self.forecast(queued, near, now_s, compares=False)
        return min(forecast, there, key=lambda one: self.position(one, now_s).ttft_s)

    def _part_of(self, ready: Sequence[EndpointState]) -> _Part:
        """Returns the key of a part of the replicas; all have the same key while they are in one region."""
        return tuple(map(id, ready)) if self.is_regional else ()

    def _running_work_at(self, ready: Sequence[EndpointState]) -> RunningWork:
        """Returns the work of the requests that run at these replicas."""
        part = self._part_of(ready)
        running_work = self._running_work.get(part)
        if running_work is None:
            running = self._running_requests
            if self.is_regional:
                running = [queued for queued in running if _runs_at(queued, ready)]
            running_work = self._running_work[part] = self._predictor.running_work(running)
        return running_work

    def _cold_start_forecast(self, queued: QueuedRequest, ahead: WorkAhead, now_s: float) -> Forecast:
        """Forecasts an entry while no replica is ready but one is starting; it will start empty."""
        regions = queued.request.regions
        coming = [
            (ready_in_s, endpoint_state)
            for endpoint_state in self._endpoint_states
            if (ready_in_s := endpoint_state.ready_in_s) is not None
            and (regions is None or endpoint_state.region in regions)
        ]
        if not coming:
            return Forecast(ahead, PredictedWait(False, 0.0), 0.0)
        cold_s, endpoint_state = min(coming, key=lambda pair: pair[0])
        if not endpoint_state.credits.total.slots and self._last_served is not None:
            endpoint_state = self._last_served
        total = endpoint_state.credits.total
        # The capacity of the first replica is unknown until it has started.
        wait = (
            self._predictor.wait(queued, ahead, total, [endpoint_state], self._predictor.running_work(()), None)
            if total.slots
            else AT_ONCE
        )
        prefill_s = self._selector.usual_prefill_s(queued, endpoint_state, ahead.entries if wait.at_once else 0, now_s)
        return Forecast(
            ahead,
            PredictedWait(False, wait.seconds),
            prefill_s,
            cold_s,
            round_trip_s=endpoint_state.round_trip_s if self.is_regional else 0.0,
        )

    def _simulate(
        self,
        queued: QueuedRequest,
        ahead: WorkAhead,
        ready: Sequence[EndpointState],
        running_work: RunningWork,
        free: int,
        now_s: float,
    ) -> PredictedTurn | None:
        """Simulates the queue until this request is dispatched; None: no simulation is possible."""
        if not self._simulates_queues or not can_simulate(queued.queue, queued, ahead):
            return None
        key = queued.queue, self._part_of(ready)
        simulation = self._simulations.get(key)
        if simulation is None:
            steps_per_s = self._predictor.steps_per_s(ready, running_work)
            if not steps_per_s:
                return None
            simulation = QueueSimulation(
                queued.queue,
                self.joins,
                self._predictor,
                self._allocator,
                ready=ready,
                steps_per_s=steps_per_s,
                now_s=now_s,
            )
            self._simulations[key] = simulation
        return simulation.until_dispatched(queued, running_work, free, self._predictor.weights.output)


def _widened_wait(ahead: WorkAhead, ready: Sequence[EndpointState], wait: PredictedWait) -> PredictedWait:
    """Shortens the wait if a replica's concurrency window is still in slow start.

    The current window says little about the wait, because it grows with every first token.
    """
    if wait.at_once:
        return wait
    widened_s = [
        in_s for endpoint_state in ready if (in_s := endpoint_state.widened_in_s(ahead.entries + 1)) is not None
    ]
    return min([wait, *(PredictedWait(False, in_s) for in_s in widened_s)], key=lambda candidate: candidate.seconds)


def _distance_s(endpoint_state: EndpointState) -> float:
    return endpoint_state.round_trip_s


def _round_trip_s(queued: QueuedRequest, ready: Sequence[EndpointState], *, at_once: bool) -> float:
    """Returns the round trip to the nearest of these replicas, if `at_once` of those that can take an entry now."""
    taking = [state for state in ready if queued.cost.within(state.free)] if at_once else ready
    return min(map(_distance_s, taking or ready))


def _runs_at(queued: QueuedRequest, endpoint_states: Sequence[EndpointState]) -> bool:
    return queued.allocation is not None and queued.allocation.endpoint_state in endpoint_states


def can_simulate(queue: QuotaQueue, queued: QueuedRequest, ahead: WorkAhead) -> bool:
    """Whether a queue can be simulated at low cost: few tenants, one class, few requests ahead."""
    return (
        ahead.entries <= MAX_AHEAD
        and len(queue.tenants) < MAX_TENANTS
        and len(queue) == queue.waiting_in(queued.flow.priority)
    )


class QueueSimulation:
    """Simulation of one quota queue from now on, with its waiting requests and expected arrivals.

    Args:
        queue: The quota queue.
        joins: Arrival rates by tenant.
        predictor: Predictor of output lengths.
        allocator: Slots that each tenant holds.
        ready: The replicas.
        steps_per_s: Engine steps per second of one replica.
        now_s: Now.
    """

    def __init__(
        self,
        queue: QuotaQueue,
        joins: ArrivalRates,
        predictor: LatencyPredictor,
        allocator: CapacityAllocator,
        ready: Sequence[EndpointState],
        steps_per_s: float,
        now_s: float,
    ) -> None:
        self._queue = queue
        self._predictor = predictor
        self._allocator = allocator
        self._overcommit_slots = allocator.overcommit_slots(queue.quota, ready)
        self._tenant_index: dict[str, int] = {}
        self._tenants: list[SimulatedTenant] = []
        self._turn_by_key: dict[tuple[str, int, int], PredictedTurn] = {}
        for entries in queue.tenants.values():
            first = next(iter(entries))
            self._add(first, entries, joins.per_s(first.tenant.id, now_s) / steps_per_s)
        self._min_counter = min((simulated.counter for simulated in self._tenants), default=0.0)
        for tenant, flow in joins:
            if len(self._tenants) == MAX_TENANTS:
                break
            if tenant not in self._tenant_index and (rate := joins.per_s(tenant, now_s)) > 0.0:
                self._tenant_index[tenant] = len(self._tenants)
                lead = max(self._min_counter, queue.fair_queue.over_service(flow))
                steps = predictor.steps_of(predictor.typical_service)
                self._append(flow.path[0], lead, 0, steps, rate / steps_per_s)

    def until_dispatched(
        self, queued: QueuedRequest, running_work: RunningWork, free: int, output: float
    ) -> PredictedTurn:
        """Returns the predicted turn of a request.

        Args:
            queued: The request, waiting or not yet joined.
            running_work: Work of the running requests.
            free: Free slots that the request may use.
            output: Service of one output token.
        """
        tenant = queued.tenant.id
        own_due_s = due_s(queued)
        own_ahead = sum(
            due_s(other) <= own_due_s for other in self._queue.tenants.get(tenant, ()) if other is not queued
        )
        known = self._turn_by_key.get((tenant, own_ahead, free))
        if known is not None:
            return known
        if tenant not in self._tenant_index:
            self._add(queued, (), 0.0)
            own_tenant = self._tenants[-1]
            own_tenant.counter = max(own_tenant.counter, self._min_counter)
        turns = [
            simulate_dispatch(
                self._tenants,
                self._tenant_index[tenant],
                own_ahead,
                [(steps, self._tenant_index.get(tenant_id, -1)) for steps, tenant_id in case],
                free,
                output,
                self._overcommit_slots,
            )
            for case in running_work.cases
        ]
        turn = self._turn_by_key[tenant, own_ahead, free] = PredictedTurn(
            *(sum(column) / len(turns) for column in zip(*turns, strict=True))
        )
        return turn

    def _add(self, queued: QueuedRequest, waiting: Collection[QueuedRequest], joins_per_step: float) -> None:
        tenant, predictor = queued.tenant, self._predictor
        self._tenant_index[tenant.id] = len(self._tenants)
        service_lead = self._queue.fair_queue.over_service(queued.flow)
        next_ones = sorted(islice(waiting, MAX_AHEAD), key=due_s)
        prompts = [predictor.prompt_service_of(next_one) for next_one in next_ones]
        self._append(tenant, service_lead, len(waiting), predictor.steps(queued), joins_per_step, prompts)

    def _append(
        self,
        tenant: FlowLevel,
        lead: float,
        waiting: int,
        steps: float,
        joins_per_step: float,
        prompts: Sequence[float] = (),
    ) -> None:
        self._tenants.append(
            SimulatedTenant(
                counter=lead,
                weight=tenant.weight,
                waiting=waiting,
                prompt_service=self._predictor.prompt_service,
                steps=steps,
                joins_per_step=joins_per_step,
                held=self._allocator.holdings.held_by(tenant),
                prompts=prompts,
            )
        )


def due_s(queued: QueuedRequest) -> float:
    """Returns the deadline by which requests of one API key are ordered."""
    return queued.arrived_s + PATIENCE_S if queued.wait_deadline_s is None else queued.wait_deadline_s
