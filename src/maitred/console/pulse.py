"""Live feed: one state per second for all viewers, so a hundred browsers cost as much as one.

The beat runs every second even without viewers, because charts begin before the first viewer; the state itself is made
only while somebody watches. A viewer that reads slowly misses states, and never delays the others.
"""

import asyncio
import logging
from collections import Counter
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
_OPERATORS_PART = 8
"""Number of places of which one is kept for operators."""


class LiveFeed(Generic[T]):
    """Feed that makes states, and gives them to viewers.

    Args:
        beat: Function that is called every second, before anything else.
        make: Function that makes the state.
        clock: Clock for the age of the last state.
        most_viewers: Largest number of viewers at one time.
    """

    def __init__(
        self, beat: Callable[[], object], make: Callable[[], Awaitable[T]], clock: Clock, most_viewers: int
    ) -> None:
        self._beat = beat
        self._make = make
        self._clock = clock
        self._most_viewers = most_viewers
        self._viewers: Counter[str] = Counter()
        self._made: tuple[float, T] | None = None
        self._making = asyncio.Lock()
        self._changed = asyncio.Condition()

    def reconfigure(self, most_viewers: int) -> None:
        """Sets the largest number of viewers; current viewers stay."""
        self._most_viewers = most_viewers

    @property
    def viewers(self) -> int:
        """Number of viewers who watch now."""
        return self._viewers.total()

    async def run(self) -> None:
        """Runs the beat until it is cancelled."""
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
        """Returns the state, which is at most a second old."""
        if self._made is None or self._clock.monotonic_s() - self._made[0] >= EVERY_S:
            return await self._remake()
        return self._made[1]

    @contextmanager
    def watching(self, key: str = "", *, is_operator: bool = False) -> Iterator[AsyncIterator[T]]:
        """Yields new states, beginning with the current one; a slow viewer gets only the newest.

        Args:
            key: Key of the viewer. Viewers with one key may take half of the places that are left.
            is_operator: Whether the viewer may take the places that are kept for operators, and more than half.

        Raises:
            Saturated: There are too many viewers.
        """
        free = self._most_viewers - self.viewers
        if not is_operator:
            free -= self._most_viewers // _OPERATORS_PART
            free = min(free, free - self._viewers[key] + 1)
        if free <= 0:
            raise Saturated(_FULL, retry_after_s=_FULL_RETRY_S)
        self._viewers[key] += 1
        try:
            yield self._states()
        finally:
            self._viewers[key] -= 1
            if not self._viewers[key]:
                del self._viewers[key]

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
            # A caller that waited while another made the state uses that state.
            if self._made is None or self._made[0] < asked_s:
                state = await self._make()
                self._made = self._clock.monotonic_s(), state
                async with self._changed:
                    self._changed.notify_all()
            return self._made[1]
