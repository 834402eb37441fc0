"""Where requests wait for a replica: the part with an event loop, around `DispatchCore`, which decides.

Whatever changes (a request joins or leaves, a report comes, a replica is lost or ready) asks for a turn. All that asks
within one turn of the event loop gets one pass of the core, so a report that frees ten places costs one pass.
"""

import asyncio
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
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.loop_lag import LoopLagMonitor
from maitred.dispatch.metrics import DispatchSnapshot, TenantActivity, dispatch_snapshot, tenant_activity
from maitred.dispatch.overflow import OverflowPlanner
from maitred.dispatch.policy.hedging import HedgePolicy
from maitred.dispatch.pool_queue import Allocation, QueuedRequest, QueueState, WaitSpan, record_immediate_dispatch
from maitred.dispatch.request import AnyEndpoint, DispatchRequest, Endpoint
from maitred.dispatch.shedding import QueueAdmission

__all__ = ["DispatchEntry", "DispatchRequest", "Dispatcher", "Endpoint"]

_TICK_S = 0.1
"""How late a deadline may be noticed while nothing else happens, and how often it is looked who should leave."""
_ANSWER_S = 2.0
"""For those who are asked to leave: what they need elsewhere is a matter of milliseconds."""


class HedgeAllocation:
    """Allocation of a request at its second replica.

    Made by `DispatchEntry.hedge`; its owner calls `settle` in any case.
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
        """Notes one submission to the second replica."""
        self._allocation.endpoint_state.credits.on_submitted(self._allocation.hold)

    def settle(self, *, won: bool) -> None:
        """Gives up one of the two replicas: the first if the second has won, otherwise the second."""
        self._dispatcher.core.settle_hedge(self._queued, self._allocation, won=won)
        self._dispatcher.schedule_dispatch()


class DispatchEntry:
    """Handle of one request in dispatch.

    Made by `Dispatcher.enqueue`; entering joins the queue, leaving frees everything.

    Nothing here awaits but `wait_dispatched`, so leaving is complete when it returns, also when a `CancelledError`
    leaves.
    """

    __slots__ = ("_dispatcher", "_waiter", "overflow_answer", "overflowed", "queued", "runs_at", "wait_span")

    wait_span: WaitSpan
    """What its timeline is told of its waiting; set when it has joined the queue."""

    def __init__(self, dispatcher: "Dispatcher", queued: QueuedRequest, runs_at: str = "") -> None:
        self._dispatcher = dispatcher
        self.runs_at = runs_at
        """Replica that it ran at before it had an entry here; empty: none."""
        self._waiter: asyncio.Future[None] | None = None
        self.overflow_answer: asyncio.Future[None] | None = None
        """Done when it has gone elsewhere, or will not; None: it was not asked."""
        self.overflowed = False
        """Whether it has gone elsewhere."""
        self.queued = queued

    async def __aenter__(self) -> "DispatchEntry":
        """Joins the queue, or starts at once where nobody waits and a replica has credits."""
        dispatcher, queued = self._dispatcher, self.queued
        if queued.state is not QueueState.NEW:
            raise RuntimeError("An entry is entered once.")
        core, now_s = dispatcher.core, dispatcher.clock.monotonic_s()
        if self.runs_at:
            core.resume(queued, self.runs_at, now_s)
        if self.runs_at or core.dispatch_now(queued, now_s):
            record_immediate_dispatch(queued, now_s)
            dispatcher.on_started(queued)
            return self
        ready = core.join(queued, now_s)
        dispatcher.overflow_planner.on_join(queued)
        dispatcher.add_waiting(self, now_s)
        # Where there is room it need not wait until the event loop has done all else that is due.
        dispatcher.dispatch(now_s, ready)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Frees all that the request holds."""
        dispatcher, queued = self._dispatcher, self.queued
        core, now_s = dispatcher.core, dispatcher.clock.monotonic_s()
        if dispatcher.remove_waiting(queued) is not None:
            reason = "moved" if self.overflowed else "cancelled" if error is None else error_code(error)
            self.wait_span.on_leave(now_s, reason)
        lost = error is not None and isinstance(error, ReplicaLost | ReplicaUnavailable)
        core.leave(queued, now_s, finished=error is None, lost=lost, moved=self.overflowed)
        dispatcher.on_left(now_s)

    async def wait_dispatched(self) -> AnyEndpoint:
        """Waits for its turn; the replica is chosen then, and its credits are taken. One task at a time.

        Cancelled while it waits, it can be asked again.

        Raises:
            DeadlineExceeded: The deadline passed, or nothing can be ready by then any more.
            ReplicaUnavailable: None has been ready for longer than its class waits.
            OverflowRequested: It should move to another model (a request that is `movable`, once at most). It can be
                waited for again.
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
        if queued.state is not QueueState.RELEASED or queued.allocation is None:
            raise RuntimeError("The entry was waited for outside its context.")
        return queued.allocation.endpoint_state.endpoint

    def wake(self) -> None:
        """Wakes the waiting task: the request's state has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def request_overflow(self) -> None:
        """Asks it to go elsewhere; see `answer`."""
        self.overflow_answer = asyncio.get_running_loop().create_future()
        self.wake()

    def decline_overflow(self) -> None:
        """Declines to move to another model; also when the request does not wait any more."""
        self._dispatcher.overflow_planner.on_leave(self.queued)
        self.resolve_overflow()

    def resolve_overflow(self) -> None:
        """Resolves the question whether the request moves, for whoever waits for it."""
        if self.overflow_answer is not None and not self.overflow_answer.done():
            self.overflow_answer.set_result(None)

    def accept_overflow(self) -> bool:
        """Accepts to move to another model, if the request still waits; returns whether it does."""
        self.overflowed = self.queued.state is QueueState.WAITING
        if not self.overflowed:
            self.decline_overflow()
        return self.overflowed

    def hedge_after_s(self) -> float | None:
        """How long to wait for the granted replica before a `second` one is asked as well; None: whatever it takes.

        To be asked once, when the request is sent.
        """
        hedging, queued = self._dispatcher.hedging, self.queued
        if not hedging.on or queued.requeues or not hedging.is_for(queued.request):
            return None
        if len(self._dispatcher.core.endpoint_states) == 1:
            return None
        hedging.on_dispatch()
        return hedging.after_s

    def hedge(self) -> HedgeAllocation | None:
        """A second replica, from now until its `settle`; None: the budget has none, or none has room."""
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
        """Whether another replica is ready that has not failed it."""
        dispatcher, queued = self._dispatcher, self.queued
        now_s = dispatcher.clock.monotonic_s()
        return queued.state is QueueState.RELEASED and dispatcher.core.has_other_replica(queued, now_s)

    def requeue(self, *, prompts: Sequence[int], answer_by_s: float | None = None, rest_s: float | None = None) -> bool:
        """Gives up the granted replica, which has failed it, and waits for another one; `granted` says which.

        It keeps its age, goes before those who have not run, and nothing is charged twice.

        Args:
            prompts: Those that have not been answered in full, by their numbers. `submitted` is to be called for each.
            answer_by_s: When its whole answer must be there; waiting ends then.
            rest_s: For how long that replica gets no requests; None: for longer each time.

        Returns:
            False if that has happened too often; nothing has changed then.
        """
        dispatcher, queued = self._dispatcher, self.queued
        if queued.state is not QueueState.RELEASED or queued.requeues >= dispatcher.recoveries:
            return False
        now_s = dispatcher.clock.monotonic_s()
        draw = dispatcher.draw()
        dispatcher.core.requeue(queued, now_s, prompts=prompts, answer_by_s=answer_by_s, draw=draw, rest_s=rest_s)
        dispatcher.add_waiting(self, now_s)
        dispatcher.schedule_dispatch()
        return True

    @property
    def expected_tokens(self) -> int:
        """Output that is predicted for each choice."""
        return self.queued.expected_tokens

    @property
    def waited_ms(self) -> dict[str, float]:
        """Milliseconds that it waited, by cause (see `WaitCause`); complete once it is granted."""
        return self.queued.waited_ms

    def position(self) -> QueuePosition | None:
        """Where it stands; None once it is granted."""
        return self._dispatcher.position(self.queued)

    def on_submitted(self) -> None:
        """To be called after each submission to the granted replica, in the order of the request's prompts.

        From then on the replica's own reports can count it. Without it, it counts twice until its first token.
        """
        self._dispatcher.core.on_submitted(self.queued)

    def charge_tokens(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """Charges real tokens as they come.

        The whole prompt was charged at dispatch; what was found in the cache is given back here, and what
        was never computed on leaving.

        Args:
            prompt_tokens: Of prompts whose first tokens came now, cached ones included.
            cached_tokens: Of these, found in the prefix cache.
            output_tokens: New ones.
        """
        self._dispatcher.core.charge_tokens(self.queued, prompt_tokens, cached_tokens, output_tokens)

    def on_first_token(self) -> None:
        """The first token came: the prediction is compared with it."""
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
        placement: Which of several replicas takes a request; None: the one with the most room.
        draw: A number from 0 to 1, for the jitter in times to come back.
        wanted: Called when a request is refused that could not wait for a replica which comes when it is needed.
        answered: Called at each first token with the seconds since its request arrived.

    Attributes:
        model: Its name.
        core: The state; to be looked at only.
        admission: Checks requests before they join.
        hedging: Decides which requests get a second replica, and when.
        overflow_planner: Chooses who is asked to move to another model.
        recoveries: How often a request may be put back after its replica failed.
        clock, draw: The time, and a number from 0 to 1 for jitter.
        notify_first_token: Called at each first token with the seconds since the request arrived; None: nobody is told.
    """

    def __init__(
        self,
        model: str,
        endpoints: Sequence[AnyEndpoint],
        config: DispatchConfig,
        clock: Clock,
        *,
        placement: CacheAwareBalancer | None = None,
        draw: Callable[[], float] = random.random,
        wanted: Callable[[], None] = lambda: None,
        answered: Callable[[float], None] | None = None,
    ) -> None:
        self.model = model
        self.core = DispatchCore(endpoints, config, placement)
        self.recoveries = config.recoveries
        self.hedging = HedgePolicy(config.hedging, model)
        self.draw = draw
        self.admission = QueueAdmission(self.core, config, draw, wanted)
        self.overflow_planner = OverflowPlanner(self.core, config, self.core.selector.cached_tokens)
        self.clock = clock
        self._entries: dict[QueuedRequest, DispatchEntry] = {}
        self._by_id: dict[str, list[QueuedRequest]] = {}
        self._has_waiting = asyncio.Event()
        """Somebody waits."""
        self._dispatch_scheduled = False
        self._lag_monitor = LoopLagMonitor(clock, self.core)
        self._on_dispatched: Callable[[], None] | None = None
        self.notify_first_token = answered
        for endpoint in endpoints:
            endpoint.replica.on_change(self._on_replica_change)

    def reconfigure(
        self, endpoints: Sequence[AnyEndpoint], config: DispatchConfig, placement: CacheAwareBalancer | None
    ) -> None:
        """Applies new settings and replicas; every entry keeps its position. See `DispatchCore.reconfigure`."""
        new = self.core.reconfigure(endpoints, config, placement, self.clock.monotonic_s())
        self.recoveries = config.recoveries
        self.hedging.reconfigure(config.hedging)
        self.admission.reconfigure(config)
        self.overflow_planner.reconfigure(config)
        for endpoint in new:
            endpoint.replica.on_change(self._on_replica_change)
        self.dispatch_ready()

    def enqueue(self, dispatch_request: DispatchRequest) -> DispatchEntry:
        """A context in which the request waits and then runs. Entering never waits and never refuses."""
        return DispatchEntry(self, self.core.new_entry(dispatch_request))

    def resume(self, dispatch_request: DispatchRequest, replica: str) -> DispatchEntry | None:
        """Enqueues a request that runs at a replica already, released by a process that has died since.

        To be entered before anybody waits. None: that replica is not known any more.
        """
        if all(endpoint_state.endpoint.name != replica for endpoint_state in self.core.endpoint_states):
            return None
        return DispatchEntry(self, self.core.new_entry(dispatch_request), runs_at=replica)

    async def overflow_others(self, dispatch_request: DispatchRequest) -> bool:
        """Sends others elsewhere who wait, where that makes room for a request that `check` has refused.

        Returns:
            Whether anybody was, for this request or for others of its kind; then `check` may say something else now.
        """
        self._request_overflow(self.overflow_planner.select_for(dispatch_request, self.clock.monotonic_s()))
        answers = [
            answer
            for queued in self.overflow_planner.pending(dispatch_request)
            if (answer := self._entries[queued].overflow_answer)
        ]
        if answers:
            await asyncio.wait(answers, timeout=_ANSWER_S)
        return bool(answers)

    def check_overflow(self) -> None:
        """Asks those to leave who would miss their objectives here, or whose leaving spares others that."""
        self._request_overflow(self.overflow_planner.select_leaving(self.clock.monotonic_s()))

    def position_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """Where a waiting request of this organisation stands; None if none of that id waits."""
        for queued in self._by_id.get(request_id, ()):
            if queued.request.principal_org == organisation:
                position = self.position(queued)
                if position is not None:
                    return position
        return None

    def position(self, queued: QueuedRequest) -> QueuePosition | None:
        """Where a request stands; None if it does not wait."""
        if queued.state is not QueueState.WAITING:
            return None
        now_s = self.clock.monotonic_s()
        forecast = self.core.forecast_cache.forecast(queued, self.core.refresh(now_s), now_s)
        return self.core.forecast_cache.position(forecast, now_s)

    def snapshot(self) -> DispatchSnapshot:
        """Returns the state of the queue for metrics."""
        return dispatch_snapshot(self.core, self.clock.monotonic_s())

    def tenant_activity(self) -> TenantActivity:
        """Returns requests by organisation for the console. It looks at all that run: once a second is enough."""
        return tenant_activity(self.core)

    @property
    def serving(self) -> bool:
        """Whether a replica that is there, or comes when it is wanted, takes anything new."""
        self.core.refresh(self.clock.monotonic_s())
        return any(
            endpoint_state.outage is None or endpoint_state.comes_in_s is not None
            for endpoint_state in self.core.endpoint_states
        )

    def on_dispatched(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every turn: who waits and who runs may have changed. It must not raise."""
        self._on_dispatched = listener

    async def run(self) -> None:
        """Notices deadlines while nothing else happens; until it is cancelled."""
        while True:
            if not self._entries:
                self._has_waiting.clear()
                await self._has_waiting.wait()
            await asyncio.sleep(_TICK_S)
            if self._entries:
                self.dispatch_ready()
                self.check_overflow()

    # --- turns ---

    def dispatch_ready(self) -> None:
        """Lets go whom there are credits for, and looks at all replicas, whether or not anybody waits."""
        now_s = self.clock.monotonic_s()
        self.dispatch(now_s, self.core.refresh(now_s))

    def _run_scheduled(self) -> None:
        self._dispatch_scheduled = False
        self.dispatch(self.clock.monotonic_s())

    def dispatch(self, now_s: float, ready: Sequence[EndpointState] | None = None) -> None:
        """Wakes the entries that the core dispatches or fails now. `ready` is what `DispatchCore.refresh` returned."""
        for queued in self.core.dispatch_ready(now_s, ready):
            entry = self.remove_waiting(queued)
            if entry is not None:
                entry.wait_span.close(now_s)
                entry.wake()
                if queued.allocation is not None and queued.allocation.endpoint_state.learns_window:
                    self._lag_monitor.watch()
        if self._on_dispatched is not None:
            self._on_dispatched()

    def _on_replica_change(self) -> None:
        """A replica has something new to say."""
        self.core.refresh(self.clock.monotonic_s())  # when a step began tells when it will end
        if self._entries:
            self.schedule_dispatch()

    def on_started(self, queued: QueuedRequest) -> None:
        """An entry that did not wait has started at a replica."""
        if queued.allocation is not None and queued.allocation.endpoint_state.learns_window:
            self._lag_monitor.watch()
        if self._on_dispatched is not None:
            self._on_dispatched()

    def on_left(self, now_s: float) -> None:
        """An entry has left: others may have room now."""
        if self._entries:
            self.schedule_dispatch()
        elif not self.core.slack or self._on_dispatched is not None:
            self.dispatch(now_s)

    def schedule_dispatch(self) -> None:
        """Dispatches in this turn of the event loop, once for all that ask for it."""
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
        self._entries[queued] = entry
        self._has_waiting.set()
        self._by_id.setdefault(queued.request.id, []).append(queued)

    def remove_waiting(self, queued: QueuedRequest) -> DispatchEntry | None:
        """Removes an entry that waits no more, and returns it if it did wait."""
        entry = self._entries.pop(queued, None)
        if entry is not None:
            self.overflow_planner.on_leave(queued)
            entry.resolve_overflow()
            same = self._by_id[queued.request.id]
            same.remove(queued)
            if not same:
                del self._by_id[queued.request.id]
        return entry


class OverflowRequested(Exception):
    """Raised to an entry that another model would serve sooner.

    The entry answers with `DispatchEntry.accept_overflow` or `DispatchEntry.decline_overflow`.

    Args:
        entry: It keeps its place here until then, and can be granted meanwhile.
    """

    def __init__(self, entry: "DispatchEntry") -> None:
        super().__init__()
        self.entry = entry
