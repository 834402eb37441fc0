"""When requests may still be sent: until the run's time is over, its requests are used up, or somebody stops it.

Time closes the doors to requests that would be *due* later. One that was due before and is late, because the tester
was, still comes in: were it turned away, the latest requests of an overloaded tester would be missing from its figures.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType


class StartGate:
    """Open at first, and closed once. Enter it in the run's event loop.

    Args:
        now_s: The clock of the run.
        duration_s: No request is due after this; None: no limit.
        requests: So many requests in all; None: no limit.
        stop: Whoever sets it closes the doors.
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
        """Waits until a request is due, and lets it in; False if the doors are closed by then."""
        if not await self.until(due_s):
            return False
        self._let_in += 1
        if self._let_in == self.requests:
            self._close()
        return True

    async def until(self, at_s: float) -> bool:
        """Waits for a moment; False if the doors are closed to what is due then."""
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
        """Waits until nobody is let in any more."""
        await self._closed.wait()

    async def _listen(self) -> None:
        await self._stop.wait()
        self._close()

    def _close(self) -> None:
        """To everybody, whenever they were due."""
        self._shut = True
        self._closed.set()
