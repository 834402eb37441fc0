"""Minimum (floor) and maximum (ceiling) of the KV blocks that each tenant can hold.

Fair shares of the *steps* do not limit the KV blocks of a tenant. A few long conversations can fill the cache. Then the
next tenant finds no free blocks, even if it got little service. So a tenant can have a *floor* and a *ceiling*. The
floor is a part of the cache that others leave free for it while it waits. The ceiling is the most that it can hold,
even if the rest is idle.

A floor takes no blocks from running sequences. Blocks that others took while a tenant was idle are returned as their
sequences end. Until then, no other sequence grows into its floor. An unused floor is available to all tenants.

Progress is guaranteed as follows: a sequence may need at most `most` blocks, which is its ceiling, or what the floors
of all other tenants leave. When the head of the waiting queue finds no blocks, only sequences inside their own floor
(`is_entitled`) may pass it. So the other tenants release their blocks over time, and then the head finds blocks even if
all floors are in use.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from maitred.core.flow import Flow
from maitred.engine.config import KVShareConfig


class _TenantBlocks:
    """Block counts of one tenant: held blocks, floor, ceiling and waiting sequences."""

    __slots__ = ("blocks", "ceiling", "guaranteed", "waiting")

    def __init__(self, share: KVShareConfig, total: int) -> None:
        self.guaranteed = int(share.floor * total)
        self.ceiling = max(1, math.ceil(share.ceiling * total))
        self.blocks: Counter[int] = Counter()
        """Block -> number of the tenant's sequences that hold it; the block counts once."""
        self.waiting = 0

    @property
    def unmet(self) -> int:
        """Number of blocks that are missing to the floor."""
        return max(0, self.guaranteed - len(self.blocks))

    @property
    def reserved(self) -> int:
        """Number of blocks that others must leave free for the tenant now."""
        return self.unmet if self.waiting else 0


class KVShares:
    """Floors and ceilings of all tenants. All operations are O(1) per block and level of the flow's path.

    Report every sequence that joins or leaves the waiting queue, and every block that a sequence gets or frees. Before
    blocks are taken, call `reserved_blocks` and leave that number idle. Blocks that other sequences of the tenant
    already hold do not count as taken; blocks revived from the prefix cache do.

    Args:
        shares: Shares by tenant id, at any level of a flow's path. Other tenants have no floor and no ceiling.
        total_blocks: Blocks of the pool.
    """

    def __init__(self, shares: Mapping[str, KVShareConfig], total_blocks: int) -> None:
        self._total = total_blocks
        self._holdings = {tenant: _TenantBlocks(share, total_blocks) for tenant, share in shares.items()}
        self._guarantees = sum(holding.guaranteed for holding in self._holdings.values())
        self._reserved = 0
        """Number of reserved blocks of all tenants together."""

    def on_join(self, flow: Flow) -> None:
        """Notes that one more sequence of the flow waits."""
        for holding in self._of(flow):
            self._reserved -= holding.reserved
            holding.waiting += 1
            self._reserved += holding.reserved

    def on_dequeue(self, flow: Flow) -> None:
        """Notes that one fewer sequence of the flow waits: it was admitted or cancelled."""
        for holding in self._of(flow):
            self._reserved -= holding.reserved
            holding.waiting -= 1
            self._reserved += holding.reserved

    def hold(self, flow: Flow, blocks: Iterable[int]) -> None:
        """Notes that a sequence of the flow now holds these blocks."""
        for holding in self._of(flow):
            self._reserved -= holding.reserved
            holding.blocks.update(blocks)
            self._reserved += holding.reserved

    def release(self, flow: Flow, blocks: Iterable[int]) -> None:
        """Notes that a sequence of the flow no longer holds these blocks."""
        for holding in self._of(flow):
            self._reserved -= holding.reserved
            for block in blocks:
                holding.blocks[block] -= 1
                if not holding.blocks[block]:
                    del holding.blocks[block]
            self._reserved += holding.reserved

    def held_blocks(self, tenant: str) -> int:
        """Returns the number of blocks that a tenant with a share holds."""
        return len(self._holdings[tenant].blocks)

    def reserved_blocks(self, flow: Flow, idle: int) -> int:
        """Returns how many idle blocks a sequence of the flow must leave idle; at most all of them."""
        return idle - self.available_blocks(flow, idle)

    def available_blocks(self, flow: Flow, idle: int) -> int:
        """Returns how many idle blocks a sequence of the flow may take, to be admitted or to grow."""
        if not self._holdings:
            return idle
        own = self._of(flow)
        reserved = self._reserved - sum(holding.reserved for holding in own)
        entitled = max((holding.unmet for holding in own), default=0)
        headroom = min((holding.ceiling - len(holding.blocks) for holding in own), default=idle)
        return max(0, min(headroom, idle, max(entitled, idle - reserved)))

    def is_entitled(self, flow: Flow, blocks: int) -> bool:
        """Returns whether this number of further blocks is inside the flow's own floor.

        If so, the sequence may pass a head of the queue that finds no blocks.
        """
        return any(blocks <= holding.unmet for holding in self._of(flow))

    @property
    def active(self) -> bool:
        """Whether any tenant has a share."""
        return bool(self._holdings)

    def is_capped(self, flow: Flow, blocks: int) -> bool:
        """Returns whether further blocks exceed a ceiling, so that the flow waits for its own sequences."""
        return any(len(holding.blocks) + blocks > holding.ceiling for holding in self._of(flow))

    def protects(self, flow: Flow) -> bool:
        """Returns whether all blocks of the flow are inside a floor, so that others must not take them."""
        return any(0 < len(holding.blocks) <= holding.guaranteed for holding in self._of(flow))

    def most(self, flow: Flow) -> int:
        """Returns the maximum blocks that one sequence of the flow can ever hold.

        Requests that need more must be refused.
        """
        own = self._of(flow)
        others = self._guarantees - sum(holding.guaranteed for holding in own)
        return min(self._total - others, *(holding.ceiling for holding in own), self._total)

    def _of(self, flow: Flow) -> list[_TenantBlocks]:
        if not self._holdings:
            return []
        return [self._holdings[share.id] for share in flow.path if share.id in self._holdings]
