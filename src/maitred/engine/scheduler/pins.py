"""Pinned prefixes: named prefixes that stay in the KV cache for a time without a sequence.

A pin holds blocks as a sequence does, so the code for eviction and preemption needs no special case. This module limits
pins: the share of the cache for all pins and for the pins of one cache scope, the time of a pin, and early release
before any sequence would wait forever. Pins are released early in two cases: the head of the waiting queue finds no
blocks although no sequence runs, or the only running sequence finds no block for its next token. Then the pin with the
earliest end is released, and the next ones, until there are enough blocks. If a tenant's ceiling blocks its own
request, its own pins are released.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from maitred.core.flow import Flow
from maitred.core.request import EngineRequest
from maitred.engine.config import PinsConfig
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.kv_shares import KVShares


@dataclass(frozen=True, slots=True)
class _Pin:
    blocks: tuple[int, ...]
    flow: Flow
    until_s: float
    of_window: tuple[int, ...]
    """Blocks of the layers with a window at the end of the prefix."""


class PinTable:
    """Table of the pins in one block pool.

    Args:
        pool: Pool of the blocks that the pins hold.
        residency: Counts the pinned blocks for their tenants.
        config: Limits of the pins' share of the pool.
        block_tokens: Tokens per block.

    Attributes:
        blocks: Number of blocks that the pins hold, for the load report.
        given_up: Number of pins that were released early because a sequence would have waited forever.
    """

    def __init__(self, pool: BlockPool, residency: KVShares, config: PinsConfig, block_tokens: int) -> None:
        self._pool = pool
        self._residency = residency
        self._most = int(config.share * pool.total)
        self._most_each = int(config.share_each * pool.total)
        self._block_tokens = block_tokens
        self._pins: dict[tuple[str, str], _Pin] = {}
        """Cache scope and name -> pin."""
        self.blocks = 0
        self.given_up = 0

    def check(self, request: EngineRequest) -> None:
        """Raises ValueError, with the reason, if the pin of a request is impossible."""
        if request.pin is None:
            return
        if not self._most:
            raise ValueError("Nothing can be pinned here: engine.prefix_cache is off, or engine.pins.share is 0.")
        blocks = len(request.prompt) // self._block_tokens
        if not blocks:
            raise ValueError(
                f"The prefix has {len(request.prompt)} tokens; only whole blocks of {self._block_tokens} are pinned."
            )
        scope, own = request.cache_scope, (request.cache_scope, request.pin.name)
        others = [key for key in self._pins if key != own]
        for most, held, owner in (
            (self._most_each, self._distinct(key for key in others if key[0] == scope), "of this tenant"),
            (self._most, self._distinct(others), "of all tenants together"),
        ):
            if held + blocks > most:
                raise ValueError(
                    f"The prefix takes {blocks} blocks; the pins {owner} may hold {most}, of which {held} are taken. "
                    "Unpin another prefix, pin a shorter one, or raise engine.pins."
                )

    def hold(self, request: EngineRequest, blocks: Iterable[int], now_s: float, of_window: Iterable[int] = ()) -> None:
        """Pins the blocks of a computed prompt. An existing pin with the same name is replaced.

        If other pins were added since `check`, pins of this scope that end sooner are released to make room. Of the
        blocks of layers with a window, pins hold what running sequences can spare; a prefix without them is computed
        again if they are evicted.
        """
        assert request.pin is not None
        key = (request.cache_scope, request.pin.name)
        window, kept = self._pool.window, tuple(of_window)
        if (
            window is None
            or len({*kept, *(b for pin in self._pins.values() for b in pin.of_window)}) > window.pin_blocks
        ):
            kept = ()
        pin = _Pin(tuple(blocks), request.flow, now_s + request.pin.ttl_s, kept)
        self._pool.share(pin.blocks)
        if window is not None:
            window.pool.share(pin.of_window)
        self._residency.hold(pin.flow, pin.blocks)
        self.release(*key)
        self._pins[key] = pin
        self.blocks = self._distinct(self._pins)
        while self.blocks > self._most or self._distinct(k for k in self._pins if k[0] == key[0]) > self._most_each:
            soonest = min((k for k in self._pins if k[0] == key[0]), key=lambda k: self._pins[k].until_s)
            self.given_up += 1
            self.release(*soonest)

    def release(self, scope: str, name: str) -> None:
        """Releases a pin; an unknown name is ignored, because the pin may have expired."""
        pin = self._pins.pop((scope, name), None)
        if pin is not None:
            self._pool.free(pin.blocks)
            if self._pool.window is not None:
                self._pool.window.pool.free(pin.of_window)
            self._residency.release(pin.flow, pin.blocks)
            self.blocks = self._distinct(self._pins)

    def ends_in_s(self, now_s: float) -> float | None:
        """Returns the seconds until the next pin expires; None: there are no pins."""
        return max(0.0, min(pin.until_s for pin in self._pins.values()) - now_s) if self._pins else None

    def expire(self, now_s: float) -> None:
        """Releases all pins whose time is over."""
        for key in [key for key, pin in self._pins.items() if pin.until_s <= now_s]:
            self.release(*key)

    def clear(self) -> None:
        """Releases all pins at once."""
        for key in list(self._pins):
            self.release(*key)

    def evict(self, flow: Flow | None = None) -> bool:
        """Releases the pin with the earliest end; returns False if there is none.

        Args:
            flow: Flow whose tenants' pins are considered; None: all pins.
        """
        theirs = None if flow is None else {share.id for share in flow.path}
        found = [
            (pin.until_s, key)
            for key, pin in self._pins.items()
            if theirs is None or theirs & {share.id for share in pin.flow.path}
        ]
        if not found:
            return False
        self.release(*min(found)[1])
        self.given_up += 1
        return True

    def _distinct(self, keys: Iterable[tuple[str, str]]) -> int:
        return len({block for key in keys for block in self._pins[key].blocks})
