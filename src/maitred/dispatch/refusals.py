"""What those were told who were refused a moment ago: it stands for others of their kind.

A forecast is of a moment: when the next turn of a tenant comes. In an overload nine of ten requests are refused, most
of them milliseconds after another one of the same key that asked for as much, and a forecast for each was a quarter of
all that the gateway did. So it is kept while nothing has happened that it did not foresee: the moment stays the same,
and whoever asks again is told how much closer it has come. Only refusals are kept. Who might be let in by it is looked
at anew.
"""

from collections.abc import Sequence

from msgspec import Struct

from maitred.core.flow import Flow
from maitred.core.queue_position import QueuePosition
from maitred.dispatch.contest import due_of
from maitred.dispatch.counts import DispatchCounters
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.entry import QueuedRequest
from maitred.dispatch.policy.credits import Cost

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
