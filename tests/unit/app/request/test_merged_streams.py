"""Several streams as one."""

import asyncio

import pytest

from maitred.app.request.engine_response import merge_streams
from maitred.core.errors import ReplicaLost
from maitred.core.request import TokenDelta


class Stream:
    """Hands out what it is given, batch by batch; an exception is raised in its place."""

    def __init__(self, *items):
        self.queue = asyncio.Queue()
        for item in items:
            self.queue.put_nowait(item)

    def cancel(self, index):
        raise NotImplementedError

    async def __aiter__(self):
        while (item := await self.queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


def batch(token):
    return [TokenDelta(0, [token])]


async def test_a_silent_stream_holds_nobody_up():
    silent, talking = Stream(), Stream(batch(1), batch(2), None)
    async with merge_streams({0: silent, 1: talking}) as batches:
        assert await anext(batches) == (1, batch(1))
        assert await anext(batches) == (1, batch(2))
        silent.queue.put_nowait(batch(3))
        assert await anext(batches) == (0, batch(3))
        silent.queue.put_nowait(None)
        with pytest.raises(StopAsyncIteration):
            await anext(batches)


async def test_a_stream_that_breaks_breaks_the_whole():
    async with merge_streams({0: Stream(batch(1), ReplicaLost()), 1: Stream()}) as batches:
        assert await anext(batches) == (0, batch(1))
        with pytest.raises(ReplicaLost):
            await anext(batches)


async def test_leaving_early_leaves_no_task_behind():
    before = asyncio.all_tasks()
    async with merge_streams({0: Stream(), 1: Stream()}):
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == len(before) + 2
    assert asyncio.all_tasks() == before


async def test_what_nobody_reads_stays_in_its_stream():
    hasty = Stream(*(batch(token) for token in range(100)), None)
    async with merge_streams({0: hasty, 1: Stream()}) as batches:
        for _ in range(20):
            await asyncio.sleep(0)
        assert hasty.queue.qsize() > 90
        assert [(await anext(batches))[1] for _ in range(100)] == [batch(token) for token in range(100)]
