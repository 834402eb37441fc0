"""The line: who waits, and whose turn it is.

Its owner asks for the `head`, and when there is room `take`s it, charges what the request really costs while it runs,
and says when it is `done`. What the policies differ in is the order, and what they make of the charges.
"""

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from maitred.core.flow import Flow, PriorityClass
from maitred.fairness.config import QueueOrderConfig
from maitred.fairness.drr import DrrQueue
from maitred.fairness.entry import QueueEntry, WorkAhead
from maitred.fairness.fcfs import FcfsQueue
from maitred.fairness.vtc import VtcQueue

__all__ = ["FairQueue", "QueueEntry", "QueueOrderConfig", "WorkAhead", "make_queue"]

T = TypeVar("T")


class FairQueue(Protocol[T]):
    """Requests that wait, and the account of what their flows were served.

    Pure: times are arguments, in seconds of one clock that does not go back. Not for several threads.
    """

    def add(self, entry: QueueEntry[T], now_s: float) -> None:
        """Joins. An entry is in one line at a time, once."""
        ...

    def remove(self, entry: QueueEntry[T]) -> None:
        """Leaves without having run: cancelled. The entry must be waiting."""
        ...

    def head(self, now_s: float) -> QueueEntry[T] | None:
        """Whose turn it is; None when nobody waits. It stays: asking again without a change gives the same."""
        ...

    def take(self, entry: QueueEntry[T], now_s: float) -> None:
        """Leaves the line and runs. Normally the head; any entry may be taken, when the head does not fit."""
        ...

    def pass_through(self, entry: QueueEntry[T], now_s: float) -> None:
        """Joins, and is taken in the same moment. Only where nobody waits; the same as `add` and `take`."""
        ...

    def charge(self, flow: Flow, service: float) -> None:
        """Books service that the flow really got; negative: a refund.

        The sooner, the fairer: charge what is certain at `take` (the prompt), and the rest as it is computed.
        """
        ...

    def stream(self, flow: Flow, service: float) -> None:
        """Charges a running flow so much more with each tick from now on; negative: less.

        Equal to a charge per tick, and cheaper where many flows get the same in every step. What was streamed to a flow
        must be taken back before the last of its entries is done or put back.
        """
        ...

    def tick(self) -> None:
        """Charges everything that streams, once."""
        ...

    def done(self, flow: Flow) -> None:
        """A taken entry has ended, in whichever way; once for each `take` that was not put back."""
        ...

    def requeue(self, entry: QueueEntry[T], now_s: float) -> None:
        """A taken entry waits again, with the age it has; what it was charged stays charged."""
        ...

    def ahead(self, entry: QueueEntry[T], now_s: float) -> WorkAhead:
        """Estimates what is taken before an entry, which waits here or might join."""
        ...

    def over_service(self, flow: Flow) -> float:
        """By how much service per weight the flow leads the least served active one of its class; at least 0.

        That one may be a flow with one slow request that runs, which gets little because it asks for little: this is
        for who gives way to whom among those that run.
        """
        ...

    def lead(self, flow: Flow) -> float:
        """Returns how far a flow is ahead of the least served one that waits; 0 if nobody waits."""
        ...

    def waiting_in(self, priority: PriorityClass) -> int:
        """How many wait that joined with this class; ageing does not change it."""
        ...

    def __len__(self) -> int:
        """Number of waiting entries."""
        ...

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        """All that wait, in no particular order."""
        ...


def make_queue(config: QueueOrderConfig) -> FairQueue[Any]:
    """A new line, empty, of the policy that the configuration names."""
    match config.policy:
        case "fifo":
            return FcfsQueue(classes=False, ageing_s=None)
        case "priority":
            return FcfsQueue(classes=True, ageing_s=config.ageing_s)
        case "deficit":
            return DrrQueue(config.quantum)
        case "fair":
            return VtcQueue(config)
