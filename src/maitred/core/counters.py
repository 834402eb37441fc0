"""Counters of limits and budgets: reserve, clamp, settle, so that no race can overspend them.

A request *reserves* the maximum that it can use in every counter that applies to it, in one atomic step: all or
nothing. The reservation is a *lease*. When the request ends, it *settles*: the counters charge what it really used and
free the rest at once. If the gateway dies before it settles a lease, the lease expires and everything is given back.

There are three kinds of counters::

    BUCKET   a rate: `capacity` tokens at most, refilled continuously. Reserving takes; settling gives back what was
             not used (or takes more, when an estimate was too low: the level may become negative).
    POOL     at one time: the sum of what is reserved stays within `capacity`. Settling frees all of it.
    BUDGET   in one window: what was charged plus what is reserved stays within `capacity`. Settling charges.

`Counters` is implemented in memory for one gateway and on Redis for several; `maitred.testing.counters_conformance`
holds both to the same rules.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec


class CounterKind(StrEnum):
    """How a counter counts."""

    BUCKET = "bucket"
    POOL = "pool"
    BUDGET = "budget"


class RequestSize(msgspec.Struct, frozen=True):
    """Size of a request before anything is generated."""

    prompt_tokens: int = 0
    """Number of tokens of all prompts together."""
    choices: int = 1
    """Number of choices of all prompts together; each may have as many tokens as are reserved."""


_ANY_SIZE = RequestSize()


class LimitClaim(msgspec.Struct, frozen=True):
    """Claim of a request on one counter, as a function of its size and of its output.

    The amount is ``ceil((fixed + per_prompt * prompt_tokens + per_output * choices * output) / divisor)``. Therefore
    all requests of one kind share one claim object, and no object is built for each request.
    """

    counter: str
    """Name of the counter. The name of a budget contains its window, so a new window is a new counter."""
    kind: CounterKind
    capacity: int
    fixed: int
    per_output: int = 0
    divisor: int = 1
    refill_per_s: float = 0.0
    """Refill rate of a bucket, per second."""
    ends_s: float | None = None
    """Wall time at which the window of a budget ends; None: never."""
    hard: bool = True
    """Whether the claim can refuse or clamp; a soft claim only counts."""
    clamps: bool = False
    """Whether `output` may be lowered to fit; otherwise the claim fits as asked or is denied."""
    per_prompt: int = 0

    def amount(self, output: int, size: RequestSize = _ANY_SIZE) -> int:
        """Returns the claimed amount for a number of output tokens per choice."""
        exact = self.fixed + self.per_prompt * size.prompt_tokens + self.per_output * size.choices * output
        return -(-exact // self.divisor)

    def of(self, size: RequestSize) -> "LimitClaim":
        """Returns the claim for requests of one size."""
        return LimitClaim(
            counter=self.counter,
            kind=self.kind,
            capacity=self.capacity,
            fixed=self.fixed + self.per_prompt * size.prompt_tokens,
            per_output=self.per_output * size.choices,
            divisor=self.divisor,
            refill_per_s=self.refill_per_s,
            ends_s=self.ends_s,
            hard=self.hard,
            clamps=self.clamps,
        )


class CounterState(msgspec.Struct, frozen=True):
    """The state of one counter."""

    capacity: int
    remaining: int
    """Amount that can be reserved now; negative if settling took more than there was."""
    reset_s: float
    """Seconds until the counter is full or the window ends; 0 if it is full or unknown."""
    used: int = 0
    """Used amount: of a budget, the charged one. Of a pool, the reserved one. Of a bucket, the missing one."""
    reserved: int = 0
    """Amount of a budget that is reserved by running requests."""


class ReservationGranted(msgspec.Struct, frozen=True):
    """The granted lease of a reservation."""

    output: int
    """Granted output tokens of each choice: as asked, or fewer."""
    readings: list[CounterState]
    """States of the counters after the reservation, in the order of the claims."""


class ReservationDenied(msgspec.Struct, frozen=True):
    """Denial of a reservation: nothing was taken."""

    claim: int
    """Index of the claim that has no room; if several have none, the one with the longest wait."""
    readings: list[CounterState]
    retry_after_s: float | None
    """Seconds until there is room without other requests; None: waiting cannot help, or unknown."""


class Reservation(msgspec.Struct, frozen=True):
    """Reservation of several claims under one lease."""

    lease: str
    """Unique id of the lease. Two reservations with the same id are a bug."""
    claims: Sequence[LimitClaim]
    output: int
    """Requested output tokens of each choice."""
    least_output: int
    """Lower bound of clamping: below it the reservation is denied. The bound is at most `output`."""
    lease_s: float
    """Lifetime of the lease in seconds after it was made or last renewed."""
    size: RequestSize = _ANY_SIZE

    def spelt_out(self) -> "Reservation":
        """Returns the reservation with the request size inside each claim, to send it on."""
        claims = [claim.of(self.size) for claim in self.claims]
        return Reservation(self.lease, claims, self.output, self.least_output, lease_s=self.lease_s)


class Counters(Protocol):
    """Interface of the counters. Every method is atomic and safe for concurrent callers."""

    @property
    def healthy(self) -> bool:
        """Whether all shared stores can be reached."""
        ...

    @property
    def settles_immediately(self) -> bool:
        """Whether settling never waits, because all counters are in this process."""
        ...

    async def reserve(self, reservation: Reservation) -> ReservationGranted | ReservationDenied:
        """Reserves all claims or none.

        Raises:
            StoreUnavailable: A shared store cannot be reached, and the share that this gateway reserved in advance is
                used up.
        """
        ...

    async def resume(self, reservation: Reservation) -> Sequence[CounterState]:
        """Takes over the lease of a running request that a dead process was granted, whether it fits or not.

        Returns:
            The states of the counters; empty if they are unknown.

        Raises:
            StoreUnavailable: The charged total of a budget cannot be read.
        """
        ...

    async def settle(self, lease: str, amounts: Mapping[str, int]) -> None:
        """Ends a lease and charges the used amounts; a second call changes nothing.

        An expired lease is charged too: late usage still counts.

        Args:
            lease: Id of the lease.
            amounts: Counter name -> amount that was really used. A counter of the lease that is missing here used
                nothing.
        """
        ...

    async def renew(self, leases: Sequence[str], lease_s: float) -> None:
        """Extends these leases; unknown ids are ignored."""
        ...

    async def read(self, claims: Sequence[LimitClaim]) -> list[CounterState]:
        """Returns the states of these counters without reserving anything."""
        ...
