"""Serving what shares a prefix one after the other, as far as fairness can wait.

Deficit longest prefix match (Cao et al., 2025) lets each client run a quantum into debt, so that requests whose prefix
is in the cache may go before others. Here, without knowing any cache: the line stays with the locality that it took
last, while

- nobody who goes before the others that way leads any of its siblings by more than the quantum (so the bound of the
  counters widens by the quantum, and by no more), and
- what has been taken in the row is worth less than the quantum (so that whoever is passed over waits no longer than
  that, also inside one key).
"""

from collections.abc import Hashable
from itertools import islice
from typing import Any

from maitred.fairness.entry import QueueEntry
from maitred.fairness.tree import Node

_CANDIDATES = 16
"""Entries of the locality that are looked at, oldest first."""


class Locality:
    """Which waiting entry may go before the one whose turn it is.

    Args:
        quantum: Service per weight.
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
        """An entry waits no more."""
        if entry.locality is not None:
            alike = self._waiting[entry.locality]
            del alike[entry]
            if not alike:
                del self._waiting[entry.locality]

    def on_take(self, entry: QueueEntry[Any]) -> None:
        """An entry begins to run."""
        if entry.locality != self._current:
            self._current = entry.locality
            self._spent = 0.0
        self._spent += entry.service

    def prefer(self, first: QueueEntry[Any]) -> QueueEntry[Any]:
        """The entry to take in place of the first one, or that itself."""
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
