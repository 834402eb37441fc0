"""State of dispatch for one model, without an event loop: waiting, running and next requests.

Every method is synchronous and returns the requests that changed; `Dispatcher` wakes their tasks. The clock is an
argument, so tests can try every order of events.

A request is dispatched when it is at the head of its queue and a replica has credits for its prompt and its predicted
output. A smaller request never overtakes the head of the queue, because a large head would then wait for ever. A
request with more sequences than a replica has slots is dispatched once a quarter of the slots is free; the replica runs
its sequences by turns.
"""

import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Sequence, Set

from maitred.core.balance import CacheAwareBalancer
from maitred.core.errors import (
    Bug,
    DeadlineExceeded,
    MaitredError,
    ModelHeld,
    ModelLoadFailed,
    ModelLoading,
    ReplicaUnavailable,
)
from maitred.core.request import WaitCause
from maitred.dispatch.arrivals import ArrivalCounter
from maitred.dispatch.capacity import CapacityAllocator, untried_endpoints
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.endpoint import EndpointState, outage_of, retry_after_s
from maitred.dispatch.forecasts import ForecastCache
from maitred.dispatch.load_estimator import LoadEstimator
from maitred.dispatch.policy.credits import Cost, request_cost
from maitred.dispatch.policy.outputs import OutputLengths
from maitred.dispatch.policy.quotas import Quota
from maitred.dispatch.predictor import LatencyPredictor
from maitred.dispatch.queue import Allocation, DispatchCounters, QueuedRequest, QueueState, QuotaQueue
from maitred.dispatch.regions import RegionPlanner, out_of_region, permitted_endpoints
from maitred.dispatch.request import AnyEndpoint, DispatchRequest
from maitred.dispatch.selector import ReplicaSelector

_DEADLINE_PASSED_MESSAGE = (
    "The deadline for the first token passed while the request waited. Allow more time, or send it when less is going "
    "on."
)
_FAULT_MESSAGE = (
    "The server failed while it chose a replica for this request. This is not the request's fault; report it with the "
    "request id {}."
)
_log = logging.getLogger(__name__)
_MAX_STALE_DEADLINES = 64
"""The deadline heap is cleaned once it holds this many entries more than twice the waiting requests."""


class DispatchCore:
    """State of dispatch for one model: its quota queues and its endpoints.

    Args:
        endpoints: The replicas; at least one.
        config: The settings.
        balancer: Balancer that chooses the replica of a request; None: the replica with the most free slots.
        region: The gateway's own region; None: it has no name.
    """

    def __init__(
        self,
        endpoints: Sequence[AnyEndpoint],
        config: DispatchConfig,
        balancer: CacheAwareBalancer | None = None,
        region: str | None = None,
    ) -> None:
        self.region = region
        self.regions: RegionPlanner | None = None
        """Decides in which region a request runs; None: all replicas are in the own region, and no request is bound to
        others."""
        self._bounds: Counter[frozenset[str]] = Counter()
        """Regions that requests are bound to -> number of such requests that wait or run."""
        self.endpoint_states = [EndpointState(endpoint) for endpoint in endpoints]
        self.weights = config.service.weights
        self.predictor = LatencyPredictor(
            OutputLengths(config.output_quantile, config.unknown_output_share), self.weights
        )
        self.load_estimator = LoadEstimator(config.reports)
        self.selector = ReplicaSelector(balancer, self.predictor, self.load_estimator)
        self.allocator = CapacityAllocator(config, self.selector)
        self.queues = [QuotaQueue(quota, config.line) for quota in self.allocator.quotas.all]
        self.running_requests: dict[QueuedRequest, None] = {}
        """Dispatched requests that have not ended, in order of dispatch."""
        simulates_queues = config.line.policy == "fair"
        self.forecast_cache = ForecastCache(
            self.endpoint_states,
            self.running_requests,
            allocator=self.allocator,
            predictor=self.predictor,
            selector=self.selector,
            simulates_queues=simulates_queues,
        )
        self.counters = DispatchCounters()
        self.arrivals: ArrivalCounter | None = None
        """Counter of arrivals; None: the number of replicas does not depend on them."""
        self.stalled_s = 0.0
        """Total event-loop lag in seconds, which is subtracted from measured times to first token."""
        self._config = config
        self._queues = dict(zip(self.allocator.quotas.all, self.queues, strict=True))
        self._last_ready: list[EndpointState] = []
        """Endpoints that were ready at the last refresh."""
        self.idle_recorded = False
        """Whether no request waits, and the wait accounts and the predictor know it."""
        self._deadline_heap: list[tuple[float, int, QueuedRequest]] = []
        self._heap_tiebreaker = itertools.count()
        self._considered: QueuedRequest | None = None
        """Request that the current dispatch pass looks at, to which a fault is put down; None: none."""
        self._considered_queue: QuotaQueue | None = None
        """Queue that the current dispatch pass looks at; None: none."""

    def reconfigure(
        self,
        endpoints: Sequence[AnyEndpoint],
        config: DispatchConfig,
        balancer: CacheAwareBalancer | None,
        now_s: float,
    ) -> list[AnyEndpoint]:
        """Applies new endpoints and settings; waiting and running requests are kept.

        A removed replica gets no new requests; those that run there finish there. A replica is the same as before if
        its `admin_state` is the same object; it then keeps its credits, even if its client changed. If the queue order,
        the reserved shares or the pools changed, all requests move to new queues and the fairness counters start at
        zero.

        Returns:
            The endpoints that are new.
        """
        known = {id(endpoint_state.endpoint.admin_state): endpoint_state for endpoint_state in self.endpoint_states}
        self.endpoint_states[:] = [
            known.get(id(endpoint.admin_state)) or EndpointState(endpoint) for endpoint in endpoints
        ]
        for endpoint_state, endpoint in zip(self.endpoint_states, endpoints, strict=True):
            endpoint_state.endpoint = endpoint
            endpoint_state.update_region()
        new_endpoints = [endpoint for endpoint in endpoints if id(endpoint.admin_state) not in known]
        previous_config, self._config = self._config, config
        self.predictor.outputs.reconfigure(config.output_quantile, config.unknown_output_share)
        self.load_estimator = LoadEstimator(config.reports)
        self.selector.reconfigure(balancer, self.load_estimator)
        self.allocator.reconfigure(config)
        self.forecast_cache.reconfigure(simulates_queues=config.line.policy == "fair")
        if self.regions is not None:
            self.regions.config, self.regions.region = config.regions, self.region
        if (previous_config.line, previous_config.reserved, previous_config.pools) != (
            config.line,
            config.reserved,
            config.pools,
        ):
            self._rebuild_queues(config, now_s)
        return new_endpoints

    def _rebuild_queues(self, config: DispatchConfig, now_s: float) -> None:
        """Moves all waiting requests into new quota queues."""
        waiting = sorted((queued for queue in self.queues for queued in queue.all()), key=lambda queued: queued.number)
        self.allocator.rebuild_quotas(config)
        self.queues[:] = [QuotaQueue(quota, config.line) for quota in self.allocator.quotas.all]
        self._queues = dict(zip(self.allocator.quotas.all, self.queues, strict=True))
        for queue in self.queues:
            queue.keeps_lanes = self.regions is not None
        for queued in (*self.running_requests, *waiting):
            quota = self.allocator.quotas.quota_for(queued.flow.path)
            self._queues[quota].take_over(queued, now_s)
            if queued.allocation is not None:
                queued.allocation.quota = quota
                quota.allocate(queued.quota_cost)

    # --- queries ---

    @property
    def running(self) -> int:
        """Number of dispatched requests that have not ended."""
        return len(self.running_requests)

    @property
    def waiting(self) -> int:
        """Number of requests that wait in all queues."""
        waiting_count = 0
        for queue in self.queues:
            waiting_count += queue.waiting
        return waiting_count

    def refresh(self, now_s: float) -> list[EndpointState]:
        """Refreshes all endpoints and returns those that are ready."""
        ready = []
        is_regional = False
        for endpoint_state in self.endpoint_states:
            load = endpoint_state.load
            try:
                endpoint_state.refresh(now_s)
            except Exception as fault:  # one replica that cannot be read holds up no other
                endpoint_state.on_fault(fault)
            if endpoint_state.load is not load:
                self.forecast_cache.invalidate()
            if endpoint_state.ready:
                ready.append(endpoint_state)
            endpoint_state.is_far = endpoint_state.region != self.region
            if endpoint_state.is_far:
                is_regional = True
        if self._bounds and not is_regional:
            is_regional = any(self.region not in bounds for bounds in self._bounds)
        if is_regional is (self.regions is None):
            self._set_regional(now_s, is_regional=is_regional)
        if ready != self._last_ready:
            self._last_ready = ready
            self.forecast_cache.invalidate()
        return ready

    def _set_regional(self, now_s: float, *, is_regional: bool) -> None:
        """Begins or ends to choose the region of each request.

        That begins with the first replica of another region, or the first request that may not run in the own one. It
        ends when the last of both has left. Running and waiting requests stay where they are.
        """
        self.regions = None
        if is_regional:
            self.regions = RegionPlanner(
                self.region,
                self.endpoint_states,
                self._config.regions,
                predict=self.forecast_cache.predict,
                predictor=self.predictor,
                selector=self.selector,
            )
        self.allocator.regions = self.regions
        self.forecast_cache.is_regional = is_regional
        self.forecast_cache.invalidate()
        for queue in self.queues:
            queue.keep_lanes(keeps=is_regional)
            for queued in list(queue.away):
                queue.call_home(queued, now_s)

    def permitted_endpoints(
        self, dispatch_request: DispatchRequest, ready: Sequence[EndpointState]
    ) -> Sequence[EndpointState]:
        """Returns those of the ready endpoints where a request may run."""
        return permitted_endpoints(dispatch_request, ready)

    def is_own_demand(self, dispatch_request: DispatchRequest) -> bool:
        """Whether a request may run in the own region, so that replicas there are for it, wherever it runs."""
        regions = dispatch_request.regions
        return regions is None or self.region in regions

    def new_entry(self, dispatch_request: DispatchRequest) -> QueuedRequest:
        """Returns a queue entry for a request that has not joined a queue yet."""
        last = self.forecast_cache.last
        if last is not None and last.queued.request is dispatch_request and last.queued.state is QueueState.NEW:
            return last.queued  # the entry was created for the prediction of the wait
        config, wait_deadline_s = self._config, dispatch_request.ttft_deadline_s
        if wait_deadline_s is None and (config.ttft_s or config.tenant_ttft_s):
            ttft_s = config.ttft_objective_s(dispatch_request.flow)
            wait_deadline_s = None if ttft_s is None else dispatch_request.arrived_s + ttft_s
        queue = self._queues[self.allocator.quotas.quota_for(dispatch_request.flow.path)]
        expected_tokens, mean = self.predictor.outputs.lengths(
            dispatch_request.organisation, dispatch_request.max_tokens
        )
        service = (
            self.weights.prompt * dispatch_request.prompt_tokens + self.weights.output * mean * dispatch_request.choices
        )
        return QueuedRequest(
            dispatch_request,
            queue,
            costs=self._costs(dispatch_request, expected_tokens),
            expected_tokens=expected_tokens,
            service=service,
            wait_deadline_s=wait_deadline_s,
        )

    def _costs(self, dispatch_request: DispatchRequest, expected_tokens: int) -> list[Cost]:
        """Returns the cost of each prompt of a request."""
        prompts, block_tokens = dispatch_request.prompts, self.endpoint_states[0].block_tokens
        if len(prompts) == 1:
            return [
                request_cost(dispatch_request.prompt_tokens, dispatch_request.choices, expected_tokens, block_tokens)
            ]
        choices = max(1, dispatch_request.choices // max(1, len(prompts)))
        return [request_cost(len(prompt), choices, expected_tokens, block_tokens) for prompt in prompts]

    # --- events ---

    def dispatch_now(self, queued: QueuedRequest, now_s: float) -> bool:
        """Dispatches an entry at once if no request waits and a replica has credits.

        Returns:
            Whether the entry was dispatched. If it was not, the only change is that its tenant was observed.
        """
        if not self.idle_recorded and self.waiting:
            return False
        queue, forecast_cache = queued.queue, self.forecast_cache
        cached = forecast_cache.cached_for(queued, now_s)
        ready = self.refresh(now_s) if cached is None or self.regions is not None else cached.ready
        self.allocator.holdings.observe(queued.tenant, now_s)
        regions = queued.request.regions
        if regions is not None and self.regions is None and self.region not in regions:
            return False  # `join` begins to choose regions
        is_ample = cached is not None and cached.forecast.ample
        if is_ample:
            endpoint_state: EndpointState | None = ready[0]  # the forecast for this entry is still valid
        else:
            endpoint_state = self._endpoint_for_arrival(queued, ready, now_s)
        if endpoint_state is None or (
            queued.wait_deadline_s is not None and self._would_miss_deadline(queued, endpoint_state, now_s)
        ):
            return False
        if cached is None:
            permitted = ready if self.regions is None else self.permitted_endpoints(queued.request, ready)
            self.forecast_cache.forecast_and_store(queued, permitted, now_s)
        if not is_ample:
            queued.prefill_s = self.selector.prefill_s(queued, endpoint_state, 0, now_s)
        queued.joined_s = now_s
        if self.arrivals is not None and self.is_own_demand(queued.request):
            self.arrivals.on_arrival(queued)
        forecast_cache.joins.observe(queued.flow, now_s)
        queue.fair_queue.pass_through(queued, now_s)
        if regions is not None:
            self._bounds[regions] += 1
        self._start(queued, endpoint_state, queue.quota, now_s)
        if not self.idle_recorded:
            self._on_idle(now_s)
        return True

    def _endpoint_for_arrival(
        self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float
    ) -> EndpointState | None:
        """Returns the endpoint for a request that arrives while no request waits; None: none has credits."""
        allocator, quota = self.allocator, queued.queue.quota
        if not ready:
            return None
        if allocator.is_ample(queued.cost, ready):
            return ready[0]
        above_share = allocator.above_share(queued, quota, ready, now_s)
        endpoint_state = allocator.endpoint_for(queued, quota, ready, now_s, above_share=above_share)
        return None if isinstance(endpoint_state, WaitCause) else endpoint_state

    def reattach(self, queued: QueuedRequest, replica: str, now_s: float) -> None:
        """Registers an entry that runs at a replica since before a restart, without a check of its free credits."""
        endpoint_state = next(
            endpoint_state for endpoint_state in self.endpoint_states if endpoint_state.endpoint.name == replica
        )
        queued.joined_s = now_s
        if queued.request.regions is not None:
            self._bounds[queued.request.regions] += 1
        queued.queue.fair_queue.pass_through(queued, now_s)
        self._start(queued, endpoint_state, queued.queue.quota, now_s)

    def join(self, queued: QueuedRequest, now_s: float) -> list[EndpointState]:
        """Enqueues an entry. Returns the ready endpoints, so that the caller can dispatch without another refresh."""
        cached = self.forecast_cache.cached_for(queued, now_s)
        if queued.request.regions is not None:
            self._bounds[queued.request.regions] += 1
        ready = self.refresh(now_s)
        self.allocator.holdings.observe(queued.tenant, now_s)
        permitted = self.permitted_endpoints(queued.request, ready)
        if permitted and (cached is None or cached.ready != permitted):
            self.forecast_cache.forecast_and_store(queued, permitted, now_s)
        queued.state, self.idle_recorded = QueueState.WAITING, False
        queued.joined_s = now_s
        if self.arrivals is not None and self.is_own_demand(queued.request):
            self.arrivals.on_arrival(queued)
        queued.queue.enqueue(queued, now_s)
        self.forecast_cache.on_join(queued.flow, now_s)
        self._track_deadline(queued)
        return ready

    def requeue(
        self,
        queued: QueuedRequest,
        now_s: float,
        *,
        prompts: Sequence[int],
        answer_by_s: float | None,
        draw: float,
        suspend_s: float | None = None,
    ) -> None:
        """Puts a request whose replica failed back into its queue, and releases its credits there.

        The request keeps its arrival time, precedes requests that have not run, and is not charged for its prompt
        again.

        Args:
            queued: The request.
            now_s: Now.
            prompts: Indexes of the prompts whose outputs are not complete.
            answer_by_s: Deadline of the whole output, in monotonic seconds; None: no deadline.
            draw: Jitter from 0 to 1 for the time during which the replica gets no requests if it still seems ready.
            suspend_s: Fixed length of that time; None: exponential backoff.
        """
        allocation = self._release(queued, lost=True)
        allocation.endpoint_state.refresh(now_s)
        if allocation.endpoint_state.ready:
            allocation.endpoint_state.suspend(now_s, draw, suspend_s)
            queued.failed_at.add(allocation.endpoint_state.endpoint.name)
        queued.keep_prompts(prompts)
        queued.allocation, queued.state, queued.joined_s, self.idle_recorded = None, QueueState.WAITING, now_s, False
        queued.requeues += 1
        queued.predicted_position = None  # the predictor must not learn from a wait that a failure caused
        if queued.has_output:
            queued.wait_deadline_s = answer_by_s
        queued.queue.requeue(queued, now_s)
        self._track_deadline(queued)

    def has_other_replica(self, queued: QueuedRequest, now_s: float) -> bool:
        """Whether another ready replica exists that has not failed this request."""
        assert queued.allocation is not None
        endpoint_state = queued.allocation.endpoint_state
        if len(self.endpoint_states) == 1 and self.endpoint_states[0] is endpoint_state:
            return False
        others = untried_endpoints(queued, self.permitted_endpoints(queued.request, self.refresh(now_s)))
        return any(other is not endpoint_state for other in others)

    def has_idle_replica(self, queued: QueuedRequest, now_s: float) -> bool:
        """Whether another ready replica that has not failed this request has room for it, while no request waits."""
        if self.waiting or not self.has_other_replica(queued, now_s):
            return False
        assert queued.allocation is not None
        failed = queued.allocation.endpoint_state
        others = [endpoint_state for endpoint_state in self.refresh(now_s) if endpoint_state is not failed]
        return self.allocator.hedge_endpoint(queued, others, now_s) is not None

    def hedge(self, queued: QueuedRequest, now_s: float) -> Allocation | None:
        """Allocates credits at a second replica for a dispatched request that has produced no token.

        Returns None while any request waits, because a hedge may only use idle credits.
        """
        if (
            queued.state is not QueueState.DISPATCHED
            or queued.allocation is None
            or queued.allocation.has_output
            or self.waiting
        ):
            return None
        others = [
            endpoint_state
            for endpoint_state in self.refresh(now_s)
            if endpoint_state is not queued.allocation.endpoint_state
        ]
        endpoint_state = self.allocator.hedge_endpoint(queued, others, now_s)
        if endpoint_state is None:
            return None
        allocation = Allocation(
            endpoint_state,
            hold=endpoint_state.acquire(queued.costs, now_s),
            quota=queued.allocation.quota,
            since_s=now_s,
            stalled_s=self.stalled_s,
        )
        self.allocator.allocate(queued, allocation.quota, self._last_ready)
        self.selector.on_dispatch(queued, endpoint_state)
        self.forecast_cache.invalidate()
        return allocation

    def settle_hedge(self, queued: QueuedRequest, second: Allocation, *, won: bool) -> None:
        """Releases the losing allocation of a hedged request: the first if the hedge won, else the hedge."""
        assert queued.allocation is not None
        loser = second
        if won:
            queued.allocation, loser = second, queued.allocation
            queued.predicted_position = None  # the prediction was made for the other replica
        loser.endpoint_state.release(loser.hold)
        self.allocator.release(queued, loser.quota)
        self.forecast_cache.invalidate()

    def run_dispatch_pass(self, now_s: float, ready: Sequence[EndpointState] | None = None) -> list[QueuedRequest]:
        """Dispatches requests that have credits and fails those whose deadline has passed. Returns these requests.

        Call this after every change: a request joined or left, a load report came, or a replica became ready or was
        lost.

        Args:
            now_s: Now.
            ready: The result of a `refresh` just before; None: this method refreshes.
        """
        changed_requests: list[QueuedRequest] = []
        if not self.waiting:
            if not self.idle_recorded:
                self._on_idle(now_s)
            return changed_requests
        self.idle_recorded = False
        if ready is None:
            ready = self.refresh(now_s)
        is_unexplained, failed = False, set[QueuedRequest]()
        while True:
            self._consider_nobody()
            try:
                self._run_pass(changed_requests, ready, now_s)
                break
            except Exception as fault:  # it fails the request that caused it, and all others go on
                culprit = self._considered or (self.regions.considered if self.regions is not None else None)
                culprits = [culprit] if culprit is not None else []
                if culprit is None and is_unexplained and self._considered_queue is not None:
                    culprits = self._considered_queue.all()  # they cannot be put in an order
                self._log_fault(fault, culprits)
                if (not culprits and is_unexplained) or not failed.isdisjoint(culprits):
                    break  # what fails is no request, or its removal; the next pass tries it again
                is_unexplained = not culprits
                failed.update(culprits)
                for queued in culprits:
                    self.fail_faulty(queued, now_s)
                    changed_requests.append(queued)
        self._consider_nobody()
        return changed_requests

    def _consider_nobody(self) -> None:
        self._considered = self._considered_queue = None
        if self.regions is not None:
            self.regions.considered = None

    def _run_pass(self, changed: list[QueuedRequest], ready: Sequence[EndpointState], now_s: float) -> None:
        """Runs one dispatch pass; a fault that is raised was caused by what the pass looked at last."""
        self._fail_expired(changed, now_s)
        if not ready:
            self._fail_without_replica(changed, now_s)
            for queue in self.queues:
                queue.wait_account.set_blocked_head(now_s, ("", WaitCause.COLD_START) if len(queue) else None)
            self.predictor.on_unsaturated()
            return
        common_queue = self.queues[-1]
        for queue in self.queues:
            blocked_head = self._dispatch_queue(queue, queue.quota, ready, changed, now_s)
            self._considered = self._considered_queue = None
            queue.wait_account.set_blocked_head(now_s, blocked_head)
        if not len(common_queue):
            for queue in self.queues[:-1]:
                if queue.quota.borrows_common and len(queue):
                    blocked_head = self._dispatch_queue(queue, self.allocator.quotas.common, ready, changed, now_s)
                    self._considered = self._considered_queue = None
                    queue.wait_account.set_blocked_head(now_s, blocked_head)
        if self.regions is not None:
            self._fail_out_of_region(ready, changed, now_s)
        if self.waiting and self.regions is None:  # while some wait for one region, another one may be idle
            self.predictor.on_saturated(sum(endpoint_state.load.steps for endpoint_state in ready) // len(ready), now_s)
        else:
            self.predictor.on_unsaturated()

    def _log_fault(self, fault: BaseException, culprits: Sequence[QueuedRequest]) -> None:
        whom = f"request {culprits[0].request.id}" if len(culprits) == 1 else f"{len(culprits)} requests"
        effect = f"fails {whom}" if culprits else "is tried again"
        _log.error("A fault in a dispatch pass %s; all others go on.", effect, exc_info=fault)

    def fail_faulty(self, queued: QueuedRequest, now_s: float) -> None:
        """Fails a request because a step for it has raised, and frees all that it holds, however far that had come.

        The owner must still call `leave`.
        """
        queue, state = queued.queue, queued.state
        if state is QueueState.NEW:
            return
        is_in_queue = queued in queue.tenants.get(queued.tenant.id, ())
        was_taken = state is QueueState.DISPATCHED or (state is QueueState.WAITING and not is_in_queue)
        queued.state = QueueState.FAILED
        queued.failure = Bug(_FAULT_MESSAGE.format(queued.request.id))
        try:
            if queued.allocation is not None:
                self._release(queued, lost=False)
                queued.allocation = None
            if is_in_queue:
                queue.remove(queued, now_s)
            if was_taken:
                queue.fair_queue.done(queued.flow)
            self._refund(queued)
        except Exception:  # the request has failed already, and the pass goes on
            _log.exception("Not all that request %s held could be freed.", queued.request.id)
        self.forecast_cache.invalidate()
        self.counters.on_rejection(queued.failure.code)

    def leave(
        self, queued: QueuedRequest, now_s: float, *, finished: bool, lost: bool = False, moved: bool = False
    ) -> None:
        """Removes an entry in any state and releases its credits and quota. A second call has no effect.

        Args:
            queued: The request.
            now_s: Now.
            finished: Whether the request completed normally.
            lost: Whether the replica failed the request.
            moved: Whether the request was moved to another model.
        """
        state, queued.state = queued.state, QueueState.GONE
        if queued.request.regions is not None and state not in (QueueState.NEW, QueueState.GONE):
            self._release_bounds(queued.request.regions)
        queued.failure = None  # its traceback may refer to this entry, which would be a reference cycle
        if state is QueueState.WAITING:
            self._refund(queued)
            queued.queue.remove(queued, now_s)
            self.forecast_cache.invalidate()
            if moved:
                self.counters.moved += 1
            else:
                self.counters.left_waiting += 1
        elif state is QueueState.DISPATCHED:
            self._release(queued, lost=lost)
            self._refund(queued)
            queued.queue.fair_queue.done(queued.flow)
            if finished:
                self.predictor.on_finished(queued)
                if self.arrivals is not None and self.is_own_demand(queued.request):
                    self.arrivals.on_finished(queued, now_s)
        if state is not QueueState.GONE and not finished:
            self.counters.wasted_tokens += queued.output_tokens

    def _release_bounds(self, regions: frozenset[str]) -> None:
        """Forgets that a request which has left was bound to these regions."""
        self._bounds[regions] -= 1
        if not self._bounds[regions]:
            del self._bounds[regions]

    def on_submitted(self, queued: QueuedRequest) -> None:
        """Records that the next prompt of the request was sent to the replica."""
        allocation = queued.allocation
        if (
            allocation is not None and allocation.endpoint_state.endpoint.reports_capacity
        ):  # other replicas never report which submissions they have received
            allocation.endpoint_state.credits.on_submitted(allocation.hold)

    def charge_tokens(self, queued: QueuedRequest, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Charges the actual tokens of an entry to its flow.

        Args:
            queued: A dispatched request.
            prompt_tokens: Tokens of prompts whose first token came now, including cached tokens.
            cached_tokens: Those prompt tokens that were found in the prefix cache.
            output_tokens: New output tokens.
        """
        allocation = queued.allocation
        if queued.state is not QueueState.DISPATCHED or allocation is None:
            return
        if not allocation.has_output:
            queued.has_output = allocation.has_output = True
            allocation.endpoint_state.credits.on_answered(allocation.hold)
        queued.reported_prompt_tokens += prompt_tokens
        queued.output_tokens += output_tokens
        weights = self.weights
        if service := weights.output * output_tokens - (weights.prompt - weights.cached) * cached_tokens:
            queued.queue.fair_queue.charge(queued.flow, service)
            self.predictor.served += service
        if prompt_tokens:
            self.predictor.on_prompt(prompt_tokens, cached_tokens)

    def on_first_token(self, queued: QueuedRequest, now_s: float) -> None:
        """Records the first token of a request."""
        if queued.allocation is not None and queued.state is QueueState.DISPATCHED:
            allocation = queued.allocation
            allocation.endpoint_state.on_first_token(
                now_s - allocation.since_s - (self.stalled_s - allocation.stalled_s)
            )
            if queued.predicted_position is not None:
                self.predictor.on_first_token(queued, now_s)

    # --- internals ---

    def _dispatch_queue(
        self,
        queue: QuotaQueue,
        quota: Quota,
        ready: Sequence[EndpointState],
        changed: list[QueuedRequest],
        now_s: float,
    ) -> tuple[str, WaitCause] | None:
        """Dispatches from the head until it is blocked; returns the head's tenant and wait cause."""
        self._considered_queue = queue
        if queue.aside:
            self._call_back(queue, ready, now_s)
        if self.regions is not None:
            return self._dispatch_in_regions(self.regions, queue, quota, ready, changed, now_s)
        while (queued := queue.head(now_s)) is not None:
            self._considered = queued
            if self.allocator.awaits_turns(queued, ready):
                queue.set_aside(queued)
                continue
            above_share = not queued.requeues and self.allocator.above_share(queued, quota, ready, now_s)
            endpoint_state = self.allocator.endpoint_for(queued, quota, ready, now_s, above_share=above_share)
            if isinstance(endpoint_state, WaitCause):
                overtaking = self._select_overtaking(queue, quota, ready, now_s) if above_share else None
                if overtaking is None:
                    self._considered = None
                    return queued.tenant.id, endpoint_state
                queued, endpoint_state = overtaking
            self._dispatch_or_fail(queued, endpoint_state, quota, changed, now_s)
        return next(((queued.tenant.id, WaitCause.SLOTS) for queued in queue.aside), None)

    def _select_overtaking(
        self,
        queue: QuotaQueue,
        quota: Quota,
        ready: Sequence[EndpointState],
        now_s: float,
        *,
        except_in: Set[str | None] = frozenset(),
    ) -> tuple[QueuedRequest, EndpointState] | None:
        """Selects a request that may overtake a blocked head, and its endpoint; None: there is none."""
        best = self.allocator.overtaking_candidate(queue, ready)
        if best is None:
            return None
        self._considered = best
        above_share = self.allocator.above_share(best, quota, ready, now_s)
        endpoint_state = self.allocator.endpoint_for(
            best, quota, ready, now_s, above_share=above_share, except_in=except_in
        )
        return None if isinstance(endpoint_state, WaitCause) else (best, endpoint_state)

    def _call_back(self, queue: QuotaQueue, ready: Sequence[EndpointState], now_s: float) -> None:
        """Returns requests that were set aside to the order, where others like them take turns no more."""
        aside = list(queue.aside)
        if self.regions is None:  # all of them wait for the same replicas
            returning = [] if self.allocator.awaits_turns(aside[0], ready) else aside
        else:
            returning = [queued for queued in aside if not self.allocator.awaits_turns(queued, ready)]
        for queued in returning:
            self._considered = queued
            queue.call_back(queued, now_s)
        self._considered = None

    def _dispatch_in_regions(
        self,
        regions: RegionPlanner,
        queue: QuotaQueue,
        quota: Quota,
        ready: Sequence[EndpointState],
        changed: list[QueuedRequest],
        now_s: float,
    ) -> tuple[str, WaitCause] | None:
        """Dispatches in the order of the queue in the own region, and beside it what may run in others.

        A request that waits for other regions leaves the order until it is dispatched, so that it is in nobody's way.
        Nobody behind it takes a place in these regions.
        """
        blocked: set[str | None] = set()
        if queue.away:
            for returning in regions.returning(queue, ready):
                self._considered = returning
                queue.call_home(returning, now_s)
            self._considered = None
            self._dispatch_away(regions, queue, quota, ready, changed, now_s, blocked=blocked, home_blocked=False)
        cause: tuple[str, WaitCause] | None = None
        overtaking: tuple[QueuedRequest, EndpointState] | None
        while (queued := queue.head(now_s)) is not None:
            self._considered = queued
            if self.allocator.awaits_turns(queued, ready):
                queue.set_aside(queued)
                continue
            above_share = not queued.requeues and self.allocator.above_share(queued, quota, ready, now_s)
            endpoint_state = self.allocator.endpoint_for(
                queued, quota, ready, now_s, above_share=above_share, except_in=blocked
            )
            if isinstance(endpoint_state, WaitCause):
                waits_for = regions.waits_for(queued, ready)
                if self.region not in waits_for:
                    queue.set_away(queued)
                    blocked |= waits_for
                    cause = cause or (queued.tenant.id, endpoint_state)
                    continue
                overtaking = None
                if above_share:
                    overtaking = self._select_overtaking(queue, quota, ready, now_s, except_in=blocked)
                if overtaking is None:
                    cause = queued.tenant.id, endpoint_state
                    blocked |= waits_for
                    break
                self._dispatch_or_fail(*overtaking, quota, changed, now_s)
            else:
                self._dispatch_or_fail(queued, endpoint_state, quota, changed, now_s)
        self._considered = None
        if queue.waiting:
            self._dispatch_away(
                regions, queue, quota, ready, changed, now_s, blocked=blocked, home_blocked=self.region in blocked
            )
        return cause or next(((queued.tenant.id, WaitCause.SLOTS) for queued in queue.aside), None)

    def _dispatch_away(
        self,
        regions: RegionPlanner,
        queue: QuotaQueue,
        quota: Quota,
        ready: Sequence[EndpointState],
        changed: list[QueuedRequest],
        now_s: float,
        *,
        blocked: set[str | None],
        home_blocked: bool,
    ) -> None:
        """Dispatches requests to regions for which no request before them waits.

        Args:
            regions: What decides on regions.
            queue: The queue.
            quota: The quota that is charged.
            ready: The replicas that are ready.
            changed: Gets the requests that were dispatched or have failed.
            now_s: Now.
            blocked: Regions for which earlier requests wait; gets those for which one of these waits.
            home_blocked: Whether the own region is full, so that late requests may leave it.
        """
        for queued in regions.away_candidates(queue, ready, now_s, late=home_blocked, blocked=blocked):
            open_states = [state for state in ready if state.region not in blocked]
            if not any(state.free.slots + state.overcommit_slots > 0 for state in open_states):
                return
            self._considered = queued
            above_share = not queued.requeues and self.allocator.above_share(queued, quota, ready, now_s)
            endpoint_state = self.allocator.endpoint_for(
                queued, quota, ready, now_s, above_share=above_share, except_in=blocked
            )
            if isinstance(endpoint_state, WaitCause):
                blocked |= regions.waits_for(queued, ready)
            else:
                self._dispatch_or_fail(queued, endpoint_state, quota, changed, now_s)
            self._considered = None

    def _dispatch_or_fail(
        self,
        queued: QueuedRequest,
        endpoint_state: EndpointState,
        quota: Quota,
        changed: list[QueuedRequest],
        now_s: float,
    ) -> None:
        """Dispatches a waiting request, or fails it if its first token would come too late."""
        if self._would_miss_deadline(queued, endpoint_state, now_s):
            self._fail(queued, DeadlineExceeded(_DEADLINE_PASSED_MESSAGE), now_s)
        else:
            queued.queue.dequeue(queued, now_s)
            queued.prefill_s = self.selector.prefill_s(queued, endpoint_state, 0, now_s)
            self._start(queued, endpoint_state, quota, now_s)
        changed.append(queued)
        self._considered = None

    def _fail_out_of_region(self, ready: Sequence[EndpointState], changed: list[QueuedRequest], now_s: float) -> None:
        """Fails requests while none of the replicas where they may run is ready.

        These are the requests over their class's longest wait, or all if no replica will become ready there.
        """
        longest = self._config.max_wait_s
        for queue in self.queues:
            for lane in list(queue.lanes.values()):
                entries = [queued for of_tenant in lane.values() for queued in of_tenant]
                if permitted_endpoints(entries[0].request, ready):
                    continue
                is_hopeless = self._is_hopeless(entries[0])
                for queued in entries:
                    self._considered = queued
                    if is_hopeless or now_s - queued.joined_s > longest.get(queued.flow.priority, float("inf")):
                        self._fail(queued, self.unavailable(queued.request), now_s)
                        changed.append(queued)
                self._considered = None

    def _on_idle(self, now_s: float) -> None:
        for queue in self.queues:
            queue.wait_account.set_blocked_head(now_s, None)
        self.predictor.on_unsaturated()
        self.idle_recorded = True

    def _would_miss_deadline(self, queued: QueuedRequest, endpoint_state: EndpointState, now_s: float) -> bool:
        """Whether the first token would be here after the deadline: from a busy replica, or even without a prefill."""
        if queued.wait_deadline_s is None:
            return False
        least_s = endpoint_state.round_trip_s
        if not endpoint_state.credits.idle:
            prefill_s = self.selector.prefill_s(queued, endpoint_state, 0, now_s)
            least_s += self.predictor.corrected_prefill_s(prefill_s, now_s)
        return now_s + least_s > queued.wait_deadline_s

    def _start(self, queued: QueuedRequest, endpoint_state: EndpointState, quota: Quota, now_s: float) -> None:
        """Marks an entry as dispatched and allocates its credits and quota."""
        queued.state = QueueState.DISPATCHED
        queued.dispatched_s = now_s
        costs: Sequence[Cost] = queued.costs
        if not endpoint_state.endpoint.reports_capacity or queued.cost.slots > 1:
            costs = self.allocator.held_costs(queued, endpoint_state)
        hold = endpoint_state.acquire(costs, now_s)
        try:
            self.allocator.allocate(queued, quota, self._last_ready)
        except Exception:
            endpoint_state.release(hold)
            raise
        queued.allocation = Allocation(endpoint_state, hold=hold, quota=quota, since_s=now_s, stalled_s=self.stalled_s)
        self.running_requests[queued] = None
        if self.selector.balancer is not None:
            self.selector.on_dispatch(queued, endpoint_state)
        if self.regions is not None:
            self.regions.on_dispatch(queued, endpoint_state)
            if queued.spill_reason is not None:
                self.counters.on_spill(endpoint_state.region, queued.spill_reason)
        self.forecast_cache.invalidate()
        if queued.requeues:
            return
        self._charge(queued, self.weights.prompt * queued.request.prompt_tokens)
        queued.owes_prompts = True
        self.predictor.on_dispatch(queued)
        if queued.raw_wait_s > 0:
            self.predictor.on_waited(queued, now_s)
        self.counters.on_dispatch(queued.flow.priority, queued.waited_ms)

    def _release(self, queued: QueuedRequest, *, lost: bool) -> Allocation:
        """Releases the credits and quota of a dispatched request."""
        allocation = queued.allocation
        assert allocation is not None
        allocation.endpoint_state.release(allocation.hold)
        if lost:
            allocation.endpoint_state.on_failure()
        self.allocator.release(queued, allocation.quota)
        del self.running_requests[queued]
        self.forecast_cache.invalidate()
        return allocation

    def _refund(self, queued: QueuedRequest) -> None:
        """Refunds the service of prompt tokens that were charged but not computed."""
        reported = queued.reported_prompt_tokens
        left = queued.request.prompt_tokens - reported
        if queued.owes_prompts and left > 0 and (reported or not queued.has_output):
            self._charge(queued, -self.weights.prompt * left)
        queued.owes_prompts = False

    def _track_deadline(self, queued: QueuedRequest) -> None:
        """Adds the deadline of a waiting request to the deadline heap."""
        if queued.wait_deadline_s is not None:
            heapq.heappush(self._deadline_heap, (queued.wait_deadline_s, next(self._heap_tiebreaker), queued))
            if len(self._deadline_heap) > 2 * self.waiting + _MAX_STALE_DEADLINES:
                self._deadline_heap = [due for due in self._deadline_heap if due[2].state is QueueState.WAITING]
                heapq.heapify(self._deadline_heap)

    def _fail(self, queued: QueuedRequest, failure: MaitredError, now_s: float) -> None:
        self._refund(queued)
        queued.queue.remove(queued, now_s)
        queued.state = QueueState.FAILED
        queued.failure = failure
        self.forecast_cache.invalidate()
        self.predictor.on_waited(queued, now_s)
        self.counters.on_rejection(failure.code)

    def _charge(self, queued: QueuedRequest, service: float) -> None:
        queued.queue.fair_queue.charge(queued.flow, service)
        self.predictor.served += service

    def _fail_expired(self, changed: list[QueuedRequest], now_s: float) -> None:
        """Fails waiting requests whose deadline has passed."""
        while self._deadline_heap and (
            self._deadline_heap[0][0] <= now_s or self._deadline_heap[0][2].state is not QueueState.WAITING
        ):
            queued = self._considered = heapq.heappop(self._deadline_heap)[2]
            due_s = queued.wait_deadline_s
            if queued.state is QueueState.WAITING and due_s is not None and due_s <= now_s:
                self._fail(queued, DeadlineExceeded(_DEADLINE_PASSED_MESSAGE), now_s)
                changed.append(queued)
        self._considered = None

    def _fail_without_replica(self, changed: list[QueuedRequest], now_s: float) -> None:
        """Fails requests over their class's longest wait, or all if no replica will become ready."""
        hopeless = isinstance(self.outage, ModelLoadFailed | ModelHeld)
        longest = self._config.max_wait_s
        for queue in self.queues:
            for queued in queue.all():
                self._considered = queued
                if (hopeless if queued.request.regions is None else self._is_hopeless(queued)) or _cold_start_wait_s(
                    queued, now_s
                ) > longest.get(queued.flow.priority, float("inf")):
                    self._fail(queued, self.unavailable(queued.request), now_s)
                    changed.append(queued)
        self._considered = None

    def _is_hopeless(self, queued: QueuedRequest) -> bool:
        """Whether no replica will become ready where a request may run, while none is ready there."""
        states = permitted_endpoints(queued.request, self.endpoint_states)
        return isinstance(outage_of(states), ModelLoadFailed | ModelHeld)

    @property
    def has_startable_replica(self) -> bool:
        """Whether a replica that is not ready starts for a waiting request, or is starting already."""
        return any(endpoint_state.ready_in_s is not None for endpoint_state in self.endpoint_states)

    def has_startable(self, dispatch_request: DispatchRequest) -> bool:
        """Whether a replica where a request may run starts for it, or is starting already."""
        return any(
            endpoint_state.ready_in_s is not None
            for endpoint_state in permitted_endpoints(dispatch_request, self.endpoint_states)
        )

    @property
    def outage(self) -> ReplicaUnavailable | None:
        """Error of the first replica that is not ready; None: no replica reports one."""
        return outage_of(self.endpoint_states)

    def unavailable(self, dispatch_request: DispatchRequest | None = None) -> ReplicaUnavailable:
        """Returns the error for requests while no replica is ready, with the most specific reason.

        Args:
            dispatch_request: The request, which may be allowed in some regions only; None: any.
        """
        if dispatch_request is not None and dispatch_request.regions is not None:
            return out_of_region(dispatch_request, self.endpoint_states)
        outage = self.outage
        if isinstance(outage, ModelLoading | ModelLoadFailed | ModelHeld):
            return type(outage)(outage.message, retry_after_s=self.retry_after_s)
        if not any(endpoint_state.endpoint.admin_state.serving for endpoint_state in self.endpoint_states):
            message = "All replicas of this model are out of service for maintenance. Try again after the time in "
            return ReplicaUnavailable(f"{message}Retry-After.", retry_after_s=self.retry_after_s)
        return ReplicaUnavailable(retry_after_s=self.retry_after_s)

    @property
    def retry_after_s(self) -> float:
        """Seconds until a replica is expected to be ready, if none is."""
        return retry_after_s(self.endpoint_states)


def _cold_start_wait_s(queued: QueuedRequest, now_s: float) -> float:
    """Returns the seconds that a request waited with no replica ready, over all its waits."""
    return queued.waited_ms.get(WaitCause.COLD_START, 0.0) / 1000 + now_s - queued.joined_s
