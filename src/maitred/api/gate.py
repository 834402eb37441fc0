"""Who may come in, who is inside, and how the house empties.

The gate bounds how many requests are inside at once, and it drains: from the first SIGTERM on it takes nobody new,
those inside get a grace period, and who is still there when it ends is shown out with an honest error.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from maitred.api.interrupt import Interruptible
from maitred.core.errors import Draining, Saturated

_RETRY_S = 1.0
"""There is no forecast yet of when a place frees up; at this pace a client finds it soon without hammering."""
_DRAIN_RETRY_S = 2.0
"""A load balancer has taken us out by then."""


class Gate:
    """Counts requests in and out.

    Args:
        capacity: How many may be inside at once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._inside: set[Interruptible] = set()
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def inside(self) -> int:
        """Requests that are being answered."""
        return len(self._inside)

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self._draining

    @asynccontextmanager
    async def enter(self, *, even_if_full: bool = False) -> AsyncIterator[Interruptible]:
        """A place inside, for as long as the block runs; the block can be interrupted.

        Args:
            even_if_full: Whether to come in where no place is left; for those who can make some.

        Raises:
            Draining: Nobody is let in any more; or, from within the block, the grace period is over.
            Saturated: Every place is taken.
        """
        if self._draining:
            raise Draining(retry_after_s=_DRAIN_RETRY_S)
        if len(self._inside) >= self._capacity and not even_if_full:
            raise Saturated(retry_after_s=_RETRY_S)
        async with Interruptible() as block:
            self._inside.add(block)
            self._empty.clear()
            try:
                yield block
            finally:
                self._inside.discard(block)
                if not self._inside:
                    self._empty.set()

    def close(self) -> None:
        """Takes nobody new from now on."""
        self._draining = True

    async def drain(self, grace_s: float) -> int:
        """Closes the gate, waits until all have left, and after `grace_s` ends those who have not.

        Returns:
            How many had to be ended.
        """
        self.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return self.end_now()

    def end_now(self) -> int:
        """Interrupts everyone inside, now; returns how many."""
        self.close()
        inside = list(self._inside)
        for block in inside:
            block.interrupt(Draining("The server shut down before the answer was complete. Send the request again."))
        return len(inside)
