"""What workers gather before they tell it."""

import asyncio
from pathlib import Path

from maitred.app.assembly.stores import running
from maitred.app.workers import controller_client as client_module
from maitred.app.workers.controller_client import ControllerClient
from maitred.fleet.agent.connection import MessageConnection
from maitred.wire.worker_protocol import ControllerSnapshot, DirectoryAck, ToController, WorkerHello


class Controller:
    """The other end of a connection; keeps the messages that it gets."""

    def __init__(self):
        self.heard, self.heard_some = [], asyncio.Event()

    def send(self, message):
        self.heard.append(message)
        self.heard_some.set()


class Gatherer:
    """Notes how often it was to tell something."""

    def __init__(self):
        self.flushes, self.flushed = 0, asyncio.Event()

    def flush(self):
        self.flushes += 1
        self.flushed.set()


async def test_gathered_reports_are_sent_together_and_once(monkeypatch):
    monkeypatch.setattr(client_module, "_FLUSH_INTERVAL_S", 0.0)
    line, one, two = ControllerClient(1, 2, Path("nowhere"), lambda _: None), Gatherer(), Gatherer()
    line.schedule_flush(one)
    line.schedule_flush(two)
    assert (one.flushes, two.flushes) == (0, 0), "it can wait"
    await two.flushed.wait()
    assert (one.flushes, two.flushes) == (1, 1)
    two.flushed.clear()
    line.schedule_flush(two)
    await two.flushed.wait()
    assert (one.flushes, two.flushes) == (1, 2)


async def test_what_can_wait_goes_out_with_what_cannot():
    line, controller = ControllerClient(1, 2, Path("nowhere"), lambda _: None), Controller()
    line._connection = controller
    line.send_soon(DirectoryAck(1))
    assert controller.heard == []
    line.send(DirectoryAck(2))
    assert controller.heard == [DirectoryAck(1), DirectoryAck(2)]


async def test_what_can_wait_goes_out_by_itself_before_long(monkeypatch):
    monkeypatch.setattr(client_module, "_DELAY_S", 0.0)
    line, controller = ControllerClient(1, 2, Path("nowhere"), lambda _: None), Controller()
    line._connection = controller
    line.send_soon(DirectoryAck(1))
    line.send_soon(DirectoryAck(2))
    await controller.heard_some.wait()
    assert controller.heard == [DirectoryAck(1), DirectoryAck(2)]


class Asking:
    """A request of which a controller has been asked."""

    unanswered_id = "asks"

    def on_message(self, message):
        raise AssertionError(message)

    def on_disconnect(self):
        pass

    def take_resume_grant(self):
        return None


async def test_the_next_controller_learns_who_was_never_answered(tmp_path):
    """Of those who still ask, and of those who have given up; once it has acknowledged them, they are forgotten."""
    hellos = asyncio.Queue()
    ends = []

    def heard(message):
        if isinstance(message, WorkerHello):
            hellos.put_nowait(message)

    def end():
        ends.append(MessageConnection(ToController, heard, lambda: None))
        return ends[-1]

    path = tmp_path / "controller"
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(end, str(path))
    welcomed = asyncio.Event()
    client = ControllerClient(1, 2, path, lambda _: welcomed.set())
    client.register(Asking())
    client.keep_unanswered_id("gave up")
    async with running(client.run(), "client"), asyncio.timeout(300):
        for _ in range(2):  # the first dies before it has done anything
            assert (await hellos.get()).unanswered_ids == ["gave up", "asks"]
            ends[-1].close()
        assert (await hellos.get()).unanswered_ids == ["gave up", "asks"]
        ends[-1].send(ControllerSnapshot(1, frozenset(), {}, {}))
        await welcomed.wait()
        ends[-1].close()
        assert (await hellos.get()).unanswered_ids == ["asks"]
    server.close()
