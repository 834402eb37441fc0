"""Claim of a gateway on the lease of a pool: it finds out whether this gateway decides on its replicas.

Time is counted on this gateway's monotonic clock alone. The owner renews its lease several times before another one
may take it. Another gateway takes it when it has seen no renewal for `_TTL_S`. While the database is away, nobody can
renew, so this time begins anew when it is back.
"""

import asyncio
import logging

from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable
from maitred.fleet.backend import LeasedBackend
from maitred.store.scaling.lease import ScalerLease, ScalerLeases

_TTL_S = 15.0
"""Time in seconds without a renewal after which a lease is taken by another gateway."""
_RENEWALS = 3
"""Renewals of a lease before another gateway would take it."""

_CHECK_S = 1.0
"""Time between two looks of `hold_lease`; the claim itself decides when the database is asked."""

_log = logging.getLogger(__name__)


class LeaseClaim:
    """Claim on the lease of one pool.

    Args:
        leases: Store of the leases.
        pool: The pool.
        owner: Name of this process, which no other one has. A lease that has it was taken by this process, and only the
            answer was lost.
        clock: The clock.
        former_owner: Name of a process that is known to be gone; empty: there is none.

    Attributes:
        owner: See above.
        leases: See above.
        lease: The lease as it was last seen.
        is_away: Whether the database did not answer the last time.
    """

    def __init__(self, leases: ScalerLeases, pool: str, owner: str, clock: Clock, *, former_owner: str = "") -> None:
        self.owner = owner
        self.leases = leases
        self._former_owner = former_owner
        self._clock = clock
        self.lease = ScalerLease(pool=pool)
        self._has_taken = False
        self._renewed_s = float("-inf")
        self._checked_s = float("-inf")
        self._unchanged_since_s: float | None = None
        self.is_away = False
        self._lock = asyncio.Lock()
        """Orders what the scaler and an operator ask of the database at the same time."""

    @property
    def is_held(self) -> bool:
        """Whether no other gateway can have taken the lease yet."""
        return self._has_taken and self._clock.monotonic_s() - self._renewed_s < _TTL_S

    @property
    def epoch(self) -> int | None:
        """Epoch in which this gateway may give orders; None: it may give none."""
        return self.lease.epoch if self.is_held else None

    async def hold(self) -> bool:
        """Renews the lease, or takes it, if that is due; returns whether this gateway decides now."""
        if self._clock.monotonic_s() - self._checked_s >= _TTL_S / _RENEWALS:
            await self.refresh()
        return self.is_held

    async def refresh(self) -> None:
        """Renews the lease, or looks who has it, now."""
        async with self._lock:
            await self._refresh()

    async def _refresh(self) -> None:
        began_s = self._checked_s = self._clock.monotonic_s()
        try:
            if self._has_taken:
                self._update(await self.leases.renew(self.lease), began_s)
            if not self._has_taken:
                await self._watch(began_s)
        except StoreUnavailable as error:
            self._on_away(error)
        else:
            self.is_away = False

    async def seize(self, after_epoch: int = 0) -> bool:
        """Takes the lease from whoever has it, for an operator's order; returns whether this gateway has it now.

        Args:
            after_epoch: An epoch that somebody has seen; that of this gateway is later then.
        """
        async with self._lock:
            began_s = self._clock.monotonic_s()
            try:
                seen = await self.leases.read(self.lease.pool)
                taken = await self.leases.take(seen, self.owner, after_epoch)
            except StoreUnavailable as error:
                self._on_away(error)
                return False
            if taken is not None:
                self._on_taken(taken, began_s)
            return self.is_held

    async def decide(self, desired: int, asleep: int, decision: bytes) -> bool:
        """Writes a decision; returns whether it may be carried out.

        It may not if the lease has another owner, if the database is away, or if writing took so long that the lease
        may have another owner since.
        """
        async with self._lock:
            began_s = self._clock.monotonic_s()
            try:
                self._update(await self.leases.decide(self.lease, desired, asleep, decision), began_s)
            except StoreUnavailable as error:
                self._on_away(error)
                return False
            self.is_away = False
            return self.is_held

    def _update(self, lease: ScalerLease | None, began_s: float) -> None:
        """Takes over the result of a renewal that was begun at this time."""
        if lease is None:
            _log.warning("Another gateway decides on the replicas of %s now.", self.lease.pool)
            self._has_taken, self._unchanged_since_s = False, None
        else:
            self.lease, self._renewed_s = lease, began_s

    async def _watch(self, now_s: float) -> None:
        seen, lease = self.lease, await self.leases.read(self.lease.pool)
        self.lease = lease
        if (seen.epoch, seen.renewals) != (lease.epoch, lease.renewals) or self._unchanged_since_s is None:
            self._unchanged_since_s = now_s
        if lease.owner not in ("", self.owner, self._former_owner) and now_s - self._unchanged_since_s < _TTL_S:
            return
        taken = await self.leases.take(lease, self.owner)
        if taken is not None:
            self._on_taken(taken, now_s)

    def _on_taken(self, taken: ScalerLease, began_s: float) -> None:
        _log.info("This gateway decides on the replicas of %s from now on (epoch %d).", taken.pool, taken.epoch)
        self.lease, self._has_taken, self._renewed_s = taken, True, began_s

    def _on_away(self, error: StoreUnavailable) -> None:
        self._unchanged_since_s = None
        if not self.is_away:
            self.is_away = True
            _log.warning(
                "The replicas of %s stay as they are, because the database is away: %s", self.lease.pool, error
            )


async def hold_lease(claim: LeaseClaim, backend: LeasedBackend) -> None:
    """Holds the lease for as long as this gateway runs, so that one gateway gives orders to the backend.

    Agents may know a later epoch than the database, if that is a new one or an older copy. They would refuse every
    order, so a gateway that holds the lease by a renewal that is later than their news begins an epoch after that.
    """
    backend.epoch = lambda: claim.epoch
    while True:
        try:
            await claim.hold()
            backend.check_lease()
            if claim.epoch is not None and (seen := backend.latest_epoch) > claim.epoch:
                await claim.refresh()
                if claim.epoch is not None and seen > claim.epoch:
                    _log.warning("Agents know the epoch %d, and the database only %d.", seen, claim.epoch)
                    await claim.seize(after_epoch=seen)
                    backend.check_lease()
        except Exception:  # without this task, no order would ever be given again
            _log.exception("The lease of %s cannot be looked at; this is tried again.", claim.lease.pool)
        await asyncio.sleep(_CHECK_S)
