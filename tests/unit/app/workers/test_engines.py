"""A worker's connections follow the engines of its controller, and no stream is cut on the way."""

import asyncio

import pytest

from maitred.app.workers.engines import WorkerEngines
from maitred.wire.worker_protocol import ControllerSnapshot
from tests.support.clock import FakeClock
from tests.support.servers.paper_fleet import PaperConnection


def snapshot(**engines):
    return ControllerSnapshot(1, frozenset(), {}, engines)


@pytest.fixture
def made():
    return {}


@pytest.fixture
async def worker(made):
    def connect(address):
        made[address] = PaperConnection()
        return made[address]

    async with WorkerEngines(connect, controller=None, pause_at_tokens=7, clock=FakeClock()) as engines:
        yield engines


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_it_connects_to_what_is_new(worker, made):
    worker.on_snapshot(snapshot(a="unix:/a", b="unix:/b"))
    worker.on_snapshot(snapshot(a="unix:/a", b="unix:/b"))
    await settle()
    assert set(worker.engines) == set(worker.endpoints) == set(worker.submission_ackers) == {"a", "b"}
    assert all(connection.is_open for connection in made.values())
    assert made["unix:/a"].client.pause_at_tokens == 7


async def test_it_leaves_what_is_gone_after_its_last_stream(worker, made):
    worker.on_snapshot(snapshot(a="unix:/a", b="unix:/b"))
    await settle()
    gone = made["unix:/a"]
    gone.client.open_streams = 1
    worker.on_snapshot(snapshot(b="unix:/b"))
    await settle()
    assert list(worker.engines) == ["b"]
    assert gone.is_open
    gone.client.end_stream()
    await settle()
    assert not gone.is_open


async def test_a_request_that_was_sent_there_meanwhile_finds_its_endpoint(worker):
    worker.on_snapshot(snapshot(a="unix:/a"))
    worker.on_snapshot(snapshot())
    await settle()
    assert not worker.endpoints["a"].replica.client.is_ready
    assert "a" not in worker.submission_ackers


async def test_a_name_that_comes_back_has_a_new_connection(worker, made):
    worker.on_snapshot(snapshot(a="unix:/a"))
    await settle()
    before = worker.engines["a"]
    before.client.open_streams = 1
    worker.on_snapshot(snapshot())
    worker.on_snapshot(snapshot(a="unix:/a"))
    await settle()
    assert "a" not in worker.engines, "the earlier connection has a stream"
    before.client.end_stream()
    await settle()
    assert worker.engines["a"] is made["unix:/a"] is not before
    assert worker.endpoints["a"].replica.client is made["unix:/a"].client
