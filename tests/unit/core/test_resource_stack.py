"""The stack of contexts that a request holds, beside the one of the standard library."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from maitred.core.resource_stack import ResourceStack


class Context:
    """Notes when it is entered and left, and with what."""

    def __init__(self, log, name, *, fails_entering=None, fails_leaving=None):
        self.log, self.name = log, name
        self.fails_entering, self.fails_leaving = fails_entering, fails_leaving

    async def __aenter__(self):
        await asyncio.sleep(0)
        if self.fails_entering is not None:
            raise self.fails_entering
        self.log.append(f"+{self.name}")
        return self.name

    async def __aexit__(self, kind, error, trace):
        await asyncio.sleep(0)
        self.log.append(f"-{self.name} {error!r}")
        assert kind is (None if error is None else type(error))
        if self.fails_leaving is not None:
            raise self.fails_leaving


async def outcome(stack_class, contexts, failure=None):
    """What happens with contexts of these faults, and an error at the end of the block."""
    log = []
    try:
        async with stack_class() as stack:
            for name, faults in contexts.items():
                log.append(await stack.enter_async_context(Context(log, name, **faults)))
            if failure is not None:
                raise failure
    except Exception as error:
        log.append(f"raised {error!r}")
    return log


@pytest.mark.parametrize("failure", [None, ValueError("end")])
@pytest.mark.parametrize(
    "contexts",
    [
        {},
        {"a": {}, "b": {}, "c": {}},
        {"a": {}, "b": {"fails_entering": OSError("enter")}},
        {"a": {}, "b": {"fails_leaving": OSError("leave")}, "c": {}},
        {"a": {"fails_leaving": OSError("a")}, "b": {"fails_leaving": OSError("b")}},
    ],
)
async def test_contexts_are_left_as_by_the_standard_library(contexts, failure):
    expected = await outcome(AsyncExitStack, contexts, failure)
    assert await outcome(ResourceStack, contexts, failure) == expected


async def test_what_is_moved_to_another_stack_is_left_with_that_one():
    log = []
    async with ResourceStack() as stack:
        await stack.enter_async_context(Context(log, "a"))
        stack.push_async_exit(Context(log, "b"))
        other = stack.pop_all()
    assert log == ["+a"]
    await other.__aexit__(None, None, None)
    await other.__aexit__(None, None, None)
    assert log == ["+a", "-b None", "-a None"], "each is left once"


async def test_a_task_that_is_cancelled_leaves_all_contexts():
    log, entered = [], asyncio.Event()

    async def hold():
        async with ResourceStack() as stack:
            await stack.enter_async_context(Context(log, "a"))
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["+a", "-a CancelledError()"]
