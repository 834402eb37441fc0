"""Prefix locality: requests with a shared prefix run in a row, within a bound on fairness.

Deficit longest prefix match (Cao et al., 2025) lets each client run a quantum into debt, so that requests whose prefix
is in the cache may go before others. This module works without knowledge of the cache: the queue stays with the
locality that it took last, while

- a node that goes first for this reason leads each sibling by at most the quantum (so the bound of the counters grows
  by exactly the quantum), and
- the service taken in this row is less than the quantum (so a skipped entry waits at most that long, also inside one
  key).
"""

from collections.abc import Hashable
from itertools import islice
from typing import Any

from maitred.fairness.entry import QueueEntry
from maitred.fairness.tree import Node

_CANDIDATES = 16
"""Maximum number of entries of the locality that are examined, oldest first."""


class Locality:
    """Chooses a waiting entry with the current locality that may go before the head.

    Args:
        quantum: Allowed lead, in service per weight.
    """

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._waiting: dict[Hashable, dict[QueueEntry[Any], None]] = {}
        self._current: Hashable | None = None
        self._spent = 0.0
        """Service taken in a row with the current locality."""

    def join(self, entry: QueueEntry[Any]) -> None:
        """Notes that an entry waits."""
        if entry.locality is not None:
            self._waiting.setdefault(entry.locality, {})[entry] = None

    def leave(self, entry: QueueEntry[Any]) -> None:
        """Notes that an entry stops waiting."""
        if entry.locality is not None:
            alike = self._waiting[entry.locality]
            del alike[entry]
            if not alike:
                del self._waiting[entry.locality]

    def on_take(self, entry: QueueEntry[Any]) -> None:
        """Notes that an entry begins to run."""
        if entry.locality != self._current:
            self._current = entry.locality
            self._spent = 0.0
        self._spent += entry.service

    def prefer(self, first: QueueEntry[Any]) -> QueueEntry[Any]:
        """Returns the entry to take instead of the first one, or the first one itself."""
        if first.locality == self._current or self._spent >= self._quantum:
            return first
        alike = self._waiting.get(self._current, ())
        return next((entry for entry in islice(alike, _CANDIDATES) if self._may_pass(entry, first)), first)

    def _may_pass(self, entry: QueueEntry[Any], first: QueueEntry[Any]) -> bool:
        if entry.rank != first.rank:
            return False
        leaf: Node = entry.position
        for node in leaf.path[:-1]:
            least = node.among.queue.least()
            if least is not None and node.counter > least.counter + self._quantum:
                return False
        return True
