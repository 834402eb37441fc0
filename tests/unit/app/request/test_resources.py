"""What is held is left as an exit stack leaves it."""

import asyncio
from contextlib import AsyncExitStack

from hypothesis import given
from hypothesis import strategies as st

from maitred.app.request.resources import ResourceStack

FAILURES = {"no": None, "error": ValueError, "end": asyncio.CancelledError}
failures = st.sampled_from([*FAILURES, "no", "no"])


class Thing:
    """Notes what it is told when it is left; each way may fail."""

    def __init__(self, name, enters, leaves, told):
        self.name, self.enters, self.leaves, self.told = name, enters, leaves, told

    async def __aenter__(self):
        if FAILURES[self.enters] is not None:
            raise FAILURES[self.enters](f"entering {self.name}")
        return self.name

    async def __aexit__(self, kind, error, trace):
        self.told.append((self.name, kind, str(error)))
        if FAILURES[self.leaves] is not None:
            raise FAILURES[self.leaves](f"leaving {self.name}")


async def taken(holder, thing):
    """Entered by the holder, or by its owner."""
    if thing.name % 2:
        return await holder.enter_async_context(thing)
    entered = await thing.__aenter__()
    assert holder.push_async_exit(thing) is thing
    return entered


async def stacked(things, body):
    async with AsyncExitStack() as stack:
        body([await taken(stack, thing) for thing in things])


async def held(things, body):
    async def begin(holder):
        return [await taken(holder, thing) for thing in things]

    async with ResourceStack(begin) as entered:
        body(entered)


def outcome(way, plan, fails):
    told = []
    things = [Thing(name, enters, leaves, told) for name, (enters, leaves) in enumerate(plan)]

    def body(entered):
        told.append(list(entered))
        if FAILURES[fails] is not None:
            raise FAILURES[fails]("the body")

    try:
        asyncio.run(way(things, body))
    except (ValueError, asyncio.CancelledError) as error:
        seen = [(type(error), str(error))]
        while (error := error.__context__) is not None:
            seen.append((type(error), str(error)))
        return told, seen
    return told, []


@given(plan=st.lists(st.tuples(failures, failures), max_size=4), fails=failures)
def test_what_is_held_is_left_as_a_stack_would(plan, fails):
    (told, seen), (expected, raised) = outcome(held, plan, fails), outcome(stacked, plan, fails)
    assert told == expected
    assert seen[:1] == raised[:1]
