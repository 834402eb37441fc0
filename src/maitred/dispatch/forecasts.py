"""What would become of a request that waits, or might join."""

from collections.abc import Sequence

from msgspec import Struct

from maitred.core.flow import Flow
from maitred.dispatch.capacity import CapacityAllocator
from maitred.dispatch.contest import QueueSimulation, playable
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.entry import QueuedRequest, QueueState
from maitred.dispatch.policy.prediction import AT_ONCE, PredictedWait
from maitred.dispatch.policy.simulation import ArrivalRates, PredictedTurn
from maitred.dispatch.pool_queue import PoolQueue
from maitred.dispatch.predictor import LatencyPredictor, RunningWork
from maitred.dispatch.selector import ReplicaSelector, ease_of
from maitred.fairness.entry import WorkAhead

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
