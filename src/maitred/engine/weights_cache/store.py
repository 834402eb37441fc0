"""Folder of cached weights: one file per key, written by one process while others wait, within a size limit.

A file is written under a temporary name, which is locked meanwhile, and renamed when it is complete. A writer that dies
releases its lock and leaves no file that would be read. The least recently used files are evicted first; a process that
has mapped an evicted file keeps its memory until it ends.
"""

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".weights"
_UNFINISHED = ".unfinished"
_LOOK_S = 0.05
WAIT_S = 300.0
"""Maximum wait for another process that is writing the same file; after it, the weights are not cached."""

logger = logging.getLogger("maitred.engine")


@dataclass(frozen=True)
class WeightsCacheStore:
    """Store of cached weights in a folder.

    Attributes:
        folder: Folder of the files, created at the first write.
        most_bytes: Maximum disk space of all files together.
        now_s: Monotonic clock.
        sleep: Function that waits for a time.
    """

    folder: Path
    most_bytes: int
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def path(self, key: str) -> Path:
        """Returns the path of the file for a key."""
        return self.folder / f"{key}{_SUFFIX}"

    def touch(self, key: str) -> None:
        """Marks a file as used, by its modification time."""
        try:
            os.utime(self.path(key))
        except OSError as fault:  # the file belongs to another user, or has just been evicted
            logger.debug("%s cannot be marked as used: %s", self.path(key), fault)

    @contextmanager
    def writing(self, key: str, *, wait_s: float = WAIT_S) -> Iterator[BinaryIO | None]:
        """Opens a new file for writing, unless another process has just written it.

        Yields:
            An empty file to write; None: another process has written it. The file is stored when the block ends without
            an exception, and discarded otherwise.

        Raises:
            TimeoutError: Another process has been writing the file for too long.
            OSError: The folder cannot be created or written to.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self.folder / f"{key}{_UNFINISHED}"
        before = _identity(self.path(key))
        file = self._lock(unfinished, self.now_s() + wait_s)
        with file:
            if _identity(self.path(key)) not in (None, before):
                unfinished.unlink(missing_ok=True)
                yield None
                return
            try:
                file.truncate(0)
                yield file
                os.fsync(file.fileno())
                unfinished.rename(self.path(key))
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise

    def tidy(self, keep: str) -> None:
        """Evicts the least recently used files until all fit into `max_bytes`, but never `keep`."""
        kept = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            try:
                status = path.stat()
            except OSError:
                continue  # another process has evicted it
            kept.append((status.st_mtime_ns, status.st_blocks * 512, path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= self.most_bytes:
                break
            if path != self.path(keep):
                logger.info("Throwing away %s, whose weights were not used for longest.", path)
                path.unlink(missing_ok=True)
                total -= size
        for path in self.folder.glob(f"*{_UNFINISHED}"):
            _remove_abandoned(path)

    def _lock(self, path: Path, until_s: float) -> BinaryIO:
        """Opens and locks the file at `path`, and checks that it is still the file at `path`."""
        while True:
            file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _identity(path) == os.fstat(file.fileno()).st_ino:
                    return file
            except BlockingIOError:
                if self.now_s() > until_s:
                    file.close()
                    raise TimeoutError(f"Another process has been writing {path} for too long.") from None
                self.sleep(_LOOK_S)
            except BaseException:
                file.close()
                raise
            file.close()


def _identity(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _remove_abandoned(path: Path) -> None:
    """Removes the file of a writer that has died; a living writer holds its lock."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _identity(path) == os.fstat(file.fileno()).st_ino:
                path.unlink()
    except OSError:
        return
