"""Order in which the entries of one owner leave a cache: learnt, because no fixed order is best.

Conversations ask again for what they asked for last, skewed traffic for what is asked for often. So entries stand in
two queues, as in S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023). New ones come
into a small queue. They reach the main one if they are used before they leave the small one, or come back soon after.

How large a part of all the small queue has is learnt, as in ARC (Megiddo and Modha, "ARC: a self-tuning, low overhead
replacement cache", FAST 2003), from what would have been a hit with another part. Here three caches without values,
one for each part, see every thirteenth key, and the part of the one that had the most hits holds (as sets duel in
Qureshi et al., "Adaptive insertion policies for high performance caching", ISCA 2007). With all in the small queue, the
order is that of the last use: LRU.
"""

from collections import OrderedDict
from collections.abc import Hashable
from math import inf
from typing import Any

_PARTS = (0.05, 0.5, 1.0)
"""Parts of an owner's entries, by size, that the small queue may have."""
_FIRST_PART = 0
"""Index of the part that holds until something is learnt."""
_MOST_USES = 3
"""Uses of an entry in the main queue that count."""
_SAMPLED = 13
"""One key in so many is seen by the caches without values; a prime, so that keys in a row are sampled evenly."""
_FEWEST_ENTRIES = 64
"""An owner with fewer entries learns nothing: too few of them would be sampled."""
_MEMORY = 16
"""Hits count for less with time: by a factor of e over so many look-ups for each entry that is sampled."""


class CacheEntry:
    """Entry of a cache; in a cache without values it has a size and an expiry only.

    Attributes:
        size: In the unit of the cache's bound.
        expires_s: When nobody gets it any more.
        uses: How often it was used since it is in its queue, as far as that counts.
        promoted: Whether it is in the main queue.
        value: What is cached.
        share: What its owner has in the cache.
    """

    __slots__ = ("expires_s", "promoted", "share", "size", "uses", "value")

    def __init__(self, size: int, expires_s: float) -> None:
        self.size = size
        self.expires_s = expires_s
        self.uses = 0
        self.promoted = False
        self.value: Any = None
        self.share: OwnerShare


class EvictionQueues:
    """Entries in the order in which they leave: a small queue, a main queue, and hashes of keys that have left.

    Attributes:
        part: Part of all that the small queue has, 0 to 1. With 1, what has been used longest ago leaves first.
        size: Sum of the sizes of all entries.
    """

    __slots__ = ("_ghosts", "_main", "_older_ghosts", "_small", "_small_size", "part", "size")

    def __init__(self, part: float) -> None:
        self.part = part
        self.size = 0
        self._small_size = 0
        self._small: OrderedDict[Any, CacheEntry] = OrderedDict()
        self._main: OrderedDict[Any, CacheEntry] = OrderedDict()
        self._ghosts: set[int] = set()
        self._older_ghosts: set[int] = set()
        """Each of the two has at most as many hashes as there were entries."""

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def items(self) -> list[tuple[Any, CacheEntry]]:
        """Returns all keys and entries."""
        return [*self._main.items(), *self._small.items()]

    def find(self, key: Hashable) -> CacheEntry | None:
        """Returns an entry; None: there is none."""
        return self._small.get(key) or self._main.get(key)

    def use(self, key: Hashable, entry: CacheEntry) -> None:
        """Notes a use of an entry that is here."""
        if not entry.promoted:
            entry.uses = 1
            self._small.move_to_end(key)
        elif entry.uses < _MOST_USES:
            entry.uses += 1

    def add(self, key: Hashable, entry: CacheEntry) -> None:
        """Adds a new entry: to the small queue, or to the main one if its key has left not long ago."""
        self.size += entry.size
        if ((ghost := hash(key)) in self._ghosts or ghost in self._older_ghosts) and self.part < 1:
            entry.promoted = True
            self._main[key] = entry
        else:
            self._small[key] = entry
            self._small_size += entry.size

    def remove(self, key: Hashable, entry: CacheEntry) -> None:
        """Removes an entry that is here."""
        self.size -= entry.size
        if entry.promoted:
            del self._main[key]
        else:
            del self._small[key]
            self._small_size -= entry.size

    def evict(self, now_s: float) -> tuple[Any, CacheEntry]:
        """Removes the entry that is least likely to be used again, and returns it with its key; there must be one.

        What has expired is not kept for having been used.
        """
        small, main, part = self._small, self._main, self.part
        while small and (not main or self._small_size >= part * self.size):
            key, entry = small.popitem(last=False)
            self._small_size -= entry.size
            if not entry.uses or part == 1 or entry.expires_s <= now_s:
                self.size -= entry.size
                if len(self._ghosts) >= len(small) + len(main):
                    self._ghosts, self._older_ghosts = set(), self._ghosts
                self._ghosts.add(hash(key))
                return key, entry
            entry.uses, entry.promoted = 0, True
            main[key] = entry
        while True:
            key, entry = main.popitem(last=False)
            if not entry.uses or entry.expires_s <= now_s:
                self.size -= entry.size
                return key, entry
            entry.uses -= 1
            main[key] = entry


class OwnerShare:
    """Share of one owner in a cache, with what has been learnt about the order in which it leaves.

    Attributes:
        queues: Its entries.
        owner: Its name.
        size: Sum of the sizes of its entries, and of one that is being added.
        listed: Size with which it stands in the list of owners by size; never less than its own.
    """

    __slots__ = ("_hits", "_sampled_size", "_shadows", "listed", "owner", "queues", "size")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.queues = EvictionQueues(_PARTS[_FIRST_PART])
        self.size = 0
        self.listed = 0
        self._shadows: list[EvictionQueues] = []
        """A cache for each part, with hashes of sampled keys and without values."""
        self._hits = [0.0] * len(_PARTS)
        self._sampled_size = 0
        """Sum of the sizes of the entries whose keys are sampled: what each of the caches without values may have."""

    def add(self, key: Hashable, entry: CacheEntry, now_s: float) -> None:
        """Adds a new entry."""
        self.queues.add(key, entry)
        hashed = hash(key)
        if self._shadows:
            if not hashed % _SAMPLED:
                self._sampled_size += entry.size
                self._learn(hashed, entry, now_s)
        elif len(self.queues) >= _FEWEST_ENTRIES:
            self._shadows = [EvictionQueues(part) for part in _PARTS]
            for known, each in self.queues.items():
                if not (hashed := hash(known)) % _SAMPLED:
                    self._sampled_size += each.size
                    self._learn(hashed, each, now_s)

    def use(self, key: Hashable, entry: CacheEntry, now_s: float) -> None:
        """Notes a use of an entry."""
        self.queues.use(key, entry)
        if self._shadows and not (hashed := hash(key)) % _SAMPLED:
            self._learn(hashed, entry, now_s)

    def remove(self, key: Hashable, entry: CacheEntry) -> None:
        """Removes an entry and what is known of it."""
        self.queues.remove(key, entry)
        if self._shadows and not (hashed := hash(key)) % _SAMPLED:
            for shadow in self._shadows:
                if (found := shadow.find(hashed)) is not None:
                    shadow.remove(hashed, found)
            self._shrink(entry.size, -inf)

    def evict(self, now_s: float) -> tuple[Any, CacheEntry]:
        """Removes the entry that is least likely to be used again, and returns it with its key; there must be one."""
        key, entry = self.queues.evict(now_s)
        if self._shadows and not hash(key) % _SAMPLED:
            self._shrink(entry.size, now_s)
        return key, entry

    def _learn(self, hashed: int, entry: CacheEntry, now_s: float) -> None:
        """Looks a sampled key up in all caches without values, and takes the part of the one with the most hits."""
        keeps = 1 - 1 / (_MEMORY * (len(self._shadows[0]) + 1))
        hits = self._hits
        for index, shadow in enumerate(self._shadows):
            hits[index] *= keeps
            found = shadow.find(hashed)
            if found is not None and found.expires_s > now_s:
                hits[index] += 1
                shadow.use(hashed, found)
                continue
            if found is not None:
                shadow.remove(hashed, found)
            shadow.add(hashed, CacheEntry(entry.size, entry.expires_s))
            while shadow.size > self._sampled_size:
                shadow.evict(now_s)
        best = max(hits)
        if best > hits[_PARTS.index(self.queues.part)]:
            self.queues.part = _PARTS[hits.index(best)]

    def _shrink(self, size: int, now_s: float) -> None:
        self._sampled_size -= size
        for shadow in self._shadows:
            while shadow.size > self._sampled_size:
                shadow.evict(now_s)
