"""The lock of a data folder: who must be alone is, and nobody who is gone keeps others out."""

import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE

import pytest

from maitred.core.errors import ConfigInvalid, StoreUnavailable
from maitred.store.data_lock import lock_path

LOCKING = """
import sys, time
from pathlib import Path
from maitred.store.data_lock import lock_path

with lock_path(Path(sys.argv[1]), exclusive=True):
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_that_must_be_alone_are_not_let_in_together(tmp_path):
    file = tmp_path / "data" / "gateway.lock"
    with lock_path(file, exclusive=True):
        with (
            pytest.raises(ConfigInvalid, match=r"Another gateway uses .*/data") as refused,
            lock_path(file, exclusive=True, timeout_s=0),
        ):
            pass
        assert "store.folder" in refused.value.message
    with lock_path(file, exclusive=True, timeout_s=0):
        pass


def test_those_that_count_together_share_it_and_keep_out_who_counts_alone(tmp_path):
    file = tmp_path / "gateway.lock"
    with (
        lock_path(file, exclusive=False),
        lock_path(file, exclusive=False, timeout_s=0),
        pytest.raises(ConfigInvalid),
        lock_path(file, exclusive=True, timeout_s=0),
    ):
        pass


async def test_a_gateway_that_was_killed_keeps_nobody_out(tmp_path):
    file = tmp_path / "gateway.lock"
    process = await create_subprocess_exec(sys.executable, "-c", LOCKING, str(file), stdout=PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"held\n"
        with pytest.raises(ConfigInvalid), lock_path(file, exclusive=True, timeout_s=0):
            pass
    finally:
        process.kill()
    with lock_path(file, exclusive=True):
        pass
    await process.wait()


def test_a_lock_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "gateway.lock").mkdir()
    with (
        pytest.raises(StoreUnavailable, match="cannot be taken"),
        lock_path(tmp_path / "gateway.lock", exclusive=True),
    ):
        pass
