"""Who uses a data folder: one gateway that counts in its own memory, or several that count together elsewhere.

Two gateways that each count for themselves would let twice as much through as their limits say, and nobody would
notice. So a gateway holds a lock on its folder for as long as it lives. It is the kernel's (`flock`): it ends with its
process, however that dies, and never keeps the next one out.
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.store.config import StoreConfig
from maitred.store.location import data_folder, database_url, make_folder

_LOCK = "gateway.lock"
_POLL_S = 0.05
_PATIENCE_S = 5.0


@asynccontextmanager
async def lock_data(config: StoreConfig, *, alone: bool) -> AsyncIterator[None]:
    """Holds the locks on all that a gateway keeps: its folder, and its SQLite file if that lies elsewhere.

    Raises:
        ConfigInvalid: Another gateway uses it, or a setting names what cannot be used.
        StoreUnavailable: It cannot be locked.
    """
    async with AsyncExitStack() as held:
        for lock in _locks(config):
            await held.enter_async_context(lock_path(lock, alone=alone))
        yield


def _locks(config: StoreConfig) -> list[Path]:
    folder = data_folder(config)
    locks = [folder / _LOCK]
    if config.url is not None:
        url = database_url(config)
        if url.get_backend_name() == "sqlite" and url.database is not None:
            file = Path(url.database)
            if file.parent.resolve() != folder.resolve():
                locks.append(file.with_name(f"{file.name}.{_LOCK}"))
    return locks


@asynccontextmanager
async def lock_path(file: Path, *, alone: bool, patience_s: float = _PATIENCE_S) -> AsyncIterator[None]:
    """Holds the lock for as long as the block lasts.

    Args:
        file: Stands for what is used; made when missing, and left there.
        alone: Nobody else may use it; else others may who do not insist on being alone either.
        patience_s: So long it waits for one that is about to end, such as a gateway that was just killed.

    Raises:
        ConfigInvalid: Another gateway uses it.
        StoreUnavailable: It cannot be locked.
    """
    make_folder(file.parent)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(_cannot(file, error)) from error
    try:
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    if _locked(descriptor, alone=alone):
                        break
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ConfigInvalid(
                f"Another gateway uses {file.parent}, and two that count in their own memory would let twice as much "
                "through as the limits say. Stop that one; or give this one a folder of its own in store.folder; or "
                "have all of them count in one Redis, with counters.url."
            ) from None
        except OSError as error:
            raise StoreUnavailable(_cannot(file, error)) from error
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, *, alone: bool) -> bool:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _cannot(file: Path, error: OSError) -> str:
    return f"The lock {file} cannot be taken ({error.strerror}). Let maitred write there, or name another folder."
