"""The whole state of dispatch for one model, without an event loop: who waits, who runs where, who is next.

Every method is synchronous and returns what changed; `Dispatcher` wakes those whom it concerns. So the decisions can be
put to every order of events by tests, and the clock is an argument.

A request is released when it is at the head of its line and the credits of a replica cover its prompt and the answer
that is predicted. The head is never passed over for a smaller request behind it: it would wait for ever. What needs
more than a replica has in all is released once it has everything.
"""

import heapq
import itertools
from collections.abc import Sequence

from maitred.core.balance import CacheAwareBalancer
from maitred.core.errors import (
    DeadlineExceeded,
    MaitredError,
    ModelHeld,
    ModelLoadFailed,
    ModelLoading,
    ReplicaUnavailable,
)
from maitred.core.request import WaitCause
from maitred.dispatch.capacity import CapacityAllocator, untried_endpoints
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.counters import DispatchCounters
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.forecasts import ForecastCache
from maitred.dispatch.load_reports import LoadReports
from maitred.dispatch.policy.credits import Cost, request_cost
from maitred.dispatch.policy.outputs import OutputLengths
from maitred.dispatch.policy.quotas import Quota
from maitred.dispatch.pool_queue import Allocation, PoolQueue, QueuedRequest, QueueState
from maitred.dispatch.predictor import LatencyPredictor
from maitred.dispatch.request import AnyEndpoint, DispatchRequest
from maitred.dispatch.selector import ReplicaSelector

_TOO_LATE = (
    "The deadline for the first token passed while the request waited. Allow more time, or send it when less is going "
    "on."
)
_LITTER = 64
"""So many that wait no more may lie among the deadlines, beside as many as wait."""


class DispatchCore:
    """State of one model's dispatch: queues where requests wait, endpoints where they run.

    Args:
        endpoints: The replicas; at least one.
        config: The settings.
        placement: Which of several replicas takes a request; None: the one with the most room.
    """

    def __init__(
        self, endpoints: Sequence[AnyEndpoint], config: DispatchConfig, placement: CacheAwareBalancer | None = None
    ) -> None:
        self.endpoint_states = [EndpointState(endpoint) for endpoint in endpoints]
        self.weights = config.service.weights
        self.predictor = LatencyPredictor(
            OutputLengths(config.output_quantile, config.unknown_output_share), self.weights
        )
        self.reports = LoadReports(config.reports)
        self.selector = ReplicaSelector(placement, self.predictor, self.reports)
        self.allocator = CapacityAllocator(config, self.selector)
        self.queues = [PoolQueue(quota, config.line) for quota in self.allocator.quotas.all]
        played = config.line.policy == "fair"
        self.forecast_cache = ForecastCache(
            self.endpoint_states, self.allocator, self.predictor, self.selector, played=played
        )
        self.counters = DispatchCounters()
        self.stalled_s = 0.0
        """For how long, in all, whoever drives this had no time for it; no replica is late by that."""
        self._config = config
        self._queues = dict(zip(self.allocator.quotas.all, self.queues, strict=True))
        self._ready: list[EndpointState] = []
        """As of the last look."""
        self.slack = False
        """Whether nobody waits, and that is noted."""
        self._due: list[tuple[float, int, QueuedRequest]] = []
        self._numbers = itertools.count()

    def reconfigure(
        self,
        endpoints: Sequence[AnyEndpoint],
        config: DispatchConfig,
        placement: CacheAwareBalancer | None,
        now_s: float,
    ) -> list[AnyEndpoint]:
        """Goes by these settings from now on: who waits goes on waiting, and who runs goes on running.

        A replica that is not named any more gets nothing new; what runs there ends there. One with the same duty is
        the same, and keeps its account, however it is spoken to. Where the line or the parts are others, everybody
        moves into new queues, and the accounts of who was served how much begin anew.

        Returns:
            The posts that are new.
        """
        known = {id(endpoint_state.endpoint.admin_state): endpoint_state for endpoint_state in self.endpoint_states}
        self.endpoint_states[:] = [
            known.get(id(endpoint.admin_state)) or EndpointState(endpoint) for endpoint in endpoints
        ]
        for endpoint_state, endpoint in zip(self.endpoint_states, endpoints, strict=True):
            endpoint_state.endpoint = endpoint
        new = [endpoint for endpoint in endpoints if id(endpoint.admin_state) not in known]
        before, self._config = self._config, config
        self.predictor.outputs.reconfigure(config.output_quantile, config.unknown_output_share)
        self.reports = LoadReports(config.reports)
        self.selector.reconfigure(placement, self.reports)
        self.allocator.reconfigure(config)
        self.forecast_cache.reconfigure(played=config.line.policy == "fair")
        if (before.line, before.reserved, before.pools) != (config.line, config.reserved, config.pools):
            self._move(config, now_s)
        return new

    def _move(self, config: DispatchConfig, now_s: float) -> None:
        """Moves all waiting requests into new pool queues."""
        waiting = sorted((queued for queue in self.queues for queued in queue.all()), key=lambda queued: queued.number)
        self.allocator.part(config)
        self.queues[:] = [PoolQueue(quota, config.line) for quota in self.allocator.quotas.all]
        self._queues = dict(zip(self.allocator.quotas.all, self.queues, strict=True))
        for queued in (*self.forecast_cache.at_work, *waiting):
            quota = self.allocator.quotas.quota_for(queued.flow.path)
            self._queues[quota].take_over(queued, now_s)
            if queued.allocation is not None:
                queued.allocation.quota = quota
                quota.allocate(queued.cost)

    # --- what is known ---

    @property
    def running(self) -> int:
        """Requests that were released and have not left."""
        return len(self.forecast_cache.at_work)

    @property
    def waiting(self) -> int:
        """Requests in all lines."""
        waiting = 0
        for queue in self.queues:
            waiting += queue.waiting
        return waiting

    def refresh(self, now_s: float) -> list[EndpointState]:
        """Looks at the replicas; returns those that are ready."""
        ready = []
        for endpoint_state in self.endpoint_states:
            load = endpoint_state.load
            endpoint_state.refresh(now_s)
            if endpoint_state.load is not load:
                self.forecast_cache.invalidate()
            if endpoint_state.ready:
                ready.append(endpoint_state)
        if ready != self._ready:
            self._ready = ready
            self.forecast_cache.invalidate()
        return ready

    def new_entry(self, dispatch_request: DispatchRequest) -> QueuedRequest:
        """Returns the entry of a request, which has not joined."""
        last = self.forecast_cache.last
        if last is not None and last.queued.request is dispatch_request and last.queued.state is QueueState.NEW:
            return last.queued  # it was made to predict its wait
        config, first_token_by_s = self._config, dispatch_request.deadline_s
        if first_token_by_s is None and (config.ttft_s or config.tenant_ttft_s):
            ttft_s = config.first_token_within_s(dispatch_request.flow)
            first_token_by_s = None if ttft_s is None else dispatch_request.arrived_s + ttft_s
        queue = self._queues[self.allocator.quotas.quota_for(dispatch_request.flow.path)]
        expected, mean = self.predictor.outputs.lengths(dispatch_request.principal_org, dispatch_request.max_tokens)
        service = (
            self.weights.prompt * dispatch_request.prompt_tokens + self.weights.output * mean * dispatch_request.choices
        )
        return QueuedRequest(
            dispatch_request,
            queue,
            self._costs(dispatch_request, expected),
            expected,
            service,
            first_token_by_s,
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

    # --- what happens ---

    def dispatch_now(self, queued: QueuedRequest, now_s: float) -> bool:
        """Dispatches an entry at once, where the queue is empty and a replica has credits.

        Returns:
            Whether it was. If not, nothing has changed, but that its tenant was seen.
        """
        if not self.slack and self.waiting:
            return False
        queue, forecaster = queued.queue, self.forecast_cache
        cached = forecaster.remember(queued, now_s)
        ready = self.refresh(now_s) if cached is None else cached.ready
        self.allocator.holdings.observe(queued.tenant, now_s)
        known = cached is not None and cached.forecast.ample
        if known:
            endpoint_state: EndpointState | None = ready[0]  # nothing has changed since it was asked about
        else:
            endpoint_state = self._endpoint_for_arrival(queued, ready, now_s)
        if endpoint_state is None or (
            queued.first_token_by_s is not None and self._too_late(queued, endpoint_state, now_s)
        ):
            return False
        if cached is None:
            self.forecast_cache.predict(queued, ready, now_s)
        if not known:
            queued.prefill_s = self.selector.prefill_s(queued, endpoint_state, 0, now_s)
        queued.joined_s = now_s
        forecaster.joins.observe(queued.flow, now_s)
        queue.fair_queue.pass_through(queued, now_s)
        self._start(queued, endpoint_state, queue.quota, now_s)
        if not self.slack:
            self._is_idle(now_s)
        return True

    def _endpoint_for_arrival(
        self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float
    ) -> EndpointState | None:
        """The replica for a request that comes where nobody waits; None: none has room."""
        allocator, quota = self.allocator, queued.queue.quota
        if not ready:
            return None
        if allocator.is_ample(queued.cost, ready):
            return ready[0]
        above_share = allocator.above_share(queued, quota, ready, now_s)
        endpoint_state = allocator.endpoint_for(queued, quota, ready, now_s, above_share=above_share)
        return None if isinstance(endpoint_state, WaitCause) else endpoint_state

    def resume(self, queued: QueuedRequest, replica: str, now_s: float) -> None:
        """Registers an entry that runs at a replica already, whatever credits that has left."""
        endpoint_state = next(
            endpoint_state for endpoint_state in self.endpoint_states if endpoint_state.endpoint.name == replica
        )
        queued.joined_s = now_s
        queued.queue.fair_queue.pass_through(queued, now_s)
        self._start(queued, endpoint_state, queued.queue.quota, now_s)

    def join(self, queued: QueuedRequest, now_s: float) -> list[EndpointState]:
        """Enqueues an entry. Returns the ready replicas, for a dispatch in the same moment."""
        cached = self.forecast_cache.remember(queued, now_s)
        ready = self.refresh(now_s)
        self.allocator.holdings.observe(queued.tenant, now_s)
        if ready and (cached is None or cached.ready != ready):
            self.forecast_cache.predict(queued, ready, now_s)
        queued.state, self.slack = QueueState.WAITING, False
        queued.joined_s = now_s
        queued.queue.enqueue(queued, now_s)
        self.forecast_cache.on_join(queued.flow, now_s)
        self._watch(queued)
        return ready

    def requeue(
        self,
        queued: QueuedRequest,
        now_s: float,
        *,
        prompts: Sequence[int],
        answer_by_s: float | None,
        draw: float,
        rest_s: float | None = None,
    ) -> None:
        """The replica of a released request has failed it: it gives back what it holds there, and waits again.

        It has the age that it had, goes before those who have not run yet, and is charged nothing twice.

        Args:
            queued: The request.
            now_s: Now.
            prompts: Those that have not been answered in full, by their numbers.
            answer_by_s: When its answer must be there.
            draw: From 0 to 1, for how long the replica rests if it still seems ready...
            rest_s: ...or just so long.
        """
        allocation = self._release(queued, lost=True)
        allocation.endpoint_state.refresh(now_s)
        if allocation.endpoint_state.ready:
            allocation.endpoint_state.suspend(now_s, draw, rest_s)
            queued.failed_at.add(allocation.endpoint_state.endpoint.name)
        queued.keep_prompts(prompts)
        queued.allocation, queued.state, queued.joined_s, self.slack = None, QueueState.WAITING, now_s, False
        queued.requeues += 1
        queued.predicted_position = None  # nothing is to be learnt from a wait that nobody could foresee
        if queued.begun:
            queued.first_token_by_s = answer_by_s
        queued.queue.requeue(queued, now_s)
        self._watch(queued)

    def has_other_replica(self, queued: QueuedRequest, now_s: float) -> bool:
        """Whether a released request that has just been failed could go to a replica that has not failed it."""
        assert queued.allocation is not None
        endpoint_state = queued.allocation.endpoint_state
        if len(self.endpoint_states) == 1 and self.endpoint_states[0] is endpoint_state:
            return False
        return any(other is not endpoint_state for other in untried_endpoints(queued, self.refresh(now_s)))

    def hedge(self, queued: QueuedRequest, now_s: float) -> Allocation | None:
        """Takes the credits of a second replica for a released request of which nothing has come.

        Only what is free and wanted by nobody: while anybody waits, there is none.
        """
        if (
            queued.state is not QueueState.RELEASED
            or queued.allocation is None
            or queued.allocation.begun
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
            endpoint_state, endpoint_state.acquire(queued.costs, now_s), queued.allocation.quota, now_s, self.stalled_s
        )
        self.allocator.allocate(queued, allocation.quota)
        self.selector.on_dispatch(queued, endpoint_state)
        self.forecast_cache.invalidate()
        return allocation

    def settle_hedge(self, queued: QueuedRequest, second: Allocation, *, won: bool) -> None:
        """Gives up one of two replicas that an entry holds: the first if the second has won."""
        assert queued.allocation is not None
        loser = second
        if won:
            queued.allocation, loser = second, queued.allocation
            queued.predicted_position = None  # it was said of the other one
        loser.endpoint_state.release(loser.hold)
        self.allocator.release(queued, loser.quota)
        self.forecast_cache.invalidate()

    def dispatch_ready(self, now_s: float, ready: Sequence[EndpointState] | None = None) -> list[QueuedRequest]:
        """Releases whom there are credits for, and fails whose time is over. Returns both.

        To be called after anything has changed: a request has joined or left, a report came, a replica is ready or
        lost.

        Args:
            now_s: Now.
            ready: What `refresh` has just said; None: nobody has asked it.
        """
        changed: list[QueuedRequest] = []
        if not self.waiting:
            if not self.slack:
                self._is_idle(now_s)
            return changed
        self.slack = False
        if ready is None:
            ready = self.refresh(now_s)
        self._expire(changed, now_s)
        if not ready:
            self._outlast(changed, now_s)
            for queue in self.queues:
                queue.wait_account.advance(now_s, ("", WaitCause.COLD_START) if len(queue) else None)
            self.predictor.slack()
            return changed
        common = self.queues[-1]
        for queue in self.queues:
            queue.wait_account.advance(now_s, self._dispatch_queue(queue, queue.quota, ready, changed, now_s))
        if not len(common):
            for queue in self.queues[:-1]:
                if queue.quota.overflows and len(queue):
                    queue.wait_account.advance(
                        now_s, self._dispatch_queue(queue, self.allocator.quotas.common, ready, changed, now_s)
                    )
        if self.waiting:
            self.predictor.full(sum(endpoint_state.load.steps for endpoint_state in ready) // len(ready), now_s)
        else:
            self.predictor.slack()
        return changed

    def leave(
        self, queued: QueuedRequest, now_s: float, *, finished: bool, lost: bool = False, moved: bool = False
    ) -> None:
        """Removes an entry, wherever it is, and frees what it holds. A second time changes nothing.

        Args:
            queued: The request.
            now_s: Now.
            finished: Whether it came to its end by itself.
            lost: Whether it was the replica that failed it.
            moved: Whether it waits elsewhere from now on.
        """
        state, queued.state = queued.state, QueueState.GONE
        queued.failure = None  # it may hold the frames that it was raised through, and these hold the entry
        if state is QueueState.WAITING:
            self._refund(queued)
            queued.queue.remove(queued, now_s)
            self.forecast_cache.invalidate()
            if moved:
                self.counters.moved += 1
            else:
                self.counters.left_waiting += 1
        elif state is QueueState.RELEASED:
            self._release(queued, lost=lost)
            self._refund(queued)
            queued.queue.fair_queue.done(queued.flow)
            if finished:
                self.predictor.on_finished(queued)
        if state is not QueueState.GONE and not finished:
            self.counters.wasted_tokens += queued.output_tokens

    def on_submitted(self, queued: QueuedRequest) -> None:
        """The next of its prompts was sent to the replica."""
        allocation = queued.allocation
        if (
            allocation is not None and not allocation.endpoint_state.learns_window
        ):  # others never say what they have heard
            allocation.endpoint_state.credits.on_submitted(allocation.hold)

    def charge_tokens(self, queued: QueuedRequest, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Charges real tokens of an entry to its flow.

        Args:
            queued: A released request.
            prompt_tokens: Of prompts of which nothing had come before, cached ones included.
            cached_tokens: Of these, found in the cache.
            output_tokens: New ones.
        """
        allocation = queued.allocation
        if queued.state is not QueueState.RELEASED or allocation is None:
            return
        if not allocation.begun:
            queued.begun = allocation.begun = True
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
        """Notes the first token of an entry."""
        if queued.allocation is not None and queued.state is QueueState.RELEASED:
            allocation = queued.allocation
            allocation.endpoint_state.on_first_token(
                now_s - allocation.since_s - (self.stalled_s - allocation.stalled_s)
            )
            if queued.predicted_position is not None:
                self.predictor.on_first_token(queued, now_s)

    # --- how ---

    def _dispatch_queue(
        self, queue: PoolQueue, quota: Quota, ready: Sequence[EndpointState], changed: list[QueuedRequest], now_s: float
    ) -> tuple[str, WaitCause] | None:
        """Releases from the head of a line until it is empty or its head lacks something; returns whose and what."""
        while (queued := queue.head(now_s)) is not None:
            above = not queued.requeues and self.allocator.above_share(queued, quota, ready, now_s)
            endpoint_state = self.allocator.endpoint_for(queued, quota, ready, now_s, above_share=above)
            if isinstance(endpoint_state, WaitCause):
                light = self.allocator.dispatch_early(queue, quota, ready, now_s) if above else None
                if light is None:
                    return queued.tenant.id, endpoint_state
                queued, endpoint_state = light
            if self._too_late(queued, endpoint_state, now_s):
                self._fail(queued, DeadlineExceeded(_TOO_LATE), now_s)
            else:
                queued.queue.dequeue(queued, now_s)
                queued.prefill_s = self.selector.prefill_s(queued, endpoint_state, 0, now_s)
                self._start(queued, endpoint_state, quota, now_s)
            changed.append(queued)
        return None

    def _is_idle(self, now_s: float) -> None:
        for queue in self.queues:
            queue.wait_account.advance(now_s, None)
        self.predictor.slack()
        self.slack = True

    def _too_late(self, queued: QueuedRequest, endpoint_state: EndpointState, now_s: float) -> bool:
        """Whether its first token could not come in time from a replica, which has something else to do."""
        if queued.first_token_by_s is None or endpoint_state.credits.idle:
            return False
        prefill_s = self.selector.prefill_s(queued, endpoint_state, 0, now_s)
        return now_s + self.predictor.corrected_prefill_s(prefill_s, now_s) > queued.first_token_by_s

    def _start(self, queued: QueuedRequest, endpoint_state: EndpointState, quota: Quota, now_s: float) -> None:
        """Starts an entry at a replica: allocates credits and quota."""
        queued.state = QueueState.RELEASED
        queued.dispatched_s = now_s
        queued.allocation = Allocation(
            endpoint_state, endpoint_state.acquire(queued.costs, now_s), quota, now_s, self.stalled_s
        )
        self.allocator.allocate(queued, quota)
        if self.selector.balancer is not None:
            self.selector.on_dispatch(queued, endpoint_state)
        self.forecast_cache.at_work[queued] = None
        self.forecast_cache.invalidate()
        if queued.requeues:
            return
        queued.owes_prompts = True
        self._charge(queued, self.weights.prompt * queued.request.prompt_tokens)
        self.predictor.on_dispatch(queued)
        if queued.raw_wait_s > 0:
            self.predictor.on_waited(queued, now_s)
        self.counters.on_dispatch(queued.flow.priority, queued.waited_ms)

    def _release(self, queued: QueuedRequest, *, lost: bool) -> Allocation:
        """A released request gives its places back."""
        allocation = queued.allocation
        assert allocation is not None
        allocation.endpoint_state.release(allocation.hold)
        if lost:
            allocation.endpoint_state.on_failure()
        self.allocator.release(queued, allocation.quota)
        del self.forecast_cache.at_work[queued]
        self.forecast_cache.invalidate()
        return allocation

    def _refund(self, queued: QueuedRequest) -> None:
        """Refunds prompt tokens that were charged and never computed."""
        reported = queued.reported_prompt_tokens
        left = queued.request.prompt_tokens - reported
        if queued.owes_prompts and left > 0 and (reported or not queued.begun):
            self._charge(queued, -self.weights.prompt * left)
        queued.owes_prompts = False

    def _watch(self, queued: QueuedRequest) -> None:
        """Notes until when a waiting request may wait."""
        if queued.first_token_by_s is not None:
            heapq.heappush(self._due, (queued.first_token_by_s, next(self._numbers), queued))
            if len(self._due) > 2 * self.waiting + _LITTER:
                self._due = [due for due in self._due if due[2].state is QueueState.WAITING]
                heapq.heapify(self._due)

    def _fail(self, queued: QueuedRequest, failure: MaitredError, now_s: float) -> None:
        self._refund(queued)
        queued.queue.remove(queued, now_s)
        self.forecast_cache.invalidate()
        queued.state = QueueState.FAILED
        queued.failure = failure
        self.predictor.on_waited(queued, now_s)
        self.counters.on_rejection(failure.code)

    def _charge(self, queued: QueuedRequest, service: float) -> None:
        queued.queue.fair_queue.charge(queued.flow, service)
        self.predictor.served += service

    def _expire(self, changed: list[QueuedRequest], now_s: float) -> None:
        """Fails those whose deadline has passed."""
        while self._due and (self._due[0][0] <= now_s or self._due[0][2].state is not QueueState.WAITING):
            queued = heapq.heappop(self._due)[2]
            due_s = queued.first_token_by_s
            if queued.state is QueueState.WAITING and due_s is not None and due_s <= now_s:
                self._fail(queued, DeadlineExceeded(_TOO_LATE), now_s)
                changed.append(queued)

    def _outlast(self, changed: list[QueuedRequest], now_s: float) -> None:
        """No replica is ready: fails those who have waited as long as their class waits, or all if none will come."""
        hopeless = isinstance(self.outage, ModelLoadFailed | ModelHeld)
        longest = self._config.max_wait_s
        for queue in self.queues:
            over = [
                queued
                for entries in queue.tenants.values()
                for queued in entries
                if hopeless or _cold_s(queued, now_s) > longest.get(queued.flow.priority, float("inf"))
            ]
            for queued in over:
                self._fail(queued, self.unavailable(), now_s)
                changed.append(queued)

    @property
    def replica_expected(self) -> bool:
        """Whether one that is not ready comes because requests wait for it."""
        return any(endpoint_state.comes_in_s is not None for endpoint_state in self.endpoint_states)

    @property
    def outage(self) -> ReplicaUnavailable | None:
        """Returns the reason that a replica gives for not being ready."""
        return next(
            (endpoint_state.outage for endpoint_state in self.endpoint_states if endpoint_state.outage is not None),
            None,
        )

    def unavailable(self) -> ReplicaUnavailable:
        """Makes the error for a request while no replica is ready, with the most telling reason."""
        outage = self.outage
        if isinstance(outage, ModelLoading | ModelLoadFailed | ModelHeld):
            return type(outage)(outage.message, retry_after_s=self.retry_after_s)
        if not any(endpoint_state.endpoint.admin_state.serving for endpoint_state in self.endpoint_states):
            message = "All replicas of this model are out of service for maintenance. Try again after the time in "
            return ReplicaUnavailable(f"{message}Retry-After.", retry_after_s=self.retry_after_s)
        return ReplicaUnavailable(retry_after_s=self.retry_after_s)

    @property
    def retry_after_s(self) -> float:
        """When a replica is expected to be ready, if none is."""
        return min((s.retry_after_s for s in self.endpoint_states if s.retry_after_s is not None), default=1.0)


def _cold_s(queued: QueuedRequest, now_s: float) -> float:
    """For how long it has waited with no replica ready: now, and before it went to one that has failed it since."""
    return queued.waited_ms.get(WaitCause.COLD_START, 0.0) / 1000 + now_s - queued.joined_s
