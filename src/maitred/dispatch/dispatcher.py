"""Where requests wait for a replica: the part with an event loop, around `DispatchCore`, which decides.

Whatever changes (a request joins or leaves, a report comes, a replica is lost or ready) asks for a turn. All that asks
within one turn of the event loop gets one turn of the floor, so a report that frees ten places costs one pass.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

from maitred.core.balance import CacheAwareBalancer
from maitred.core.clock import Clock
from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.queue_position import QueuePosition
from maitred.core.timeline import code_of
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.crowd import TenantActivity, crowd_of
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.entry import Allocation, QueuedRequest, QueueState
from maitred.dispatch.loop_lag import LoopLagMonitor
from maitred.dispatch.metrics import DispatchSnapshot, state_of
from maitred.dispatch.overflow import OverflowPlanner
from maitred.dispatch.passage import WaitSpan, walked_in
from maitred.dispatch.policy.hedging import HedgePolicy
from maitred.dispatch.request import AnyEndpoint, DispatchRequest, Endpoint
from maitred.dispatch.seat import DispatchEntry
from maitred.dispatch.shedding import QueueAdmission
from maitred.dispatch.spare import HedgeAllocation

__all__ = ["DispatchEntry", "DispatchRequest", "Dispatcher", "Endpoint"]

_TICK_S = 0.1
"""How late a deadline may be noticed while nothing else happens, and how often it is looked who should leave."""
_ANSWER_S = 2.0
"""For those who are asked to leave: what they need elsewhere is a matter of milliseconds."""


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
