"""Requests in flight: how many may be, which are, and how they drain.

The gate bounds how many requests are inside at once, and it drains: from the first SIGTERM on it takes nobody new,
those inside get a grace period, and who is still there when it ends is shown out with an honest error. So is, at any
time, whose key is no longer valid.
"""

import asyncio
import random
from collections.abc import Callable
from types import TracebackType
from typing import Self

from maitred.admission.policy.retries import SlotReleaseRate
from maitred.core.clock import Clock, SystemClock
from maitred.core.errors import Draining, Saturated, Unauthenticated
from maitred.core.tenancy import Principal
from maitred.dispatch.policy.retry_after import RetryAfterTurns

_REVOKED = "This API key was revoked, or has expired, while the request ran. What was generated until then is billed."
_DRAIN_RETRY_S = 2.0
"""A load balancer has taken us out by then."""


class InFlightLimiter:
    """Counts requests in and out.

    Args:
        capacity: How many may be inside at once.
        clock: For the pace at which places come free.
        draw: A number from 0 to 1, for the jitter in times to come back.
    """

    def __init__(self, capacity: int, clock: Clock | None = None, *, draw: Callable[[], float] = random.random) -> None:
        self._capacity = capacity
        self._clock = clock or SystemClock()
        self._draw = draw
        self._release_rate = SlotReleaseRate()
        self._retry_turns = RetryAfterTurns()
        self._slots: dict[CancelScope, Principal | None] = {}
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    def reconfigure(self, capacity: int) -> None:
        """Sets how many may be in flight from now on; those that are stay."""
        self._capacity = capacity

    @property
    def count(self) -> int:
        """Requests that are being answered."""
        return len(self._slots)

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self._draining

    def acquire(self, principal: Principal | None = None, *, even_if_full: bool = False) -> "InFlightSlot":
        """A place inside, to be taken at once, for as long as the block runs; the block can be interrupted.

        Args:
            principal: Whose request it is; None: it ends by itself, whoever sent it. Those of one tenant that are
                refused shall come back one after the other, as places come free.
            even_if_full: Whether to come in where no place is left; for those who can make some.

        Raises:
            Draining: Nobody is let in any more; or, from within the block, the grace period is over.
            Unauthenticated: From within the block, the principal's key is no longer valid.
            Saturated: Every place is taken.
        """
        if self._draining:
            raise Draining(retry_after_s=_DRAIN_RETRY_S)
        if len(self._slots) >= self._capacity and not even_if_full:
            raise Saturated(retry_after_s=self._retry_after_s(principal))
        return InFlightSlot(self, principal)

    def cancel_revoked(self, holds: Callable[[Principal], bool]) -> int:
        """Interrupts everyone inside whose key is no longer valid; returns how many.

        Args:
            holds: Whether a request of this principal would still be let in; asked once for each key and tenant.
        """
        verdicts: dict[tuple[str, str], bool] = {}
        ended = 0
        for block, principal in list(self._slots.items()):
            if principal is None:
                continue
            member = principal.key, principal.tenants[0]
            if member not in verdicts:
                verdicts[member] = holds(principal)
            if not verdicts[member]:
                block.cancel(Unauthenticated(_REVOKED))
                ended += 1
        return ended

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
        return self.cancel_all()

    def cancel_all(self) -> int:
        """Interrupts everyone inside, now; returns how many."""
        self.close()
        inside = list(self._slots)
        for block in inside:
            block.cancel(Draining("The server shut down before the answer was complete. Send the request again."))
        return len(inside)

    def _retry_after_s(self, principal: Principal | None) -> float:
        now_s = self._clock.monotonic_s()
        gap_s = self._release_rate.gap_s(now_s)
        tenant = None if principal is None else principal.tenants[0]
        return self._retry_turns.take(tenant, gap_s, gap_s, now_s, self._draw())


class CancelScope:
    """A block of one task that others can end.

    An answer can take minutes, and two things may end it at any moment: the client leaves, or the server has to stop.
    Both reach the task as a cancellation, so that every `async with` on its stack releases what it holds; and both
    leave the block as the exception that says why. `asyncio.timeout` works so, for time alone.

    Example::

        with CancelScope() as scope:
            connection.on_lost(lambda: scope.cancel(ClientDisconnected()))
            await long_work()
    """

    _task: asyncio.Task[object] | None = None
    _cancelling = 0
    _reason: Exception | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        return self

    def cancel(self, reason: Exception) -> None:
        """Ends the block with `reason`; only the first reason counts, and none after the block has ended."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            # As the message too, for those on the stack who settle differently with a caller that left and with us.
            self._task.cancel(reason)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Raises the reason where that has ended the block.
        task, self._task = self._task, None
        if task is None or self._reason is None:
            return
        # If someone else cancelled the task as well, that cancellation stands and must go on.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None


class InFlightSlot(CancelScope):
    """A request's place inside. Made by `InFlightLimiter.acquire`.

    Args:
        in_flight: What it has come in by.
        principal: Whose request it is; None: it ends by itself, whoever sent it.
    """

    def __init__(self, in_flight: InFlightLimiter, principal: Principal | None) -> None:
        self._limiter = in_flight
        self._principal = principal

    def __enter__(self) -> Self:
        limiter = self._limiter
        if not limiter._slots:
            limiter._release_rate.restart(limiter._clock.monotonic_s())
            limiter._empty.clear()
        limiter._slots[self] = self._principal
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        limiter = self._limiter
        del limiter._slots[self]
        limiter._release_rate.on_release(limiter._clock.monotonic_s())
        if not limiter._slots:
            limiter._empty.set()
        super().__exit__(kind, error, traceback)


class ClientDisconnected(Exception):
    """The connection is closed: nobody reads the rest. Not an error, and never answered."""
