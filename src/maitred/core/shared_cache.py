"""Cache whose bound is shared: when it is full, the owner that uses most of it makes room, not whoever waited longest.

With one list of entries by their last use, an owner with many entries drives out those of all others.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SharedCache(Generic[K, V]):
    """Cache of values by key. Each entry counts for the owner that has put it there; all may read it.

    When the cache is too large, the owner with the largest sum of sizes loses the entry of its own that was used least
    recently.

    Args:
        most: Largest sum of the sizes of all entries.

    Attributes:
        most: Largest sum of the sizes of all entries; the next `put` applies a change.
        size: Sum of the sizes of all entries.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        self._entries: dict[K, tuple[V, str, int]] = {}
        self._by_owner: dict[str, OrderedDict[K, None]] = {}
        """Keys of each owner, the least recently used first."""
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """Returns the value of a key, which counts as a use; None: there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._by_owner[entry[1]].move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, owner: str, size: int = 1) -> list[K]:
        """Adds an entry unless its key is there already; returns the keys of the entries that were dropped for it.

        An entry that is larger than its owner's part can be dropped at once.
        """
        if key in self._entries:
            return []
        self._entries[key] = value, owner, size
        if owner not in self._by_owner:
            self._by_owner[owner], self._sizes[owner] = OrderedDict(), 0
        self._by_owner[owner][key] = None
        self._sizes[owner] += size
        self.size += size
        dropped = []
        while self.size > self.most:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            oldest = next(iter(self._by_owner[largest]))
            self.pop(oldest)
            dropped.append(oldest)
        return dropped

    def pop(self, key: K) -> V | None:
        """Removes an entry and returns its value; None: there is none."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        value, owner, size = entry
        del self._by_owner[owner][key]
        self._sizes[owner] -= size
        self.size -= size
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._sizes[owner]
        return value
