"""What is there when serving begins is not looked at again."""

import asyncio
import gc
import weakref
from contextlib import contextmanager

from maitred.app import runtime as garbage
from maitred.app.runtime import GcSweep, tune_gc


class Circle:
    """Refers to itself."""

    def __init__(self):
        self.itself = self


@contextmanager
def looks():
    """Counts those through everything."""
    ends = []

    def look(phase, about):
        if phase == "stop" and about["generation"] == 2:
            ends.append(phase)

    gc.callbacks.append(look)
    try:
        yield ends
    finally:
        gc.callbacks.remove(look)


async def came(ends, looks):
    """Waits for so many of them, and for one more that must not come."""
    async with asyncio.timeout(300):
        while len(ends) < looks:  # noqa: ASYNC110 - a callback of the collector counts them
            await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(ends) == looks


async def test_what_was_old_when_it_was_let_go_of_is_swept_away_in_one_look(monkeypatch):
    monkeypatch.setattr(garbage, "_LATER_S", (0.0,))
    circles = [Circle() for _ in range(3)]
    known = [weakref.ref(circle) for circle in circles]
    gc.collect()  # they are old now
    sweep, enabled = GcSweep(), gc.isenabled()
    gc.disable()
    try:
        with looks() as ends:
            for _ in known:
                circles.pop()
                sweep.later()
            assert all(circle() is not None for circle in known)
            await came(ends, 1)
            assert not any(circle() is not None for circle in known)
            sweep.later()  # it may be had again
            await came(ends, 2)
    finally:
        if enabled:
            gc.enable()


def test_what_stays_is_left_alone_and_the_rest_is_looked_at_seldom():
    before, enabled = gc.get_threshold(), gc.isenabled()
    try:
        gc.set_threshold(700, 10, 10)  # Python's own; a test before may have served here
        stays, frozen = [Circle() for _ in range(1_000)], gc.get_freeze_count()  # the tests themselves are frozen
        tune_gc()
        assert gc.get_freeze_count() >= frozen + len(stays)
        new, young, middle = gc.get_threshold()
        assert new > 700
        assert middle > 10
        assert new * (young + 1) <= 20_000  # a look takes a microsecond an object, and nobody is served meanwhile
        assert gc.isenabled() == enabled
    finally:
        gc.set_threshold(*before)
