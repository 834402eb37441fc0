"""Forecasts for requests that wait or might join, shared until something changes."""

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from maitred.core.flow import Flow, FlowLevel, QueuePosition
from maitred.dispatch.capacity import CapacityAllocator
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.prediction import AT_ONCE, PredictedWait
from maitred.dispatch.policy.simulation import (
    MOST_AHEAD,
    MOST_TENANTS,
    PredictedTurn,
    SimulatedTenant,
    simulate_dispatch,
)
from maitred.dispatch.pool_queue import PoolQueue, QueuedRequest
from maitred.dispatch.predictor import LatencyPredictor, RunningWork
from maitred.dispatch.selector import ReplicaSelector, prefill_ease
from maitred.fairness.entry import WorkAhead
from maitred.fairness.vtc import PATIENCE_S

_NOBODY = WorkAhead(0, 0.0)
_MEMORY_S = 10.0
"""Arrivals of so long ago count for 37 % in the rates."""
_SAME_S = 0.005
"""Who joins so soon after it was asked what would become of it is told the same, if nothing has changed."""


class ArrivalRates:
    """How often each tenant sends something that may wait; a mean that forgets."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float, Flow]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[tuple[str, Flow]]:
        """Iterates over the tenants and their last flows, the latest one last."""
        return ((tenant, flow) for tenant, (_, _, flow) in self._of.items())

    def observe(self, flow: Flow, now_s: float) -> None:
        """Counts one arrival of a tenant."""
        tenant, count = flow.path[0].id, 1.0
        known = self._of.pop(tenant, None)
        if known is not None:
            count += known[0] * math.exp((known[1] - now_s) / _MEMORY_S)
        elif len(self._of) >= 2 * MOST_TENANTS:
            del self._of[next(iter(self._of))]
        self._of[tenant] = (count, now_s, flow)

    def per_s(self, tenant: str, now_s: float) -> float:
        """Returns a tenant's arrival rate now."""
        known = self._of.get(tenant)
        if known is None:
            return 0.0
        count, seen_s, _ = known
        return count * math.exp(-(now_s - seen_s) / _MEMORY_S) / _MEMORY_S


class Forecast(Struct, frozen=True):
    """Forecast of one request, before any correction."""

    ahead: WorkAhead
    wait: PredictedWait
    prefill_s: float
    cold_s: float = 0.0
    """Of the wait, until a replica is ready; it says so itself, so no correction is made to it."""
    ample: bool = False
    """There is surely room for it at the only replica, whoever asks, and nobody is before it."""


class _CachedForecast(Struct, frozen=True):
    """Last forecast, with the entry that it was made for."""

    queued: QueuedRequest
    ready: Sequence[EndpointState]
    now_s: float
    forecast: Forecast


class ForecastCache:
    """Keeps what forecasts have in common until something changes: most requests of an overload are only asked about.

    Args:
        endpoint_states: All replicas.
        allocator: Who may have what.
        predictor: How long things take.
        choice: Knows what replicas hold of a prompt.
        played: Whether lines share among tenants, so that they have to be played through.
    """

    def __init__(
        self,
        endpoint_states: Sequence[EndpointState],
        allocator: CapacityAllocator,
        predictor: LatencyPredictor,
        choice: ReplicaSelector,
        *,
        played: bool,
    ) -> None:
        self.at_work: dict[QueuedRequest, None] = {}
        """Those that were released and have not left; to be followed by `changed`."""
        self._endpoint_states = endpoint_states
        self._allocator = allocator
        self._predictor = predictor
        self._selector = choice
        self._simulated = played
        self.joins = ArrivalRates()
        """Who sends how often; whoever adds to it calls `changed`."""
        self._cached: RunningWork | None = None
        self._simulations: dict[PoolQueue, QueueSimulation] = {}
        self.last: _CachedForecast | None = None
        """The last one; None: something has changed since."""

    def reconfigure(self, *, played: bool) -> None:
        """Lines share among tenants, or not, from now on; and whatever else has changed."""
        self._simulated = played
        self.invalidate()

    def invalidate(self) -> None:
        """Something joined, left, was released or advanced."""
        self._cached = self.last = None
        if self._simulations:
            self._simulations.clear()

    def on_join(self, flow: Flow, now_s: float) -> None:
        """A request of a flow has begun to wait."""
        self.joins.observe(flow, now_s)
        self.last = None
        if self._simulations:
            self._simulations.clear()

    def remember(self, queued: QueuedRequest, now_s: float) -> _CachedForecast | None:
        """Returns the forecast just made for this entry; None: there was none, or something has changed since."""
        last = self.last
        return last if last is not None and last.queued is queued and now_s - last.now_s <= _SAME_S else None

    def predict(self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> Forecast:
        """Forecasts an entry that would join now; the entry keeps the forecast, and so does this until a change."""
        last = self.last
        same = last is not None and (last.queued is queued or last.queued.request == queued.request)
        if last is None or not same or now_s - last.now_s > _SAME_S or last.ready != ready:
            last = self.last = _CachedForecast(queued, ready, now_s, self.forecast(queued, ready, now_s))
        forecast = last.forecast
        queued.raw_wait_s, queued.prefill_s = forecast.wait.seconds, forecast.prefill_s
        queued.predicted_position = self.position(forecast, now_s)
        return forecast

    def position(self, forecast: Forecast, now_s: float) -> QueuePosition:
        """Returns a forecast as it is told to callers."""
        cold_s = forecast.cold_s
        position = self._predictor.position(forecast.ahead.entries, forecast.wait.seconds, forecast.prefill_s, now_s)
        if not cold_s:
            return position
        return replace(position, wait_s=position.wait_s + cold_s, ttft_s=position.ttft_s + cold_s)

    def forecast(self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> Forecast:
        """Forecasts the work ahead of an entry, its dispatch, and its prefill then."""
        queue = queued.queue
        ahead = queue.fair_queue.ahead(queued, now_s) if queue.waiting else _NOBODY
        if not ready:
            return self._cold(queued, ahead, now_s)
        allocator = self._allocator
        if not ahead.entries and allocator.is_ample(queued.cost, ready):
            return Forecast(ahead, AT_ONCE, self._selector.prefill_s(queued, ready[0], 0, now_s), ample=True)
        above = allocator.above_share(queued, queued.queue.quota, ready, now_s)
        free = allocator.free_capacity(queued, ready, above_share=above)
        wait = AT_ONCE
        leads = not ahead.entries or (allocator.headroom > 0 and allocator.may_lead(queued))
        if not leads or not queued.cost.within(free):
            if self._cached is None:
                self._cached = self._predictor.at_work(self.at_work)
            free = allocator.without_overcommit(free, ready)
            turn = self._simulate(queued, ahead, ready, self._cached, free.slots, now_s)
            turn_s = None if turn is None else self._predictor.turn_s(turn, ready, self._cached, now_s)
            if turn is None or turn.steps or queued.cost.blocks > free.blocks:
                wait = _widened_wait(
                    ahead, ready, self._predictor.wait(queued, ahead, free, ready, self._cached, turn_s)
                )
        endpoint_state = max(ready, key=prefill_ease)
        if wait.at_once:
            return Forecast(ahead, wait, self._selector.prefill_s(queued, endpoint_state, ahead.entries, now_s))
        # Places come free with a report, and with that a step begins.
        prefill_s = self._selector.prefill_s(queued, endpoint_state, 0, now_s, released_s=endpoint_state.step_began_s)
        return Forecast(ahead, wait, prefill_s)

    def _cold(self, queued: QueuedRequest, ahead: WorkAhead, now_s: float) -> Forecast:
        """Where a replica comes because requests wait for it: it comes empty, and takes those ahead first."""
        coming = [
            (comes_s, endpoint_state)
            for endpoint_state in self._endpoint_states
            if (comes_s := endpoint_state.comes_in_s) is not None
        ]
        if not coming:
            return Forecast(ahead, PredictedWait(False, 0.0), 0.0)
        cold_s, endpoint_state = min(coming, key=lambda pair: pair[0])
        total = endpoint_state.credits.total
        # Of one that has never been there, nobody knows how much it takes at once.
        wait = (
            self._predictor.wait(queued, ahead, total, [endpoint_state], self._predictor.at_work(()), None)
            if total.slots
            else AT_ONCE
        )
        prefill_s = self._selector.usual_prefill_s(queued, endpoint_state, ahead.entries if wait.at_once else 0, now_s)
        return Forecast(ahead, PredictedWait(False, wait.seconds), prefill_s, cold_s)

    def _simulate(
        self,
        queued: QueuedRequest,
        ahead: WorkAhead,
        ready: Sequence[EndpointState],
        at_work: RunningWork,
        free: int,
        now_s: float,
    ) -> PredictedTurn | None:
        """When it is a request's turn, where the line shares among tenants and can be played through."""
        if not self._simulated or not can_simulate(queued.queue, queued, ahead):
            return None
        contest = self._simulations.get(queued.queue)
        if contest is None:
            steps_per_s = self._predictor.steps_per_s(ready, at_work)
            if not steps_per_s:
                return None
            contest = QueueSimulation(
                queued.queue, self.joins, self._predictor, self._allocator, ready, steps_per_s, now_s
            )
            self._simulations[queued.queue] = contest
        return contest.until_dispatched(queued, at_work, free, self._predictor.weights.output)


def _widened_wait(ahead: WorkAhead, ready: Sequence[EndpointState], wait: PredictedWait) -> PredictedWait:
    """The wait where a replica takes more with every first token, because nothing has come to queue in it so far.

    What it takes now says nothing of how long a line will wait then.
    """
    if wait.at_once:
        return wait
    widened_s = [
        in_s for endpoint_state in ready if (in_s := endpoint_state.widened_in_s(ahead.entries + 1)) is not None
    ]
    return min([wait, *(PredictedWait(False, in_s) for in_s in widened_s)], key=lambda candidate: candidate.seconds)


def can_simulate(queue: PoolQueue, queued: QueuedRequest, ahead: WorkAhead) -> bool:
    """Whether it pays to play a line through, and can be done: few tenants wait, of one class, and not for long."""
    return (
        ahead.entries <= MOST_AHEAD
        and len(queue.tenants) < MOST_TENANTS
        and len(queue) == queue.waiting_in(queued.flow.priority)
    )


class QueueSimulation:
    """Simulation of one pool queue as of one moment: those that wait, and arrivals that may come.

    Args:
        queue: The room.
        joins: Who sends how often.
        predictor: How long answers are.
        allocator: Who has which places.
        ready: The replicas.
        steps_per_s: Of these.
        now_s: Now.
    """

    def __init__(
        self,
        queue: PoolQueue,
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
        self._index: dict[str, int] = {}
        self._tenants: list[SimulatedTenant] = []
        self._simulated: dict[tuple[str, int, int], PredictedTurn] = {}
        for entries in queue.tenants.values():
            first = next(iter(entries))
            self._add(first, entries, joins.per_s(first.tenant.id, now_s) / steps_per_s)
        self._level = min((runner.counter for runner in self._tenants), default=0.0)
        for tenant, flow in joins:
            if len(self._tenants) == MOST_TENANTS:
                break
            if tenant not in self._index and (rate := joins.per_s(tenant, now_s)) > 0.0:
                self._index[tenant] = len(self._tenants)
                lead = max(self._level, queue.fair_queue.over_service(flow))
                steps = predictor.steps_of(predictor.typical_service)
                self._append(flow.path[0], lead, 0, steps, rate / steps_per_s)

    def until_dispatched(self, queued: QueuedRequest, at_work: RunningWork, free: int, output: float) -> PredictedTurn:
        """When a request is released.

        Args:
            queued: It waits here, or might.
            at_work: What runs.
            free: Places that it may use.
            output: Service of a token of an answer.
        """
        tenant = queued.tenant.id
        own_due_s = due_s(queued)
        before = sum(due_s(other) <= own_due_s for other in self._queue.tenants.get(tenant, ()) if other is not queued)
        known = self._simulated.get((tenant, before, free))
        if known is not None:
            return known
        if tenant not in self._index:
            self._add(queued, (), 0.0)
            mine = self._tenants[-1]
            mine.counter = max(mine.counter, self._level)
        turns = [
            simulate_dispatch(
                self._tenants,
                self._index[tenant],
                before,
                [(steps, self._index.get(tenant_id, -1)) for steps, tenant_id in case],
                free,
                output,
                self._overcommit_slots,
            )
            for case in at_work.cases
        ]
        played = self._simulated[tenant, before, free] = PredictedTurn(
            *(sum(column) / len(turns) for column in zip(*turns, strict=True))
        )
        return played

    def _add(self, queued: QueuedRequest, waiting: Collection[QueuedRequest], joins_per_step: float) -> None:
        tenant, predictor = queued.tenant, self._predictor
        self._index[tenant.id] = len(self._tenants)
        lead = self._queue.fair_queue.over_service(queued.flow)
        next_ones = sorted(islice(waiting, MOST_AHEAD), key=due_s)
        prompts = [predictor.prompt_service_of(next_one) for next_one in next_ones]
        self._append(tenant, lead, len(waiting), predictor.steps(queued), joins_per_step, prompts)

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
                lead,
                tenant.weight,
                waiting,
                self._predictor.prompt_service,
                steps,
                joins_per_step,
                self._allocator.holdings.held_by(tenant),
                prompts,
            )
        )


def due_s(queued: QueuedRequest) -> float:
    """Returns the time that orders the requests of one key."""
    return queued.arrived_s + PATIENCE_S if queued.first_token_by_s is None else queued.first_token_by_s
