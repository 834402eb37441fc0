"""Load shedding: rejects requests that may not wait, with a Retry-After time.

Rejection must be cheap: at ten times the capacity, nine of ten requests are rejected here.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from maitred.core.errors import DeadlineUnmeetable, QueueFull
from maitred.core.flow import SHARE_OF_FREE, Flow, QueuePosition
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.forecasts import due_s
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.retry_after import RetryAfterTurns
from maitred.dispatch.queue import DispatchCounters, QueuedRequest
from maitred.dispatch.request import DispatchRequest

_Rejection = QueueFull | DeadlineUnmeetable


class LoadShedder:
    """Rejects requests that may not wait, before they join.

    Args:
        core: State of the queue.
        config: The limits.
        draw: Returns a number from 0 to 1 for jitter.
        on_wanted: Called when a request is rejected while a replica could start on demand.
    """

    def __init__(
        self,
        core: DispatchCore,
        config: DispatchConfig,
        draw: Callable[[], float],
        on_wanted: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._config = config
        self._draw = draw
        self._on_wanted = on_wanted
        self._retry_after_turns = RetryAfterTurns()
        self._rejections = RejectionCache(core.counters)

    def reconfigure(self, config: DispatchConfig) -> None:
        """Applies new limits. Requests that already wait are kept."""
        self._config = config
        self._rejections.forget()

    def check(self, dispatch_request: DispatchRequest, now_s: float) -> QueuePosition:
        """Predicts position and TTFT of a new request; raises if it may not wait.

        The request does not join the queue.

        Raises:
            ReplicaUnavailable: No replica is ready, and none is starting.
            QueueFull: Too many requests of its class wait, or its predicted wait is too long.
            DeadlineUnmeetable: The predicted first token is after the deadline.
        """
        core = self._core
        ready: Sequence[EndpointState] = core.refresh(now_s)
        if dispatch_request.regions is not None:
            ready = core.permitted_endpoints(dispatch_request, ready)
        if not ready and not core.has_startable(dispatch_request):
            unavailable = core.unavailable(dispatch_request)
            core.counters.on_rejection(unavailable.code)
            if core.arrivals is not None and core.is_own_demand(dispatch_request):
                core.arrivals.on_refused(core.new_entry(dispatch_request))
            raise unavailable
        queued = core.new_entry(dispatch_request)
        cached_position = self._rejections.cached_position(queued, ready, now_s)
        if (
            cached_position is not None
            and (rejection := self._rejection_for(queued, cached_position, now_s, at_once=False)) is not None
        ):
            raise rejection
        at_once = core.forecast_cache.forecast_and_store(queued, ready, now_s).wait.at_once
        position = queued.predicted_position
        assert position is not None
        if not at_once or queued.wait_deadline_s is not None:
            rejection = self._rejection_for(queued, position, now_s, at_once=at_once)
            if rejection is not None:
                if not at_once:
                    self._rejections.store(queued, position, ready, now_s)
                raise rejection
        passed_s = now_s - dispatch_request.arrived_s
        return position if passed_s <= 0.0 else replace(position, ttft_s=position.ttft_s + passed_s)

    def _rejection_for(
        self, queued: QueuedRequest, position: QueuePosition, now_s: float, *, at_once: bool
    ) -> _Rejection | None:
        """Returns the rejection of a request with this prediction; None: it may wait."""
        priority = queued.flow.priority
        if not at_once:
            max_waiting, longest_s = self._config.max_waiting.get(priority), self._config.max_wait_s.get(priority)
            if max_waiting is not None and (reason := self._full_reason(queued.flow, max_waiting)):
                return self._make_rejection(QueueFull, reason, queued, position, now_s)
            if longest_s is not None and position.wait_s > longest_s:
                reason = f"A request of class {priority} would wait longer than {longest_s:g} s now"
                return self._make_rejection(QueueFull, reason, queued, position, now_s)
        # The wait is uncertain, so add a safety margin before the deadline is promised.
        ttft_deadline_s = queued.wait_deadline_s
        if ttft_deadline_s is not None and now_s + self._core.predictor.cautious_s(position) > ttft_deadline_s:
            reason = f"The first token is expected in {position.ttft_s:.2f} s and must come within "
            return self._make_rejection(
                DeadlineUnmeetable, f"{reason}{max(0.0, ttft_deadline_s - now_s):.2f} s", queued, position, now_s
            )
        return None

    def _full_reason(self, flow: Flow, max_waiting: int) -> str:
        """Returns why a request may not wait beside those that do; empty if it may.

        Organisations, teams and keys share the places by `SHARE_OF_FREE`.
        """
        queues, priority = self._core.queues, flow.priority
        free = max_waiting - sum(queue.waiting_in(priority) for queue in queues)
        if free <= 0:
            return f"{max_waiting} requests of class {priority} wait already, which is the most"
        for depth in range(1, len(flow.path) + 1):
            path = flow.path[:depth]
            waiting = sum(queue.waiting_by_flow.get((priority, path), 0) for queue in queues)
            free = SHARE_OF_FREE * free - waiting
            if free <= 0:
                return (
                    f"{waiting} requests of class {priority} of {path[-1].id} wait already, as many as its share allows"
                )
        return ""

    def _make_rejection(
        self,
        kind: type[QueueFull] | type[DeadlineUnmeetable],
        reason: str,
        queued: QueuedRequest,
        position: QueuePosition,
        now_s: float,
    ) -> _Rejection:
        core = self._core
        core.counters.on_rejection(kind.code)
        if core.arrivals is not None and core.is_own_demand(queued.request):
            core.arrivals.on_refused(queued)
        if core.has_startable_replica:
            self._on_wanted()  # start a replica, else the retry would be rejected too
        tenant, wait_account = queued.tenant, queued.queue.wait_account
        others = wait_account.weight - (tenant.weight if wait_account.has_waiting(tenant.id) else 0.0)
        per_s = core.predictor.per_s(
            [endpoint_state for endpoint_state in core.endpoint_states if endpoint_state.ready]
        )
        share = (per_s or 0.0) * tenant.weight / (tenant.weight + others)
        service_time_s = queued.service / share if share else 0.0
        retry_s = self._retry_after_turns.take(tenant.id, position.wait_s, service_time_s, now_s, self._draw())
        return kind(f"{reason}. Try again after the time in Retry-After.", position=position, retry_after_s=retry_s)


_REJECTION_TTL_S = 0.1
"""How long a cached rejection is valid: a few engine steps. After this time an unexpected event, such as an early end
of a long output, is noticed."""
_MIN_BLOCK_RATIO, _MAX_BLOCK_RATIO = 0.5, 2.0
"""A cached rejection applies to requests with KV blocks in this range relative to it. An overload mostly lacks slots,
so the number of blocks hardly changes the wait."""
_PRUNE_ABOVE_FLOWS = 1024
"""Expired rejections are dropped once this many flows are cached."""


class _CachedRejection(Struct, frozen=True):
    """Last rejection of one flow."""

    queued: QueuedRequest
    position: QueuePosition
    at_s: float
    ready: Sequence[EndpointState]
    own_waiting: int
    """Number of waiting requests of its tenant at that time."""
    gone: int
    """Number of requests that had left the queue without dispatch at that time."""


class RejectionCache:
    """Cache of the last rejection of each flow.

    A forecast predicts the time of a tenant's next turn. In an overload most rejections
    follow a similar rejection of the same key within milliseconds, and a forecast for each took a quarter of the
    gateway's CPU time. So the forecast is reused until an unexpected event; the remaining wait is the cached wait less
    the time since. Only rejections are kept. A request that might be admitted gets a new forecast.

    Args:
        counters: Counters of the queue.
    """

    def __init__(self, counters: DispatchCounters) -> None:
        self._counters = counters
        self._last_by_flow: dict[Flow, _CachedRejection] = {}

    def cached_position(
        self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float
    ) -> QueuePosition | None:
        """Returns the cached position of a new request; None: it must be computed.

        Args:
            queued: Entry of the request.
            ready: Endpoints that are ready.
            now_s: Now.
        """
        last = self._last_by_flow.get(queued.flow)
        if last is None or not self._is_valid(last, queued, ready, now_s):
            return None
        position, age_s = last.position, now_s - last.at_s
        return QueuePosition(position.position, max(0.0, position.wait_s - age_s), max(0.0, position.ttft_s - age_s))

    def store(
        self, queued: QueuedRequest, position: QueuePosition, ready: Sequence[EndpointState], now_s: float
    ) -> None:
        """Stores the rejection of a request."""
        if len(self._last_by_flow) >= _PRUNE_ABOVE_FLOWS:
            self._last_by_flow = {
                flow: last for flow, last in self._last_by_flow.items() if now_s - last.at_s <= _REJECTION_TTL_S
            }
        self._last_by_flow[queued.flow] = _CachedRejection(
            queued=queued,
            position=position,
            at_s=now_s,
            ready=ready,
            own_waiting=_own_waiting(queued),
            gone=self._left_count,
        )

    def forget(self) -> None:
        """Drops all cached rejections."""
        self._last_by_flow.clear()

    @property
    def _left_count(self) -> int:
        return self._counters.left_waiting + self._counters.moved

    def _is_valid(
        self, last: _CachedRejection, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float
    ) -> bool:
        return (
            now_s - last.at_s <= _REJECTION_TTL_S
            and queued.queue.waiting > 0  # otherwise there may be capacity, and a forecast is cheap
            and due_s(queued) >= due_s(last.queued)  # its deadline is not earlier
            and _similar_cost(queued.cost, last.queued.cost)
            and _own_waiting(queued) == last.own_waiting
            and self._left_count == last.gone
            and ready == last.ready
        )


def _own_waiting(queued: QueuedRequest) -> int:
    return len(queued.queue.tenants.get(queued.tenant.id, ()))


def _similar_cost(cost: Cost, other: Cost) -> bool:
    """Whether two costs have equal slots and similar KV blocks."""
    return (
        cost.slots == other.slots and _MIN_BLOCK_RATIO * other.blocks <= cost.blocks <= _MAX_BLOCK_RATIO * other.blocks
    )
