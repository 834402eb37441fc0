"""Load shedding: requests that may not begin to wait, and when they should come back.

Refusing is the cheap path: at ten times the capacity nine of ten requests end here.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from maitred.core.errors import DeadlineUnmeetable, QueueFull
from maitred.core.flow import Flow, QueuePosition
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.counters import DispatchCounters
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.forecasts import due_s
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.retry_after import RetryAfterTurns
from maitred.dispatch.pool_queue import QueuedRequest
from maitred.dispatch.request import DispatchRequest

_Rejection = QueueFull | DeadlineUnmeetable


class QueueAdmission:
    """Checks requests before they join.

    Args:
        core: Where they would wait.
        config: The limits.
        draw: From 0 to 1, for jitter.
        wanted: Called when a request is refused that could not wait for a replica to come.
    """

    def __init__(
        self,
        core: DispatchCore,
        config: DispatchConfig,
        draw: Callable[[], float],
        wanted: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._config = config
        self._draw = draw
        self._on_wanted = wanted
        self._retry_after_turns = RetryAfterTurns()
        self._rejections = RejectionCache(core.counters)

    def reconfigure(self, config: DispatchConfig) -> None:
        """Goes by these limits from now on. Who waits already stays."""
        self._config = config
        self._rejections.forget()

    def check(self, dispatch_request: DispatchRequest, now_s: float) -> QueuePosition:
        """Predicts position and wait of a request that would join now, from its arrival; rejects who may not wait.

        Nothing joins by this.

        Raises:
            ReplicaUnavailable: No replica is ready, nor will one be because requests wait for it.
            QueueFull: Too many of its class wait, or it would wait too long.
            DeadlineUnmeetable: Its first token would come too late.
        """
        core = self._core
        ready = core.refresh(now_s)
        if not ready and not core.replica_expected:
            unavailable = core.unavailable()
            core.counters.on_rejection(unavailable.code)
            raise unavailable
        queued = core.new_entry(dispatch_request)
        stands = self._rejections.cached_position(queued, ready, now_s)
        if stands is not None and (refusal := self._rejection_for(queued, stands, now_s, at_once=False)) is not None:
            raise refusal
        at_once = core.forecast_cache.predict(queued, ready, now_s).wait.at_once
        position = queued.predicted_position
        assert position is not None
        if not at_once or queued.first_token_by_s is not None:
            refusal = self._rejection_for(queued, position, now_s, at_once=at_once)
            if refusal is not None:
                if not at_once:
                    self._rejections.store(queued, position, ready, now_s)
                raise refusal
        passed_s = now_s - dispatch_request.arrived_s
        return position if passed_s <= 0.0 else replace(position, ttft_s=position.ttft_s + passed_s)

    def _rejection_for(
        self, queued: QueuedRequest, position: QueuePosition, now_s: float, *, at_once: bool
    ) -> _Rejection | None:
        """Returns what stands against a request with this prediction."""
        priority = queued.flow.priority
        if not at_once:
            most, longest_s = self._config.max_waiting.get(priority), self._config.max_wait_s.get(priority)
            if most is not None and sum(queue.waiting_in(priority) for queue in self._core.queues) >= most:
                reason = f"{most} requests of class {priority} wait already, which is the most"
                return self._reject(QueueFull, reason, queued, position, now_s)
            if longest_s is not None and position.wait_s > longest_s:
                reason = f"A request of class {priority} would wait longer than {longest_s:g} s now"
                return self._reject(QueueFull, reason, queued, position, now_s)
        # A wait is not certain; what was promised should be kept mostly.
        by_s = queued.first_token_by_s
        if by_s is not None and now_s + self._core.predictor.cautious_s(position) > by_s:
            reason = f"The first token is expected in {position.ttft_s:.2f} s and must come within "
            return self._reject(DeadlineUnmeetable, f"{reason}{max(0.0, by_s - now_s):.2f} s", queued, position, now_s)
        return None

    def _reject(
        self,
        kind: type[QueueFull] | type[DeadlineUnmeetable],
        reason: str,
        queued: QueuedRequest,
        position: QueuePosition,
        now_s: float,
    ) -> _Rejection:
        core = self._core
        core.counters.on_rejection(kind.code)
        if core.replica_expected:
            self._on_wanted()  # else whoever comes back would find what it has found now
        tenant, waits = queued.tenant, queued.queue.wait_account
        others = waits.weight - (tenant.weight if waits.waits(tenant.id) else 0.0)
        per_s = core.predictor.per_s(
            [endpoint_state for endpoint_state in core.endpoint_states if endpoint_state.ready]
        )
        share = (per_s or 0.0) * tenant.weight / (tenant.weight + others)
        takes_s = queued.service / share if share else 0.0
        retry_s = self._retry_after_turns.take(tenant.id, position.wait_s, takes_s, now_s, self._draw())
        return kind(f"{reason}. Try again after the time in Retry-After.", position=position, retry_after_s=retry_s)


_STANDS_S = 0.1
"""Some steps of an engine. What goes otherwise than foreseen, such as a long answer that ends early, shows after it."""
_LEAST, _MOST = 0.5, 2.0
"""Of the KV blocks of the one that was refused, which another may want. It is places that an overload lacks mostly, and
then its own blocks change nothing but its prompt's milliseconds."""
_MANY = 1024
"""From so many flows on, those whose refusals stand no more are forgotten."""


class _CachedRejection(Struct, frozen=True):
    """The last one of a flow."""

    queued: QueuedRequest
    position: QueuePosition
    at_s: float
    ready: Sequence[EndpointState]
    own_waiting: int
    """Requests of its tenant that waited then."""
    gone: int
    """How many had given up waiting by then."""


class RejectionCache:
    """The last refusal of each flow.

    A forecast is of a moment: when the next turn of a tenant comes. In an overload nine of ten requests are rejected,
    most of them milliseconds after another one of the same key that asked for as much, and a forecast for each was a
    quarter of all that the gateway did. So it is kept while nothing has happened that it did not foresee: the moment
    stays the same, and the next request is told how much closer it has come. Only rejections are kept. A request that
    might be admitted by it is forecast anew.

    Args:
        counts: Counters of the same queue.
    """

    def __init__(self, counts: DispatchCounters) -> None:
        self._counters = counts
        self._last: dict[Flow, _CachedRejection] = {}

    def __len__(self) -> int:
        return len(self._last)

    def cached_position(
        self, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float
    ) -> QueuePosition | None:
        """Returns a position that still holds for a request that has not joined; None: it has to be computed.

        Args:
            queued: Entry of the request.
            ready: The replicas that are.
            now_s: Now.
        """
        last = self._last.get(queued.flow)
        if last is None or not self._is_valid(last, queued, ready, now_s):
            return None
        position, age_s = last.position, now_s - last.at_s
        return QueuePosition(position.position, max(0.0, position.wait_s - age_s), max(0.0, position.ttft_s - age_s))

    def store(
        self, queued: QueuedRequest, position: QueuePosition, ready: Sequence[EndpointState], now_s: float
    ) -> None:
        """A request was refused by a forecast of just now."""
        if len(self._last) >= _MANY:
            self._last = {flow: last for flow, last in self._last.items() if now_s - last.at_s <= _STANDS_S}
        self._last[queued.flow] = _CachedRejection(queued, position, now_s, ready, _own_waiting(queued), self._is_gone)

    def forget(self) -> None:
        """Drops all cached rejections: other rules hold from now on."""
        self._last.clear()

    @property
    def _is_gone(self) -> int:
        return self._counters.left_waiting + self._counters.moved

    def _is_valid(
        self, last: _CachedRejection, queued: QueuedRequest, ready: Sequence[EndpointState], now_s: float
    ) -> bool:
        return (
            now_s - last.at_s <= _STANDS_S
            and queued.queue.waiting > 0  # else there may be room, and a look at it is cheap
            and due_s(queued) >= due_s(last.queued)  # it would not go before that one
            and _alike(queued.cost, last.queued.cost)
            and _own_waiting(queued) == last.own_waiting
            and self._is_gone == last.gone
            and ready == last.ready
        )


def _own_waiting(queued: QueuedRequest) -> int:
    return len(queued.queue.tenants.get(queued.tenant.id, ()))


def _alike(cost: Cost, other: Cost) -> bool:
    """Whether both want as many places, and about as much room."""
    return cost.slots == other.slots and _LEAST * other.blocks <= cost.blocks <= _MOST * other.blocks
