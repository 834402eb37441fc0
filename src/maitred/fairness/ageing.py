"""Waiting makes urgent: after so long in a class, a request competes in the next one."""

from typing import Any

from maitred.fairness.entry import QueueEntry
from maitred.fairness.heap import Heap


class Ageing:
    """Knows which waiting entry is the next to move up.

    An entry moves up one class each time that its age, counted from its arrival, passes a multiple of `ageing_s`; one
    that ran and was put back goes on from there.

    Args:
        ageing_s: Time in each class; None: nobody ever moves.
    """

    def __init__(self, ageing_s: float | None) -> None:
        self._ageing_s = ageing_s
        self._due: Heap[QueueEntry[Any]] = Heap()

    def watch(self, entry: QueueEntry[Any]) -> None:
        """An entry waits."""
        if self._ageing_s is not None and entry.rank:
            classes = entry.flow.priority.rank - entry.rank + 1
            self._due.push(entry.arrived_s + classes * self._ageing_s, entry.number, entry)

    def forget(self, entry: QueueEntry[Any]) -> None:
        """An entry waits no more."""
        self._due.discard(entry)

    def ripe(self, now_s: float) -> QueueEntry[Any] | None:
        """An entry whose time in its class is up; it is watched no more. None when there is none."""
        entry = self._due.least()
        if entry is None or self._due.live[entry][0] > now_s:
            return None
        self._due.discard(entry)
        return entry
