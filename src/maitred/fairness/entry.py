"""Entries of a queue, and the work ahead of them."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec import Struct

from maitred.core.flow import Flow

T = TypeVar("T")


@dataclass(eq=False, repr=False, slots=True)
class QueueEntry(Generic[T]):
    """One request in a queue. The owner creates the entry and passes the same object to every method of the queue.

    Attributes:
        value: Object of the owner, for the time when the entry is taken.
        flow: Owner and priority class of the request.
        arrived_s: Time at which the entry began to wait. A requeued entry keeps this time.
        service: Predicted service of the whole request (`ServiceWeights.service`).
        deadline_s: Time by which the request must be served; None: no deadline.
        turn: Place of the entry among those of its request, from 0.
        locality: Equal for requests that share work, such as a prefix of their prompts; None: shares nothing.
        number: Set by the queue: grows with each join and breaks ties.
        rank: Rank of the class in which the entry competes, set by the queue; ageing changes it.
        position: Place of the entry in the queue's data structures, set by the queue.
    """

    value: T
    flow: Flow
    arrived_s: float = field(kw_only=True)
    service: float = field(kw_only=True)
    deadline_s: float | None = field(default=None, kw_only=True)
    locality: Hashable | None = field(default=None, kw_only=True)
    turn: int = field(default=0, kw_only=True)
    number: int = field(default=0, init=False)
    rank: int = field(default=0, init=False)
    position: Any = field(default=None, init=False)

    def __repr__(self) -> str:
        return f"Entry({self.value!r}, arrived_s={self.arrived_s}, service={self.service})"


class WorkAhead(Struct, frozen=True):
    """Work that will be taken before an entry, if nobody else joins and nobody leaves."""

    entries: int
    service: float
    """Predicted service of all these entries together."""
