"""Entries of a queue, and the work ahead of them."""

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from msgspec import Struct

from maitred.core.flow import Flow

T = TypeVar("T")


class QueueEntry(Generic[T]):
    """A request in a line. Its owner makes it, and hands the same object to every method of the line.

    Args:
        value: What the owner gets back when it is this entry's turn.
        flow: Whose request it is, and how urgent.
        arrived_s: When it began to wait. An entry that waits again keeps it.
        service: What the whole request will cost, predicted (`ServiceWeights.service`).
        deadline_s: When it must have been served; None: no particular time.
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
        """The line's own: rises with joining, settles ties."""
        self.rank = flow.priority.rank
        """The line's own: of the class in which it competes, which is another than its flow's when it has aged."""
        self.position: Any = None
        """The line's own: where it keeps, or kept, the entry."""

    def __repr__(self) -> str:
        return f"Entry({self.value!r}, arrived_s={self.arrived_s}, service={self.service})"


class WorkAhead(Struct, frozen=True):
    """Work that will be taken before an entry, if nobody else joins and nobody leaves."""

    entries: int
    service: float
    """Predicted, of all of them together."""
