"""Queue of requests that wait for a replica: the asyncio part around `DispatchCore`, which decides.

Every change (a request joins or leaves, a load report comes, a replica is lost or ready) schedules a dispatch pass. All
changes within one iteration of the event loop share one pass, so a report that frees ten slots costs one pass.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from types import TracebackType

from maitred.core.balance import CacheAwareBalancer
from maitred.core.clock import Clock
from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.flow import QueuePosition
from maitred.core.timeline import error_code
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.demand_meter import DemandMeter
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.loop_lag import LoopLagMonitor
from maitred.dispatch.metrics import DispatchSnapshot, TenantActivity, dispatch_snapshot, tenant_activity
from maitred.dispatch.overflow import OverflowPlanner
from maitred.dispatch.policy.hedging import HedgePolicy
from maitred.dispatch.queue import Allocation, QueuedRequest, QueueState, WaitSpan, record_immediate_dispatch
from maitred.dispatch.request import AnyEndpoint, DispatchRequest
from maitred.dispatch.shedding import LoadShedder

_POLL_INTERVAL_S = 0.1
"""Interval of the checks for passed deadlines and for overflow while nothing else happens."""
_log = logging.getLogger(__name__)
_OVERFLOW_ANSWER_TIMEOUT_S = 2.0
"""Time limit for answers of requests that are asked to move; most answer in milliseconds."""


class HedgeAllocation:
    """Allocation of a request at its second replica.

    `DispatchEntry.hedge` creates it; its owner must always call `settle`.
    """

    __slots__ = ("_allocation", "_dispatcher", "_queued")

    def __init__(self, dispatcher: "Dispatcher", queued: QueuedRequest, allocation: Allocation) -> None:
        self._dispatcher = dispatcher
        self._queued = queued
        self._allocation = allocation

    @property
    def endpoint(self) -> AnyEndpoint:
        """Endpoint of the second replica."""
        return self._allocation.endpoint_state.endpoint

    def on_submitted(self) -> None:
        """Records one submission to the second replica."""
        self._allocation.endpoint_state.credits.on_submitted(self._allocation.hold)

    def settle(self, *, won: bool) -> None:
        """Releases the losing replica: the first if the second won, otherwise the second."""
        self._dispatcher.core.settle_hedge(self._queued, self._allocation, won=won)
        self._dispatcher.schedule_dispatch()


class DispatchEntry:
    """Handle of one request in dispatch.

    `Dispatcher.enqueue` creates it; entering it joins the queue, and leaving it releases all credits.

    Only `wait_dispatched` awaits, so `__aexit__` always completes, even after a `CancelledError`.
    """

    __slots__ = (
        "_dispatcher",
        "_waiter",
        "expected_tokens",
        "overflow_answer",
        "overflowed",
        "queued",
        "runs_at",
        "wait_span",
    )

    wait_span: WaitSpan
    """Timeline span of the current wait; set when the request joins the queue."""

    def __init__(self, dispatcher: "Dispatcher", queued: QueuedRequest, runs_at: str = "") -> None:
        self._dispatcher = dispatcher
        self.runs_at = runs_at
        """Name of the replica where the request already runs; empty: none."""
        self._waiter: asyncio.Future[None] | None = None
        self.overflow_answer: asyncio.Future[None] | None = None
        """Future that is done once the request accepted or declined to move; None: it was not asked."""
        self.overflowed = False
        """Whether the request moved to another model."""
        self.queued = queued
        self.expected_tokens = queued.expected_tokens
        """Predicted output tokens of each choice."""

    async def __aenter__(self) -> "DispatchEntry":
        """Joins the queue, or starts at once if no request waits and a replica has credits."""
        dispatcher, queued = self._dispatcher, self.queued
        if queued.state is not QueueState.NEW:
            raise RuntimeError("An entry is entered once.")
        core, now_s = dispatcher.core, dispatcher.clock.monotonic_s()
        try:
            if self.runs_at:
                core.reattach(queued, self.runs_at, now_s)
            if self.runs_at or core.dispatch_now(queued, now_s):
                record_immediate_dispatch(queued, now_s)
                dispatcher.on_started(queued)
                return self
            ready = core.join(queued, now_s)
            dispatcher.overflow_planner.on_join(queued)
            dispatcher.add_waiting(self, now_s)
            # Dispatch now: if there are credits, the request need not wait for the next loop iteration.
            dispatcher.dispatch(now_s, ready)
        except Exception:  # nobody will leave
            core.fail_faulty(queued, now_s)
            dispatcher.remove_waiting(queued)
            core.leave(queued, now_s, finished=False)
            dispatcher.on_left(now_s)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Releases the credits of the request, or removes it from the queue."""
        dispatcher, queued = self._dispatcher, self.queued
        core, now_s = dispatcher.core, dispatcher.clock.monotonic_s()
        if dispatcher.remove_waiting(queued) is not None:
            reason = "moved" if self.overflowed else "cancelled" if error is None else error_code(error)
            self.wait_span.on_leave(now_s, reason)
        lost = error is not None and isinstance(error, ReplicaLost | ReplicaUnavailable)
        core.leave(queued, now_s, finished=error is None, lost=lost, moved=self.overflowed)
        dispatcher.on_left(now_s)

    async def wait_dispatched(self) -> AnyEndpoint:
        """Waits until the request is dispatched, and returns the endpoint. Only one task may wait at a time.

        After a cancellation it can be called again.

        Raises:
            DeadlineExceeded: The deadline passed, or the first token can no longer come in time.
            ReplicaUnavailable: No replica was ready for longer than the class's longest wait.
            OverflowRequested: The request should move to another model; only for `movable` requests, at most once. The
                caller may wait again afterwards.
        """
        queued = self.queued
        while queued.state is QueueState.WAITING:
            if self.overflow_answer is not None and not self.overflow_answer.done():
                raise OverflowRequested(self)
            if self._waiter is not None:
                raise RuntimeError("Another task waits for this entry already.")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if queued.failure is not None:
            raise queued.failure
        if queued.state is not QueueState.DISPATCHED or queued.allocation is None:
            raise RuntimeError("The entry was waited for outside its context.")
        return queued.allocation.endpoint_state.endpoint

    def wake(self) -> None:
        """Wakes the waiting task: the request's state has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def request_overflow(self) -> None:
        """Asks the request to move to another model; `overflow_answer` becomes a pending future."""
        self.overflow_answer = asyncio.get_running_loop().create_future()
        self.wake()

    def decline_overflow(self) -> None:
        """Declines to move to another model; allowed after the request was dispatched."""
        self._dispatcher.overflow_planner.on_leave(self.queued)
        self.resolve_overflow()

    def resolve_overflow(self) -> None:
        """Completes `overflow_answer`, so that its waiters go on."""
        if self.overflow_answer is not None and not self.overflow_answer.done():
            self.overflow_answer.set_result(None)

    def accept_overflow(self) -> bool:
        """Accepts to move to another model, if the request still waits; returns whether it does."""
        self.overflowed = self.queued.state is QueueState.WAITING
        if not self.overflowed:
            self.decline_overflow()
        return self.overflowed

    def start_hedge_timer(self) -> float | None:
        """Returns the seconds to wait for a first token before a hedge is sent; None: no hedge.

        Call this once, when the request is sent: it adds to the hedging budget.
        """
        hedging, queued = self._dispatcher.hedging, self.queued
        if not hedging.on or queued.requeues or not hedging.is_for(queued.request):
            return None
        if len(self._dispatcher.core.endpoint_states) == 1:
            return None
        hedging.on_dispatch()
        return hedging.after_s

    def hedge(self) -> HedgeAllocation | None:
        """Allocates a second replica until `settle`; None: the hedge budget or the capacity is used up."""
        dispatcher, queued = self._dispatcher, self.queued
        if not dispatcher.hedging.affordable:
            return None
        allocation = dispatcher.core.hedge(queued, dispatcher.clock.monotonic_s())
        if allocation is None:
            return None
        dispatcher.hedging.spend()
        return HedgeAllocation(dispatcher, queued, allocation)

    @property
    def has_other_replica(self) -> bool:
        """Whether another ready replica exists that has not failed this request."""
        dispatcher, queued = self._dispatcher, self.queued
        now_s = dispatcher.clock.monotonic_s()
        return queued.state is QueueState.DISPATCHED and dispatcher.core.has_other_replica(queued, now_s)

    @property
    def has_idle_replica(self) -> bool:
        """Whether one of these replicas has room for the request, while nobody waits."""
        dispatcher, queued = self._dispatcher, self.queued
        now_s = dispatcher.clock.monotonic_s()
        return queued.state is QueueState.DISPATCHED and dispatcher.core.has_idle_replica(queued, now_s)

    def requeue(
        self, *, prompts: Sequence[int], answer_by_s: float | None = None, suspend_s: float | None = None
    ) -> bool:
        """Releases the replica that failed and joins the queue again; then await `wait_dispatched`.

        The request keeps its arrival time, precedes requests that have not run, and is not charged for its prompt
        again.

        Args:
            prompts: Indexes of the prompts whose outputs are not complete. Call `on_submitted` for each of them.
            answer_by_s: Deadline of the whole output; the wait ends then.
            suspend_s: Seconds for which the failed replica gets no requests; None: exponential backoff.

        Returns:
            False if the request was requeued too often; nothing changes then.
        """
        dispatcher, queued = self._dispatcher, self.queued
        if queued.state is not QueueState.DISPATCHED or queued.requeues >= dispatcher.recoveries:
            return False
        now_s = dispatcher.clock.monotonic_s()
        draw = dispatcher.draw()
        dispatcher.core.requeue(queued, now_s, prompts=prompts, answer_by_s=answer_by_s, draw=draw, suspend_s=suspend_s)
        dispatcher.add_waiting(self, now_s)
        dispatcher.schedule_dispatch()
        return True

    @property
    def region(self) -> str | None:
        """Region of the replica to which the request was dispatched; None: it has no name, or there is none yet."""
        allocation = self.queued.allocation
        return None if allocation is None else allocation.endpoint_state.region

    @property
    def waited_ms(self) -> dict[str, float]:
        """Milliseconds that the request waited, by `WaitCause`; complete once it is dispatched."""
        return self.queued.waited_ms

    def position(self) -> QueuePosition | None:
        """Position in the queue; None once the request is dispatched."""
        return self._dispatcher.position(self.queued)

    def on_submitted(self) -> None:
        """Call this after each submission to the replica, in the order of the request's prompts.

        From then on the replica's load reports can include the submission. Without this call the submission is counted
        twice until its first token.
        """
        self._dispatcher.core.on_submitted(self.queued)

    def charge_tokens(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charges tokens of the output as they come.

        Dispatch charged the whole prompt; this method refunds cached tokens, and `__aexit__` refunds tokens that were
        not computed.

        Args:
            prompt_tokens: Tokens of prompts whose first token came now, including cached tokens.
            cached_tokens: Those prompt tokens that were found in the prefix cache.
            output_tokens: New output tokens.
        """
        self._dispatcher.core.charge_tokens(self.queued, prompt_tokens, cached_tokens, output_tokens)

    def on_first_token(self) -> None:
        """Records the first token and compares the predicted time with it."""
        dispatcher, queued = self._dispatcher, self.queued
        now_s, hedging = dispatcher.clock.monotonic_s(), dispatcher.hedging
        if hedging.on and not queued.requeues and hedging.is_for(queued.request):
            hedging.on_answered(now_s - queued.dispatched_s)
        dispatcher.core.on_first_token(queued, now_s)
        if dispatcher.notify_first_token is not None:
            dispatcher.notify_first_token(now_s - queued.request.arrived_s)


class Dispatcher:
    """The queue of one model.

    Args:
        model: Its name.
        endpoints: The replicas that run it; at least one.
        config: The settings.
        clock: The time.
        balancer: Balancer that chooses the replica of a request; None: the replica with the most free slots.
        draw: Returns a number from 0 to 1 for the jitter of Retry-After times.
        on_wanted: Called when a request is rejected while a replica could start on demand.
        notify_first_token: Called at each first token with the seconds since the request arrived; None: no callback.
        region: The gateway's own region; None: it has no name.

    Attributes:
        model: Its name.
        core: The state of dispatch; read-only for callers.
        load_shedder: Rejects requests that may not wait, before they join.
        hedging: Decides which requests get a second replica, and when.
        overflow_planner: Selects the requests that are asked to move to another model.
        recoveries: Maximum number of times that a request is requeued after its replica failed.
        clock, draw: The clock, and the source of jitter from 0 to 1.
        notify_first_token: Called at each first token with the seconds since the request arrived; None: no callback.
    """

    def __init__(
        self,
        model: str,
        endpoints: Sequence[AnyEndpoint],
        config: DispatchConfig,
        clock: Clock,
        *,
        balancer: CacheAwareBalancer | None = None,
        draw: Callable[[], float] = random.random,
        on_wanted: Callable[[], None] = lambda: None,
        notify_first_token: Callable[[float], None] | None = None,
        region: str | None = None,
    ) -> None:
        self.model = model
        self.core = DispatchCore(endpoints, config, balancer, region)
        self.recoveries = config.recoveries
        self.hedging = HedgePolicy(config.hedging, model)
        self.draw = draw
        self.load_shedder = LoadShedder(self.core, config, draw, on_wanted)
        self.overflow_planner = OverflowPlanner(self.core, config, self.core.selector.cached_tokens)
        self.clock = clock
        self._entries: dict[QueuedRequest, DispatchEntry] = {}
        self._queued_by_request_id: dict[str, list[QueuedRequest]] = {}
        self._has_entries = asyncio.Event()
        """Set while at least one request waits."""
        self._dispatch_scheduled = False
        self._lag_monitor = LoopLagMonitor(clock, self.core)
        self._dispatch_listener: Callable[[], None] | None = None
        self._wait_listener: Callable[[], None] | None = None
        self.notify_first_token = notify_first_token
        for endpoint in endpoints:
            endpoint.replica.on_change(self._on_replica_change)

    def reconfigure(
        self, endpoints: Sequence[AnyEndpoint], config: DispatchConfig, balancer: CacheAwareBalancer | None
    ) -> None:
        """Applies new settings and replicas; every entry keeps its position. See `DispatchCore.reconfigure`."""
        new = self.core.reconfigure(endpoints, config, balancer, self.clock.monotonic_s())
        self.recoveries = config.recoveries
        self.hedging.reconfigure(config.hedging)
        self.load_shedder.reconfigure(config)
        self.overflow_planner.reconfigure(config)
        for endpoint in new:
            endpoint.replica.on_change(self._on_replica_change)
        self.refresh_and_dispatch()

    def enqueue(self, dispatch_request: DispatchRequest) -> DispatchEntry:
        """Returns a context manager in which the request waits and then runs.

        Entering it never blocks and never rejects.
        """
        return DispatchEntry(self, self.core.new_entry(dispatch_request))

    def reattach(self, dispatch_request: DispatchRequest, replica: str) -> DispatchEntry | None:
        """Registers a request that runs at a replica and was dispatched by a process that has died.

        Enter it before any request waits. Returns None if the replica no longer exists.
        """
        if all(endpoint_state.endpoint.name != replica for endpoint_state in self.core.endpoint_states):
            return None
        return DispatchEntry(self, self.core.new_entry(dispatch_request), runs_at=replica)

    async def overflow_others(self, dispatch_request: DispatchRequest) -> bool:
        """Asks waiting requests to move if that lets `LoadShedder.check` admit a rejected request.

        Returns:
            Whether any request was asked to move; then `LoadShedder.check` may now admit the request.
        """
        self._request_overflow(self.overflow_planner.select_for(dispatch_request, self.clock.monotonic_s()))
        answers = [
            answer
            for queued in self.overflow_planner.pending(dispatch_request)
            if (answer := self._entries[queued].overflow_answer)
        ]
        if answers:
            await asyncio.wait(answers, timeout=_OVERFLOW_ANSWER_TIMEOUT_S)
        return bool(answers)

    def check_overflow(self) -> None:
        """Asks waiting requests to move to another model if objectives would be missed otherwise."""
        self._request_overflow(self.overflow_planner.select_late(self.clock.monotonic_s()))

    def position_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """Position of an organisation's waiting request with this id; None if there is none."""
        for queued in self._queued_by_request_id.get(request_id, ()):
            if queued.request.organisation == organisation:
                position = self.position(queued)
                if position is not None:
                    return position
        return None

    def position(self, queued: QueuedRequest) -> QueuePosition | None:
        """Position of a request in the queue; None if it does not wait."""
        if queued.state is not QueueState.WAITING:
            return None
        now_s = self.clock.monotonic_s()
        ready = self.core.permitted_endpoints(queued.request, self.core.refresh(now_s))
        forecast = self.core.forecast_cache.forecast(queued, ready, now_s)
        return self.core.forecast_cache.position(forecast, now_s)

    def snapshot(self) -> DispatchSnapshot:
        """Returns the state of the queue for metrics."""
        return dispatch_snapshot(self.core, self.clock.monotonic_s())

    def tenant_activity(self) -> TenantActivity:
        """Returns requests by organisation for the console.

        It iterates over all running requests, so call it at most once a second.
        """
        return tenant_activity(self.core)

    @property
    def serving(self) -> bool:
        """Whether any replica takes new requests now, or will once it has started."""
        self.core.refresh(self.clock.monotonic_s())
        return any(
            endpoint_state.outage is None or endpoint_state.ready_in_s is not None
            for endpoint_state in self.core.endpoint_states
        )

    def set_dispatch_listener(self, listener: Callable[[], None] | None) -> None:
        """Sets the listener that is called after every dispatch pass; None: no listener. It must not raise."""
        self._dispatch_listener = listener

    def meter_demand(self, listener: Callable[[], None]) -> DemandMeter:
        """Begins to measure the demand; `listener` is called each time that requests begin to wait."""
        self._wait_listener = listener
        return DemandMeter(self.core, self.clock.monotonic_s())

    async def run(self) -> None:
        """Checks deadlines and overflow periodically, until it is cancelled."""
        while True:
            if not self._entries:
                self._has_entries.clear()
                await self._has_entries.wait()
            await asyncio.sleep(_POLL_INTERVAL_S)
            if self._entries:
                self.refresh_and_dispatch()
                try:
                    self.check_overflow()
                except Exception:  # dispatch must go on without it
                    _log.exception("Nobody was asked to move to another model.")

    # --- dispatch passes ---

    def refresh_and_dispatch(self) -> None:
        """Refreshes all replicas and dispatches requests that have credits."""
        now_s = self.clock.monotonic_s()
        self.dispatch(now_s, self.core.refresh(now_s))

    def _run_scheduled(self) -> None:
        self._dispatch_scheduled = False
        self.dispatch(self.clock.monotonic_s())

    def dispatch(self, now_s: float, ready: Sequence[EndpointState] | None = None) -> None:
        """Wakes the entries that the core dispatches or fails now. `ready` is what `DispatchCore.refresh` returned.

        A fault fails the request that it concerns, and nothing is raised.
        """
        for queued in self.core.run_dispatch_pass(now_s, ready):
            entry = self._entries.get(queued)
            if entry is None:
                continue
            try:
                self.remove_waiting(queued)
                entry.wait_span.close(now_s)
                self._watch_lag(queued)
            except Exception:  # it must not keep the others from being woken
                _log.exception("A fault after a dispatch pass fails request %s.", queued.request.id)
                self.core.fail_faulty(queued, now_s)
            finally:
                entry.wake()
        if self._dispatch_listener is not None:
            self._notify_listener(self._dispatch_listener)

    def _notify_listener(self, listener: Callable[[], None]) -> None:
        try:
            listener()
        except Exception:  # all requests have been woken, and that holds
            _log.exception("A listener to dispatch passes has failed.")

    def _on_replica_change(self) -> None:
        """Handles a new load report or a new state of a replica."""
        self.core.refresh(self.clock.monotonic_s())  # refresh now, so that the start time of the engine step is exact
        if self._entries:
            self.schedule_dispatch()

    def on_started(self, queued: QueuedRequest) -> None:
        """Records that an entry was dispatched without a wait."""
        self._watch_lag(queued)
        if self._dispatch_listener is not None:
            self._notify_listener(self._dispatch_listener)

    def _watch_lag(self, queued: QueuedRequest) -> None:
        """Watches the lag of the event loop if the request was dispatched to a replica whose window is learned."""
        if queued.allocation is not None and not queued.allocation.endpoint_state.endpoint.reports_capacity:
            self._lag_monitor.watch()

    def on_left(self, now_s: float) -> None:
        """Schedules a dispatch pass after an entry has left."""
        if self._entries:
            self.schedule_dispatch()
        elif not self.core.idle_recorded or self._dispatch_listener is not None:
            self.dispatch(now_s)

    def schedule_dispatch(self) -> None:
        """Schedules one dispatch pass for the next iteration of the event loop."""
        if not self._dispatch_scheduled:
            self._dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._run_scheduled)

    def _request_overflow(self, entries: Sequence[QueuedRequest]) -> None:
        for queued in entries:
            self.overflow_planner.on_requested(queued)
            self._entries[queued].request_overflow()

    def add_waiting(self, entry: DispatchEntry, now_s: float) -> None:
        """Registers an entry that waits from now on."""
        queued = entry.queued
        entry.wait_span = WaitSpan(queued, now_s)
        if self._wait_listener is not None and not self._entries:
            self._wait_listener()
        self._entries[queued] = entry
        self._has_entries.set()
        self._queued_by_request_id.setdefault(queued.request.id, []).append(queued)

    def remove_waiting(self, queued: QueuedRequest) -> DispatchEntry | None:
        """Removes an entry that waits no more, and returns it if it did wait."""
        entry = self._entries.pop(queued, None)
        if entry is not None:
            self.overflow_planner.on_leave(queued)
            entry.resolve_overflow()
            same_id = self._queued_by_request_id[queued.request.id]
            same_id.remove(queued)
            if not same_id:
                del self._queued_by_request_id[queued.request.id]
        return entry


class OverflowRequested(Exception):
    """Raised in the task of an entry that another model would serve sooner.

    The entry answers with `DispatchEntry.accept_overflow` or `DispatchEntry.decline_overflow`.

    Args:
        entry: The entry; it keeps its position until it answers, and can be dispatched meanwhile.
    """

    def __init__(self, entry: "DispatchEntry") -> None:
        super().__init__()
        self.entry = entry
