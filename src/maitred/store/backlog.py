"""Backlog of usage events that are journaled and not yet in the database.

A bounded number of events is held in memory; events beyond that are in the journal alone. The queue in memory is always
the oldest part of the backlog: once one event is left out of it, every newer event is left out too, until the queue has
been refilled from the journal up to its end.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

from maitred.core.usage import UsageEvent
from maitred.store.journal import Journal, JournalPosition

_REFILL_EVENTS = 1_000
"""Events read from the journal in one go, which takes a few milliseconds of the event loop."""


class Backlog:
    """Events of the journal in their order, each until it is written to the database.

    Args:
        journal: The journal; the backlog owns it and closes it.
        max_events: Most events that are held in memory, about 1 KiB each.
    """

    def __init__(self, journal: Journal, *, max_events: int = 10_000) -> None:
        self._journal = journal
        self._max_events = max_events
        self._queue: deque[tuple[UsageEvent, JournalPosition]] = deque()
        self._journal_only = 0
        self._written_up_to = journal.first_position
        self._journal_only_charges: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._queue) + self._journal_only

    def add(self, event: UsageEvent) -> int:
        """Journals an event and adds it to the backlog.

        Returns:
            Events in the backlog after that.

        Raises:
            StoreUnavailable: The journal cannot take the event; nothing has changed.
        """
        position = self._journal.record(event)
        count = len(self._queue)
        if self._journal_only or count >= self._max_events:
            self._journal_only += 1
            self._journal_only_charges.update(event.charges)
            return count + self._journal_only
        self._queue.append((event, position))
        return count + 1

    def oldest_events(self, limit: int) -> list[UsageEvent]:
        """Returns the oldest events, up to `limit` of them, and leaves them in the backlog.

        Raises:
            StoreUnavailable: The events are in the journal alone, and it cannot be read.
        """
        if not self._queue and self._journal_only:
            found = self._journal.read(self._written_up_to, _REFILL_EVENTS)
            self._queue.extend(found)
            for event, _ in found:
                self._journal_only_charges.subtract(event.charges)
            self._journal_only_charges = +self._journal_only_charges
            # Fewer events than expected: the disk has lost some. Their charges stay here, so that budgets still count
            # them while this process lives.
            self._journal_only = self._journal_only - len(found) if len(found) == _REFILL_EVENTS else 0
        return [event for event, _ in islice(self._queue, limit)]

    def mark_written(self, count: int) -> None:
        """Removes the `count` oldest events, which are in the database now."""
        for _ in range(count):
            _, self._written_up_to = self._queue.popleft()
        self._journal.release(self._written_up_to)

    def pending_charges(self, counters: Sequence[str]) -> dict[str, int]:
        """Returns what the events of the backlog charge to the given counters."""
        charges = {counter: self._journal_only_charges[counter] for counter in counters}
        for event, _ in self._queue:
            for counter in event.charges.keys() & charges.keys():
                charges[counter] += event.charges[counter]
        return charges

    @property
    def oldest_s(self) -> float | None:
        """Wall time of the oldest event; None: the backlog is empty."""
        return self._queue[0][0].time_s if self._queue else None

    def close(self) -> None:
        """Closes the journal; events that are not written stay in it."""
        self._journal.close(self._written_up_to)
