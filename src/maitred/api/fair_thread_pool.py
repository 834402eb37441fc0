"""Threads that callers share fairly: whoever has work for many turns waits behind its own work.

A thread pool by itself runs what came first. Then a caller with a hundred large bodies holds everybody else's up for as
long as all of them take.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from maitred.admission.semaphore import FairSemaphore
from maitred.core.flow import Flow
from maitred.core.tenancy import Principal

T = TypeVar("T")


class FairThreadPool:
    """Thread pool in which functions wait in fair order, by organisation, team and key.

    Args:
        threads: Number of threads.
        name: Prefix of their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._turns = FairSemaphore(threads)

    async def run(self, principal: Principal, cost: float, function: Callable[[], T]) -> T:
        """Returns what the function returns, once it is the caller's turn and a thread has run it.

        Args:
            principal: The caller.
            cost: Cost of the function, in any unit that is the same for all functions of the pool.
            function: The function. It runs to its end, even if the caller is cancelled.
        """
        return await self._run_in_thread(await self._turns.acquire(principal, cost), function)

    async def _run_in_thread(self, flow: Flow, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()

        def on_end(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._turns.release, flow)

        job = self._pool.submit(function)
        job.add_done_callback(on_end)
        return await asyncio.wrap_future(job)
