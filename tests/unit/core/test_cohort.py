"""Who halts at the end of a stage, for whom, and that nobody is left standing."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.cohort import Cohort, CohortStage

STAGES = (CohortStage.KNOWN, CohortStage.READ, CohortStage.ADMITTED)


async def goes(cohort, name, seen):
    """A request's task: its first step, and a stage before each halt."""
    cohort.arrive(CohortStage.COME)
    for halt in STAGES:
        seen.append((halt, name))
        await cohort.sync(halt)
    seen.append((CohortStage.DISPATCHED, name))


def test_who_is_alone_does_not_halt():
    cohort, seen = Cohort(), []
    cohort.expect(CohortStage.COME)
    alone = goes(cohort, "one", seen)
    try:
        alone.send(None)
    except StopIteration:
        pass
    else:
        raise AssertionError("it has halted")
    assert [halt for halt, _ in seen] == [*STAGES, CohortStage.DISPATCHED]
    assert cohort.empty


async def test_those_who_come_together_go_through_each_stage_together():
    cohort, seen = Cohort(), []
    for _ in range(3):
        cohort.expect(CohortStage.COME)
    await asyncio.gather(*(goes(cohort, name, seen) for name in "abc"))
    assert seen == [(halt, name) for halt in (*STAGES, CohortStage.DISPATCHED) for name in "abc"]
    assert cohort.empty


async def test_nobody_halts_for_who_is_stages_away():
    cohort, seen = Cohort(), []

    async def stands():
        cohort.expect(CohortStage.READ)
        await cohort.sync(CohortStage.ADMITTED)
        seen.append("stood")

    standing = asyncio.create_task(stands())
    await asyncio.sleep(0)
    ahead = asyncio.create_task(goes_on_from(cohort, CohortStage.SETTLED, seen))
    behind = asyncio.create_task(goes_on_from(cohort, CohortStage.KNOWN, seen))
    await asyncio.wait([standing, ahead, behind])
    assert seen == ["stood", CohortStage.SETTLED, CohortStage.KNOWN]
    cohort.arrive(CohortStage.READ)
    assert cohort.empty


async def goes_on_from(cohort, halt, seen):
    """Comes to a halt; without anybody near it goes on in the same turn."""
    turns = []
    asyncio.get_running_loop().call_soon(turns.append, "another turn")
    await cohort.sync(halt)
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
            cohort.expect(CohortStage.COME)
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
            assert stages == [*STAGES, CohortStage.DISPATCHED][: len(stages)]
            assert task.cancelled() or len(stages) == len(STAGES) + 1

    asyncio.run(play())
