"""What would become of a request that waits, or might join."""

from collections.abc import Collection, Sequence
from itertools import islice

from msgspec import Struct

from maitred.core.flow import Flow, FlowLevel
from maitred.dispatch.capacity import CapacityAllocator
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.prediction import AT_ONCE, PredictedWait
from maitred.dispatch.policy.simulation import (
    MOST_AHEAD,
    MOST_TENANTS,
    ArrivalRates,
    PredictedTurn,
    SimulatedTenant,
    until_turn,
)
from maitred.dispatch.pool_queue import PoolQueue, QueuedRequest, QueueState
from maitred.dispatch.predictor import LatencyPredictor, RunningWork
from maitred.dispatch.selector import ReplicaSelector, ease_of
from maitred.fairness.entry import WorkAhead
from maitred.fairness.vtc import PATIENCE_S

_NOBODY = WorkAhead(0, 0.0)
_SAME_S = 0.005
"""Who joins so soon after it was asked what would become of it is told the same, if nothing has changed."""


class Forecast(Struct, frozen=True):
    """Before any correction."""

    ahead: WorkAhead
    wait: PredictedWait
    prefill_s: float
    cold_s: float = 0.0
    """Of the wait, until a replica is ready; it says so itself, so no correction is made to it."""
    ample: bool = False
    """There is surely room for it at the only replica, whoever asks, and nobody is before it."""


class _CachedForecast(Struct, frozen=True):
    """What was forecast last, and of whom."""

    ticket: QueuedRequest
    ready: Sequence[EndpointState]
    now_s: float
    forecast: Forecast


class ForecastCache:
    """Keeps what forecasts have in common until something changes: most requests of an overload are only asked about.

    Args:
        stations: All replicas.
        allotment: Who may have what.
        outlook: How long things take.
        choice: Knows what replicas hold of a prompt.
        played: Whether lines share among tenants, so that they have to be played through.
    """

    def __init__(
        self,
        stations: Sequence[EndpointState],
        allotment: CapacityAllocator,
        outlook: LatencyPredictor,
        choice: ReplicaSelector,
        *,
        played: bool,
    ) -> None:
        self.at_work: dict[QueuedRequest, None] = {}
        """Those that were released and have not left; to be followed by `changed`."""
        self._stations = stations
        self._allotment = allotment
        self._outlook = outlook
        self._choice = choice
        self._played = played
        self.joins = ArrivalRates()
        """Who sends how often; whoever adds to it calls `changed`."""
        self._known: RunningWork | None = None
        self._contests: dict[PoolQueue, QueueSimulation] = {}
        self.last: _CachedForecast | None = None
        """The last one; None: something has changed since."""

    def adopt(self, *, played: bool) -> None:
        """Lines share among tenants, or not, from now on; and whatever else has changed."""
        self._played = played
        self.changed()

    def changed(self) -> None:
        """Something joined, left, was released or advanced."""
        self._known = self.last = None
        if self._contests:
            self._contests.clear()

    def joined(self, flow: Flow, now_s: float) -> None:
        """A request of a flow has begun to wait."""
        self.joins.saw(flow, now_s)
        self.last = None
        if self._contests:
            self._contests.clear()

    def told(self, ticket: QueuedRequest, now_s: float) -> _CachedForecast | None:
        """What was forecast of this ticket just now. None: nobody has asked, or something has changed since."""
        told = self.last
        return told if told is not None and told.ticket is ticket and now_s - told.now_s <= _SAME_S else None

    def of(self, ticket: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> Forecast:
        """What is ahead of it, when it is released, and how long its prefill takes then."""
        if ticket.state is not QueueState.NEW:
            return self._of(ticket, ready, now_s)
        told = self.last
        same = told is not None and (told.ticket is ticket or told.ticket.errand == ticket.errand)
        if told is None or not same or now_s - told.now_s > _SAME_S or told.ready != ready:
            told = self.last = _CachedForecast(ticket, ready, now_s, self._of(ticket, ready, now_s))
        return told.forecast

    def _of(self, ticket: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> Forecast:
        room = ticket.room
        ahead = room.line.ahead(ticket, now_s) if room.waiting else _NOBODY
        if not ready:
            return self._cold(ticket, ahead, now_s)
        allotment = self._allotment
        if not ahead.entries and allotment.ample(ticket.cost, ready):
            return Forecast(ahead, AT_ONCE, self._choice.prefill_s(ticket, ready[0], 0, now_s), ample=True)
        above = allotment.above_share(ticket, ticket.room.quota, ready, now_s)
        free = allotment.free(ticket, ready, above_share=above)
        wait = AT_ONCE
        leads = not ahead.entries or (allotment.headroom > 0 and allotment.may_lead(ticket))
        if not leads or not ticket.cost.within(free):
            if self._known is None:
                self._known = self._outlook.at_work(self.at_work)
            free = allotment.without_guests(free, ready)
            turn = self._play(ticket, ahead, ready, self._known, free.slots, now_s)
            turn_s = None if turn is None else self._outlook.turn_s(turn, ready, self._known, now_s)
            if turn is None or turn.steps or ticket.cost.blocks > free.blocks:
                wait = _widened(ahead, ready, self._outlook.wait(ticket, ahead, free, ready, self._known, turn_s))
        station = max(ready, key=ease_of)
        if wait.at_once:
            return Forecast(ahead, wait, self._choice.prefill_s(ticket, station, ahead.entries, now_s))
        # Places come free with a report, and with that a step begins.
        prefill_s = self._choice.prefill_s(ticket, station, 0, now_s, released_s=station.step_began_s)
        return Forecast(ahead, wait, prefill_s)

    def _cold(self, ticket: QueuedRequest, ahead: WorkAhead, now_s: float) -> Forecast:
        """Where a replica comes because requests wait for it: it comes empty, and takes those ahead first."""
        coming = [(comes_s, station) for station in self._stations if (comes_s := station.comes_in_s) is not None]
        if not coming:
            return Forecast(ahead, PredictedWait(False, 0.0), 0.0)
        cold_s, station = min(coming, key=lambda one: one[0])
        room = station.credits.total
        # Of one that has never been there, nobody knows how much it takes at once.
        wait = (
            self._outlook.wait(ticket, ahead, room, [station], self._outlook.at_work(()), None)
            if room.slots
            else AT_ONCE
        )
        prefill_s = self._choice.usual_prefill_s(ticket, station, ahead.entries if wait.at_once else 0, now_s)
        return Forecast(ahead, PredictedWait(False, wait.seconds), prefill_s, cold_s)

    def _play(
        self,
        ticket: QueuedRequest,
        ahead: WorkAhead,
        ready: Sequence[EndpointState],
        at_work: RunningWork,
        free: int,
        now_s: float,
    ) -> PredictedTurn | None:
        """When it is a request's turn, where the line shares among tenants and can be played through."""
        if not self._played or not playable(ticket.room, ticket, ahead):
            return None
        contest = self._contests.get(ticket.room)
        if contest is None:
            steps_per_s = self._outlook.steps_per_s(ready, at_work)
            if not steps_per_s:
                return None
            contest = QueueSimulation(
                ticket.room, self.joins, self._outlook, self._allotment, ready, steps_per_s, now_s
            )
            self._contests[ticket.room] = contest
        return contest.turn(ticket, at_work, free, self._outlook.weights.output)


def _widened(ahead: WorkAhead, ready: Sequence[EndpointState], wait: PredictedWait) -> PredictedWait:
    """The wait where a replica takes more with every first token, because nothing has come to queue in it so far.

    What it takes now says nothing of how long a line will wait then.
    """
    if wait.at_once:
        return wait
    widened_s = [in_s for station in ready if (in_s := station.widened_in_s(ahead.entries + 1)) is not None]
    return min([wait, *(PredictedWait(False, in_s) for in_s in widened_s)], key=lambda one: one.seconds)


def playable(room: PoolQueue, ticket: QueuedRequest, ahead: WorkAhead) -> bool:
    """Whether it pays to play a line through, and can be done: few tenants wait, of one class, and not for long."""
    return (
        ahead.entries <= MOST_AHEAD
        and len(room.tenants) < MOST_TENANTS
        and len(room) == room.waiting_in(ticket.flow.priority)
    )


class QueueSimulation:
    """Who waits in a room and may still come, as of one moment.

    Args:
        room: The room.
        joins: Who sends how often.
        outlook: How long answers are.
        allotment: Who has which places.
        ready: The replicas.
        steps_per_s: Of these.
        now_s: Now.
    """

    def __init__(
        self,
        room: PoolQueue,
        joins: ArrivalRates,
        outlook: LatencyPredictor,
        allotment: CapacityAllocator,
        ready: Sequence[EndpointState],
        steps_per_s: float,
        now_s: float,
    ) -> None:
        self._room = room
        self._outlook = outlook
        self._allotment = allotment
        self._guests = allotment.guests_of(room.quota, ready)
        self._index: dict[str, int] = {}
        self._runners: list[SimulatedTenant] = []
        self._played: dict[tuple[str, int, int], PredictedTurn] = {}
        for tickets in room.tenants.values():
            first = next(iter(tickets))
            self._add(first, tickets, joins.per_s(first.tenant.id, now_s) / steps_per_s)
        self._level = min((runner.counter for runner in self._runners), default=0.0)
        for tenant, flow in joins:
            if len(self._runners) == MOST_TENANTS:
                break
            if tenant not in self._index and (rate := joins.per_s(tenant, now_s)) > 0.0:
                self._index[tenant] = len(self._runners)
                lead = max(self._level, room.line.over_service(flow))
                steps = outlook.steps_of(outlook.typical_service)
                self._append(flow.path[0], lead, 0, steps, rate / steps_per_s)

    def turn(self, ticket: QueuedRequest, at_work: RunningWork, free: int, output: float) -> PredictedTurn:
        """When a request is released.

        Args:
            ticket: It waits here, or might.
            at_work: What runs.
            free: Places that it may use.
            output: Service of a token of an answer.
        """
        tenant = ticket.tenant.id
        due_s = due_of(ticket)
        before = sum(due_of(other) <= due_s for other in self._room.tenants.get(tenant, ()) if other is not ticket)
        known = self._played.get((tenant, before, free))
        if known is not None:
            return known
        if tenant not in self._index:
            self._add(ticket, (), 0.0)
            mine = self._runners[-1]
            mine.counter = max(mine.counter, self._level)
        turns = [
            until_turn(
                self._runners,
                self._index[tenant],
                before,
                [(steps, self._index.get(whose, -1)) for steps, whose in way],
                free,
                output,
                self._guests,
            )
            for way in at_work.ways
        ]
        played = self._played[tenant, before, free] = PredictedTurn(
            *(sum(each) / len(turns) for each in zip(*turns, strict=True))
        )
        return played

    def _add(self, ticket: QueuedRequest, waiting: Collection[QueuedRequest], joins_per_step: float) -> None:
        tenant, outlook = ticket.tenant, self._outlook
        self._index[tenant.id] = len(self._runners)
        lead = self._room.line.over_service(ticket.flow)
        next_ones = sorted(islice(waiting, MOST_AHEAD), key=due_of)
        prompts = [outlook.prompt_service_of(one) for one in next_ones]
        self._append(tenant, lead, len(waiting), outlook.steps(ticket), joins_per_step, prompts)

    def _append(
        self,
        tenant: FlowLevel,
        lead: float,
        waiting: int,
        steps: float,
        joins_per_step: float,
        prompts: Sequence[float] = (),
    ) -> None:
        self._runners.append(
            SimulatedTenant(
                lead,
                tenant.weight,
                waiting,
                self._outlook.prompt_service,
                steps,
                joins_per_step,
                self._allotment.holdings.held_by(tenant),
                prompts,
            )
        )


def due_of(ticket: QueuedRequest) -> float:
    """What orders the requests of one key."""
    return ticket.arrived_s + PATIENCE_S if ticket.first_token_by_s is None else ticket.first_token_by_s
