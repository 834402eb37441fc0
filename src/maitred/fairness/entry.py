"""Entries of a queue, and the work ahead of them."""

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from msgspec import Struct

from maitred.core.flow import Flow

T = TypeVar("T")


class QueueEntry(Generic[T]):
    """One request in a queue. The owner creates the entry and passes the same object to every method of the queue.

    Args:
        value: Object of the owner, for the time when the entry is taken.
        flow: Owner and priority class of the request.
        arrived_s: Time at which the entry began to wait. A requeued entry keeps this time.
        service: Predicted service of the whole request (`ServiceWeights.service`).
        deadline_s: Time by which the request must be served; None: no deadline.
        locality: Equal for requests that share work, such as a prefix of their prompts; None: shares nothing.
    """

    __slots__ = ("arrived_s", "deadline_s", "flow", "locality", "number", "position", "rank", "service", "value")

    def __init__(
        self,
        value: T,
        flow: Flow,
        *,
        arrived_s: float,
        service: float,
        deadline_s: float | None = None,
        locality: Hashable | None = None,
    ) -> None:
        self.value = value
        self.flow = flow
        self.arrived_s = arrived_s
        self.service = service
        self.deadline_s = deadline_s
        self.locality = locality
        self.number = 0
        """Number set by the queue: grows with each join and breaks ties."""
        self.rank = flow.priority.rank
        """Rank of the class in which the entry competes, set by the queue; ageing changes it."""
        self.position: Any = None
        """Place of the entry in the queue's data structures, set by the queue."""

    def __repr__(self) -> str:
        return f"Entry({self.value!r}, arrived_s={self.arrived_s}, service={self.service})"


class WorkAhead(Struct, frozen=True):
    """Work that will be taken before an entry, if nobody else joins and nobody leaves."""

    entries: int
    service: float
    """Predicted service of all these entries together."""
