"""Journals whose processes are dead: read to the last entry that holds, then removed.

Whoever gets the lock of an orphan reads it; whoever does not leaves it alone. The lock saves work and is not needed for
the truth: an event that two adopters write, or one adopter twice because it died in between, is in the ledger once.
"""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from maitred.core.answer import Outcome
from maitred.core.usage import UsageEvent
from maitred.store.journal import DAMAGED, lock
from maitred.store.segment import SUFFIX, BeginRecord, Segment, SegmentDamage, UsageRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SurvivingWork:
    """What has outlived the process that had begun it.

    Attributes:
        leases: Ids of events whose requests go on, or have ended since: they are somebody else's to record.
        unanswered: Ids of requests that nobody has told what was granted to them: whatever was begun for them has used
            nothing, and they have asked again or given up.
    """

    leases: Collection[str] = ()
    unanswered: Collection[str] = ()


NOTHING = SurvivingWork()


class OrphanJournal:
    """One orphaned journal, whose lock is held.

    Args:
        folder: Of the dead process.
        outlived: What has outlived it.
    """

    def __init__(self, folder: Path, outlived: SurvivingWork) -> None:
        self._folder = folder
        self._outlived = outlived
        self._segments = sorted(folder.glob(f"*{SUFFIX}"))
        self.damages: list[SegmentDamage] = []
        """Complete once `batches` has ended. Torn ends, as every death may leave one, are not among them."""
        self.interrupted = 0
        """Requests that had begun, were never recorded, and have not outlived it."""
        self.carried: list[UsageEvent] = []
        """What goes on."""
        self.unanswered: list[UsageEvent] = []
        """What was begun for nobody; it is not in the ledger."""

    def batches(self, most: int) -> Iterator[list[UsageEvent]]:
        """Every event that was recorded, then one for each request that was interrupted; at most `most` at a time.

        Raises:
            StoreUnavailable: A file cannot be read at all.
        """
        batch: list[UsageEvent] = []
        for event in self._events():
            batch.append(event)
            if len(batch) == most:
                yield batch
                batch = []
        if batch:
            yield batch

    def remove(self) -> None:
        """Deletes the journal, now that everything in it is in the database; damaged segments are put aside."""
        damaged = {damage.path for damage in self.damages}
        for path in self._segments:
            if path in damaged:
                aside = self._folder.parent / DAMAGED
                aside.mkdir(exist_ok=True, mode=0o700)
                path.rename(aside / f"{self._folder.name}-{path.name}")
            else:
                path.unlink(missing_ok=True)
        self._folder.rmdir()

    def _events(self) -> Iterator[UsageEvent]:
        self.damages, self.interrupted, self.carried, self.unanswered = [], 0, [], []
        begun: dict[str, BeginRecord] = {}
        last_sign_s = 0.0  # of life
        for path in self._segments:
            segment = Segment(path)
            for entry, _ in segment:
                if isinstance(entry, UsageRecord):
                    begun.pop(entry.event.id, None)
                    last_sign_s = max(last_sign_s, entry.event.time_s)
                    yield entry.event
                else:
                    begun[entry.event.id] = entry
                    last_sign_s = max(last_sign_s, entry.event.time_s)
            if segment.damage is not None and segment.damage.torn:
                log.warning("A gateway died while it wrote to its usage journal. %s", segment.damage)
            elif segment.damage is not None:
                self.damages.append(segment.damage)
                log.error("A usage journal is damaged; it is kept in the folder %r. %s", DAMAGED, segment.damage)
        for entry in begun.values():
            if entry.event.id in self._outlived.leases:
                self.carried.append(entry.event)
            elif entry.event.request_id in self._outlived.unanswered:
                self.unanswered.append(entry.event)
            else:
                self.interrupted += 1
                yield _interrupted(entry, last_sign_s)


def orphans(folder: Path) -> list[Path]:
    """Where the journals of all processes are; most of them belong to living ones."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and path.name != DAMAGED)
    except FileNotFoundError:
        return []


@contextmanager
def open_orphan(folder: Path, outlived: SurvivingWork = NOTHING) -> Iterator[OrphanJournal | None]:
    """Holds the lock of a dead process's journal; None when its process lives or somebody else adopts it."""
    descriptor = lock(folder)
    if descriptor is None:
        yield None
        return
    try:
        yield OrphanJournal(folder, outlived)
    finally:
        os.close(descriptor)


def _interrupted(begun: BeginRecord, last_sign_s: float) -> UsageEvent:
    """What a request leaves that nobody could end. Nothing is known of what it used, so nothing is claimed.

    What it had reserved of rates stays taken: those protect what can be processed, and it may have used all of it.
    """
    return replace(
        begun.event,
        time_s=last_sign_s,
        duration_s=last_sign_s - begun.event.time_s,
        prompt_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        cost_nusd=0,
        ttft_s=None,
        outcome=Outcome.FAILED,
        charges={},
    )
