"""Requests in flight: their limit, their cancellation and their drain.

`InFlightLimiter` limits how many requests run at once, and it drains: after the first SIGTERM it accepts no new
request, running requests get a grace period, and requests that still run at its end are cancelled with an error that
says so. A request is also cancelled as soon as its API key is no longer valid.

Organisations share the slots by a dynamic threshold (Choudhury and Hahne, IEEE/ACM Transactions on Networking, 1998):
one may take another slot while it holds fewer than `SHARE_OF_FREE` times the free ones. So one that is alone may hold
nearly all, some remain for whoever comes, and those that want more than there is end up with equal numbers. The same
holds within an organisation: what it may still take is what is free to its teams, and so on down to the keys.
"""

import asyncio
import random
from collections.abc import Callable
from types import TracebackType
from typing import Self

from maitred.admission.policy.retries import SlotReleaseRate
from maitred.core.clock import Clock, SystemClock
from maitred.core.errors import Draining, Saturated, Unauthenticated
from maitred.core.flow import SHARE_OF_FREE
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.dispatch.policy.retry_after import RetryAfterTurns

_REVOKED = "This API key was revoked, or has expired, while the request ran. What was generated until then is billed."
_SHARE_TAKEN = (
    "Your {owner} has as many requests in flight here as its share allows while others are to be served too. Try "
    "again after the time in Retry-After."
)
_DRAIN_RETRY_S = 2.0
"""By this time, a load balancer has stopped sending requests to this gateway."""


class InFlightLimiter:
    """Limits the number of requests in flight.

    Args:
        capacity: Largest number of requests in flight.
        clock: Measures how fast slots become free.
        draw: Returns a random number from 0 to 1, for the jitter of `Retry-After`.
    """

    def __init__(self, capacity: int, clock: Clock | None = None, *, draw: Callable[[], float] = random.random) -> None:
        self._capacity = capacity
        self._clock = clock or SystemClock()
        self._draw = draw
        self._release_rate = SlotReleaseRate()
        self._retry_turns = RetryAfterTurns()
        self._slots: dict[CancelScope, Principal | None] = {}
        self._held: dict[str, int] = {}
        """Slots by owner, for those that hold any; see `Principal.owners`."""
        self._draining = False
        self._on_close: list[Callable[[], None]] = []
        self._empty = asyncio.Event()
        self._empty.set()

    def watch_close(self, listener: Callable[[], None]) -> None:
        """Calls a function once, when new requests are refused from then on."""
        self._on_close.append(listener)

    def reconfigure(self, capacity: int) -> None:
        """Sets the largest number of requests in flight from now on; requests that run continue."""
        self._capacity = capacity

    @property
    def count(self) -> int:
        """Number of requests in flight."""
        return len(self._slots)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def acquire(self, principal: Principal | None = None, *, even_if_full: bool = False) -> "InFlightSlot":
        """Returns a slot, which is taken at once and released when its block ends; the block can be cancelled.

        Args:
            principal: Principal of the request; None: no revoked key cancels it. Refused requests of one tenant get
                different retry times, in the pace in which slots become free.
            even_if_full: Whether the request is accepted without a free slot; for requests that can free slots.

        Raises:
            Draining: No new request is accepted; or, raised inside the block, the grace period is over.
            Unauthenticated: Raised inside the block: the principal's key is no longer valid.
            Saturated: Every slot is taken, or all that the principal's organisation, team or key may have.
        """
        if self._draining:
            raise Draining(retry_after_s=_DRAIN_RETRY_S)
        if not even_if_full:
            taken = len(self._slots)
            free = self._capacity - taken
            if free <= 0:
                raise Saturated(retry_after_s=self._retry_after_s(principal))
            # With more free than that, even one who holds all that is taken has less than its share.
            if (SHARE_OF_FREE - 1) * free < taken and principal is not None and principal is not ANONYMOUS:
                self._check_shares(principal, free)
        return InFlightSlot(self, principal)

    def _check_shares(self, principal: Principal, free: int) -> None:
        """Raises Saturated if the principal's organisation, one of its teams, or its key holds its share."""
        for owner in principal.owners:
            free = SHARE_OF_FREE * free - self._held.get(owner, 0)
            if free <= 0:
                first, *_, last = principal.owners
                name = "key" if owner == last else "organisation" if owner == first else "team"
                raise Saturated(_SHARE_TAKEN.format(owner=name), retry_after_s=self._retry_after_s(principal))

    def cancel_revoked(self, holds: Callable[[Principal], bool]) -> int:
        """Cancels all requests whose key is no longer valid; returns their number.

        Args:
            holds: Returns whether a request of this principal would still be accepted; called once for each key and
                tenant.
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
        """Refuses all new requests from now on."""
        self._draining = True
        listeners, self._on_close = self._on_close, []
        for listener in listeners:
            listener()

    async def drain(self, grace_s: float) -> int:
        """Refuses new requests, waits until all have ended, and after `grace_s` cancels the others.

        Returns:
            The number of cancelled requests.
        """
        self.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return self.cancel_all()

    def cancel_all(self) -> int:
        """Cancels all requests in flight at once; returns their number."""
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
    """Block of one task that other tasks can cancel.

    An answer can take minutes, and two events may
    end it at any moment: the client disconnects, or the server must stop. Both events cancel the task, so every `async
    with` on its stack releases its resources; and both leave the block as the exception that gives the reason.
    `asyncio.timeout` works in the same way, but only for time limits.

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
        """Cancels the block; only the first `reason` counts, and a call after the end has no effect."""
        if self._task is not None and self._reason is None:
            self._reason = reason
            # The reason is also the message of the cancellation: code on the stack settles differently for a disconnect
            # and for a shutdown.
            self._task.cancel(reason)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # This raises the reason if the reason has ended the block.
        task, self._task = self._task, None
        if task is None or self._reason is None:
            return
        # If another task cancelled this task too, that cancellation must be passed on.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._reason from None


class InFlightSlot(CancelScope):
    """Slot of one request under the in-flight limit. `InFlightLimiter.acquire` makes it.

    Args:
        in_flight: The limiter that the slot belongs to.
        principal: Principal of the request; None: no revoked key cancels it.
    """

    def __init__(self, in_flight: InFlightLimiter, principal: Principal | None) -> None:
        self._limiter = in_flight
        self._principal = principal
        self._owners = () if principal is None else principal.owners

    def __enter__(self) -> Self:
        limiter = self._limiter
        if not limiter._slots:
            limiter._release_rate.restart(limiter._clock.monotonic_s())
            limiter._empty.clear()
        limiter._slots[self] = self._principal
        held = limiter._held
        for owner in self._owners:
            held[owner] = held.get(owner, 0) + 1
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        limiter = self._limiter
        del limiter._slots[self]
        held = limiter._held
        for owner in self._owners:
            if held[owner] == 1:
                del held[owner]
            else:
                held[owner] -= 1
        limiter._release_rate.on_release(limiter._clock.monotonic_s())
        if not limiter._slots:
            limiter._empty.set()
        super().__exit__(kind, error, traceback)


class ClientDisconnected(Exception):
    """The client closed the connection; nobody reads the response. This is not an error and gets no response."""
