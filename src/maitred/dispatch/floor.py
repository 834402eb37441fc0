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

from maitred.core.errors import DeadlineExceeded, MaitredError, ReplicaUnavailable
from maitred.core.flow import Share
from maitred.core.request import WaitCause
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.contest import Contest, playable
from maitred.dispatch.counts import Counts
from maitred.dispatch.errand import Errand, Post
from maitred.dispatch.outlook import Left, Outlook
from maitred.dispatch.policy.credits import NOTHING, Cost, cost_of, sum_of
from maitred.dispatch.policy.outputs import OutputLengths
from maitred.dispatch.policy.prediction import AT_ONCE, Wait
from maitred.dispatch.policy.quotas import Holdings, Quota, Quotas
from maitred.dispatch.policy.race import Joins
from maitred.dispatch.room import Room
from maitred.dispatch.station import Station
from maitred.dispatch.ticket import Grip, State, Ticket
from maitred.fairness.entry import Ahead

_TOO_LATE = (
    "The deadline for the first token passed while the request waited. Allow more time, or send it when less is going "
    "on."
)
_NOBODY = Ahead(0, 0.0)


class Floor:
    """Rooms where requests wait, stations where they run.

    Args:
        posts: The replicas; at least one.
        config: The settings.
    """

    def __init__(self, posts: Sequence[Post], config: DispatchConfig) -> None:
        self.stations = [Station(post) for post in posts]
        self.weights = config.service.weights
        self.outlook = Outlook(OutputLengths(config.output_quantile, config.unknown_output_share), self.weights)
        self.quotas = Quotas(config.reserved, {name: (pool.tenants, pool.share) for name, pool in config.pools.items()})
        self.rooms = [Room(quota, config.line) for quota in self.quotas.all]
        self.holdings = Holdings()
        self.counts = Counts()
        self._config = config
        self._headroom = config.headroom if config.line.policy == "fair" else 0.0
        self._rooms = dict(zip(self.quotas.all, self.rooms, strict=True))
        self._due: list[tuple[float, int, Ticket]] = []
        self._numbers = itertools.count()
        self._at_work: dict[Ticket, None] = {}
        self._left: Left | None = None
        """What `Outlook.left` said of them, while it holds."""
        self._joins = Joins()
        self._contests: dict[Room, Contest] = {}
        """Set up, while they hold."""

    # --- what is known ---

    @property
    def running(self) -> int:
        """Requests that were released and have not left."""
        return len(self._at_work)

    @property
    def waiting(self) -> int:
        """Requests in all lines."""
        return sum(map(len, self.rooms))

    @property
    def next_due_s(self) -> float | None:
        """When the next deadline passes."""
        return self._due[0][0] if self._due else None

    def refresh(self, now_s: float) -> list[Station]:
        """Looks at the replicas; returns those that are ready."""
        for station in self.stations:
            load = station.load
            station.refresh(now_s)
            if station.load is not load:
                self._left = None
                self._contests.clear()
        return [station for station in self.stations if station.ready]

    def ticket(self, errand: Errand) -> Ticket:
        """A ticket that has not joined."""
        room = self._rooms[self.quotas.of(errand.flow.path)]
        outputs = self.outlook.outputs
        expected = outputs.predict(errand.principal_org, errand.max_tokens)
        block_tokens = self.stations[0].block_tokens
        choices = max(1, errand.choices // max(1, len(errand.prompts)))
        costs = [cost_of(len(prompt), choices, expected, block_tokens) for prompt in errand.prompts]
        mean = outputs.expect(errand.principal_org, errand.max_tokens)
        service = self.weights.prompt * errand.prompt_tokens + self.weights.output * mean * errand.choices
        deadline_s = errand.deadline_s
        if deadline_s is None and (ttft_s := self._config.ttft_s.get(errand.flow.priority)) is not None:
            deadline_s = errand.arrived_s + ttft_s
        return Ticket(errand, room, costs, expected, service, deadline_s)

    def forecast(self, ticket: Ticket, ready: Sequence[Station], now_s: float) -> tuple[Ahead, Wait, float]:
        """What is ahead of a request that waits or might join; when it is released; how long its prefill takes then."""
        line = ticket.room.line
        ahead = line.ahead(ticket.entry, now_s) if len(line) else _NOBODY
        if not ready:
            return ahead, Wait(False, 0.0), 0.0
        above = self._above_share(ticket, ticket.room.quota, ready, now_s)
        free = self._free(ticket, ready, above_share=above)
        wait = AT_ONCE
        if not ticket.cost.within(free) or (ahead.entries and not (self._headroom and self._may_lead(ticket, above))):
            if self._left is None:
                self._left = self.outlook.left(self._at_work)
            turn_steps = self._play(ticket, ahead, ready, self._left, free.slots, now_s)
            wait = self.outlook.wait(ticket, ahead, free, ready, self._left, turn_steps)
        station = max(ready, key=_ease)
        return ahead, wait, self.outlook.prefill_s(ticket, station, ahead.entries if wait.at_once else 0, now_s)

    # --- what happens ---

    def join(self, ticket: Ticket, now_s: float) -> None:
        """It begins to wait."""
        ready = self.refresh(now_s)
        ahead, wait, prefill_s = self.forecast(ticket, ready, now_s)
        if ready:
            ticket.raw_wait_s, ticket.prefill_s = wait.seconds, prefill_s
            ticket.predicted = self.outlook.place(ahead.entries, wait.seconds, prefill_s, now_s)
        ticket.state = State.WAITING
        ticket.joined_s = now_s
        self.holdings.saw(tenant_of(ticket), now_s)
        ticket.room.join(ticket, now_s)
        self._joins.saw(ticket.errand.flow, now_s)
        self._contests.clear()
        if ticket.deadline_s is not None:
            heapq.heappush(self._due, (ticket.deadline_s, next(self._numbers), ticket))

    def turn(self, now_s: float) -> list[Ticket]:
        """Releases whom there are credits for, and fails whose time is over. Returns both.

        To be called after anything has changed: a request has joined or left, a report came, a replica is ready or
        lost.
        """
        changed: list[Ticket] = []
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
                    room.waits.now(now_s, self._serve(room, self.quotas.common, ready, changed, now_s))
        if self.waiting:
            self.outlook.full(sum(station.load.steps for station in ready) // len(ready), now_s)
        else:
            self.outlook.slack()
        return changed

    def leave(self, ticket: Ticket, now_s: float, *, finished: bool, lost: bool = False) -> None:
        """It leaves, wherever it is, and gives back what it holds. A second time changes nothing.

        Args:
            ticket: The request.
            now_s: Now.
            finished: Whether it came to its end by itself.
            lost: Whether it was the replica that failed it.
        """
        state, ticket.state = ticket.state, State.GONE
        if state is State.WAITING:
            ticket.room.remove(ticket, now_s)
            self._contests.clear()
            self.counts.left_waiting += 1
        elif state is State.RELEASED:
            grip = ticket.grip
            assert grip is not None
            grip.station.credits.release(grip.hold)
            if lost:
                grip.station.failed()
            grip.quota.give(ticket.cost)
            self.holdings.give(tenant_of(ticket), ticket.cost.slots)
            del self._at_work[ticket]
            self._left = None
            self._contests.clear()
            told = ticket.told_prompt_tokens
            if not ticket.begun or told:
                # What of the prompt was never computed is not owed.
                self._charge(ticket, -self.weights.prompt * max(0, ticket.errand.prompt_tokens - told))
            ticket.room.line.done(ticket.errand.flow)
            if finished:
                self.outlook.finished(ticket)
            else:
                self.counts.wasted_tokens += ticket.output_tokens

    def submitted(self, ticket: Ticket) -> None:
        """The next of its prompts was sent to the replica."""
        if ticket.grip is not None:
            ticket.grip.station.credits.submitted(ticket.grip.hold)

    def took(self, ticket: Ticket, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Real tokens came.

        Args:
            ticket: A released request.
            prompt_tokens: Of prompts of which nothing had come before, cached ones included.
            cached_tokens: Of these, found in the cache.
            output_tokens: New ones.
        """
        if ticket.state is not State.RELEASED:
            return
        if not ticket.begun:
            ticket.begun = True
            assert ticket.grip is not None
            ticket.grip.station.credits.answered(ticket.grip.hold)
        ticket.told_prompt_tokens += prompt_tokens
        ticket.output_tokens += output_tokens
        weights = self.weights
        self._charge(ticket, weights.output * output_tokens - (weights.prompt - weights.cached) * cached_tokens)
        self.outlook.prompt(prompt_tokens, cached_tokens)

    def first_token(self, ticket: Ticket, now_s: float) -> None:
        """Its first token came."""
        if ticket.grip is not None and ticket.state is State.RELEASED:
            ticket.grip.station.first_token(now_s - ticket.released_s)
            self.outlook.first_token(ticket, now_s)

    # --- how ---

    def _serve(
        self, room: Room, quota: Quota, ready: Sequence[Station], changed: list[Ticket], now_s: float
    ) -> tuple[str, WaitCause] | None:
        """Releases from the head of a line until it is empty or its head lacks something; returns whose and what."""
        while (entry := room.line.head(now_s)) is not None:
            ticket = entry.value
            above = self._above_share(ticket, quota, ready, now_s)
            station = self._station_for(ticket, quota, ready, above_share=above)
            if isinstance(station, WaitCause):
                light = self._below_share(room, quota, ready, now_s) if above else None
                if light is None:
                    return tenant_of(ticket).id, station
                ticket, station = light
            prefill_s = self.outlook.prefill_s(ticket, station, 0, now_s)
            late_s = now_s + self.outlook.corrected_prefill_s(prefill_s, now_s)
            if ticket.deadline_s is not None and late_s > ticket.deadline_s and not station.credits.idle:
                self._fail(ticket, DeadlineExceeded(_TOO_LATE), now_s)
            else:
                ticket.prefill_s = prefill_s
                self._release(ticket, station, quota, now_s)
            changed.append(ticket)
        return None

    def _below_share(
        self, room: Room, quota: Quota, ready: Sequence[Station], now_s: float
    ) -> tuple[Ticket, Station] | None:
        """Whom the headroom is for: the most urgent of those who hold least, and a replica for it.

        The head of the line may not use the headroom. Whoever may is not taken more than one request before its turn,
        so that the bound of the fair line grows by that and no more.
        """
        if not any(station.free.slots > 0 for station in ready):
            return None
        best: Ticket | None = None
        best_key = (0, 0.0, 0.0)
        for tickets in room.tenants.values():
            ticket = next(iter(tickets))
            tenant = tenant_of(ticket)
            key = (
                ticket.errand.flow.priority.rank,
                self.holdings.held_by(tenant) / tenant.weight,
                ticket.errand.arrived_s,
            )
            if (best is None or key < best_key) and self._may_lead(
                ticket, self._above_share(ticket, quota, ready, now_s)
            ):
                best, best_key = ticket, key
        if best is None:
            return None
        station = self._station_for(best, quota, ready, above_share=False)
        return None if isinstance(station, WaitCause) else (best, station)

    def _station_for(
        self, ticket: Ticket, quota: Quota, ready: Sequence[Station], *, above_share: bool
    ) -> Station | WaitCause:
        """The replica that has room for it and the most left; else what is lacking."""
        headroom = self._headroom if above_share else 0.0
        if len(self.rooms) > 1:
            limit = _less(self.quotas.limit(quota, _total(ready)), headroom)
            need = ticket.cost.at_most(limit)
            room = limit.minus(quota.used)
            if not need.within(room) and quota.used != NOTHING:
                return WaitCause.SLOTS if need.slots > room.slots else WaitCause.KV_FULL
        best: Station | None = None
        slots = False
        for station in ready:
            limit = _less(station.total, headroom)
            need = ticket.cost.at_most(limit)
            free = station.free.minus(station.total.minus(limit))
            if need.within(free) or station.credits.idle:
                if best is None or _ease(station) > _ease(best):
                    best = station
            elif need.slots > free.slots:
                slots = True
        return best or (WaitCause.SLOTS if slots else WaitCause.KV_FULL)

    def _free(self, ticket: Ticket, ready: Sequence[Station], *, above_share: bool) -> Cost:
        """What of all replicas' credits it may use now."""
        quota = ticket.room.quota
        total = _total(ready)
        free = sum_of([station.free for station in ready])
        if above_share:
            free = free.minus(total.minus(_less(total, self._headroom)))
        if len(self.rooms) > 1:
            free = free.at_most(self.quotas.room(quota, total))
        return free

    def _play(
        self, ticket: Ticket, ahead: Ahead, ready: Sequence[Station], left: Left, free: int, now_s: float
    ) -> float | None:
        """Steps until a request's turn, where the line shares among tenants and can be played through."""
        if self._config.line.policy != "fair" or not playable(ticket.room, ticket, ahead):
            return None
        contest = self._contests.get(ticket.room)
        if contest is None:
            steps_per_s = self.outlook.steps_per_s(ready)
            if not steps_per_s:
                return None
            contest = Contest(ticket.room, self._joins, self.outlook, steps_per_s, now_s)
            self._contests[ticket.room] = contest
        return contest.steps(ticket, left, free, self.weights.output)

    def _may_lead(self, ticket: Ticket, above_share: bool) -> bool:
        """Whether it may be taken before its turn into the headroom."""
        if above_share or ticket.room.quota is not self.quotas.common:
            return False
        lead = ticket.room.line.over_service(ticket.errand.flow)
        return lead * tenant_of(ticket).weight <= ticket.entry.service

    def _above_share(self, ticket: Ticket, quota: Quota, ready: Sequence[Station], now_s: float) -> bool:
        if not self._headroom or quota is not self.quotas.common:
            return False
        slots = self.quotas.limit(quota, _total(ready)).slots
        return self.holdings.above_share(tenant_of(ticket), ticket.cost.slots, slots, now_s)

    def _release(self, ticket: Ticket, station: Station, quota: Quota, now_s: float) -> None:
        ticket.room.take(ticket, now_s)
        self._contests.clear()
        ticket.state = State.RELEASED
        ticket.released_s = now_s
        ticket.grip = Grip(station, station.hold(ticket.costs), quota)
        quota.take(ticket.cost)
        self.holdings.take(tenant_of(ticket), ticket.cost.slots)
        self._at_work[ticket] = None
        self._left = None
        self._charge(ticket, self.weights.prompt * ticket.errand.prompt_tokens)
        self.outlook.released(ticket)
        self.outlook.waited(ticket, now_s)
        self.counts.released(ticket.errand.flow.priority, ticket.waited_ms)

    def _fail(self, ticket: Ticket, failure: MaitredError, now_s: float) -> None:
        ticket.room.remove(ticket, now_s)
        self._contests.clear()
        ticket.state = State.FAILED
        ticket.failure = failure
        self.outlook.waited(ticket, now_s)
        self.counts.refused(failure.code)

    def _charge(self, ticket: Ticket, service: float) -> None:
        if service:
            ticket.room.line.charge(ticket.errand.flow, service)
            self.outlook.served += service

    def _expire(self, changed: list[Ticket], now_s: float) -> None:
        """Fails those whose deadline has passed."""
        while self._due and (self._due[0][0] <= now_s or self._due[0][2].state is not State.WAITING):
            ticket = heapq.heappop(self._due)[2]
            if ticket.state is State.WAITING:
                self._fail(ticket, DeadlineExceeded(_TOO_LATE), now_s)
                changed.append(ticket)

    def _outlast(self, changed: list[Ticket], now_s: float) -> None:
        """No replica is ready: fails those who have waited as long as their class waits."""
        longest = self._config.max_wait_s
        for room in self.rooms:
            over = [
                entry.value
                for entry in room.line
                if now_s - entry.value.joined_s > longest.get(entry.flow.priority, float("inf"))
            ]
            for ticket in over:
                self._fail(ticket, ReplicaUnavailable(retry_after_s=self.retry_after_s), now_s)
                changed.append(ticket)

    @property
    def retry_after_s(self) -> float:
        """When a replica is expected to be ready, if none is."""
        return min((s.retry_after_s for s in self.stations if s.retry_after_s is not None), default=1.0)


def tenant_of(ticket: Ticket) -> Share:
    """The organisation, with its weight."""
    return ticket.errand.flow.path[0]


def _total(stations: Sequence[Station]) -> Cost:
    return sum_of([station.total for station in stations])


def _less(cost: Cost, headroom: float) -> Cost:
    """What is left of it for those who may not use the headroom."""
    return cost.minus(cost.part(headroom)) if headroom else cost


def _ease(station: Station) -> float:
    """How much of a replica is free."""
    return station.free.slots / max(1, station.total.slots)
