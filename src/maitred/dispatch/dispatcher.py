"""Where requests wait for a replica: the part with an event loop, around `DispatchCore`, which decides.

Whatever changes (a request joins or leaves, a report comes, a replica is lost or ready) asks for a turn. All that asks
within one turn of the event loop gets one turn of the floor, so a report that frees ten places costs one pass.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from types import TracebackType

from maitred.core.balance import CacheAwareBalancer
from maitred.core.clock import Clock
from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.flow import QueuePosition
from maitred.core.timeline import code_of
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.loop_lag import LoopLagMonitor
from maitred.dispatch.metrics import DispatchSnapshot, TenantActivity, crowd_of, state_of
from maitred.dispatch.overflow import OverflowPlanner
from maitred.dispatch.policy.hedging import HedgePolicy
from maitred.dispatch.pool_queue import Allocation, QueuedRequest, QueueState
from maitred.dispatch.request import AnyEndpoint, DispatchRequest, Endpoint
from maitred.dispatch.shedding import QueueAdmission
from maitred.dispatch.timeline import WaitSpan, walked_in

__all__ = ["DispatchEntry", "DispatchRequest", "Dispatcher", "Endpoint"]

_TICK_S = 0.1
"""How late a deadline may be noticed while nothing else happens, and how often it is looked who should leave."""
_ANSWER_S = 2.0
"""For those who are asked to leave: what they need elsewhere is a matter of milliseconds."""


class HedgeAllocation:
    """What a request holds there. Made by `Seat.spare`; whoever asked for it calls `settle`, whatever happens."""

    __slots__ = ("_dispatcher", "_grip", "_ticket")

    def __init__(self, dispatcher: "Dispatcher", ticket: QueuedRequest, grip: Allocation) -> None:
        self._dispatcher = dispatcher
        self._ticket = ticket
        self._grip = grip

    @property
    def post(self) -> AnyEndpoint:
        """The replica."""
        return self._grip.station.post

    def submitted(self) -> None:
        """See `Seat.submitted`."""
        self._grip.station.credits.submitted(self._grip.hold)

    def settle(self, *, won: bool) -> None:
        """One of the two is given up: if it has won, the one that the seat had been granted, which it then has."""
        self._dispatcher.settle(self._ticket, self._grip, won=won)


class DispatchEntry:
    """One request's. Made by `Dispatcher.seat`; entering joins the line, leaving gives everything back.

    Nothing here awaits but `granted`, so leaving is complete when it returns, also when a `CancelledError` leaves.
    """

    __slots__ = ("_dispatcher", "_waiter", "answer", "moved", "passage", "runs_at", "ticket")

    passage: WaitSpan
    """What is told of its waiting; since it has joined the line."""

    def __init__(self, dispatcher: "Dispatcher", ticket: QueuedRequest, runs_at: str = "") -> None:
        self._dispatcher = dispatcher
        self.runs_at = runs_at
        """The replica that it ran at before it had a seat here; empty: at none."""
        self._waiter: asyncio.Future[None] | None = None
        self.answer: asyncio.Future[None] | None = None
        """Done when it has gone elsewhere, or will not; None: it was not asked."""
        self.moved = False
        """Whether it has gone elsewhere."""
        self.ticket = ticket

    async def __aenter__(self) -> "DispatchEntry":
        self._dispatcher.join(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dispatcher.leave(self, error)

    async def granted(self) -> AnyEndpoint:
        """Waits for its turn; the replica is chosen then, and its credits are taken. One task at a time.

        Cancelled while it waits, it can be asked again.

        Raises:
            DeadlineExceeded: The deadline passed, or nothing can be ready by then any more.
            ReplicaUnavailable: None has been ready for longer than its class waits.
            AskedToLeave: It should go elsewhere (of an errand that is `movable`, once at most). It can be asked again.
        """
        ticket = self.ticket
        while ticket.state is QueueState.WAITING:
            if self.answer is not None and not self.answer.done():
                raise OverflowRequested(self)
            if self._waiter is not None:
                raise RuntimeError("Another task waits for this seat already.")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if ticket.failure is not None:
            raise ticket.failure
        if ticket.state is not QueueState.RELEASED or ticket.grip is None:
            raise RuntimeError("The seat was asked for outside its context.")
        return ticket.grip.station.post

    def wake(self) -> None:
        """Its state has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def ask_to_leave(self) -> None:
        """Asks it to go elsewhere; see `answer`."""
        self.answer = asyncio.get_running_loop().create_future()
        self.wake()

    def stay(self) -> None:
        """It was asked to leave, and does not; also when it does not wait any more."""
        self._dispatcher.stays(self.ticket)
        self.answered()

    def answered(self) -> None:
        """Whoever has asked need not wait for an answer any more."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(None)

    def move(self) -> bool:
        """It was asked to leave, and leaves its context next, if it still waits; returns whether it does."""
        self.moved = self.ticket.state is QueueState.WAITING
        if not self.moved:
            self.stay()
        return self.moved

    def hedge_after_s(self) -> float | None:
        """How long to wait for the granted replica before a `spare` one is asked as well; None: whatever it takes.

        To be asked once, when the request is sent.
        """
        return self._dispatcher.hedge_after_s(self.ticket)

    def spare(self) -> HedgeAllocation | None:
        """A second replica, from now until its `settle`; None: the budget has none, or none has room."""
        return self._dispatcher.spare(self.ticket)

    @property
    def elsewhere(self) -> bool:
        """Whether another replica is ready that has not failed it."""
        return self._dispatcher.elsewhere(self)

    def again(self, *, prompts: Sequence[int], answer_by_s: float | None = None, rest_s: float | None = None) -> bool:
        """Gives up the granted replica, which has failed it, and waits for another one; `granted` says which.

        It keeps its age, goes before those who have not run, and nothing is charged twice.

        Args:
            prompts: Those that have not been answered in full, by their numbers. `submitted` is to be called for each.
            answer_by_s: When its whole answer must be there; waiting ends then.
            rest_s: For how long that replica gets no requests; None: for longer each time.

        Returns:
            False if that has happened too often; nothing has changed then.
        """
        return self._dispatcher.again(self, prompts=prompts, answer_by_s=answer_by_s, rest_s=rest_s)

    @property
    def expected_tokens(self) -> int:
        """Output that is predicted for each choice."""
        return self.ticket.expected_tokens

    @property
    def waited_ms(self) -> dict[str, float]:
        """Milliseconds that it waited, by cause (see `WaitCause`); complete once it is granted."""
        return self.ticket.waited_ms

    def place(self) -> QueuePosition | None:
        """Where it stands; None once it is granted."""
        return self._dispatcher.place(self.ticket)

    def submitted(self) -> None:
        """To be called after each submission to the granted replica, in the order of the errand's prompts.

        From then on the replica's own reports can count it. Without it, it counts twice until its first token.
        """
        self._dispatcher.floor.submitted(self.ticket)

    def took(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """Real tokens as they come.

        The whole prompt was charged when the seat was granted; what was found in the cache is given back here, and what
        was never computed on leaving.

        Args:
            prompt_tokens: Of prompts whose first tokens came now, cached ones included.
            cached_tokens: Of these, found in the prefix cache.
            output_tokens: New ones.
        """
        self._dispatcher.floor.took(self.ticket, prompt_tokens, cached_tokens, output_tokens)

    def first_token(self) -> None:
        """The first token came: the prediction is compared with it."""
        self._dispatcher.first_token(self.ticket)


class Dispatcher:
    """The queue of one model.

    Args:
        model: Its name.
        posts: The replicas that run it; at least one.
        config: The settings.
        clock: The time.
        placement: Which of several replicas takes a request; None: the one with the most room.
        draw: A number from 0 to 1, for the jitter in times to come back.
        wanted: Called when a request is refused that could not wait for a replica which comes when it is needed.
        answered: Told of every first token how many seconds its request has been here.

    Attributes:
        model: Its name.
        floor: The state; to be looked at only.
    """

    def __init__(
        self,
        model: str,
        posts: Sequence[AnyEndpoint],
        config: DispatchConfig,
        clock: Clock,
        *,
        placement: CacheAwareBalancer | None = None,
        draw: Callable[[], float] = random.random,
        wanted: Callable[[], None] = lambda: None,
        answered: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.model = model
        self.floor = DispatchCore(posts, config, placement)
        self._recoveries = config.recoveries
        self._hedging = HedgePolicy(config.hedging, model)
        self._draw = draw
        self._gatekeeper = QueueAdmission(self.floor, config, draw, wanted)
        self._relief = OverflowPlanner(self.floor, config, self.floor.choice.held)
        self._clock = clock
        self._seats: dict[QueuedRequest, DispatchEntry] = {}
        self._by_id: dict[str, list[QueuedRequest]] = {}
        self._waits = asyncio.Event()
        """Somebody waits."""
        self._turn_asked = False
        self._stalls = LoopLagMonitor(clock, self.floor)
        self._after_turn: Callable[[], None] | None = None
        self._answered = answered
        for post in posts:
            post.replica.watch(self._news)

    def adopt(self, posts: Sequence[AnyEndpoint], config: DispatchConfig, placement: CacheAwareBalancer | None) -> None:
        """Applies new settings and replicas; every entry keeps its position. See `DispatchCore.adopt`."""
        new = self.floor.adopt(posts, config, placement, self._clock.monotonic_s())
        self._recoveries = config.recoveries
        self._hedging.adopt(config.hedging)
        self._gatekeeper.adopt(config)
        self._relief.adopt(config)
        for post in new:
            post.replica.watch(self._news)
        self.turn()

    def check(self, errand: DispatchRequest) -> QueuePosition:
        """What is predicted for a request that would join now, counted from its arrival. Changes nothing for anybody.

        Raises:
            ReplicaUnavailable: No replica is ready, nor will one be because requests wait for it.
            QueueFull: Too many of its class wait, or it would wait too long.
            DeadlineUnmeetable: Its first token would come too late.
        """
        now_s = self._clock.monotonic_s()
        place = self._gatekeeper.check(errand, now_s)
        passed_s = now_s - errand.arrived_s
        return QueuePosition(place.position, place.wait_s, place.ttft_s + passed_s) if passed_s > 0.0 else place

    def seat(self, errand: DispatchRequest) -> DispatchEntry:
        """A context in which the request waits and then runs. Entering never waits and never refuses."""
        return DispatchEntry(self, self.floor.ticket(errand))

    def resume(self, errand: DispatchRequest, replica: str) -> DispatchEntry | None:
        """As `seat`, for a request that runs at a replica already: a process that has died since had released it.

        To be entered before anybody waits. None: that replica is not known any more.
        """
        if all(station.post.name != replica for station in self.floor.stations):
            return None
        return DispatchEntry(self, self.floor.ticket(errand), runs_at=replica)

    async def relieve(self, errand: DispatchRequest) -> bool:
        """Sends others elsewhere who wait, where that makes room for a request that `check` has refused.

        Returns:
            Whether anybody was, for this request or for others of its kind; then `check` may say something else now.
        """
        self._ask_to_leave(self._relief.before(errand, self._clock.monotonic_s()))
        answers = [answer for ticket in self._relief.leaving(errand) if (answer := self._seats[ticket].answer)]
        if answers:
            await asyncio.wait(answers, timeout=_ANSWER_S)
        return bool(answers)

    def look(self) -> None:
        """Asks those to leave who would miss their objectives here, or whose leaving spares others that."""
        self._ask_to_leave(self._relief.among(self._clock.monotonic_s()))

    def place_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """Where a waiting request of this organisation stands; None if none of that id waits."""
        for ticket in self._by_id.get(request_id, ()):
            if ticket.errand.principal_org == organisation:
                place = self.place(ticket)
                if place is not None:
                    return place
        return None

    def place(self, ticket: QueuedRequest) -> QueuePosition | None:
        """Where a request stands; None if it does not wait."""
        if ticket.state is not QueueState.WAITING:
            return None
        now_s = self._clock.monotonic_s()
        forecast = self.floor.forecaster.of(ticket, self.floor.refresh(now_s), now_s)
        return self.floor.place(forecast, now_s)

    def state(self) -> DispatchSnapshot:
        """For metrics."""
        return state_of(self.floor, self._clock.monotonic_s())

    def crowd(self) -> TenantActivity:
        """Who is here, for people who watch. Looks at everyone who runs: for once a second, not for each request."""
        return crowd_of(self.floor)

    @property
    def serving(self) -> bool:
        """Whether a replica that is there, or comes when it is wanted, takes anything new."""
        self.floor.refresh(self._clock.monotonic_s())
        return any(station.outage is None or station.comes_in_s is not None for station in self.floor.stations)

    def after_turn(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every turn: who waits and who runs may have changed. It must not raise."""
        self._after_turn = listener

    async def run(self) -> None:
        """Notices deadlines while nothing else happens; until it is cancelled."""
        while True:
            if not self._seats:
                self._waits.clear()
                await self._waits.wait()
            await asyncio.sleep(_TICK_S)
            if self._seats:
                self.turn()
                self.look()

    # --- what seats tell ---

    def join(self, seat: DispatchEntry) -> None:
        """See `DispatchEntry`."""
        ticket = seat.ticket
        if ticket.state is not QueueState.NEW:
            raise RuntimeError("A seat is entered once.")
        now_s = self._clock.monotonic_s()
        if seat.runs_at:
            self.floor.resume(ticket, seat.runs_at, now_s)
        if seat.runs_at or self.floor.walk_in(ticket, now_s):
            walked_in(ticket, now_s)
            self._stalls.watch(ticket)
            if self._after_turn is not None:
                self._after_turn()
            return
        ready = self.floor.join(ticket, now_s)
        self._relief.joined(ticket)
        self._wait(seat, now_s)
        # Where there is room it need not wait until the event loop has done all else that is due.
        self._turn(now_s, ready)

    def elsewhere(self, seat: DispatchEntry) -> bool:
        """See `DispatchEntry`."""
        return seat.ticket.state is QueueState.RELEASED and self.floor.elsewhere(seat.ticket, self._clock.monotonic_s())

    def again(
        self, seat: DispatchEntry, *, prompts: Sequence[int], answer_by_s: float | None, rest_s: float | None
    ) -> bool:
        """See `DispatchEntry`."""
        ticket = seat.ticket
        if ticket.state is not QueueState.RELEASED or ticket.returns >= self._recoveries:
            return False
        now_s = self._clock.monotonic_s()
        self.floor.put_back(ticket, now_s, prompts=prompts, answer_by_s=answer_by_s, draw=self._draw(), rest_s=rest_s)
        self._wait(seat, now_s)
        self._ask_for_turn()
        return True

    def leave(self, seat: DispatchEntry, error: BaseException | None) -> None:
        """See `DispatchEntry`."""
        ticket, now_s = seat.ticket, self._clock.monotonic_s()
        if ticket in self._seats:
            self._forget(ticket)
            seat.passage.left(now_s, "moved" if seat.moved else "cancelled" if error is None else code_of(error))
        lost = error is not None and isinstance(error, ReplicaLost | ReplicaUnavailable)
        self.floor.leave(ticket, now_s, finished=error is None, lost=lost, moved=seat.moved)
        if self._seats:
            self._ask_for_turn()
        elif not self.floor.slack or self._after_turn is not None:
            self._turn(now_s)

    def first_token(self, ticket: QueuedRequest) -> None:
        """See `DispatchEntry`."""
        now_s = self._clock.monotonic_s()
        if self._hedging.on and not ticket.returns and self._hedging.is_for(ticket.errand):
            self._hedging.answered(now_s - ticket.released_s)
        self.floor.first_token(ticket, now_s)
        self._answered(now_s - ticket.errand.arrived_s)

    def hedge_after_s(self, ticket: QueuedRequest) -> float | None:
        """See `DispatchEntry`."""
        hedging = self._hedging
        if not hedging.on or ticket.returns or len(self.floor.stations) == 1 or not hedging.is_for(ticket.errand):
            return None
        self._hedging.released()
        return self._hedging.after_s

    def spare(self, ticket: QueuedRequest) -> HedgeAllocation | None:
        """See `DispatchEntry`."""
        grip = self.floor.spare(ticket, self._clock.monotonic_s()) if self._hedging.affordable else None
        if grip is None:
            return None
        self._hedging.spend()
        return HedgeAllocation(self, ticket, grip)

    def settle(self, ticket: QueuedRequest, spare: Allocation, *, won: bool) -> None:
        """See `HedgeAllocation`."""
        self.floor.settle(ticket, spare, won=won)
        self._ask_for_turn()

    # --- turns ---

    def turn(self) -> None:
        """Lets go whom there are credits for, and looks at all replicas, whether or not anybody waits."""
        now_s = self._clock.monotonic_s()
        self._turn(now_s, self.floor.refresh(now_s))

    def _asked_turn(self) -> None:
        self._turn_asked = False
        self._turn(self._clock.monotonic_s())

    def _turn(self, now_s: float, ready: Sequence[EndpointState] | None = None) -> None:
        for ticket in self.floor.turn(now_s, ready):
            seat = self._forget(ticket)
            if seat is not None:
                seat.passage.over(now_s)
                seat.wake()
                self._stalls.watch(ticket)
        if self._after_turn is not None:
            self._after_turn()

    def _news(self) -> None:
        """A replica has something new to say."""
        self.floor.refresh(self._clock.monotonic_s())  # when a step began tells when it will end
        if self._seats:
            self._ask_for_turn()

    def _ask_for_turn(self) -> None:
        if not self._turn_asked:
            self._turn_asked = True
            asyncio.get_running_loop().call_soon(self._asked_turn)

    def stays(self, ticket: QueuedRequest) -> None:
        """See `DispatchEntry`."""
        self._relief.left(ticket)

    def _ask_to_leave(self, tickets: Sequence[QueuedRequest]) -> None:
        for ticket in tickets:
            self._relief.asked(ticket)
            self._seats[ticket].ask_to_leave()

    def _wait(self, seat: DispatchEntry, now_s: float) -> None:
        """It waits from now on."""
        ticket = seat.ticket
        seat.passage = WaitSpan(ticket, now_s)
        self._seats[ticket] = seat
        self._waits.set()
        self._by_id.setdefault(ticket.errand.id, []).append(ticket)

    def _forget(self, ticket: QueuedRequest) -> DispatchEntry | None:
        """It does not wait any more. Returns its seat if it did."""
        seat = self._seats.pop(ticket, None)
        if seat is not None:
            self._relief.left(ticket)
            seat.answered()
            same = self._by_id[ticket.errand.id]
            same.remove(ticket)
            if not same:
                del self._by_id[ticket.errand.id]
        return seat


class OverflowRequested(Exception):
    """Raised to an entry that another model would serve sooner.

    The entry answers with `DispatchEntry.move` or `DispatchEntry.stay`.

    Args:
        seat: It keeps its place here until then, and can be granted meanwhile.
    """

    def __init__(self, seat: "DispatchEntry") -> None:
        super().__init__()
        self.seat = seat
