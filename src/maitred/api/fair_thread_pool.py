"""Threads that callers share fairly: whoever has work for many turns waits behind its own work.

A thread pool by itself runs what came first. Then a caller with a hundred large bodies holds everybody else's up for as
long as all of them take.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from maitred.core.flow import Flow, FlowLevel
from maitred.core.tenancy import Principal
from maitred.fairness.config import QueueOrderConfig
from maitred.fairness.entry import QueueEntry
from maitred.fairness.vtc import VtcQueue

T = TypeVar("T")


class FairThreadPool:
    """Thread pool in which functions wait in fair order, by organisation, team and key.

    Args:
        threads: Number of threads.
        name: Prefix of their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
        self._idle_threads = threads
        self._queue: VtcQueue[asyncio.Future[None]] = VtcQueue(QueueOrderConfig())

    async def run(self, principal: Principal, cost: float, function: Callable[[], T]) -> T:
        """Returns what the function returns, once it is the caller's turn and a thread has run it.

        Args:
            principal: The caller.
            cost: Cost of the function, in any unit that is the same for all functions of the pool.
            function: The function. It runs to its end, even if the caller is cancelled.
        """
        flow = Flow(principal.shares or (FlowLevel(principal.key),))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = QueueEntry(turn, flow, arrived_s=time.monotonic(), service=cost)
        self._queue.add(entry, entry.arrived_s)
        self._start_next()
        try:
            # Shielded, so that a turn which comes while its caller is being cancelled is not given to nobody.
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            if turn.done():
                self._on_end(flow)
            else:
                self._queue.remove(entry)
            raise
        return await self._run_in_thread(flow, function)

    async def _run_in_thread(self, flow: Flow, function: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()

        def on_end(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._on_end, flow)

        job = self._pool.submit(function)
        job.add_done_callback(on_end)
        return await asyncio.wrap_future(job)

    def _start_next(self) -> None:
        now_s = time.monotonic()
        while self._idle_threads and (entry := self._queue.head(now_s)) is not None:
            self._idle_threads -= 1
            self._queue.take(entry, now_s)
            self._queue.charge(entry.flow, entry.service)
            entry.value.set_result(None)

    def _on_end(self, flow: Flow) -> None:
        self._queue.done(flow)
        self._idle_threads += 1
        self._start_next()
