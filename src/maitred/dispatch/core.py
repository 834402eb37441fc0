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

from msgspec.structs import replace

from maitred.core.balance import CacheAwareBalancer
from maitred.core.errors import (
    DeadlineExceeded,
    MaitredError,
    ModelHeld,
    ModelLoadFailed,
    ModelLoading,
    ReplicaUnavailable,
)
from maitred.core.flow import QueuePosition
from maitred.core.request import WaitCause
from maitred.dispatch.capacity import CapacityAllocator, untried
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.counters import DispatchCounters
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.forecasts import Forecast, ForecastCache
from maitred.dispatch.load_reports import LoadReports
from maitred.dispatch.policy.credits import Cost, cost_of
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
    """Rooms where requests wait, stations where they run.

    Args:
        posts: The replicas; at least one.
        config: The settings.
        placement: Which of several replicas takes a request; None: the one with the most room.
    """

    def __init__(
        self, posts: Sequence[AnyEndpoint], config: DispatchConfig, placement: CacheAwareBalancer | None = None
    ) -> None:
        self.stations = [EndpointState(post) for post in posts]
        self.weights = config.service.weights
        self.outlook = LatencyPredictor(
            OutputLengths(config.output_quantile, config.unknown_output_share), self.weights
        )
        self.reports = LoadReports(config.reports)
        self.choice = ReplicaSelector(placement, self.outlook, self.reports)
        self.allotment = CapacityAllocator(config, self.choice)
        self.rooms = [PoolQueue(quota, config.line) for quota in self.allotment.quotas.all]
        played = config.line.policy == "fair"
        self.forecaster = ForecastCache(self.stations, self.allotment, self.outlook, self.choice, played=played)
        self.counts = DispatchCounters()
        self.stalled_s = 0.0
        """For how long, in all, whoever drives this had no time for it; no replica is late by that."""
        self._config = config
        self._rooms = dict(zip(self.allotment.quotas.all, self.rooms, strict=True))
        self._ready: list[EndpointState] = []
        """As of the last look."""
        self.slack = False
        """Whether nobody waits, and that is noted."""
        self._due: list[tuple[float, int, QueuedRequest]] = []
        self._numbers = itertools.count()

    def adopt(
        self, posts: Sequence[AnyEndpoint], config: DispatchConfig, placement: CacheAwareBalancer | None, now_s: float
    ) -> list[AnyEndpoint]:
        """Goes by these settings from now on: who waits goes on waiting, and who runs goes on running.

        A replica that is not named any more gets nothing new; what runs there ends there. One with the same duty is
        the same, and keeps its account, however it is spoken to. Where the line or the parts are others, everybody
        moves into new rooms, and the accounts of who was served how much begin anew.

        Returns:
            The posts that are new.
        """
        known = {id(station.post.duty): station for station in self.stations}
        self.stations[:] = [known.get(id(post.duty)) or EndpointState(post) for post in posts]
        for station, post in zip(self.stations, posts, strict=True):
            station.post = post
        new = [post for post in posts if id(post.duty) not in known]
        before, self._config = self._config, config
        self.outlook.outputs.adopt(config.output_quantile, config.unknown_output_share)
        self.reports = LoadReports(config.reports)
        self.choice.adopt(placement, self.reports)
        self.allotment.adopt(config)
        self.forecaster.adopt(played=config.line.policy == "fair")
        if (before.line, before.reserved, before.pools) != (config.line, config.reserved, config.pools):
            self._move(config, now_s)
        return new

    def _move(self, config: DispatchConfig, now_s: float) -> None:
        """Everybody into new rooms."""
        waiting = sorted((ticket for room in self.rooms for ticket in room.all()), key=lambda ticket: ticket.number)
        self.allotment.part(config)
        self.rooms[:] = [PoolQueue(quota, config.line) for quota in self.allotment.quotas.all]
        self._rooms = dict(zip(self.allotment.quotas.all, self.rooms, strict=True))
        for ticket in (*self.forecaster.at_work, *waiting):
            quota = self.allotment.quotas.of(ticket.flow.path)
            self._rooms[quota].take_over(ticket, now_s)
            if ticket.grip is not None:
                ticket.grip.quota = quota
                quota.take(ticket.cost)

    # --- what is known ---

    @property
    def running(self) -> int:
        """Requests that were released and have not left."""
        return len(self.forecaster.at_work)

    @property
    def waiting(self) -> int:
        """Requests in all lines."""
        waiting = 0
        for room in self.rooms:
            waiting += room.waiting
        return waiting

    def refresh(self, now_s: float) -> list[EndpointState]:
        """Looks at the replicas; returns those that are ready."""
        ready = []
        for station in self.stations:
            load = station.load
            station.refresh(now_s)
            if station.load is not load:
                self.forecaster.changed()
            if station.ready:
                ready.append(station)
        if ready != self._ready:
            self._ready = ready
            self.forecaster.changed()
        return ready

    def ticket(self, errand: DispatchRequest) -> QueuedRequest:
        """A ticket that has not joined."""
        told = self.forecaster.last
        if told is not None and told.ticket.errand is errand and told.ticket.state is QueueState.NEW:
            return told.ticket  # it was made to ask what would become of it
        room = self._rooms[self.allotment.quotas.of(errand.flow.path)]
        expected, mean = self.outlook.outputs.lengths(errand.principal_org, errand.max_tokens)
        service = self.weights.prompt * errand.prompt_tokens + self.weights.output * mean * errand.choices
        return QueuedRequest(errand, room, self._costs(errand, expected), expected, service, self._due_s(errand))

    def _costs(self, errand: DispatchRequest, expected_tokens: int) -> list[Cost]:
        """What each of its prompts needs."""
        prompts, block_tokens = errand.prompts, self.stations[0].block_tokens
        if len(prompts) == 1:
            return [cost_of(errand.prompt_tokens, errand.choices, expected_tokens, block_tokens)]
        choices = max(1, errand.choices // max(1, len(prompts)))
        return [cost_of(len(prompt), choices, expected_tokens, block_tokens) for prompt in prompts]

    def _due_s(self, errand: DispatchRequest) -> float | None:
        """When its first token must be there."""
        config = self._config
        if errand.deadline_s is not None or not (config.ttft_s or config.tenant_ttft_s):
            return errand.deadline_s
        ttft_s = config.first_token_within_s(errand.flow)
        return None if ttft_s is None else errand.arrived_s + ttft_s

    def foretell(self, ticket: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> Forecast:
        """What would become of a request that joined now; its ticket notes what it was told."""
        forecast = self.forecaster.of(ticket, ready, now_s)
        ticket.raw_wait_s, ticket.prefill_s = forecast.wait.seconds, forecast.prefill_s
        ticket.predicted = self.place(forecast, now_s)
        return forecast

    def place(self, forecast: Forecast, now_s: float) -> QueuePosition:
        """A forecast as it is told to callers."""
        place = self.outlook.place(forecast.ahead.entries, forecast.wait.seconds, forecast.prefill_s, now_s)
        if not forecast.cold_s:
            return place
        return replace(place, wait_s=place.wait_s + forecast.cold_s, ttft_s=place.ttft_s + forecast.cold_s)

    # --- what happens ---

    def walk_in(self, ticket: QueuedRequest, now_s: float) -> bool:
        """It is released in the moment in which it comes: nobody waits, and there is room. As by `join` and `turn`.

        Returns:
            Whether it was. If not, nothing has changed, but that its tenant was seen.
        """
        if not self.slack and self.waiting:
            return False
        room, forecaster = ticket.room, self.forecaster
        told = forecaster.told(ticket, now_s)
        ready = self.refresh(now_s) if told is None else told.ready
        self.allotment.holdings.saw(ticket.tenant, now_s)
        known = told is not None and told.forecast.ample
        if known:
            station: EndpointState | None = ready[0]  # nothing has changed since it was asked about
        else:
            station = self._station_for_newcomer(ticket, ready, now_s)
        if station is None or (ticket.first_token_by_s is not None and self._too_late(ticket, station, now_s)):
            return False
        if told is None:
            self.foretell(ticket, ready, now_s)
        if not known:
            ticket.prefill_s = self.choice.prefill_s(ticket, station, 0, now_s)
        ticket.joined_s = now_s
        forecaster.joins.saw(ticket.flow, now_s)
        room.line.pass_through(ticket, now_s)
        self._run(ticket, station, room.quota, now_s)
        if not self.slack:
            self._nobody_waits(now_s)
        return True

    def _station_for_newcomer(
        self, ticket: QueuedRequest, ready: Sequence[EndpointState], now_s: float
    ) -> EndpointState | None:
        """The replica for a request that comes where nobody waits; None: none has room."""
        allotment, quota = self.allotment, ticket.room.quota
        if not ready:
            return None
        if allotment.ample(ticket.cost, ready):
            return ready[0]
        above_share = allotment.above_share(ticket, quota, ready, now_s)
        station = allotment.station_for(ticket, quota, ready, now_s, above_share=above_share)
        return None if isinstance(station, WaitCause) else station

    def resume(self, ticket: QueuedRequest, replica: str, now_s: float) -> None:
        """It runs at a replica already, whatever that has left."""
        station = next(station for station in self.stations if station.post.name == replica)
        ticket.joined_s = now_s
        ticket.room.line.pass_through(ticket, now_s)
        self._run(ticket, station, ticket.room.quota, now_s)

    def join(self, ticket: QueuedRequest, now_s: float) -> list[EndpointState]:
        """It begins to wait. Returns the replicas that are ready, for a turn in the same moment."""
        told = self.forecaster.told(ticket, now_s)
        ready = self.refresh(now_s)
        self.allotment.holdings.saw(ticket.tenant, now_s)
        if ready and (told is None or told.ready != ready):
            self.foretell(ticket, ready, now_s)
        ticket.state, self.slack = QueueState.WAITING, False
        ticket.joined_s = now_s
        ticket.room.join(ticket, now_s)
        self.forecaster.joined(ticket.flow, now_s)
        self._watch(ticket)
        return ready

    def put_back(
        self,
        ticket: QueuedRequest,
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
            ticket: The request.
            now_s: Now.
            prompts: Those that have not been answered in full, by their numbers.
            answer_by_s: When its answer must be there.
            draw: From 0 to 1, for how long the replica rests if it still seems ready...
            rest_s: ...or just so long.
        """
        grip = self._let_go(ticket, lost=True)
        grip.station.refresh(now_s)
        if grip.station.ready:
            grip.station.rest(now_s, draw, rest_s)
            ticket.failed_at.add(grip.station.post.name)
        ticket.keep(prompts)
        ticket.grip, ticket.state, ticket.joined_s, self.slack = None, QueueState.WAITING, now_s, False
        ticket.returns += 1
        ticket.predicted = None  # nothing is to be learnt from a wait that nobody could foresee
        if ticket.begun:
            ticket.first_token_by_s = answer_by_s
        ticket.room.put_back(ticket, now_s)
        self._watch(ticket)

    def elsewhere(self, ticket: QueuedRequest, now_s: float) -> bool:
        """Whether a released request that has just been failed could go to a replica that has not failed it."""
        assert ticket.grip is not None
        station = ticket.grip.station
        if len(self.stations) == 1 and self.stations[0] is station:
            return False
        return any(other is not station for other in untried(ticket, self.refresh(now_s)))

    def spare(self, ticket: QueuedRequest, now_s: float) -> Allocation | None:
        """Takes the credits of a second replica for a released request of which nothing has come.

        Only what is free and wanted by nobody: while anybody waits, there is none.
        """
        if ticket.state is not QueueState.RELEASED or ticket.grip is None or ticket.grip.begun or self.waiting:
            return None
        others = [station for station in self.refresh(now_s) if station is not ticket.grip.station]
        station = self.allotment.spare_for(ticket, others, now_s)
        if station is None:
            return None
        grip = Allocation(station, station.hold(ticket.costs, now_s), ticket.grip.quota, now_s, self.stalled_s)
        self.allotment.take(ticket, grip.quota)
        self.choice.released(ticket, station)
        self.forecaster.changed()
        return grip

    def settle(self, ticket: QueuedRequest, spare: Allocation, *, won: bool) -> None:
        """Of two replicas that a request holds, one is given up: if the second has won, the first."""
        assert ticket.grip is not None
        loser = spare
        if won:
            ticket.grip, loser = spare, ticket.grip
            ticket.predicted = None  # it was said of the other one
        loser.station.release(loser.hold)
        self.allotment.give(ticket, loser.quota)
        self.forecaster.changed()

    def turn(self, now_s: float, ready: Sequence[EndpointState] | None = None) -> list[QueuedRequest]:
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
                self._nobody_waits(now_s)
            return changed
        self.slack = False
        if ready is None:
            ready = self.refresh(now_s)
        self._expire(changed, now_s)
        if not ready:
            self._outlast(changed, now_s)
            for room in self.rooms:
                room.waits.now(now_s, ("", WaitCause.COLD_START) if len(room) else None)
            self.outlook.slack()
            return changed
        common = self.rooms[-1]
        for room in self.rooms:
            room.waits.now(now_s, self._serve(room, room.quota, ready, changed, now_s))
        if not len(common):
            for room in self.rooms[:-1]:
                if room.quota.overflows and len(room):
                    room.waits.now(now_s, self._serve(room, self.allotment.quotas.common, ready, changed, now_s))
        if self.waiting:
            self.outlook.full(sum(station.load.steps for station in ready) // len(ready), now_s)
        else:
            self.outlook.slack()
        return changed

    def leave(
        self, ticket: QueuedRequest, now_s: float, *, finished: bool, lost: bool = False, moved: bool = False
    ) -> None:
        """It leaves, wherever it is, and gives back what it holds. A second time changes nothing.

        Args:
            ticket: The request.
            now_s: Now.
            finished: Whether it came to its end by itself.
            lost: Whether it was the replica that failed it.
            moved: Whether it waits elsewhere from now on.
        """
        state, ticket.state = ticket.state, QueueState.GONE
        ticket.failure = None  # it may hold the frames that it was raised through, and these hold the ticket
        if state is QueueState.WAITING:
            self._refund(ticket)
            ticket.room.remove(ticket, now_s)
            self.forecaster.changed()
            if moved:
                self.counts.moved += 1
            else:
                self.counts.left_waiting += 1
        elif state is QueueState.RELEASED:
            self._let_go(ticket, lost=lost)
            self._refund(ticket)
            ticket.room.line.done(ticket.flow)
            if finished:
                self.outlook.finished(ticket)
        if state is not QueueState.GONE and not finished:
            self.counts.wasted_tokens += ticket.output_tokens

    def submitted(self, ticket: QueuedRequest) -> None:
        """The next of its prompts was sent to the replica."""
        grip = ticket.grip
        if grip is not None and not grip.station.learns:  # others never say what they have heard
            grip.station.credits.submitted(grip.hold)

    def took(self, ticket: QueuedRequest, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Real tokens came.

        Args:
            ticket: A released request.
            prompt_tokens: Of prompts of which nothing had come before, cached ones included.
            cached_tokens: Of these, found in the cache.
            output_tokens: New ones.
        """
        grip = ticket.grip
        if ticket.state is not QueueState.RELEASED or grip is None:
            return
        if not grip.begun:
            ticket.begun = grip.begun = True
            grip.station.credits.answered(grip.hold)
        ticket.told_prompt_tokens += prompt_tokens
        ticket.output_tokens += output_tokens
        weights = self.weights
        if service := weights.output * output_tokens - (weights.prompt - weights.cached) * cached_tokens:
            self._charge(ticket, service)
        if prompt_tokens:
            self.outlook.prompt(prompt_tokens, cached_tokens)

    def first_token(self, ticket: QueuedRequest, now_s: float) -> None:
        """Its first token came."""
        if ticket.grip is not None and ticket.state is QueueState.RELEASED:
            grip = ticket.grip
            grip.station.first_token(now_s - grip.since_s - (self.stalled_s - grip.stalled_s))
            if ticket.predicted is not None:
                self.outlook.first_token(ticket, now_s)

    # --- how ---

    def _serve(
        self, room: PoolQueue, quota: Quota, ready: Sequence[EndpointState], changed: list[QueuedRequest], now_s: float
    ) -> tuple[str, WaitCause] | None:
        """Releases from the head of a line until it is empty or its head lacks something; returns whose and what."""
        while (ticket := room.head(now_s)) is not None:
            above = not ticket.returns and self.allotment.above_share(ticket, quota, ready, now_s)
            station = self.allotment.station_for(ticket, quota, ready, now_s, above_share=above)
            if isinstance(station, WaitCause):
                light = self.allotment.before_turn(room, quota, ready, now_s) if above else None
                if light is None:
                    return ticket.tenant.id, station
                ticket, station = light
            if self._too_late(ticket, station, now_s):
                self._fail(ticket, DeadlineExceeded(_TOO_LATE), now_s)
            else:
                ticket.room.take(ticket, now_s)
                ticket.prefill_s = self.choice.prefill_s(ticket, station, 0, now_s)
                self._run(ticket, station, quota, now_s)
            changed.append(ticket)
        return None

    def _nobody_waits(self, now_s: float) -> None:
        for room in self.rooms:
            room.waits.now(now_s, None)
        self.outlook.slack()
        self.slack = True

    def _too_late(self, ticket: QueuedRequest, station: EndpointState, now_s: float) -> bool:
        """Whether its first token could not come in time from a replica, which has something else to do."""
        if ticket.first_token_by_s is None or station.credits.idle:
            return False
        prefill_s = self.choice.prefill_s(ticket, station, 0, now_s)
        return now_s + self.outlook.corrected_prefill_s(prefill_s, now_s) > ticket.first_token_by_s

    def _run(self, ticket: QueuedRequest, station: EndpointState, quota: Quota, now_s: float) -> None:
        """It runs at a replica from now on."""
        ticket.state = QueueState.RELEASED
        ticket.released_s = now_s
        ticket.grip = Allocation(station, station.hold(ticket.costs, now_s), quota, now_s, self.stalled_s)
        self.allotment.take(ticket, quota)
        if self.choice.placement is not None:
            self.choice.released(ticket, station)
        self.forecaster.at_work[ticket] = None
        self.forecaster.changed()
        if ticket.returns:
            return
        ticket.owes_prompts = True
        self._charge(ticket, self.weights.prompt * ticket.errand.prompt_tokens)
        self.outlook.released(ticket)
        if ticket.raw_wait_s > 0:
            self.outlook.waited(ticket, now_s)
        self.counts.released(ticket.flow.priority, ticket.waited_ms)

    def _let_go(self, ticket: QueuedRequest, *, lost: bool) -> Allocation:
        """A released request gives its places back."""
        grip = ticket.grip
        assert grip is not None
        grip.station.release(grip.hold)
        if lost:
            grip.station.failed()
        self.allotment.give(ticket, grip.quota)
        del self.forecaster.at_work[ticket]
        self.forecaster.changed()
        return grip

    def _refund(self, ticket: QueuedRequest) -> None:
        """What of its prompts was charged and never computed is not owed."""
        told = ticket.told_prompt_tokens
        left = ticket.errand.prompt_tokens - told
        if ticket.owes_prompts and left > 0 and (told or not ticket.begun):
            self._charge(ticket, -self.weights.prompt * left)
        ticket.owes_prompts = False

    def _watch(self, ticket: QueuedRequest) -> None:
        """Notes until when a waiting request may wait."""
        if ticket.first_token_by_s is not None:
            heapq.heappush(self._due, (ticket.first_token_by_s, next(self._numbers), ticket))
            if len(self._due) > 2 * self.waiting + _LITTER:
                self._due = [due for due in self._due if due[2].state is QueueState.WAITING]
                heapq.heapify(self._due)

    def _fail(self, ticket: QueuedRequest, failure: MaitredError, now_s: float) -> None:
        self._refund(ticket)
        ticket.room.remove(ticket, now_s)
        self.forecaster.changed()
        ticket.state = QueueState.FAILED
        ticket.failure = failure
        self.outlook.waited(ticket, now_s)
        self.counts.refused(failure.code)

    def _charge(self, ticket: QueuedRequest, service: float) -> None:
        ticket.room.line.charge(ticket.flow, service)
        self.outlook.served += service

    def _expire(self, changed: list[QueuedRequest], now_s: float) -> None:
        """Fails those whose deadline has passed."""
        while self._due and (self._due[0][0] <= now_s or self._due[0][2].state is not QueueState.WAITING):
            ticket = heapq.heappop(self._due)[2]
            due_s = ticket.first_token_by_s
            if ticket.state is QueueState.WAITING and due_s is not None and due_s <= now_s:
                self._fail(ticket, DeadlineExceeded(_TOO_LATE), now_s)
                changed.append(ticket)

    def _outlast(self, changed: list[QueuedRequest], now_s: float) -> None:
        """No replica is ready: fails those who have waited as long as their class waits, or all if none will come."""
        hopeless = isinstance(self.outage, ModelLoadFailed | ModelHeld)
        longest = self._config.max_wait_s
        for room in self.rooms:
            over = [
                ticket
                for tickets in room.tenants.values()
                for ticket in tickets
                if hopeless or _cold_s(ticket, now_s) > longest.get(ticket.flow.priority, float("inf"))
            ]
            for ticket in over:
                self._fail(ticket, self.unavailable(), now_s)
                changed.append(ticket)

    @property
    def comes(self) -> bool:
        """Whether one that is not ready comes because requests wait for it."""
        return any(station.comes_in_s is not None for station in self.stations)

    @property
    def outage(self) -> ReplicaUnavailable | None:
        """What one says that is not ready."""
        return next((station.outage for station in self.stations if station.outage is not None), None)

    def unavailable(self) -> ReplicaUnavailable:
        """What a request is told while no replica is ready: why, as far as one says more than that it is not."""
        outage = self.outage
        if isinstance(outage, ModelLoading | ModelLoadFailed | ModelHeld):
            return type(outage)(outage.message, retry_after_s=self.retry_after_s)
        if not any(station.post.duty.serving for station in self.stations):
            message = "All replicas of this model are out of service for maintenance. Try again after the time in "
            return ReplicaUnavailable(f"{message}Retry-After.", retry_after_s=self.retry_after_s)
        return ReplicaUnavailable(retry_after_s=self.retry_after_s)

    @property
    def retry_after_s(self) -> float:
        """When a replica is expected to be ready, if none is."""
        return min((s.retry_after_s for s in self.stations if s.retry_after_s is not None), default=1.0)


def _cold_s(ticket: QueuedRequest, now_s: float) -> float:
    """For how long it has waited with no replica ready: now, and before it went to one that has failed it since."""
    return ticket.waited_ms.get(WaitCause.COLD_START, 0.0) / 1000 + now_s - ticket.joined_s
