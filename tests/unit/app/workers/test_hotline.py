"""What workers gather before they tell it."""

import asyncio
from pathlib import Path

from maitred.app.workers import hotline
from maitred.app.workers.hotline import Hotline
from maitred.wire.desk import Knows


class Controller:
    """The other end of a line; keeps what it is told."""

    def __init__(self):
        self.heard, self.heard_some = [], asyncio.Event()

    def tell(self, message):
        self.heard.append(message)
        self.heard_some.set()


class Gatherer:
    """Notes how often it was to tell something."""

    def __init__(self):
        self.flushes, self.flushed = 0, asyncio.Event()

    def flush(self):
        self.flushes += 1
        self.flushed.set()


async def test_what_is_gathered_is_told_together_and_once(monkeypatch):
    monkeypatch.setattr(hotline, "_GATHERED_S", 0.0)
    line, one, two = Hotline(1, 2, Path("nowhere"), lambda _: None), Gatherer(), Gatherer()
    line.gather(one)
    line.gather(two)
    assert (one.flushes, two.flushes) == (0, 0), "it can wait"
    await two.flushed.wait()
    assert (one.flushes, two.flushes) == (1, 1)
    two.flushed.clear()
    line.gather(two)
    await two.flushed.wait()
    assert (one.flushes, two.flushes) == (1, 2)


async def test_what_can_wait_goes_out_with_what_cannot():
    line, controller = Hotline(1, 2, Path("nowhere"), lambda _: None), Controller()
    line._line = controller
    line.report(Knows(1))
    assert controller.heard == []
    line.tell(Knows(2))
    assert controller.heard == [Knows(1), Knows(2)]


async def test_what_can_wait_goes_out_by_itself_before_long(monkeypatch):
    monkeypatch.setattr(hotline, "_REPORTED_S", 0.0)
    line, controller = Hotline(1, 2, Path("nowhere"), lambda _: None), Controller()
    line._line = controller
    line.report(Knows(1))
    line.report(Knows(2))
    await controller.heard_some.wait()
    assert controller.heard == [Knows(1), Knows(2)]
