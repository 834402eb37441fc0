"""Selects waiting requests that should move to another model; `policy.overflow` has the rules.

Overflow is decided for a *group*: the requests of one tenant and class. In a fair queue a tenant's wait depends on its
own requests, so only its own requests move when it would miss its objective. If the queue order is not fair between
tenants, all requests of a class form one group.
"""

from collections.abc import Callable, Sequence

from maitred.core.flow import PriorityClass
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.overflow import OverflowCandidate, OverflowState, select_overflow, surplus
from maitred.dispatch.queue import QueuedRequest, QueueState
from maitred.dispatch.request import DispatchRequest

_ALL_TENANTS = ""
_MAX_CANDIDATES = 64
"""Only the newest requests of a group are candidates, because each needs a cache lookup."""

Group = tuple[str, PriorityClass]


class OverflowPlanner:
    """Selects requests of one queue that should move to another model; it does not move them.

    Args:
        core: State of the queue.
        config: Settings of dispatch, with the overflow thresholds.
        cached_tokens: Returns the cached leading prompt tokens of a request.
    """

    def __init__(
        self, core: DispatchCore, config: DispatchConfig, cached_tokens: Callable[[DispatchRequest], int]
    ) -> None:
        self._core = core
        self._config = config
        self._cached_tokens = cached_tokens
        self._is_fair = config.line.policy == "fair"
        self._movable_by_group: dict[Group, dict[QueuedRequest, None]] = {}
        self._requested_by_group: dict[Group, dict[QueuedRequest, None]] = {}
        """Waiting requests that were asked to move and have not declined."""
        self._states: dict[Group, OverflowState] = {}

    def reconfigure(self, config: DispatchConfig) -> None:
        """Applies new settings, also to waiting requests."""
        self._config = config
        shared = config.line.policy == "fair"
        if shared == self._is_fair:
            return
        movable = [queued for group in self._movable_by_group.values() for queued in group]
        asked = [queued for group in self._requested_by_group.values() for queued in group]
        self._is_fair, self._movable_by_group, self._requested_by_group, self._states = shared, {}, {}, {}
        for queued in movable:
            self.on_join(queued)
        for queued in asked:
            self.on_requested(queued)

    def on_join(self, queued: QueuedRequest) -> None:
        """Registers a movable request that joined the queue."""
        if queued.request.movable:
            self._movable_by_group.setdefault(self._group_of(queued), {})[queued] = None

    def on_leave(self, queued: QueuedRequest) -> None:
        """Removes an entry that no longer waits or that declined to move."""
        _remove(self._movable_by_group, self._group_of(queued), queued)
        _remove(self._requested_by_group, self._group_of(queued), queued)

    def on_requested(self, queued: QueuedRequest) -> None:
        """Records that an entry was asked to move, so that it is asked only once."""
        _remove(self._movable_by_group, self._group_of(queued), queued)
        self._requested_by_group.setdefault(self._group_of(queued), {})[queued] = None

    def pending(self, dispatch_request: DispatchRequest) -> list[QueuedRequest]:
        """Returns entries of a request's group that were asked and have not answered yet."""
        return list(self._requested_by_group.get(self._group_of(self._core.new_entry(dispatch_request)), ()))

    def select_for(self, dispatch_request: DispatchRequest, now_s: float) -> list[QueuedRequest]:
        """Selects entries to move so that a new request, rejected otherwise, can wait.

        The list is empty if that would not be enough, or if the new request itself should move.
        """
        core = self._core
        ready = core.permitted_endpoints(dispatch_request, core.refresh(now_s))
        if not ready:
            return []
        queued = core.new_entry(dispatch_request)
        group = self._group_of(queued)
        late_s, wait_s, objective_ratio = self._predict_lateness(queued, ready, now_s)
        self._state(group).observe(max(objective_ratio, 1.0 + 1e-9), now_s)
        entries = self._movable_of(group)
        if dispatch_request.movable:
            entries = [*entries, queued]
        service = queued.service + sum(waiting.service for waiting in self._waiting(group))
        selected = self._select(group, entries, surplus(service, wait_s, late_s))
        return [] if queued in selected else selected

    def select_late(self, now_s: float) -> list[QueuedRequest]:
        """Selects waiting requests to move because their predictions exceed the allowed objective."""
        ready = self._core.refresh(now_s)
        if not ready:
            return self._select_before_start(now_s)
        if not self._core.predictor.is_rate_known(ready):
            return []
        leaving: list[QueuedRequest] = []
        for group, overflow_state in list(self._states.items()):
            if group not in self._movable_by_group:
                overflow_state.observe(0.0, now_s)
                if not overflow_state.is_on:
                    del self._states[group]
        for group in list(self._movable_by_group):
            leaving += self._select_from_group(group, ready, now_s)
        return leaving

    def _select_before_start(self, now_s: float) -> list[QueuedRequest]:
        """Selects the requests whose objective ends before the first replica is expected to serve.

        That others move would not help them, so the queue does not matter here.
        """
        starts_s = [
            ready_in_s + state.round_trip_s
            for state in self._core.endpoint_states
            if (ready_in_s := state.ready_in_s) is not None
        ]
        if not starts_s:
            return []
        ready_s = now_s + min(starts_s)
        return [
            queued
            for group in self._movable_by_group
            for queued in self._movable_of(group)
            if queued.request.arrived_s + self._objective_s(queued) < ready_s
        ]

    def _select_from_group(self, group: Group, ready: Sequence[EndpointState], now_s: float) -> list[QueuedRequest]:
        entries = self._movable_of(group)
        last = max(reversed(entries), key=_due_s)
        late_s, wait_s, share = self._predict_lateness(last, ready, now_s)
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
        return chosen or ([] if self._requested_by_group.get(group) else [last])

    def _select(self, group: Group, entries: list[QueuedRequest], service: float) -> list[QueuedRequest]:
        """Selects entries to move, in addition to those already asked."""
        requested_services = [queued.service for queued in self._requested_by_group.get(group, ())]
        if requested_services and sum(requested_services) >= service:
            return []
        service -= sum(requested_services)
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

    def _predict_lateness(
        self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float
    ) -> tuple[float, float, float]:
        """Returns lateness and wait in seconds, and the ratio of predicted TTFT to objective."""
        core = self._core
        position = core.forecast_cache.position(core.forecast_cache.forecast(queued, ready, now_s), now_s)
        expected_s = core.predictor.cautious_s(position)
        objective_s = self._objective_s(queued)
        whole_s = max(0.0, now_s - queued.request.arrived_s) + expected_s
        return whole_s - objective_s, position.wait_s, whole_s / objective_s if objective_s > 0 else float("inf")

    def _objective_s(self, queued: QueuedRequest) -> float:
        """Returns the TTFT objective of a request, or the longest wait of its class."""
        if queued.wait_deadline_s is not None:
            return queued.wait_deadline_s - queued.request.arrived_s
        return self._config.max_wait_s.get(queued.flow.priority, float("inf"))

    def _movable_of(self, group: Group) -> list[QueuedRequest]:
        entries = [queued for queued in self._movable_by_group.get(group, ()) if queued.state is QueueState.WAITING]
        return entries[-_MAX_CANDIDATES:]

    def _waiting(self, group: Group) -> list[QueuedRequest]:
        """Returns all waiting entries of a group, movable or not."""
        tenant, priority = group
        return [
            queued
            for queue in self._core.queues
            for id_, entries in queue.tenants.items()
            if tenant in (id_, _ALL_TENANTS)
            for queued in entries
            if queued.flow.priority is priority
        ]

    def _group_of(self, queued: QueuedRequest) -> Group:
        return (queued.tenant.id if self._is_fair else _ALL_TENANTS), queued.flow.priority

    def _state(self, group: Group) -> OverflowState:
        overflow = self._config.overflow
        return self._states.setdefault(group, OverflowState(overflow.back_below, overflow.back_after_s))


def _due_s(queued: QueuedRequest) -> float:
    """Returns the deadline of a request, or its arrival time if it has none."""
    return queued.arrived_s if queued.wait_deadline_s is None else queued.wait_deadline_s


def _remove(groups: dict[Group, dict[QueuedRequest, None]], group: Group, queued: QueuedRequest) -> None:
    of_group = groups.get(group)
    if of_group is not None:
        of_group.pop(queued, None)
        if not of_group:
            del groups[group]
