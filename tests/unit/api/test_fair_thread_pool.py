"""Threads that callers share: who waits for whom, and what becomes of those that leave."""

import asyncio
import threading

import pytest

from maitred.api.fair_thread_pool import FairThreadPool
from maitred.core.flow import FlowLevel
from maitred.core.tenancy import Principal, Scope


def principal(organisation, key):
    path = (FlowLevel(organisation), FlowLevel(key))
    return Principal(key=key, tenants=(organisation,), scopes=frozenset({Scope.INFERENCE}), shares=path)


class HeldThread:
    """One thread that is held by a function until `release`; what is submitted meanwhile waits."""

    def __init__(self):
        self.threads = FairThreadPool(1, "test")
        self.order = []
        self._gate = threading.Event()
        self._tasks = []

    async def __aenter__(self):
        await self._submit(principal("holder", "holder"), 0.0, self._gate.wait)
        return self

    async def __aexit__(self, *_):
        self._gate.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def release(self):
        """Returns when the thread is free, and before the event loop knows."""
        self._gate.set()
        self.threads._pool.submit(int).result()

    async def submit(self, name, organisation, key, cost=1.0):
        return await self._submit(principal(organisation, key), cost, lambda: self.order.append(name))

    async def _submit(self, caller, cost, function):
        task = asyncio.create_task(self.threads.run(caller, cost, function))
        self._tasks.append(task)
        await asyncio.sleep(0)
        return task


async def test_organisations_take_turns_and_within_them_keys():
    async with HeldThread() as held:
        for number in range(4):
            await held.submit(f"a1-{number}", "a", "a1")
        await held.submit("a2-0", "a", "a2")
        await held.submit("b-0", "b", "b1")
        await held.submit("b-1", "b", "b1")
    assert set(held.order[:2]) == {"a1-0", "b-0"}
    assert set(held.order[2:4]) == {"a2-0", "b-1"}
    assert held.order[4:] == ["a1-1", "a1-2", "a1-3"]


async def test_who_costs_more_has_fewer_turns():
    async with HeldThread() as held:
        for number in range(3):
            await held.submit(f"large-{number}", "a", "a1", cost=10.0)
        for number in range(9):
            await held.submit(f"small-{number}", "b", "b1", cost=1.0)
    assert held.order.index("large-1") > held.order.index("small-7")


async def test_who_leaves_while_waiting_takes_no_turn():
    async with HeldThread() as held:
        leaving = await held.submit("left", "a", "a1")
        await held.submit("stayed", "a", "a1")
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    assert held.order == ["stayed"]
    assert await held.threads.run(principal("c", "c1"), 1.0, lambda: 5) == 5


async def test_who_is_being_cancelled_when_the_thread_is_freed_takes_no_turn():
    async with HeldThread() as held:
        leaving = await held.submit("left", "a", "a1")
        staying = await held.submit("stayed", "a", "a1")
        held.release()
        leaving.cancel()
        await asyncio.wait({leaving, staying}, timeout=60)
        assert leaving.cancelled()
        assert staying.done()
    assert held.order == ["stayed"]
    assert await held.threads.run(principal("c", "c1"), 1.0, lambda: 5) == 5


async def test_who_leaves_in_the_moment_of_its_turn_frees_the_thread():
    threads = FairThreadPool(1, "test")
    task = asyncio.create_task(threads.run(principal("a", "a1"), 1.0, lambda: 1))
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await threads.run(principal("b", "b1"), 1.0, lambda: 2) == 2


async def test_a_thread_is_not_free_before_its_function_has_ended():
    threads, gate, order = FairThreadPool(1, "test"), threading.Event(), []

    def first():
        gate.wait()
        order.append("first")

    leaving = asyncio.create_task(threads.run(principal("a", "a1"), 1.0, first))
    second = asyncio.create_task(threads.run(principal("b", "b1"), 1.0, lambda: order.append("second")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    gate.set()
    await second
    assert order == ["first", "second"]


async def test_what_a_function_raises_is_raised():
    threads = FairThreadPool(2, "test")
    with pytest.raises(ZeroDivisionError):
        await threads.run(principal("a", "a1"), 1.0, lambda: 1 // 0)
    assert await asyncio.gather(*(threads.run(principal("a", "a1"), 1.0, lambda: 3) for _ in range(9))) == [3] * 9
