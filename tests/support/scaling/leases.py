"""Stores of scalers' leases and of their demand in memory, which can be away and slow."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from maitred.core.errors import StoreUnavailable
from maitred.store.scaling.demand import GatewayDemand
from maitred.store.scaling.lease import ScalerLease, StoredDecision


class PaperLeases:
    """Does what `ScalerLeases` does."""

    def __init__(self, clock) -> None:
        self.leases: dict[str, ScalerLease] = {}
        self.written: list[tuple[str, int, int, bytes]] = []
        """Owner, epoch, desired number and decision of all that was written."""
        self.away = False
        self.on_write = lambda: None
        self._clock = clock

    async def read(self, pool: str) -> ScalerLease:
        self._check()
        return self.leases.get(pool, ScalerLease(pool=pool))

    async def take(self, seen: ScalerLease, owner: str, after_epoch: int = 0) -> ScalerLease | None:
        now = await self.read(seen.pool)
        if (now.epoch, now.renewals) != (seen.epoch, seen.renewals):
            return None
        self.leases[seen.pool] = replace(now, owner=owner, epoch=max(now.epoch, after_epoch) + 1, renewals=0)
        return self.leases[seen.pool]

    async def renew(self, lease: ScalerLease) -> ScalerLease | None:
        now = await self.read(lease.pool)
        if now.epoch != lease.epoch:
            return None
        self.leases[lease.pool] = replace(now, renewals=now.renewals + 1)
        return self.leases[lease.pool]

    async def decide(self, lease: ScalerLease, desired: int, asleep: int, decision: bytes) -> ScalerLease | None:
        renewed = await self.renew(lease)
        if renewed is None:
            return None
        self.leases[lease.pool] = replace(renewed, desired=desired, asleep=asleep)
        self.written.append((renewed.owner, renewed.epoch, desired, decision))
        self.on_write()
        return self.leases[lease.pool]

    async def set_override(self, pool: str, replicas: int | None, until_s: float | None) -> None:
        now = await self.read(pool)
        self.leases[pool] = replace(now, override_replicas=replicas, override_until_s=until_s)

    async def decisions(self, pool: str, *, before: int | None = None, limit: int = 100) -> Sequence[StoredDecision]:
        self._check()
        rows = [StoredDecision(row, 0.0, epoch, data) for row, (_, epoch, _, data) in enumerate(self.written, 1)]
        return [row for row in reversed(rows) if before is None or row.id < before][:limit]

    def _check(self) -> None:
        if self.away:
            raise StoreUnavailable


class PaperExchange:
    """Does what `DemandExchange` does."""

    def __init__(self) -> None:
        self.told: dict[tuple[str, str], GatewayDemand] = {}
        self.away: set[str] = set()
        """Gateways that do not reach it."""

    async def exchange(self, pool: str, own: GatewayDemand) -> Sequence[GatewayDemand]:
        if own.gateway in self.away:
            raise StoreUnavailable
        self.told[pool, own.gateway] = own
        return [one for (of, gateway), one in self.told.items() if of == pool and gateway != own.gateway]

    async def remove(self, pool: str, gone: Mapping[str, int]) -> None:
        for gateway, sequence in gone.items():
            if self.told[pool, gateway].sequence == sequence:
                del self.told[pool, gateway]
