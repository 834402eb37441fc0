"""What becomes of a request whose client leaves."""

import asyncio
from functools import partial

import pytest

from maitred.api.call import Call, Progress
from maitred.api.interrupt import ClientLeft, Interruptible


def call():
    return Call({"path": "/", "method": "POST", "headers": []}, None, None, 0.0)


async def test_a_client_that_leaves_ends_what_is_waited_for():
    async def wait():
        async with Interruptible() as block:
            asyncio.get_running_loop().call_soon(partial(call().left, block))
            await asyncio.Event().wait()

    with pytest.raises(ClientLeft):
        await wait()


async def test_a_client_that_has_its_answer_may_leave():
    answered = call()
    answered.progress = Progress.COMPLETE
    async with Interruptible() as block:
        answered.left(block)
        await asyncio.sleep(0)


async def test_work_that_goes_on_without_its_client_is_told_of_its_leaving():
    left = []
    recorded = call()
    recorded.on_left = partial(left.append, True)
    async with Interruptible() as block:
        recorded.left(block)
        await asyncio.sleep(0)
    assert left == [True]
