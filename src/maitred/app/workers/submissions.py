"""When an engine has heard of what a worker has sent it, so that the controller need not count it any more."""

import asyncio
from collections import deque
from contextlib import suppress

from maitred.app.workers.client import ControllerClient
from maitred.replica.engine.client import EngineClient
from maitred.wire.worker_protocol import SubmissionAcked

_PATIENCE_S = 2.0
"""For a line to an engine that the controller says is there."""


class SubmissionTracker:
    """To one engine. Submissions are heard in the order in which they were sent.

    Args:
        engine: Which.
        line: To the controller.
    """

    def __init__(self, engine: EngineClient, line: ControllerClient) -> None:
        self._engine = engine
        self._line = line
        self._sent: deque[int] = deque()
        self._reported = asyncio.Event()
        engine.watch(self._look)

    def sent(self, number: int) -> None:
        """A prompt of the request of this number was sent."""
        self._sent.append(number)

    @property
    def met(self) -> bool:
        """Whether there is a line to it. There is none yet where it, or this worker, has just been started."""
        return self._engine.ready

    async def meet(self) -> None:
        """Waits for that for a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while not self.met:
                    self._reported.clear()
                    await self._reported.wait()

    def _look(self) -> None:
        """The engine has reported."""
        self._reported.set()
        while len(self._sent) > self._engine.unheard():
            self._line.tell(SubmissionAcked(self._sent.popleft()))
