"""The folder of kept weights: one file per key, written by one process while others wait for it, and never too many.

A file is written under another name, which is locked meanwhile, and appears under its own when it is whole. A writer
that dies gives its lock back and leaves nothing that anybody would read. The files that were not used for longest go
first; those who have one mapped keep it until they end.
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
"""For another process that is writing the same; then one does without."""

logger = logging.getLogger("maitred.engine")


@dataclass(frozen=True)
class WeightsCacheStore:
    """A folder of kept weights.

    Attributes:
        folder: Made when something is written.
        most_bytes: Of disk, for all together.
        now_s: A clock that only goes forward.
        sleep: Lets time pass.
    """

    folder: Path
    most_bytes: int
    now_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def path(self, key: str) -> Path:
        """Where the weights of a key are, if they are there."""
        return self.folder / f"{key}{_SUFFIX}"

    def used(self, key: str) -> None:
        """Notes that somebody has just opened it."""
        try:
            os.utime(self.path(key))
        except OSError as fault:  # it is another's, or was thrown away this moment
            logger.debug("%s cannot be marked as used: %s", self.path(key), fault)

    @contextmanager
    def writing(self, key: str, *, wait_s: float = WAIT_S) -> Iterator[BinaryIO | None]:
        """Puts a file there, unless somebody else has meanwhile.

        Yields:
            An empty file to write; None: another process has put it there. When the block ends without an exception
            the file is there; with one, nothing is.

        Raises:
            TimeoutError: Another process is writing it, and does not come to an end.
            OSError: The folder cannot be made or written to.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self.folder / f"{key}{_UNFINISHED}"
        before = _identity(self.path(key))
        file = self._locked(unfinished, self.now_s() + wait_s)
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
        """Throws away what was not used for longest until all fits into `most_bytes`, but never `keep`."""
        kept = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            try:
                status = path.stat()
            except OSError:
                continue  # another process has thrown it away
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

    def _locked(self, path: Path, until_s: float) -> BinaryIO:
        """The file at `path`, which nobody else has locked, and which is still the one at `path`."""
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
    """Removes what a writer that died has left; one that lives has it locked."""
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _identity(path) == os.fstat(file.fileno()).st_ino:
                path.unlink()
    except OSError:
        return
