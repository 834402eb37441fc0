"""Faults on their timeline: each is logged as it was, and undone whatever happens. Time is scripted."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from maitred.core.errors import Unavailable
from maitred.load.chaos.plan import ChaosFault
from maitred.load.chaos.timeline import FaultTimeline

HANG = ChaosFault(kind="hang", target="engine", at_s=0, for_s=1000)


class Scene:
    """Notes what is done and undone."""

    def __init__(self, *faults, now_s=0.0):
        self.done, self.undone, self.messages = [], [], []
        self.begun = asyncio.Event()
        self.timeline = FaultTimeline(faults, self.inflict, lambda: now_s, self.messages.append)

    @asynccontextmanager
    async def inflict(self, fault, note):
        if fault.target == "nobody":
            raise Unavailable("No process plays the role 'nobody' now.")
        self.done.append(fault.kind)
        note(f"{fault.kind} done")
        self.begun.set()
        try:
            yield
        finally:
            self.undone.append(fault.kind)

    async def cut_short(self):
        """Cancels it once something has begun."""
        playing = asyncio.create_task(self.timeline.play())
        await self.begun.wait()
        await asyncio.sleep(0)
        playing.cancel()
        await asyncio.wait({playing})


async def test_a_fault_is_done_and_undone():
    scene = Scene(ChaosFault(kind="kill", target="engine", at_s=3), now_s=3.5)
    await scene.timeline.play()
    (entry,) = scene.timeline.log
    assert (entry.planned_s, entry.began_s, entry.ended_s, entry.error) == (3, 3.5, 3.5, "")
    assert entry.said == ["kill done"]
    assert scene.done == scene.undone == ["kill"]
    assert [line.strip() for line in scene.messages] == [
        "3.5 s  fault 0 (kill engine): kill done",
        "3.5 s  fault 0 (kill engine): over",
    ]


async def test_it_does_not_begin_early_where_a_timer_ends_early():
    scene = Scene(ChaosFault(kind="kill", target="engine", at_s=0.01))
    times = iter([0.0, 0.0094, 0.0103])
    scene.timeline._now_s = lambda: next(times, 0.0103)
    await scene.timeline.play()
    (entry,) = scene.timeline.log
    assert (entry.planned_s, entry.began_s, scene.done) == (0.01, 0.01, ["kill"])


async def test_one_that_cannot_be_done_does_not_stop_the_others():
    scene = Scene(ChaosFault(kind="kill", target="nobody", at_s=0), ChaosFault(kind="kill", target="engine", at_s=0))
    await scene.timeline.play()
    failed, played = scene.timeline.log
    assert (failed.error, failed.began_s) == ("No process plays the role 'nobody' now.", None)
    assert (played.error, scene.undone) == ("", ["kill"])


async def test_the_end_of_the_load_undoes_what_is_done_then():
    scene = Scene(HANG, ChaosFault(kind="kill", target="engine", at_s=500))
    await scene.cut_short()
    assert scene.undone == ["hang"]
    hang, kill = scene.timeline.log
    assert hang.error == ""
    assert hang.said == ["hang done", "undone early, as the load had ended"]
    assert hang.ended_s is not None
    assert (kill.error, kill.began_s, kill.ended_s) == ("The load had ended by then.", None, None)


async def test_a_fault_of_the_timeline_itself_is_not_swallowed():
    scene = Scene(HANG)

    def broken(fault, note):
        raise ZeroDivisionError

    timeline = FaultTimeline([HANG], broken, lambda: 0.0, scene.messages.append)
    with pytest.raises(ExceptionGroup) as caught:
        await timeline.play()
    assert caught.group_contains(ZeroDivisionError)
