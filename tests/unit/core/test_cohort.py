"""Who halts at the end of a stage, for whom, and that nobody is left standing."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.cohort import Cohort, Halt

STAGES = (Halt.KNOWN, Halt.READ, Halt.ADMITTED)


async def goes(cohort, name, seen):
    """A request's task: its first step, and a stage before each halt."""
    cohort.came(Halt.COME)
    for halt in STAGES:
        seen.append((halt, name))
        await cohort.regroup(halt)
    seen.append((Halt.RELEASED, name))


def test_who_is_alone_does_not_halt():
    cohort, seen = Cohort(), []
    cohort.called(Halt.COME)
    alone = goes(cohort, "one", seen)
    try:
        alone.send(None)
    except StopIteration:
        pass
    else:
        raise AssertionError("it has halted")
    assert [halt for halt, _ in seen] == [*STAGES, Halt.RELEASED]
    assert cohort.empty


async def test_those_who_come_together_go_through_each_stage_together():
    cohort, seen = Cohort(), []
    for _ in range(3):
        cohort.called(Halt.COME)
    await asyncio.gather(*(goes(cohort, name, seen) for name in "abc"))
    assert seen == [(halt, name) for halt in (*STAGES, Halt.RELEASED) for name in "abc"]
    assert cohort.empty


async def test_nobody_halts_for_who_is_stages_away():
    cohort, seen = Cohort(), []

    async def stands():
        cohort.called(Halt.READ)
        await cohort.regroup(Halt.ADMITTED)
        seen.append("stood")

    standing = asyncio.create_task(stands())
    await asyncio.sleep(0)
    ahead = asyncio.create_task(goes_on_from(cohort, Halt.SETTLED, seen))
    behind = asyncio.create_task(goes_on_from(cohort, Halt.KNOWN, seen))
    await asyncio.wait([standing, ahead, behind])
    assert seen == ["stood", Halt.SETTLED, Halt.KNOWN]
    cohort.came(Halt.READ)
    assert cohort.empty


async def goes_on_from(cohort, halt, seen):
    """Comes to a halt; without anybody near it goes on in the same turn."""
    turns = []
    asyncio.get_running_loop().call_soon(turns.append, "another turn")
    await cohort.regroup(halt)
    assert not turns
    seen.append(halt)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 8)), min_size=1, max_size=8))
def test_nobody_is_left_standing(plans):
    """Whoever begins when, and whoever is cancelled when."""

    async def play():
        cohort, seen, tasks = Cohort(), [], {}

        async def begins(name, after, cancelled_after):
            for _ in range(after):
                await asyncio.sleep(0)
            cohort.called(Halt.COME)
            task = tasks[name] = asyncio.create_task(goes(cohort, name, seen))
            await asyncio.sleep(0)  # it has begun
            for _ in range(cancelled_after):
                await asyncio.sleep(0)
            task.cancel()

        await asyncio.gather(*(begins(name, *plan) for name, plan in enumerate(plans)))
        await asyncio.wait(tasks.values())
        assert cohort.empty
        for name, task in tasks.items():
            stages = [halt for halt, who in seen if who == name]
            assert stages == [*STAGES, Halt.RELEASED][: len(stages)]
            assert task.cancelled() or len(stages) == len(STAGES) + 1

    asyncio.run(play())
