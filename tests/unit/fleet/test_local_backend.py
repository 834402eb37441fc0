"""Starts that fail before there is an engine: they are told, and tried again after a pause."""

import asyncio

import pytest

from maitred.core.errors import ReplicaUnavailable
from maitred.fleet.backend import BackendFacts
from maitred.fleet.local_backend import LocalBackend
from maitred.fleet.policy.reconciler import DesiredReplicas
from maitred.fleet.pool import ReplicaPool
from maitred.scaling.replica_status import ReplicaPhase
from maitred.scaling.startup_times import StartKind, StartupTimes
from tests.support.clock import FakeClock
from tests.support.servers.paper_fleet import PaperConnection


class Engine(PaperConnection):
    """Engine that cannot be entered while the disk is full."""

    def __init__(self, disk):
        super().__init__()
        self._disk = disk
        disk.starts = 0

    async def __aenter__(self):
        self._disk.starts += 1
        if self._disk.full:
            raise OSError("No space left on device")
        return await super().__aenter__()

    async def wait_started(self):
        if self._disk.broken:
            raise ValueError("no card")
        await super().wait_started()


class Disk:
    def __init__(self, *, full=False, broken=False):
        self.full, self.broken = full, broken
        self.pauses = []
        self.is_over = asyncio.Event()

    async def pause(self, seconds):
        self.pauses.append(seconds)
        await self.is_over.wait()


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def pool_on(disk):
    clock = FakeClock()
    backend = LocalBackend(lambda name: Engine(disk), BackendFacts(max_replicas=2), str, clock, disk.pause)
    return ReplicaPool(backend, DesiredReplicas(1), StartupTimes({StartKind.COLD: 1.0}), clock)


async def test_a_full_disk_is_told_and_tried_again_after_a_pause():
    disk = Disk(full=True)
    async with pool_on(disk) as pool:
        await settle()
        (replica,) = pool.backend.replicas().values()
        assert (replica.phase, disk.starts, disk.pauses) == (ReplicaPhase.FAILED, 1, [0.2])
        assert "No space left" in replica.failure
        with pytest.raises(ReplicaUnavailable, match="No space left"):
            await pool.wait_started()
        disk.is_over.set()
        await asyncio.sleep(0)
        disk.is_over.clear()
        await settle()
        assert (disk.starts, disk.pauses) == (2, [0.2, 0.4])
        disk.full = False
        disk.is_over.set()
        await settle()
        assert [status.phase for status in pool.replicas()] == [ReplicaPhase.STARTING]
        replica.engine.connect()
        await settle()
        assert [status.phase for status in pool.replicas()] == [ReplicaPhase.SERVING]
        assert pool.backend.has_started


async def test_a_replica_that_cannot_be_started_can_be_stopped():
    disk = Disk(full=True)
    async with pool_on(disk) as pool:
        await settle()
        pool.set_desired(0)
        await settle()
        assert not pool.backend.replicas()
        assert disk.starts == 1


async def test_whatever_a_first_start_fails_with_is_told():
    async with pool_on(Disk(broken=True)) as pool:
        await settle()
        (replica,) = pool.backend.replicas().values()
        assert (replica.phase, replica.failure) == (ReplicaPhase.FAILED, "The engine did not start: no card")
        with pytest.raises(ReplicaUnavailable, match="no card"):
            await pool.wait_started()
