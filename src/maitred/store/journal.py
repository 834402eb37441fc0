"""Usage journal: it keeps usage events beyond a crash, and is written before a response's last event.

Each process has its own folder in the journal folder and holds a lock on it (`flock`) while it lives; the folder has
append-only segments (see `maitred.store.segment`)::

    journal/
      4711-9c41d2e07ab3/       locked: its process lives
        00000001.segment
        00000002.segment       the one that is written
      4242-07b1c65fe913/       not locked: an orphan, adopted by the first process to lock it
      damaged/                 segments that could not be read to their end, kept for people

Each entry is one `write` call: after it returns, the kernel has the bytes, and the death of the process cannot lose
them. A crash of the *machine* can lose the entries that its kernel had not yet written to disk (about 30 s); with
`durable` each entry is synced, which costs the latency of the disk and blocks the event loop meanwhile.

A full disk is an error: `begin` and `record` raise, the partial entry is removed, and the caller must not complete the
response as if it were billed. When the disk has space again, the next entry is written as usual.
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
from maitred.store.segment import (
    SUFFIX,
    BeginRecord,
    ReleaseRecord,
    Segment,
    UsageRecord,
    encode_frame,
    torn_frame,
)

log = logging.getLogger(__name__)

DAMAGED_FOLDER = "damaged"
"""Folder for unreadable segments, next to the folders of the processes."""


_PROBE_ENTRY = torn_frame(4096)
"""Test entry of the size of a long entry.

If this process dies before it removes the test entry, readers treat it as an incomplete entry.
"""


class JournalPosition(msgspec.Struct, frozen=True, order=True):
    """Position between two entries of one journal."""

    segment: int
    offset: int


class Journal:
    """Journal of this process; it belongs to one thread.

    Args:
        folder: Folder that is shared by all processes on this machine that write to the same database; it is created if
            it does not exist.
        durable: Whether every entry is synced to the disk.
        segment_bytes: Size at which a segment is closed and a new one is opened.

    Raises:
        StoreUnavailable: The folder cannot be written.
    """

    def __init__(self, folder: Path, *, durable: bool = False, segment_bytes: int = 8 << 20) -> None:
        self.folder = folder
        self._durable = durable
        self._segment_bytes = segment_bytes
        self._begin_segments: dict[str, int] = {}  # id of an unfinished event -> segment with its begin record
        self._unfinished_counts: Counter[int] = Counter()  # segment -> number of unfinished events
        self._segments: list[int] = []
        self._segment_fd = -1
        self._offset = 0
        self._healthy = True
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._own_folder, self._lock_fd = _create_locked_folder(folder)
            self._open_next_segment()
        except OSError as error:
            raise self._unavailable(error) from error

    @property
    def name(self) -> str:
        """Name of this process's own folder, by which the process that adopts it knows whose journal it is."""
        return self._own_folder.name

    def begin(self, event: UsageEvent) -> None:
        """Records that a request has begun to use tokens. Implements `maitred.core.usage.Ledger.begin`.

        Raises:
            StoreUnavailable: The entry could not be written; the journal is unchanged.
        """
        self._append(encode_frame(BeginRecord(event)))
        segment = self._begin_segments[event.id] = self._segments[-1]
        self._unfinished_counts[segment] += 1

    def record(self, event: UsageEvent, response: str = "") -> JournalPosition:
        """Records the usage of a request; afterwards the death of this process cannot lose it.

        Args:
            event: The usage.
            response: Id of the response without which it is not to be billed after a crash, until `release_event`.

        Returns:
            The position where the entry ends.

        Raises:
            StoreUnavailable: The entry could not be written; the journal is unchanged.
        """
        self._append(encode_frame(UsageRecord(event, response)))
        segment = self._begin_segments.pop(event.id, 0)
        if segment:
            self._unfinished_counts[segment] -= 1
        return JournalPosition(self._segments[-1], self._offset)

    def release_event(self, event_id: str) -> None:
        """Records that usage is billed without its response.

        Raises:
            StoreUnavailable: The entry could not be written; the journal is unchanged.
        """
        self._append(encode_frame(ReleaseRecord(event_id)))

    @property
    def healthy(self) -> bool:
        """Whether the last write of an entry succeeded."""
        return self._healthy

    def check(self) -> None:
        """Checks whether an entry could be written now; skips the check while writes succeed.

        Raises:
            StoreUnavailable: No entry can be written.
        """
        if not self._healthy:
            self._append(_PROBE_ENTRY)
            self._offset -= len(_PROBE_ENTRY)
            self._undo_partial_write()

    @property
    def first_position(self) -> JournalPosition:
        """Position before the oldest entry that the journal still has."""
        return JournalPosition(self._segments[0], 0)

    def read(self, after: JournalPosition, limit: int) -> list[tuple[UsageEvent, JournalPosition]]:
        """Returns the next recorded events with their end positions; fewer than `limit` only at the end."""
        found: list[tuple[UsageEvent, JournalPosition]] = []
        for number in self._segments:
            if number < after.segment:
                continue
            segment = Segment(self._segment_path(number), after.offset if number == after.segment else 0)
            for entry, end in segment:
                if isinstance(entry, UsageRecord):
                    found.append((entry.event, JournalPosition(number, end)))
                    if len(found) == limit:
                        return found
            if segment.damage is not None:
                log.error("The usage journal is damaged: %s", segment.damage)
        return found

    def release(self, up_to: JournalPosition) -> None:
        """Deletes the segments up to a position; the database must have all of their events.

        A segment is kept while a request that began in it is running, and the last segment is kept for further writes.
        """
        for number in [
            number for number in self._segments if number < up_to.segment and not self._unfinished_counts[number]
        ]:
            self._segment_path(number).unlink(missing_ok=True)
            self._segments.remove(number)
            del self._unfinished_counts[number]

    def close(self, written: JournalPosition | None = None) -> None:
        """Closes the journal and releases its lock.

        Args:
            written: Position up to which the database has all events. Later events and running requests are left for
                another process to adopt; if there are none, the folder is removed.
        """
        if self._segment_fd < 0:
            return
        if not self._begin_segments and written == JournalPosition(self._segments[-1], self._offset):
            for number in self._segments:
                self._segment_path(number).unlink(missing_ok=True)
            self._own_folder.rmdir()
        os.close(self._segment_fd)
        os.close(self._lock_fd)
        self._segment_fd = self._lock_fd = -1

    def _append(self, data: bytes) -> None:
        try:
            if self._segment_fd < 0:
                raise OSError(errno.EBADF, "it is closed")
            if self._offset >= self._segment_bytes:
                self._open_next_segment()
            written = os.write(self._segment_fd, data)
            if written == len(data):
                if self._durable:
                    os.fdatasync(self._segment_fd)
                self._offset += written
                self._healthy = True
                return
            cause = None  # only a part of the entry was written, because the disk is full
        except OSError as error:
            cause = error
        self._healthy = False
        self._undo_partial_write()
        raise self._unavailable(cause) from cause

    def _undo_partial_write(self) -> None:
        """Removes a partial entry, so that later entries can be read."""
        try:
            if self._offset < self._segment_bytes:  # otherwise no entry was begun, or its remains must stay
                os.ftruncate(self._segment_fd, self._offset)
        except OSError:
            self._offset = self._segment_bytes  # leave the damaged segment as it is and continue in a new segment

    def _open_next_segment(self) -> None:
        number = self._segments[-1] + 1 if self._segments else 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        segment_fd = os.open(self._segment_path(number), flags, 0o600)
        if self._durable:
            os.fsync(self._lock_fd)
        if self._segment_fd >= 0:
            os.close(self._segment_fd)
        self._segment_fd, self._offset = segment_fd, 0
        self._segments.append(number)

    def _segment_path(self, number: int) -> Path:
        return self._own_folder / f"{number:08d}{SUFFIX}"

    def _unavailable(self, cause: OSError | None) -> StoreUnavailable:
        reason = "no space is left" if cause is None else cause.strerror
        return StoreUnavailable(
            f"The usage journal in {self.folder} cannot be written ({reason}), and no answer goes out unbilled. Make "
            "room there, or let maitred write there."
        )


def lock_folder(folder: Path) -> int | None:
    """Locks the folder of a process and returns the descriptor, or None.

    None means that the process is alive or that the folder does not exist any more.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            return descriptor
    # Another process holds the lock, or has removed the folder in the meantime
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _create_locked_folder(folder: Path) -> tuple[Path, int]:
    """Creates and locks a folder; if another process adopts the empty folder first, creates another one."""
    while True:
        own_folder = folder / f"{os.getpid()}-{secrets.token_hex(6)}"
        own_folder.mkdir(mode=0o700)
        descriptor = lock_folder(own_folder)
        if descriptor is not None:
            return own_folder, descriptor
