"""Cache of answers and embeddings: the owner that uses most of it makes room, in an order that is learnt.

It is fair as `maitred.core.shared_cache` is, whose calls take half the time and whose entries half the memory,
and which evicts the least recently used. This one is for values that cost much more than that to make again. Entries
may expire.
"""

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Generic, TypeVar

from maitred.cache.eviction import CacheEntry, OwnerShare

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_GROWTH_PARTS = 8
"""An owner that grows is listed anew when it is larger by one part in so many, not with each entry."""


class AdaptiveCache(Generic[K, V]):
    """Cache of values by key, fair to owners, whose order of eviction is learnt.

    Each entry counts for the owner that has put it there; all may read it.

    When the cache is too large, the owner with the largest sum of sizes loses an entry of its own, in the order that
    `EvictionQueues` learns. Calls take constant time, but for the logarithm of the number of owners; see `_fits`.

    Args:
        most: Largest sum of the sizes of all entries.

    Attributes:
        most: Largest sum of the sizes of all entries; the next `put` applies a change.
        size: Sum of the sizes of all entries.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        self._entries: dict[K, CacheEntry] = {}
        self._shares: dict[str, OwnerShare] = {}
        self._by_size: list[tuple[int, str]] = []
        """Heap of owners by the size with which they are listed, negative; items that hold no longer stay a while."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def values(self) -> Iterator[V]:
        """Yields all values, in no order; those that have expired, too, until somebody asks for them."""
        return (entry.value for entry in self._entries.values())

    def get(self, key: K, now_s: float = -inf) -> V | None:
        """Returns the value of a key, which counts as a use; None: there is none, or it has expired by `now_s`."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_s <= now_s:
            self.pop(key)
            return None
        entry.share.use(key, entry, now_s)
        value: V = entry.value
        return value

    def put(
        self, key: K, value: V, owner: str, size: int = 1, *, expires_s: float = inf, now_s: float = -inf
    ) -> list[K]:
        """Adds an entry in place of the one with its key; returns the keys of the entries that were dropped for it.

        The new entry itself is dropped if it is larger than what its owner may have beside the others.

        Args:
            key: What `get` finds it by.
            value: What `get` returns.
            owner: For whom it counts.
            size: In the unit of `most`.
            expires_s: When nobody gets it any more, by the clock of `now_s`.
            now_s: Time of now.
        """
        if key in self._entries:
            self.pop(key)
        share = self._shares.get(owner) or OwnerShare(owner)
        if self.size - share.size + size > self.most and not self._fits(share, size):
            return [key]
        self._shares[owner] = share
        self.size += size
        self._resize(share, share.size + size)
        dropped: list[K] = []
        while self.size > self.most:
            largest = self._largest()
            oldest, entry = largest.evict(now_s)
            del self._entries[oldest]
            self.size -= entry.size
            self._shrink(largest, entry.size)
            dropped.append(oldest)
        if owner not in self._shares:  # It has lost all, and this has no size.
            share = self._shares[owner] = OwnerShare(owner)
        entry = CacheEntry(size, expires_s)
        entry.value, entry.share = value, share
        self._entries[key] = entry
        share.add(key, entry, now_s)
        return dropped

    def pop(self, key: K) -> V | None:
        """Removes an entry and returns its value; None: there is none."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        entry.share.remove(key, entry)
        self.size -= entry.size
        self._shrink(entry.share, entry.size)
        value: V = entry.value
        return value

    def _fits(self, share: OwnerShare, size: int) -> bool:
        """Whether an entry has space if nobody else keeps more than it takes.

        Without this question, one that is too large would drop others before itself. One that is no larger than an
        equal part for each owner always fits; for others, all owners are looked at.
        """
        others = self._shares.values()
        if size * (len(others) + 1) <= self.most:
            return True
        return size + sum(min(other.size, size) for other in others if other is not share) <= self.most

    def _resize(self, share: OwnerShare, size: int) -> None:
        """Applies a new size of an owner. It is listed with room to grow, and anew as it is when it is the first."""
        share.size = size
        if size > share.listed:
            share.listed = size + size // _GROWTH_PARTS
            heappush(self._by_size, (-share.listed, share.owner))
            if len(self._by_size) > 2 * len(self._shares) + 16:
                self._list_all()

    def _shrink(self, share: OwnerShare, size: int) -> None:
        """Applies that an owner has lost an entry, and forgets the owner if it was the last."""
        share.size -= size
        if not share.size and not share.queues:
            del self._shares[share.owner]

    def _list_all(self) -> None:
        for share in self._shares.values():
            share.listed = share.size
        self._by_size = [(-share.size, owner) for owner, share in self._shares.items()]
        heapify(self._by_size)

    def _largest(self) -> OwnerShare:
        """Returns the owner with the largest size; there must be one whose size is above zero."""
        by_size = self._by_size
        while True:
            negative, owner = by_size[0]
            share = self._shares.get(owner)
            if share is None or share.listed != -negative:
                heappop(by_size)
            elif share.size != share.listed:
                share.listed = share.size
                heapreplace(by_size, (-share.size, owner))
            else:
                return share
