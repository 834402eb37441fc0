"""Who may not even begin to wait, and when it should come back.

Refusing is the cheap path: at ten times the capacity nine of ten requests end here.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct

from maitred.core.errors import DeadlineUnmeetable, QueueFull
from maitred.core.flow import Flow, QueuePosition
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.core import DispatchCore
from maitred.dispatch.counters import DispatchCounters
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.forecasts import due_of
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.retry_after import RetryAfterTurns
from maitred.dispatch.pool_queue import QueuedRequest
from maitred.dispatch.request import DispatchRequest

_Refusal = QueueFull | DeadlineUnmeetable


class QueueAdmission:
    """Checks requests before they join.

    Args:
        floor: Where they would wait.
        config: The limits.
        draw: From 0 to 1, for jitter.
        wanted: Called when a request is refused that could not wait for a replica to come.
    """

    def __init__(
        self,
        floor: DispatchCore,
        config: DispatchConfig,
        draw: Callable[[], float],
        wanted: Callable[[], None] = lambda: None,
    ) -> None:
        self._floor = floor
        self._config = config
        self._draw = draw
        self._wanted = wanted
        self._comebacks = RetryAfterTurns()
        self._refusals = RejectionCache(floor.counts)

    def adopt(self, config: DispatchConfig) -> None:
        """Goes by these limits from now on. Who waits already stays."""
        self._config = config
        self._refusals.forget()

    def check(self, errand: DispatchRequest, now_s: float) -> QueuePosition:
        """What is predicted for it, if it may wait.

        Raises:
            ReplicaUnavailable: No replica is ready, nor will one be because requests wait for it.
            QueueFull: Too many of its class wait, or it would wait too long.
            DeadlineUnmeetable: Its first token would come too late.
        """
        floor = self._floor
        ready = floor.refresh(now_s)
        if not ready and not floor.comes:
            unavailable = floor.unavailable()
            floor.counts.refused(unavailable.code)
            raise unavailable
        ticket = floor.ticket(errand)
        stands = self._refusals.place(ticket, ready, now_s)
        if stands is not None and (refusal := self._against(ticket, stands, now_s, at_once=False)) is not None:
            raise refusal
        at_once = floor.foretell(ticket, ready, now_s).wait.at_once
        place = ticket.predicted
        assert place is not None
        if at_once and ticket.first_token_by_s is None:
            return place
        if (refusal := self._against(ticket, place, now_s, at_once=at_once)) is not None:
            if not at_once:
                self._refusals.note(ticket, place, ready, now_s)
            raise refusal
        return place

    def _against(self, ticket: QueuedRequest, place: QueuePosition, now_s: float, *, at_once: bool) -> _Refusal | None:
        """What stands against a request for which this is predicted."""
        priority = ticket.flow.priority
        if not at_once:
            most, longest_s = self._config.max_waiting.get(priority), self._config.max_wait_s.get(priority)
            if most is not None and sum(room.waiting_in(priority) for room in self._floor.rooms) >= most:
                reason = f"{most} requests of class {priority} wait already, which is the most"
                return self._refusal(QueueFull, reason, ticket, place, now_s)
            if longest_s is not None and place.wait_s > longest_s:
                reason = f"A request of class {priority} would wait longer than {longest_s:g} s now"
                return self._refusal(QueueFull, reason, ticket, place, now_s)
        # A wait is not certain; what was promised should be kept mostly.
        by_s = ticket.first_token_by_s
        if by_s is not None and now_s + self._floor.outlook.cautious_s(place) > by_s:
            reason = f"The first token is expected in {place.ttft_s:.2f} s and must come within "
            return self._refusal(DeadlineUnmeetable, f"{reason}{max(0.0, by_s - now_s):.2f} s", ticket, place, now_s)
        return None

    def _refusal(
        self,
        kind: type[QueueFull] | type[DeadlineUnmeetable],
        reason: str,
        ticket: QueuedRequest,
        place: QueuePosition,
        now_s: float,
    ) -> _Refusal:
        floor = self._floor
        floor.counts.refused(kind.code)
        if floor.comes:
            self._wanted()  # else whoever comes back would find what it has found now
        tenant, waits = ticket.tenant, ticket.room.waits
        others = waits.weight - (tenant.weight if waits.waits(tenant.id) else 0.0)
        per_s = floor.outlook.per_s([station for station in floor.stations if station.ready])
        share = (per_s or 0.0) * tenant.weight / (tenant.weight + others)
        takes_s = ticket.service / share if share else 0.0
        retry_s = self._comebacks.take(tenant.id, place.wait_s, takes_s, now_s, self._draw())
        return kind(f"{reason}. Try again after the time in Retry-After.", place=place, retry_after_s=retry_s)


_STANDS_S = 0.1
"""Some steps of an engine. What goes otherwise than foreseen, such as a long answer that ends early, shows after it."""
_LEAST, _MOST = 0.5, 2.0
"""Of the KV blocks of the one that was refused, which another may want. It is places that an overload lacks mostly, and
then its own blocks change nothing but its prompt's milliseconds."""
_MANY = 1024
"""From so many flows on, those whose refusals stand no more are forgotten."""


class _Refused(Struct, frozen=True):
    """The last one of a flow."""

    ticket: QueuedRequest
    place: QueuePosition
    at_s: float
    ready: Sequence[EndpointState]
    own_waiting: int
    """Requests of its tenant that waited then."""
    gone: int
    """How many had given up waiting by then."""


class RejectionCache:
    """The last refusal of each flow.

    Args:
        counts: Of the same floor.
    """

    def __init__(self, counts: DispatchCounters) -> None:
        self._counts = counts
        self._last: dict[Flow, _Refused] = {}

    def __len__(self) -> int:
        return len(self._last)

    def place(self, ticket: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> QueuePosition | None:
        """What is still true for a request that has not joined; None: nobody knows without a look.

        Args:
            ticket: Its ticket.
            ready: The replicas that are.
            now_s: Now.
        """
        last = self._last.get(ticket.flow)
        if last is None or not self._stands(last, ticket, ready, now_s):
            return None
        place, age_s = last.place, now_s - last.at_s
        return QueuePosition(place.position, max(0.0, place.wait_s - age_s), max(0.0, place.ttft_s - age_s))

    def note(self, ticket: QueuedRequest, place: QueuePosition, ready: Sequence[EndpointState], now_s: float) -> None:
        """A request was refused by a forecast of just now."""
        if len(self._last) >= _MANY:
            self._last = {flow: last for flow, last in self._last.items() if now_s - last.at_s <= _STANDS_S}
        self._last[ticket.flow] = _Refused(ticket, place, now_s, ready, _own_waiting(ticket), self._gone)

    def forget(self) -> None:
        """Other rules hold from now on."""
        self._last.clear()

    @property
    def _gone(self) -> int:
        return self._counts.left_waiting + self._counts.moved

    def _stands(self, last: _Refused, ticket: QueuedRequest, ready: Sequence[EndpointState], now_s: float) -> bool:
        return (
            now_s - last.at_s <= _STANDS_S
            and ticket.room.waiting > 0  # else there may be room, and a look at it is cheap
            and due_of(ticket) >= due_of(last.ticket)  # it would not go before that one
            and _alike(ticket.cost, last.ticket.cost)
            and _own_waiting(ticket) == last.own_waiting
            and self._gone == last.gone
            and ready == last.ready
        )


def _own_waiting(ticket: QueuedRequest) -> int:
    return len(ticket.room.tenants.get(ticket.tenant.id, ()))


def _alike(one: Cost, other: Cost) -> bool:
    """Whether both want as many places, and about as much room."""
    return one.slots == other.slots and _LEAST * other.blocks <= one.blocks <= _MOST * other.blocks
