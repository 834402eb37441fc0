"""How much of the KV cache each tenant can count on, and how much it can have.

Fair shares of the *steps* say nothing about who sits in the cache. A few long conversations can fill it, and whoever
comes next finds no room, however little it was served. So a tenant can have a *floor*, a part of the cache that others
leave to it while it waits, and a *ceiling*, beyond which it gets nothing even if the rest is idle.

Nothing is taken from anybody who holds it. What others took while a tenant was away they give back as their sequences
end; until then none of them grows into its floor. A floor that nobody asks for is lent to everybody.

How it stays alive: nobody may ask for more than `most` at once, its ceiling or what the floors of all others leave.
When the head of the line gets no room, only sequences inside their own floor (`entitled`) may pass it. So the others
run dry, and then there is room for the head, even with all floors full.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from maitred.core.flow import Flow
from maitred.engine.config import KVShareConfig


class _TenantBlocks:
    """Blocks of one tenant: those that it has, may have, and waits for."""

    __slots__ = ("blocks", "ceiling", "guaranteed", "waiting")

    def __init__(self, share: KVShareConfig, total: int) -> None:
        self.guaranteed = int(share.floor * total)
        self.ceiling = max(1, math.ceil(share.ceiling * total))
        self.blocks: Counter[int] = Counter()
        """Block -> how many of the tenant's sequences hold it; it counts once."""
        self.waiting = 0

    @property
    def unmet(self) -> int:
        """Blocks short of the floor."""
        return max(0, self.guaranteed - len(self.blocks))

    @property
    def reserved(self) -> int:
        """Blocks that others must leave to it now."""
        return self.unmet if self.waiting else 0


class KVShares:
    """Keeps floors and ceilings. All operations are O(1) per block and level of the flow's path.

    Tell it of every sequence that joins or leaves the waiting line, and of every block that a sequence gets or gives
    back; before blocks are taken ask for `reserved_blocks` and leave so many idle. Blocks that the tenant's other
    sequences hold already are not taken; those that are revived from the prefix cache are.

    Args:
        shares: By the id of a tenant: any level of a flow's path. Tenants without one have no floor and no ceiling.
        total_blocks: Blocks of the pool.
    """

    def __init__(self, shares: Mapping[str, KVShareConfig], total_blocks: int) -> None:
        self._total = total_blocks
        self._holdings = {tenant: _TenantBlocks(share, total_blocks) for tenant, share in shares.items()}
        self._guarantees = sum(holding.guaranteed for holding in self._holdings.values())
        self._reserved = 0
        """For all tenants together."""

    def on_join(self, flow: Flow) -> None:
        """One more sequence of the flow waits."""
        for holding in self._of(flow):
            self._reserved -= holding.reserved
            holding.waiting += 1
            self._reserved += holding.reserved

    def on_dequeue(self, flow: Flow) -> None:
        """One fewer sequence of the flow waits: it was admitted or cancelled."""
        for holding in self._of(flow):
            self._reserved -= holding.reserved
            holding.waiting -= 1
            self._reserved += holding.reserved

    def hold(self, flow: Flow, blocks: Iterable[int]) -> None:
        """A sequence of the flow now holds these blocks too."""
        for holding in self._of(flow):
            self._reserved -= holding.reserved
            holding.blocks.update(blocks)
            self._reserved += holding.reserved

    def release(self, flow: Flow, blocks: Iterable[int]) -> None:
        """A sequence of the flow no longer holds these."""
        for holding in self._of(flow):
            self._reserved -= holding.reserved
            for block in blocks:
                holding.blocks[block] -= 1
                if not holding.blocks[block]:
                    del holding.blocks[block]
            self._reserved += holding.reserved

    def held_blocks(self, tenant: str) -> int:
        """Blocks that a tenant with a share holds."""
        return len(self._holdings[tenant].blocks)

    def reserved_blocks(self, flow: Flow, idle: int) -> int:
        """How many of the idle blocks must stay idle when a sequence of the flow takes some; at most all of them."""
        return idle - self.available_blocks(flow, idle)

    def available_blocks(self, flow: Flow, idle: int) -> int:
        """How many of the idle blocks a sequence of the flow may take, to be admitted or to grow."""
        if not self._holdings:
            return idle
        own = self._of(flow)
        reserved = self._reserved - sum(holding.reserved for holding in own)
        entitled = max((holding.unmet for holding in own), default=0)
        headroom = min((holding.ceiling - len(holding.blocks) for holding in own), default=idle)
        return max(0, min(headroom, idle, max(entitled, idle - reserved)))

    def is_entitled(self, flow: Flow, blocks: int) -> bool:
        """Whether so many more blocks are inside the flow's own floor. If so, it may pass a head that finds no room."""
        return any(blocks <= holding.unmet for holding in self._of(flow))

    @property
    def active(self) -> bool:
        """Whether anybody has a share."""
        return bool(self._holdings)

    def is_capped(self, flow: Flow, blocks: int) -> bool:
        """Whether so many more blocks are beyond a ceiling, so that the flow waits for its own sequences to end."""
        return any(len(holding.blocks) + blocks > holding.ceiling for holding in self._of(flow))

    def protects(self, flow: Flow) -> bool:
        """Whether all that the flow holds is inside a floor, so that others must not take it."""
        return any(0 < len(holding.blocks) <= holding.guaranteed for holding in self._of(flow))

    def most(self, flow: Flow) -> int:
        """The most blocks that one sequence of the flow can ever hold. Refuse what needs more."""
        own = self._of(flow)
        others = self._guarantees - sum(holding.guaranteed for holding in own)
        return min(self._total - others, *(holding.ceiling for holding in own), self._total)

    def _of(self, flow: Flow) -> list[_TenantBlocks]:
        if not self._holdings:
            return []
        return [self._holdings[share.id] for share in flow.path if share.id in self._holdings]
