"""One state a second, made once for all who watch: a hundred open browsers cost what one does.

The pulse beats whether anybody watches or not, because charts begin before the first look at them; the state itself is
made only while somebody does. A viewer that reads slowly misses states and never holds up the others.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from maitred.core.clock import Clock
from maitred.core.errors import Saturated

log = logging.getLogger(__name__)

T = TypeVar("T")
EVERY_S = 1.0
_FULL = "As many watch the live state as this server lets. Close a console, or raise console.viewers."
_FULL_RETRY_S = 10.0


class LiveFeed(Generic[T]):
    """Makes states, and hands them to viewers.

    Args:
        beat: Called every second, before anything else.
        make: Makes the state.
        clock: Tells how old the last one is.
        most_viewers: At one time.
    """

    def __init__(
        self, beat: Callable[[], object], make: Callable[[], Awaitable[T]], clock: Clock, most_viewers: int
    ) -> None:
        self._beat = beat
        self._make = make
        self._clock = clock
        self._most_viewers = most_viewers
        self._viewers = 0
        self._made: tuple[float, T] | None = None
        self._making = asyncio.Lock()
        self._changed = asyncio.Condition()

    def reconfigure(self, most_viewers: int) -> None:
        """Sets how many may watch from now on; who watches goes on."""
        self._most_viewers = most_viewers

    @property
    def viewers(self) -> int:
        """Number of viewers who watch now."""
        return self._viewers

    async def run(self) -> None:
        """Beats until it is cancelled."""
        due_s = self._clock.monotonic_s()
        while True:
            self._beat()
            if self._viewers:
                try:
                    await self._remake()
                except Exception:  # the charts of the next viewer need the beat
                    log.exception("The live state could not be made.")
            now_s = self._clock.monotonic_s()
            due_s = max(due_s + EVERY_S, now_s)
            await asyncio.sleep(due_s - now_s)

    async def now(self) -> T:
        """The state, not older than a second."""
        if self._made is None or self._clock.monotonic_s() - self._made[0] >= EVERY_S:
            return await self._remake()
        return self._made[1]

    @contextmanager
    def watching(self) -> Iterator[AsyncIterator[T]]:
        """States as they are made, beginning with one at once; only the newest is ever handed out.

        Raises:
            Saturated: Too many watch.
        """
        if self._viewers >= self._most_viewers:
            raise Saturated(_FULL, retry_after_s=_FULL_RETRY_S)
        self._viewers += 1
        try:
            yield self._states()
        finally:
            self._viewers -= 1

    async def _states(self) -> AsyncIterator[T]:
        await self.now()
        seen = self._made
        while True:
            if seen is not None:
                yield seen[1]
            async with self._changed:
                while self._made is seen:
                    await self._changed.wait()
            seen = self._made

    async def _remake(self) -> T:
        asked_s = self._clock.monotonic_s()
        async with self._making:
            # Whoever waited for another's making has what it wants.
            if self._made is None or self._made[0] < asked_s:
                state = await self._make()
                self._made = self._clock.monotonic_s(), state
                async with self._changed:
                    self._changed.notify_all()
            return self._made[1]
