"""Prefixes that stay in the KV cache though no sequence holds them: pinned, for a time, by name.

A pin holds blocks as a sequence does, so nothing that evicts or preempts knows of it. What bounds it is here: the part
of the cache that all pins may hold, and those of one cache scope; its time; and that it goes before anybody would wait
for ever. When the head of the line finds no room although nothing runs, or the only sequence that runs finds none for
its next token, the pin that would end soonest is given up, and the next one, until there is room; and where a tenant's
ceiling is in the way of its own request, its own pins are.
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


class PinTable:
    """The pins of one pool.

    Args:
        pool: Whose blocks they hold.
        residency: Counts them for their tenants.
        config: How much of the pool they may hold.
        block_tokens: Tokens per block.

    Attributes:
        blocks: That any pin holds; each step's report says so.
        given_up: Pins that went before their time because somebody would have waited for ever.
    """

    def __init__(self, pool: BlockPool, residency: KVShares, config: PinsConfig, block_tokens: int) -> None:
        self._pool = pool
        self._residency = residency
        self._most = int(config.share * pool.total)
        self._most_each = int(config.share_each * pool.total)
        self._block_tokens = block_tokens
        self._pins: dict[tuple[str, str], _Pin] = {}
        """By cache scope and name."""
        self.blocks = 0
        self.given_up = 0

    def check(self, request: EngineRequest) -> None:
        """Raises ValueError, with the reason, if the request asks for a pin that can not be had."""
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

    def hold(self, request: EngineRequest, blocks: Iterable[int], now_s: float) -> None:
        """Holds the blocks of a prompt that has been computed. A pin of that name is replaced.

        What others have pinned since it was checked makes no difference: then pins of this scope go that end sooner.
        """
        assert request.pin is not None
        key = (request.cache_scope, request.pin.name)
        pin = _Pin(tuple(blocks), request.flow, now_s + request.pin.ttl_s)
        self._pool.share(pin.blocks)
        self._residency.hold(pin.flow, pin.blocks)
        self.release(*key)
        self._pins[key] = pin
        self.blocks = self._distinct(self._pins)
        while self.blocks > self._most or self._distinct(k for k in self._pins if k[0] == key[0]) > self._most_each:
            soonest = min((k for k in self._pins if k[0] == key[0]), key=lambda k: self._pins[k].until_s)
            self.given_up += 1
            self.release(*soonest)

    def release(self, scope: str, name: str) -> None:
        """Lets go of a pin; unknown names are ignored: it may be over already."""
        pin = self._pins.pop((scope, name), None)
        if pin is not None:
            self._pool.free(pin.blocks)
            self._residency.release(pin.flow, pin.blocks)
            self.blocks = self._distinct(self._pins)

    def ends_in_s(self, now_s: float) -> float | None:
        """When the next one is over; None: there is none."""
        return max(0.0, min(pin.until_s for pin in self._pins.values()) - now_s) if self._pins else None

    def expire(self, now_s: float) -> None:
        """Lets go of those whose time is over."""
        for key in [key for key, pin in self._pins.items() if pin.until_s <= now_s]:
            self.release(*key)

    def clear(self) -> None:
        """Lets go of all."""
        for key in list(self._pins):
            self.release(*key)

    def evict(self, flow: Flow | None = None) -> bool:
        """Gives up the pin that would end soonest; False if there is none.

        Args:
            flow: Only pins of its tenants; None: anybody's.
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
