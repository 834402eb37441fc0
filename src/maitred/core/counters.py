"""Reserve, clamp, settle: how limits and budgets are counted so that no race can overspend them.

A request *reserves* the most that it can use, in every counter that holds for it, in one atomic step: all or nothing.
Its reservation is a *lease*. When the request ends it *settles*: what it really used is charged, the rest goes back at
once. A lease that is not settled, because its gateway died, expires and gives everything back.

There are three sorts of counters::

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
    """How large a request is, before anything is generated."""

    prompt_tokens: int = 0
    """Of all prompts together."""
    choices: int = 1
    """Answers to all prompts together; each may have as many tokens as are reserved."""


_ANY_SIZE = RequestSize()


class LimitClaim(msgspec.Struct, frozen=True):
    """Claim of a request on one counter, as a function of its size and of its output.

    The amount is ``ceil((fixed + per_prompt * prompt_tokens + per_output * choices * output) / divisor)``. So the same
    claim serves all requests of one sort, and nothing needs to be made for each of them.
    """

    counter: str
    """Name of the counter. Budgets have a window in theirs, so that a new window is a new counter."""
    kind: CounterKind
    capacity: int
    fixed: int
    per_output: int = 0
    divisor: int = 1
    refill_per_s: float = 0.0
    """Of a bucket."""
    ends_s: float | None = None
    """Of a budget: wall time at which its window ends; None: never."""
    hard: bool = True
    """A claim that is not hard never refuses or clamps; it only counts."""
    clamps: bool = False
    """Whether `output` may be lowered to make it fit; otherwise it fits as asked or is denied."""
    per_prompt: int = 0

    def amount(self, output: int, size: RequestSize = _ANY_SIZE) -> int:
        """Returns the amount that so much output of each choice takes."""
        exact = self.fixed + self.per_prompt * size.prompt_tokens + self.per_output * size.choices * output
        return -(-exact // self.divisor)

    def of(self, size: RequestSize) -> "LimitClaim":
        """Returns the claim for requests of one size."""
        return LimitClaim(
            self.counter,
            self.kind,
            self.capacity,
            self.fixed + self.per_prompt * size.prompt_tokens,
            self.per_output * size.choices,
            self.divisor,
            self.refill_per_s,
            self.ends_s,
            self.hard,
            self.clamps,
        )


class CounterState(msgspec.Struct, frozen=True):
    """The state of one counter."""

    capacity: int
    remaining: int
    """What could be reserved now; negative when settling took more than there was."""
    reset_s: float
    """Seconds until it is full again, or until the window ends; 0 when it is full or nothing is known."""
    used: int = 0
    """Of a budget: charged. Of a pool: reserved. Of a bucket: missing from it."""
    reserved: int = 0
    """Of a budget: held by requests that run."""


class ReservationGranted(msgspec.Struct, frozen=True):
    """The lease is held."""

    output: int
    """What may be generated: as asked, or less."""
    readings: list[CounterState]
    """After the reservation, in the order of the claims."""


class ReservationDenied(msgspec.Struct, frozen=True):
    """Denial of a reservation: nothing was taken."""

    claim: int
    """Index of the claim that has no room; of several, the one that will have room last."""
    readings: list[CounterState]
    retry_after_s: float | None
    """When there will be room if nobody else comes; None: never by waiting, or nobody knows."""


class Reservation(msgspec.Struct, frozen=True):
    """Reservation of several claims under one lease."""

    lease: str
    """Unique. Reserving twice under one id is a fault of ours."""
    claims: Sequence[LimitClaim]
    output: int
    """Output tokens that are wanted of each choice."""
    least_output: int
    """Fewer than this are of no use: deny instead of clamping below it. At most `output`."""
    lease_s: float
    """The lease ends so long after it was made or last renewed."""
    size: RequestSize = _ANY_SIZE

    def spelt_out(self) -> "Reservation":
        """Returns the reservation with claims that hold the size themselves, to be passed on."""
        claims = [claim.of(self.size) for claim in self.claims]
        return Reservation(self.lease, claims, self.output, self.least_output, self.lease_s)


class Counters(Protocol):
    """Counts. Every method is atomic, and safe under any number of concurrent callers."""

    @property
    def healthy(self) -> bool:
        """Whether everything that is shared can be reached."""
        ...

    @property
    def settles_immediately(self) -> bool:
        """Whether settling never waits for anybody, because everything is counted in this process."""
        ...

    async def reserve(self, reservation: Reservation) -> ReservationGranted | ReservationDenied:
        """Takes all claims or none.

        Raises:
            StoreUnavailable: A shared store is away, and what this gateway holds of it in advance is used up.
        """
        ...

    async def settle(self, lease: str, amounts: Mapping[str, int]) -> None:
        """Ends a lease and charges what was used; settling a second time changes nothing.

        A lease that expired before is charged all the same: usage counts even if it comes late.

        Args:
            lease: Its id.
            amounts: Counter -> what was really used. A counter of the lease that is missing here used nothing.
        """
        ...

    async def renew(self, leases: Sequence[str], lease_s: float) -> None:
        """Puts off the end of these leases; unknown ones are passed over."""
        ...

    async def read(self, claims: Sequence[LimitClaim]) -> list[CounterState]:
        """The state of these counters; nothing is taken."""
        ...
