"""Gate for new requests: open until the time is over, the requests are used up, or a stop.

The end of the time stops requests that would be *due* later. A request that was due before but is late because of the
tester is still sent. Otherwise the latest requests of an overloaded tester would be missing from its figures.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType


class StartGate:
    """Gate that is open at first and closes once. It must be entered in the event loop of the run.

    Args:
        now_s: Returns the time of the run's clock.
        duration_s: Time after which no request is due; None: no limit.
        requests: Largest number of requests; None: no limit.
        stop: Event that closes the gate.
    """

    def __init__(
        self, now_s: Callable[[], float], *, duration_s: float | None, requests: int | None, stop: asyncio.Event
    ) -> None:
        self.duration_s = duration_s
        self.requests = requests
        self._now_s = now_s
        self._stop = stop
        self._let_in = 0
        self._shut = False
        self._closed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "StartGate":
        if self.duration_s is not None:
            left_s = self.duration_s - self._now_s()
            self._timer = asyncio.get_running_loop().call_later(left_s, self._closed.set)
        self._listener = asyncio.create_task(self._listen(), name="load stop")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()

    async def admit(self, due_s: float) -> bool:
        """Waits until a request is due, and admits it; returns False if the gate is closed by then."""
        if not await self.until(due_s):
            return False
        self._let_in += 1
        if self._let_in == self.requests:
            self._close()
        return True

    async def until(self, at_s: float) -> bool:
        """Waits until a time; returns False if the gate is closed for requests that are due then."""
        if self.duration_s is not None and at_s > self.duration_s:
            await self._closed.wait()
            return False
        left_s = at_s - self._now_s()
        if left_s > 0 and not self._closed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._closed.wait()
        return not self._shut

    async def wait_closed(self) -> None:
        """Waits until the gate is closed for all requests."""
        await self._closed.wait()

    async def _listen(self) -> None:
        await self._stop.wait()
        self._close()

    def _close(self) -> None:
        """Closes the gate for all requests, whenever they were due."""
        self._shut = True
        self._closed.set()
