"""Orphaned journals of dead processes: each is read up to its last valid entry and then removed.

The process that gets the lock of an orphaned journal reads it; other processes skip it. The lock only saves work;
correctness does not depend on it: an event that two adopters write, or that one adopter writes twice after a crash, is
in the ledger once.
"""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from maitred.core.context import Outcome
from maitred.core.usage import UsageEvent
from maitred.store.journal import DAMAGED_FOLDER, lock_folder
from maitred.store.segment import SUFFIX, BeginRecord, ReleaseRecord, Segment, SegmentDamage, UsageRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SurvivingWork:
    """Requests that are still running after the process that began them has died.

    Attributes:
        leases: Ids of events whose requests are still running or have ended since; another process records these
            events.
        unanswered: Ids of requests that never received the reply with their grant: they have used nothing, and their
            senders have asked again or given up.
    """

    leases: Collection[str] = ()
    unanswered: Collection[str] = ()


NOTHING_SURVIVED = SurvivingWork()


class OrphanJournal:
    """Orphaned journal; this process holds its lock.

    Args:
        folder: Folder of the dead process.
        surviving_work: Requests that have outlived that process.
    """

    def __init__(self, folder: Path, surviving_work: SurvivingWork) -> None:
        self._folder = folder
        self._surviving_work = surviving_work
        self._segments = sorted(folder.glob(f"*{SUFFIX}"))
        self.damages: list[SegmentDamage] = []
        """Damage that was found; the list is complete when `batches` has ended.

        The list excludes incomplete last entries, because every process that dies may leave one.
        """
        self.interrupted = 0
        """Number of requests that had begun, were never recorded, and ended with the process."""
        self.unstored: list[UsageEvent] = []
        """Events that were recorded for a response; the list is complete when `batches` has ended.

        If the database has such an event, it has the response. If not, the request was interrupted.
        """
        self.surviving: list[UsageEvent] = []
        """Number of events whose requests are still running in another process."""
        self.unanswered: list[UsageEvent] = []
        """Number of events that were begun for requests without a reply; the ledger omits them."""

    def batches(self, limit: int) -> Iterator[list[UsageEvent]]:
        """Yields all recorded events, then one event for each interrupted request, `limit` per list.

        Events that were recorded for a response are left out; see `unstored`.

        Raises:
            StoreUnavailable: A file cannot be read at all.
        """
        batch: list[UsageEvent] = []
        for event in self._events():
            batch.append(event)
            if len(batch) == limit:
                yield batch
                batch = []
        if batch:
            yield batch

    def remove(self) -> None:
        """Deletes the journal; the database must have all of its events.

        Damaged segments are moved to another folder.
        """
        damaged = {damage.path for damage in self.damages}
        for path in self._segments:
            if path in damaged:
                damaged_folder = self._folder.parent / DAMAGED_FOLDER
                damaged_folder.mkdir(exist_ok=True, mode=0o700)
                path.rename(damaged_folder / f"{self._folder.name}-{path.name}")
            else:
                path.unlink(missing_ok=True)
        self._folder.rmdir()

    def _events(self) -> Iterator[UsageEvent]:
        self.damages, self.interrupted, self.surviving, self.unanswered, self.unstored = [], 0, [], [], []
        unfinished: dict[str, BeginRecord] = {}
        unstored: dict[str, UsageEvent] = {}
        last_event_s = 0.0  # of the latest entry: the process was alive at this time
        for path in self._segments:
            segment = Segment(path)
            for entry, _ in segment:
                if isinstance(entry, ReleaseRecord):
                    if entry.id in unstored:
                        yield unstored.pop(entry.id)
                elif isinstance(entry, UsageRecord):
                    unfinished.pop(entry.event.id, None)
                    last_event_s = max(last_event_s, entry.event.time_s)
                    if entry.response:
                        unstored[entry.event.id] = entry.event
                    else:
                        yield entry.event
                else:
                    unfinished[entry.event.id] = entry
                    last_event_s = max(last_event_s, entry.event.time_s)
            if segment.damage is not None and segment.damage.torn:
                log.warning("A gateway died while it wrote to its usage journal. %s", segment.damage)
            elif segment.damage is not None:
                self.damages.append(segment.damage)
                log.error("A usage journal is damaged; it is kept in the folder %r. %s", DAMAGED_FOLDER, segment.damage)
        for entry in unfinished.values():
            if entry.event.id in self._surviving_work.leases:
                self.surviving.append(entry.event)
            elif entry.event.request_id in self._surviving_work.unanswered:
                self.unanswered.append(entry.event)
            else:
                self.interrupted += 1
                ended = replace(entry.event, time_s=last_event_s, duration_s=last_event_s - entry.event.time_s)
                yield interrupted_event(ended)
        self.unstored = list(unstored.values())


def journal_folders(folder: Path) -> list[Path]:
    """Returns the folders of all journals; most of these belong to running processes."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name != DAMAGED_FOLDER)
    except FileNotFoundError:
        return []


@contextmanager
def open_orphan(folder: Path, surviving_work: SurvivingWork = NOTHING_SURVIVED) -> Iterator[OrphanJournal | None]:
    """Locks and opens the journal of a dead process.

    The result is None if the process is alive or another process adopts the journal.
    """
    descriptor = lock_folder(folder)
    if descriptor is None:
        yield None
        return
    try:
        yield OrphanJournal(folder, surviving_work)
    finally:
        os.close(descriptor)


def interrupted_event(event: UsageEvent) -> UsageEvent:
    """Makes the event of a request that was interrupted, from what is known of it.

    The usage of such a request is unknown, so it is charged no tokens.

    The amounts that the request had reserved of rates stay taken, because rates protect capacity and the request may
    have used all of it.
    """
    return replace(
        event,
        prompt_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        cache_write_tokens=0,
        saved_tokens=0,
        cost_nusd=0,
        ttft_s=None,
        outcome=Outcome.FAILED,
        charges={},
    )
