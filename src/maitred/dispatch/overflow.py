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
from maitred.dispatch.policy.overflow import OverflowCandidate, OverflowState, select_overflow, surplus
from maitred.dispatch.pool_queue import QueuedRequest, QueueState
from maitred.dispatch.request import DispatchRequest

_EVERYBODY = ""
_MOST_CANDIDATES = 64
"""The newest of a group: for each the caches are asked, and only some leave at a time."""

Group = tuple[str, PriorityClass]


class OverflowPlanner:
    """Planner of overflow for one queue: it names the requests that should move, and changes nothing itself.

    Args:
        core: Where they wait.
        config: When there is pressure.
        held: How many leading tokens of a request's prompts a cache here holds.
    """

    def __init__(self, core: DispatchCore, config: DispatchConfig, held: Callable[[DispatchRequest], int]) -> None:
        self._core = core
        self._config = config
        self._cached_tokens = held
        self._shared = config.line.policy == "fair"
        self._movable: dict[Group, dict[QueuedRequest, None]] = {}
        self._requested: dict[Group, dict[QueuedRequest, None]] = {}
        """Those that were asked, wait still, and have not said that they stay."""
        self._states: dict[Group, OverflowState] = {}

    def reconfigure(self, config: DispatchConfig) -> None:
        """Goes by these settings from now on, also for those that wait."""
        self._config = config
        shared = config.line.policy == "fair"
        if shared == self._shared:
            return
        movable = [queued for group in self._movable.values() for queued in group]
        asked = [queued for group in self._requested.values() for queued in group]
        self._shared, self._movable, self._requested, self._states = shared, {}, {}, {}
        for queued in movable:
            self.on_join(queued)
        for queued in asked:
            self.on_requested(queued)

    def on_join(self, queued: QueuedRequest) -> None:
        """A request begins to wait."""
        if queued.request.movable:
            self._movable.setdefault(self._group_of(queued), {})[queued] = None

    def on_leave(self, queued: QueuedRequest) -> None:
        """Notes that an entry does not wait any more, or stays."""
        _remove(self._movable, self._group_of(queued), queued)
        _remove(self._requested, self._group_of(queued), queued)

    def on_requested(self, queued: QueuedRequest) -> None:
        """Notes that an entry is asked to move, so that it is asked once only."""
        _remove(self._movable, self._group_of(queued), queued)
        self._requested.setdefault(self._group_of(queued), {})[queued] = None

    def pending(self, dispatch_request: DispatchRequest) -> list[QueuedRequest]:
        """Returns entries of a request's group that were asked and have not answered yet."""
        return list(self._requested.get(self._group_of(self._core.new_entry(dispatch_request)), ()))

    def select_for(self, dispatch_request: DispatchRequest, now_s: float) -> list[QueuedRequest]:
        """Selects entries that should move so that a new request can wait that would be rejected now.

        Nobody, where that would not be enough, or where the request itself is the one that should go.
        """
        core = self._core
        ready = core.refresh(now_s)
        if not ready:
            return []
        queued = core.new_entry(dispatch_request)
        group = self._group_of(queued)
        late_s, wait_s, share = self._late_s(queued, ready, now_s)
        self._state(group).observe(max(share, 1.0 + 1e-9), now_s)
        entries = self._movable_of(group)
        if dispatch_request.movable:
            entries = [*entries, queued]
        service = queued.service + sum(waiting.service for waiting in self._waiting(group))
        chosen = self._select(group, entries, surplus(service, wait_s, late_s))
        return [] if queued in chosen else chosen

    def select_leaving(self, now_s: float) -> list[QueuedRequest]:
        """Chooses waiting requests that should leave: the predictions have become worse, or pressure lasts."""
        ready = self._core.refresh(now_s)
        if not ready or not self._core.predictor.is_sure(ready):
            return []
        leaving: list[QueuedRequest] = []
        for group, pressure in list(self._states.items()):
            if group not in self._movable:
                pressure.observe(0.0, now_s)
                if not pressure.is_on:
                    del self._states[group]
        for group in list(self._movable):
            leaving += self._of_group(group, ready, now_s)
        return leaving

    def _of_group(self, group: Group, ready: list[EndpointState], now_s: float) -> list[QueuedRequest]:
        entries = self._movable_of(group)
        last = max(reversed(entries), key=_due_s)
        late_s, wait_s, share = self._late_s(last, ready, now_s)
        pressure = self._states.get(group)
        if pressure is None:
            if share <= 1.0:
                return []
            pressure = self._state(group)
        pressure.observe(share, now_s)
        if share <= pressure.allowed:
            return []
        late_s += (1.0 - pressure.allowed) * self._objective_s(last)
        service = sum(waiting.service for waiting in self._waiting(group))
        chosen = self._select(group, entries, surplus(service, wait_s, late_s))
        return chosen or ([] if self._requested.get(group) else [last])

    def _select(self, group: Group, entries: list[QueuedRequest], service: float) -> list[QueuedRequest]:
        """Selects entries to move, beside those that are about to."""
        about_to = [queued.service for queued in self._requested.get(group, ())]
        if about_to and sum(about_to) >= service:
            return []
        service -= sum(about_to)
        candidates = [
            OverflowCandidate(
                queued.request.prompt_tokens,
                self._cached_tokens(queued.request),
                queued.service,
                queued.request.arrived_s,
            )
            for queued in entries
        ]
        return [entries[number] for number in select_overflow(candidates, service)]

    def _late_s(self, queued: QueuedRequest, ready: list[EndpointState], now_s: float) -> tuple[float, float, float]:
        """By how much the objective of a request would be missed, its wait, and which part of it the whole takes."""
        core = self._core
        position = core.forecast_cache.position(core.forecast_cache.forecast(queued, ready, now_s), now_s)
        expected_s = core.predictor.cautious_s(position)
        objective_s = self._objective_s(queued)
        whole_s = max(0.0, now_s - queued.request.arrived_s) + expected_s
        return whole_s - objective_s, position.wait_s, whole_s / objective_s if objective_s > 0 else float("inf")

    def _objective_s(self, queued: QueuedRequest) -> float:
        """From its arrival to its first token, or how long its class may wait."""
        if queued.first_token_by_s is not None:
            return queued.first_token_by_s - queued.request.arrived_s
        return self._config.max_wait_s.get(queued.flow.priority, float("inf"))

    def _movable_of(self, group: Group) -> list[QueuedRequest]:
        entries = [queued for queued in self._movable.get(group, ()) if queued.state is QueueState.WAITING]
        return entries[-_MOST_CANDIDATES:]

    def _waiting(self, group: Group) -> list[QueuedRequest]:
        """Returns all waiting entries of a group, movable or not."""
        tenant, priority = group
        return [
            queued
            for queue in self._core.queues
            for id_, entries in queue.tenants.items()
            if tenant in (id_, _EVERYBODY)
            for queued in entries
            if queued.flow.priority is priority
        ]

    def _group_of(self, queued: QueuedRequest) -> Group:
        return (queued.tenant.id if self._shared else _EVERYBODY), queued.flow.priority

    def _state(self, group: Group) -> OverflowState:
        overflow = self._config.overflow
        return self._states.setdefault(group, OverflowState(overflow.back_below, overflow.back_after_s))


def _due_s(queued: QueuedRequest) -> float:
    """Returns the time that orders the requests of a group: their deadline, or since when they wait."""
    return queued.arrived_s if queued.first_token_by_s is None else queued.first_token_by_s


def _remove(groups: dict[Group, dict[QueuedRequest, None]], group: Group, queued: QueuedRequest) -> None:
    of_group = groups.get(group)
    if of_group is not None:
        of_group.pop(queued, None)
        if not of_group:
            del groups[group]
