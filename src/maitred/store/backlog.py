"""What is journaled and not yet in the database: in memory as far as there is room, in the journal alone beyond that.

The queue is always the oldest part of the backlog, so once something is left out of it everything newer is, until the
queue has been refilled from the journal up to its end.
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

from maitred.core.usage import UsageEvent
from maitred.store.journal import Journal, JournalPosition

_REFILL = 1_000
"""Events read from the journal at one time: a few milliseconds of the event loop."""


class Backlog:
    """The journal's events in their order, each until it is `written`.

    Args:
        journal: Owned; closed with it.
        most_events: Kept in memory, about 1 KiB each.
    """

    def __init__(self, journal: Journal, *, most_events: int = 10_000) -> None:
        self._journal = journal
        self._most_events = most_events
        self._queue: deque[tuple[UsageEvent, JournalPosition]] = deque()
        self._beyond = 0
        self._written = journal.start
        self._charges_beyond: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._queue) + self._beyond

    def add(self, event: UsageEvent) -> int:
        """Journals an event and takes it up.

        Returns:
            How many there are then.

        Raises:
            StoreUnavailable: The journal cannot take it; nothing has changed.
        """
        position = self._journal.record(event)
        count = len(self._queue)
        if self._beyond or count >= self._most_events:
            self._beyond += 1
            self._charges_beyond.update(event.charges)
            return count + self._beyond
        self._queue.append((event, position))
        return count + 1

    def oldest(self, most: int) -> list[UsageEvent]:
        """Up to `most` events that come next; they stay.

        Raises:
            StoreUnavailable: They are in the journal alone, and it cannot be read.
        """
        if not self._queue and self._beyond:
            found = self._journal.read(self._written, _REFILL)
            self._queue.extend(found)
            for event, _ in found:
                self._charges_beyond.subtract(event.charges)
            self._charges_beyond = +self._charges_beyond
            # Fewer than there must be: the disk has lost them. Their charges stay here, so that budgets still count
            # them while this process lives.
            self._beyond = self._beyond - len(found) if len(found) == _REFILL else 0
        return [event for event, _ in islice(self._queue, most)]

    def written(self, count: int) -> None:
        """The `count` oldest events are in the database."""
        for _ in range(count):
            _, self._written = self._queue.popleft()
        self._journal.release(self._written)

    def charged(self, counters: Sequence[str]) -> dict[str, int]:
        """What these events charge to some counters."""
        charged = {counter: self._charges_beyond[counter] for counter in counters}
        for event, _ in self._queue:
            for counter in event.charges.keys() & charged.keys():
                charged[counter] += event.charges[counter]
        return charged

    @property
    def oldest_s(self) -> float | None:
        """Wall time of the oldest event; None when there is none."""
        return self._queue[0][0].time_s if self._queue else None

    def close(self) -> None:
        """Closes the journal; what is not written stays in it."""
        self._journal.close(self._written)
