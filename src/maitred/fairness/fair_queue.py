"""Interface of the fair queue: the waiting entries and their order.

The owner asks for the `head`, calls `take` when there is room, charges the real cost while the request runs, and calls
`done` when it ends. The policies differ in the order and in the use of the charges.
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
    """Queue of waiting entries, with the service that each flow got.

    The class is pure: times are arguments, in seconds of one monotonic clock. It is not thread-safe.
    """

    def add(self, entry: QueueEntry[T], now_s: float) -> None:
        """Adds an entry to the queue. An entry is in at most one queue, and only once."""
        ...

    def remove(self, entry: QueueEntry[T]) -> None:
        """Removes a cancelled entry that has not run. The entry must be waiting."""
        ...

    def head(self, now_s: float) -> QueueEntry[T] | None:
        """Returns the next entry; None if the queue is empty.

        The entry stays in the queue: a repeated call returns the same entry.
        """
        ...

    def take(self, entry: QueueEntry[T], now_s: float) -> None:
        """Takes an entry out of the queue to run.

        This is normally the head; if the head does not fit, any entry may be taken.
        """
        ...

    def pass_through(self, entry: QueueEntry[T], now_s: float) -> None:
        """Adds an entry and takes it at once. Call it only if the queue is empty; it equals `add` and `take`."""
        ...

    def charge(self, flow: Flow, service: float) -> None:
        """Books service that the flow really got; a negative value is a refund.

        Early charges make the order fairer: charge the certain part (the prompt) at `take`, and the rest as it is
        computed.
        """
        ...

    def stream(self, flow: Flow, service: float) -> None:
        """Raises the charge per tick of a running flow; a negative value lowers it.

        A stream equals one charge per tick, and it is cheaper if many flows get the same service in every step. The
        owner must cancel the streams of a flow before its last entry is done or requeued.
        """
        ...

    def tick(self) -> None:
        """Charges every stream once."""
        ...

    def done(self, flow: Flow) -> None:
        """Ends a taken entry, whatever its outcome; called once for each `take` without a `requeue`."""
        ...

    def requeue(self, entry: QueueEntry[T], now_s: float) -> None:
        """Puts a taken entry back into the queue with its age; its charges stay."""
        ...

    def ahead(self, entry: QueueEntry[T], now_s: float) -> WorkAhead:
        """Estimates the work ahead of an entry that waits here or might join."""
        ...

    def over_service(self, flow: Flow) -> float:
        """Returns the flow's lead in service per weight over the least served active flow of its class.

        The result is at least 0. The least served flow may have only one slow running request, which gets little
        service because it needs little: use the result to choose which running flow yields to another.
        """
        ...

    def lead(self, flow: Flow) -> float:
        """Returns the flow's lead over the least served waiting flow; 0 if the queue is empty."""
        ...

    def waiting_in(self, priority: PriorityClass) -> int:
        """Returns the number of waiting entries that joined with this class, whatever their age."""
        ...

    def __len__(self) -> int:
        """Number of waiting entries."""
        ...

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        """Iterates over all waiting entries in no particular order."""
        ...


def make_queue(config: QueueOrderConfig) -> FairQueue[Any]:
    """Makes an empty queue with the configured policy."""
    match config.policy:
        case "fifo":
            return FcfsQueue(classes=False, ageing_s=None)
        case "priority":
            return FcfsQueue(classes=True, ageing_s=config.ageing_s)
        case "deficit":
            return DrrQueue(config.quantum)
        case "fair":
            return VtcQueue(config)
