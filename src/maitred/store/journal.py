"""The usage journal: what must not be lost when this process dies, written before an answer's last event goes out.

Every process has a folder of its own in the journal's folder and holds a lock on it (`flock`) while it lives; in it are
append-only segments (see `maitred.store.segment`)::

    journal/
      4711-9c41d2e07ab3/       locked: its process lives
        00000001.segment
        00000002.segment       the one that is written
      4242-07b1c65fe913/       not locked: an orphan, for whoever comes first to adopt (see
      `maitred.store.orphan_journal`) damaged/                 segments that could not be read to their end, kept for
      people

An entry is one `write`: once it has returned, the kernel has the bytes and no death of the process can lose them. The
death of the *machine* can, up to what its kernel had not yet written out (some 30 s); with `durable` each entry is
synced, at the price of a disk's latency, which stops the event loop meanwhile.

A full disk is not passed over: `begin` and `record` raise, half an entry is taken back, and whoever calls must not
complete the answer as if it were billed. Once there is room, the next entry is written as if nothing had been.
"""

import errno
import fcntl
import logging
import os
import secrets
from collections import Counter
from pathlib import Path

import msgspec

from maitred.core.errors import StoreUnavailable
from maitred.core.usage import UsageEvent
from maitred.store.segment import SUFFIX, BeginRecord, Segment, UsageRecord, frame, frame_of_nothing

log = logging.getLogger(__name__)

DAMAGED = "damaged"
"""Folder, beside those of the processes, for what could not be read."""


_PROBE = frame_of_nothing(4096)
"""As much as a long entry; should this process die before it is taken back, it looks like one that is incomplete."""


class JournalPosition(msgspec.Struct, frozen=True, order=True):
    """A place between two entries of one journal."""

    segment: int
    offset: int


class Journal:
    """The journal of this process. Not for several threads.

    Args:
        folder: Shared by all processes on this machine that write to the same database. Made when missing.
        durable: Sync every entry to the disk.
        segment_bytes: A segment that has reached this is followed by a new one.

    Raises:
        StoreUnavailable: The folder cannot be written.
    """

    def __init__(self, folder: Path, *, durable: bool = False, segment_bytes: int = 8 << 20) -> None:
        self.folder = folder
        self._durable = durable
        self._segment_bytes = segment_bytes
        self._begun_in: dict[str, int] = {}  # id of an event -> segment that says it has begun
        self._held: Counter[int] = Counter()  # segment -> how many of those
        self._segments: list[int] = []
        self._file = -1
        self._offset = 0
        self._healthy = True
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._own, self._lock = _locked_folder(folder)
            self._next_segment()
        except OSError as error:
            raise self._unavailable(error) from error

    def begin(self, event: UsageEvent) -> None:
        """Notes that work has begun; see `maitred.core.usage.Ledger`.

        Raises:
            StoreUnavailable: It could not be written, and nothing of it was.
        """
        self._append(frame(BeginRecord(event)))
        segment = self._begun_in[event.id] = self._segments[-1]
        self._held[segment] += 1

    def record(self, event: UsageEvent) -> JournalPosition:
        """Notes what was used. On return, the death of this process cannot lose it.

        Returns:
            Where the entry ends.

        Raises:
            StoreUnavailable: It could not be written, and nothing of it was.
        """
        self._append(frame(UsageRecord(event)))
        segment = self._begun_in.pop(event.id, 0)
        if segment:
            self._held[segment] -= 1
        return JournalPosition(self._segments[-1], self._offset)

    @property
    def healthy(self) -> bool:
        """Whether the last entry could be written."""
        return self._healthy

    def check(self) -> None:
        """Finds out whether an entry could be written now; costs nothing as long as they are.

        Raises:
            StoreUnavailable: None could.
        """
        if not self._healthy:
            self._append(_PROBE)
            self._offset -= len(_PROBE)
            self._take_back()

    @property
    def start(self) -> JournalPosition:
        """Before the oldest entry that is kept."""
        return JournalPosition(self._segments[0], 0)

    def read(self, after: JournalPosition, most: int) -> list[tuple[UsageEvent, JournalPosition]]:
        """The next recorded events, each with where it ends; fewer than `most` only at the end of the journal."""
        found: list[tuple[UsageEvent, JournalPosition]] = []
        for number in self._segments:
            if number < after.segment:
                continue
            segment = Segment(self._path(number), after.offset if number == after.segment else 0)
            for entry, end in segment:
                if isinstance(entry, UsageRecord):
                    found.append((entry.event, JournalPosition(number, end)))
                    if len(found) == most:
                        return found
            if segment.damage is not None:
                log.error("The usage journal is damaged: %s", segment.damage)
        return found

    def release(self, upto: JournalPosition) -> None:
        """Deletes the segments that are of no more use: everything up to `upto` is in the database.

        A segment stays while a request that began in it runs, and the last one stays to be written.
        """
        for number in [number for number in self._segments if number < upto.segment and not self._held[number]]:
            self._path(number).unlink(missing_ok=True)
            self._segments.remove(number)
            del self._held[number]

    def close(self, written: JournalPosition | None = None) -> None:
        """Gives up the lock.

        Args:
            written: How far the database has everything. Whatever lies beyond, or runs still, is left for another
                process to adopt; if there is nothing, nothing is left.
        """
        if self._file < 0:
            return
        if not self._begun_in and written == JournalPosition(self._segments[-1], self._offset):
            for number in self._segments:
                self._path(number).unlink(missing_ok=True)
            self._own.rmdir()
        os.close(self._file)
        os.close(self._lock)
        self._file = self._lock = -1

    def _append(self, data: bytes) -> None:
        try:
            if self._file < 0:
                raise OSError(errno.EBADF, "it is closed")
            if self._offset >= self._segment_bytes:
                self._next_segment()
            written = os.write(self._file, data)
            if written == len(data):
                if self._durable:
                    os.fdatasync(self._file)
                self._offset += written
                self._healthy = True
                return
            cause = None  # half an entry: the disk is full
        except OSError as error:
            cause = error
        self._healthy = False
        self._take_back()
        raise self._unavailable(cause) from cause

    def _take_back(self) -> None:
        """Removes half an entry, so that entries after it can be read."""
        try:
            if self._offset < self._segment_bytes:  # else no entry was begun, or its remains are to stay
                os.ftruncate(self._file, self._offset)
        except OSError:
            self._offset = self._segment_bytes  # leave this segment to its damage, go on in another

    def _next_segment(self) -> None:
        number = self._segments[-1] + 1 if self._segments else 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        file = os.open(self._path(number), flags, 0o600)
        if self._durable:
            os.fsync(self._lock)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._offset = file, 0
        self._segments.append(number)

    def _path(self, number: int) -> Path:
        return self._own / f"{number:08d}{SUFFIX}"

    def _unavailable(self, cause: OSError | None) -> StoreUnavailable:
        reason = "no space is left" if cause is None else cause.strerror
        return StoreUnavailable(
            f"The usage journal in {self.folder} cannot be written ({reason}), and no answer goes out unbilled. Make "
            "room there, or let maitred write there."
        )


def lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of a process's folder; None while its process lives, or when it is gone."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # it is held, or was removed in between
        pass
    os.close(descriptor)
    return None


def _locked_folder(folder: Path) -> tuple[Path, int]:
    """A new folder with its lock. Another process may adopt the empty folder before it is locked: then take another."""
    while True:
        own = folder / f"{os.getpid()}-{secrets.token_hex(6)}"
        own.mkdir(mode=0o700)
        descriptor = lock(own)
        if descriptor is not None:
            return own, descriptor
