"""Cache of measurements on disk, so that a machine measures once: small JSON files, each under its key.

A note is a convenience. One that is missing, broken or of another version is measured again, and one that cannot be
written is lost; neither stops an engine from starting.
"""

import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

logger = logging.getLogger("maitred.engine")

T = TypeVar("T")

_SUFFIX = ".json"
_MOST_NOTES = 256
"""In a folder. Those that were written first are thrown away first."""


@dataclass(frozen=True)
class StepTimeCache(Generic[T]):
    """A folder of notes of one kind.

    Attributes:
        folder: Made when something is written. None: nothing is kept.
        kind: What a note says, as msgspec reads it.
    """

    folder: Path | None
    kind: type[T]

    def read(self, key: str) -> T | None:
        """Returns what was stored under a key; None: nothing that can be read."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}{_SUFFIX}"
        try:
            return msgspec.json.decode(path.read_bytes(), type=self.kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as fault:
            logger.warning("%s is not used, and written anew: %s.", path, fault)
            return None

    def write(self, key: str, value: T) -> None:
        """Notes it. Whoever reads meanwhile finds what was there before, or all of it."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, unfinished = tempfile.mkstemp(dir=self.folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(value))
                Path(unfinished).rename(self.folder / f"{key}{_SUFFIX}")
            except BaseException:
                Path(unfinished).unlink(missing_ok=True)
                raise
            self._tidy()
        except OSError as fault:
            logger.warning("What was measured cannot be kept in %s: %s", self.folder, fault)

    def _tidy(self) -> None:
        assert self.folder is not None
        dated = []
        for path in self.folder.glob(f"*{_SUFFIX}"):
            try:
                dated.append((path.stat().st_mtime_ns, path))
            except OSError:
                continue  # another process has thrown it away
        for _, path in sorted(dated)[:-_MOST_NOTES]:
            path.unlink(missing_ok=True)
