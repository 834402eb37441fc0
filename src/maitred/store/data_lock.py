"""Lock of a data folder: it allows one gateway with own counters or several with shared ones.

If two gateways counted in their own memory, they would together let through twice as much as their limits allow,
without any error. Each gateway therefore holds a lock on its folder while it runs. The kernel manages the lock
(`flock`): the lock ends with its process in every case, even after a crash.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.store.config import StoreConfig
from maitred.store.location import data_folder, database_url, make_folder

_LOCK_FILE = "gateway.lock"
_POLL_S = 0.05
_LOCK_TIMEOUT_S = 5.0


@contextmanager
def lock_data(config: StoreConfig, *, exclusive: bool) -> Iterator[None]:
    """Holds the locks on all files of a gateway: its folder, and its SQLite file if that is elsewhere.

    It waits without an event loop, because with several workers the locks are held by the process that has none.

    Raises:
        ConfigInvalid: Another gateway uses the data, or a setting names a path that cannot be used.
        StoreUnavailable: The data cannot be locked.
    """
    with ExitStack() as stack:
        for lock_file in _lock_files(config):
            stack.enter_context(lock_path(lock_file, exclusive=exclusive))
        yield


def _lock_files(config: StoreConfig) -> list[Path]:
    folder = data_folder(config)
    locks = [folder / _LOCK_FILE]
    if config.url is not None:
        url = database_url(config)
        if url.get_backend_name() == "sqlite" and url.database is not None:
            file = Path(url.database)
            if file.parent.resolve() != folder.resolve():
                locks.append(file.with_name(f"{file.name}.{_LOCK_FILE}"))
    return locks


@contextmanager
def lock_path(file: Path, *, exclusive: bool, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
    """Holds a lock file while the block runs.

    Args:
        file: The lock file; it is created if it does not exist, and it is not removed.
        exclusive: True: no other process may hold the lock; False: other processes may hold the lock too, if they also
            pass False.
        timeout_s: Longest wait for a process that is about to end, such as a gateway that was just killed.

    Raises:
        ConfigInvalid: Another gateway holds the lock.
        StoreUnavailable: The file cannot be locked.
    """
    make_folder(file.parent)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(_lock_failure_message(file, error)) from error
    try:
        try:
            ends_s = time.monotonic() + timeout_s
            while not _try_lock(descriptor, exclusive=exclusive):
                if time.monotonic() >= ends_s:
                    raise ConfigInvalid(
                        f"Another gateway uses {file.parent}, and two that count in their own memory would let twice "
                        "as much through as the limits say. Stop that one; or give this one a folder of its own in "
                        "store.folder; or have all of them count in one Redis, with counters.url."
                    )
                time.sleep(_POLL_S)
        except OSError as error:
            raise StoreUnavailable(_lock_failure_message(file, error)) from error
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, *, exclusive: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_failure_message(file: Path, error: OSError) -> str:
    return f"The lock {file} cannot be taken ({error.strerror}). Let maitred write there, or name another folder."
