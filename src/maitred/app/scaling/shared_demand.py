"""Shared demand: what all gateways of a pool ask of its replicas, told through the database."""

import logging
from collections.abc import Iterator, Sequence

import msgspec

from maitred.core.clock import Clock
from maitred.core.errors import StoreUnavailable
from maitred.scaling.demand import Demand
from maitred.scaling.demand_sum import DemandSum
from maitred.store.scaling.demand import DemandExchange, GatewayDemand

_REMOVED_S = 60.0
"""Time in seconds without news of a gateway after which what it has told is removed."""

_log = logging.getLogger(__name__)


class SharedDemand:
    """Demand of all gateways that share one pool.

    While the database is away, the others count as they were for a few seconds, and then only this gateway does. What
    arrives meanwhile is told later.

    Args:
        exchange: Store of the demands.
        pool: The pool.
        gateway: Name of this process, which no other one has.
        clock: The clock.
    """

    def __init__(self, exchange: DemandExchange, pool: str, gateway: str, clock: Clock) -> None:
        self._exchange = exchange
        self._pool = pool
        self._gateway = gateway
        self._clock = clock
        self._sum = DemandSum()
        self._sequence = 0

    async def add_others(self, own: Demand) -> Demand:
        """Tells the demand of this gateway; returns it together with that of the others."""
        self._sequence += 1
        told = msgspec.msgpack.encode(self._sum.tell(own))
        try:
            others = await self._exchange.exchange(self._pool, GatewayDemand(self._gateway, self._sequence, told))
            now_s = self._clock.monotonic_s()
            self._sum.hear(_read(others), now_s)
            if gone := self._sum.silent(_REMOVED_S, now_s):
                await self._exchange.remove(self._pool, gone)
        except StoreUnavailable as error:
            _log.debug("The demand for %s was not told to other gateways: %s", self._pool, error)
        return self._sum.add(own, self._clock.monotonic_s())


def _read(others: Sequence[GatewayDemand]) -> Iterator[tuple[str, int, Demand]]:
    for told in others:
        try:
            demand = msgspec.msgpack.decode(told.demand, type=Demand)
        except msgspec.DecodeError:
            _log.debug("Another version has written the demand of %s.", told.gateway)
            continue
        yield told.gateway, told.sequence, demand
