"""Finds out who of those that wait would better be served elsewhere; see `policy.overflow`, which decides.

Pressure is that of a *group*: the requests of one tenant and class. A fair line keeps the waits of tenants apart, so
the wait of a tenant that misses its objective is made by its own requests, and only these leave for it. Where the line
does not share among tenants, all requests of a class are one group.
"""

from collections.abc import Callable

from maitred.core.flow import PriorityClass
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.overflow import OverflowCandidate, OverflowState, leavers, surplus
from maitred.dispatch.pool_queue import QueuedRequest, QueueState
from maitred.dispatch.request import DispatchRequest

_EVERYBODY = ""
_MOST_CANDIDATES = 64
"""The newest of a group: for each the caches are asked, and only some leave at a time."""

Group = tuple[str, PriorityClass]


class OverflowPlanner:
    """Of one queue. Changes nothing for anybody: it names those that should be asked to leave.

    Args:
        floor: Where they wait.
        config: When there is pressure.
        held: How many leading tokens of a request's prompts a cache here holds.
    """

    def __init__(self, floor: DispatchCore, config: DispatchConfig, held: Callable[[DispatchRequest], int]) -> None:
        self._floor = floor
        self._config = config
        self._held = held
        self._shared = config.line.policy == "fair"
        self._movable: dict[Group, dict[QueuedRequest, None]] = {}
        self._asked: dict[Group, dict[QueuedRequest, None]] = {}
        """Those that were asked, wait still, and have not said that they stay."""
        self._pressures: dict[Group, OverflowState] = {}

    def adopt(self, config: DispatchConfig) -> None:
        """Goes by these settings from now on, also for those that wait."""
        self._config = config
        shared = config.line.policy == "fair"
        if shared == self._shared:
            return
        movable = [ticket for group in self._movable.values() for ticket in group]
        asked = [ticket for group in self._asked.values() for ticket in group]
        self._shared, self._movable, self._asked, self._pressures = shared, {}, {}, {}
        for ticket in movable:
            self.joined(ticket)
        for ticket in asked:
            self.asked(ticket)

    def joined(self, ticket: QueuedRequest) -> None:
        """A request begins to wait."""
        if ticket.errand.movable:
            self._movable.setdefault(self._group_of(ticket), {})[ticket] = None

    def left(self, ticket: QueuedRequest) -> None:
        """It does not wait any more, or stays."""
        _remove(self._movable, self._group_of(ticket), ticket)
        _remove(self._asked, self._group_of(ticket), ticket)

    def asked(self, ticket: QueuedRequest) -> None:
        """It is asked to leave, and not a second time."""
        _remove(self._movable, self._group_of(ticket), ticket)
        self._asked.setdefault(self._group_of(ticket), {})[ticket] = None

    def leaving(self, errand: DispatchRequest) -> list[QueuedRequest]:
        """Those of the group of a request that were asked and have not answered yet."""
        return list(self._asked.get(self._group_of(self._floor.ticket(errand)), ()))

    def before(self, errand: DispatchRequest, now_s: float) -> list[QueuedRequest]:
        """Who should leave so that a new request can wait that would be refused now.

        Nobody, where that would not be enough, or where the request itself is the one that should go.
        """
        floor = self._floor
        ready = floor.refresh(now_s)
        if not ready:
            return []
        ticket = floor.ticket(errand)
        group = self._group_of(ticket)
        late_s, wait_s, share = self._late_s(ticket, ready, now_s)
        self._pressure(group).saw(max(share, 1.0 + 1e-9), now_s)
        tickets = self._movable_of(group)
        if errand.movable:
            tickets = [*tickets, ticket]
        service = ticket.service + sum(waiting.service for waiting in self._waiting(group))
        chosen = self._leavers(group, tickets, surplus(service, wait_s, late_s))
        return [] if ticket in chosen else chosen

    def among(self, now_s: float) -> list[QueuedRequest]:
        """Who should leave of those that wait, because the predictions have become worse, or pressure lasts."""
        ready = self._floor.refresh(now_s)
        if not ready or not self._floor.outlook.is_sure(ready):
            return []
        leaving: list[QueuedRequest] = []
        for group, pressure in list(self._pressures.items()):
            if group not in self._movable:
                pressure.saw(0.0, now_s)
                if not pressure.is_on:
                    del self._pressures[group]
        for group in list(self._movable):
            leaving += self._of_group(group, ready, now_s)
        return leaving

    def _of_group(self, group: Group, ready: list[EndpointState], now_s: float) -> list[QueuedRequest]:
        tickets = self._movable_of(group)
        last = max(reversed(tickets), key=_due_s)
        late_s, wait_s, share = self._late_s(last, ready, now_s)
        pressure = self._pressures.get(group)
        if pressure is None:
            if share <= 1.0:
                return []
            pressure = self._pressure(group)
        pressure.saw(share, now_s)
        if share <= pressure.allowed:
            return []
        late_s += (1.0 - pressure.allowed) * self._objective_s(last)
        service = sum(waiting.service for waiting in self._waiting(group))
        chosen = self._leavers(group, tickets, surplus(service, wait_s, late_s))
        return chosen or ([] if self._asked.get(group) else [last])

    def _leavers(self, group: Group, tickets: list[QueuedRequest], service: float) -> list[QueuedRequest]:
        """Who leaves beside those that are about to."""
        about_to = [ticket.service for ticket in self._asked.get(group, ())]
        if about_to and sum(about_to) >= service:
            return []
        service -= sum(about_to)
        candidates = [
            OverflowCandidate(
                ticket.errand.prompt_tokens, self._held(ticket.errand), ticket.service, ticket.errand.arrived_s
            )
            for ticket in tickets
        ]
        return [tickets[number] for number in leavers(candidates, service)]

    def _late_s(self, ticket: QueuedRequest, ready: list[EndpointState], now_s: float) -> tuple[float, float, float]:
        """By how much the objective of a request would be missed, its wait, and which part of it the whole takes."""
        floor = self._floor
        place = floor.place(floor.forecaster.of(ticket, ready, now_s), now_s)
        expected_s = floor.outlook.cautious_s(place)
        objective_s = self._objective_s(ticket)
        whole_s = max(0.0, now_s - ticket.errand.arrived_s) + expected_s
        return whole_s - objective_s, place.wait_s, whole_s / objective_s if objective_s > 0 else float("inf")

    def _objective_s(self, ticket: QueuedRequest) -> float:
        """From its arrival to its first token, or how long its class may wait."""
        if ticket.first_token_by_s is not None:
            return ticket.first_token_by_s - ticket.errand.arrived_s
        return self._config.max_wait_s.get(ticket.flow.priority, float("inf"))

    def _movable_of(self, group: Group) -> list[QueuedRequest]:
        tickets = [ticket for ticket in self._movable.get(group, ()) if ticket.state is QueueState.WAITING]
        return tickets[-_MOST_CANDIDATES:]

    def _waiting(self, group: Group) -> list[QueuedRequest]:
        """All of a group, whether they may leave or not."""
        tenant, priority = group
        return [
            ticket
            for room in self._floor.rooms
            for id_, tickets in room.tenants.items()
            if tenant in (id_, _EVERYBODY)
            for ticket in tickets
            if ticket.flow.priority is priority
        ]

    def _group_of(self, ticket: QueuedRequest) -> Group:
        return (ticket.tenant.id if self._shared else _EVERYBODY), ticket.flow.priority

    def _pressure(self, group: Group) -> OverflowState:
        overflow = self._config.overflow
        return self._pressures.setdefault(group, OverflowState(overflow.back_below, overflow.back_after_s))


def _due_s(ticket: QueuedRequest) -> float:
    """What orders the requests of a group: until when they can wait, or since when they do."""
    return ticket.arrived_s if ticket.first_token_by_s is None else ticket.first_token_by_s


def _remove(groups: dict[Group, dict[QueuedRequest, None]], group: Group, ticket: QueuedRequest) -> None:
    of_group = groups.get(group)
    if of_group is not None:
        of_group.pop(ticket, None)
        if not of_group:
            del groups[group]
