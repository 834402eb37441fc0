"""Orders of eviction that `cache_eviction` puts beside the cache of maitred; all entries are of size 1.

Each is written from its paper. `look_up` returns whether the key was there, and adds it if it was not.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict


class EvictionPolicy(ABC):
    """A cache of keys. Its size is a number of entries."""

    def __init__(self, size: int) -> None:
        self.size = size

    @abstractmethod
    def look_up(self, key: int) -> bool:
        """Returns whether a key is there, which counts as a use; adds it if not."""


class LruPolicy(EvictionPolicy):
    """The least recently used entry leaves."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._keys: OrderedDict[int, None] = OrderedDict()

    def look_up(self, key: int) -> bool:
        """See `EvictionPolicy`."""
        if key in self._keys:
            self._keys.move_to_end(key)
            return True
        if len(self._keys) >= self.size:
            self._keys.popitem(last=False)
        self._keys[key] = None
        return False


class S3FifoPolicy(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP 2023, algorithm 1): a tenth for the small queue, promoted after two uses."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._small_size = max(1, size // 10)

    def look_up(self, key: int) -> bool:
        """See `EvictionPolicy`."""
        for queue in (self._small, self._main):
            if key in queue:
                queue[key] = min(3, queue[key] + 1)
                return True
        while len(self._small) + len(self._main) >= self.size:
            self._evict()
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0
        return False

    def _evict(self) -> None:
        while self._small and (len(self._small) >= self._small_size or not self._main):
            key, uses = self._small.popitem(last=False)
            if uses <= 1:
                self._ghosts[key] = None
                if len(self._ghosts) > self.size - self._small_size:
                    self._ghosts.popitem(last=False)
                return
            self._main[key] = 0
        while self._main:
            key, uses = self._main.popitem(last=False)
            if not uses:
                return
            self._main[key] = uses - 1


class ArcPolicy(EvictionPolicy):
    """ARC (Megiddo and Modha, FAST 2003, figure 4)."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._target = 0.0
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[int, None] = OrderedDict()

    def look_up(self, key: int) -> bool:
        """See `EvictionPolicy`."""
        if key in self._frequent:
            self._frequent.move_to_end(key)
            return True
        if key in self._recent:
            del self._recent[key]
            self._frequent[key] = None
            return True
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if key in self._recent_ghosts:
            self._target = min(self.size, self._target + max(1.0, frequent / recent))
            self._replace()
            del self._recent_ghosts[key]
            self._frequent[key] = None
        elif key in self._frequent_ghosts:
            self._target = max(0.0, self._target - max(1.0, recent / frequent))
            self._replace(again=True)
            del self._frequent_ghosts[key]
            self._frequent[key] = None
        else:
            self._add(key)
        return False

    def _add(self, key: int) -> None:
        recent = len(self._recent) + len(self._recent_ghosts)
        total = recent + len(self._frequent) + len(self._frequent_ghosts)
        if recent == self.size:
            if len(self._recent) < self.size:
                self._recent_ghosts.popitem(last=False)
                self._replace()
            else:
                self._recent.popitem(last=False)
        elif total >= self.size:
            if total == 2 * self.size:
                self._frequent_ghosts.popitem(last=False)
            self._replace()
        self._recent[key] = None

    def _replace(self, *, again: bool = False) -> None:
        recent = len(self._recent)
        if recent and (recent > self._target or (again and recent == self._target)):
            self._recent_ghosts[self._recent.popitem(last=False)[0]] = None
        else:
            self._frequent_ghosts[self._frequent.popitem(last=False)[0]] = None


class TinyLfuPolicy(EvictionPolicy):
    """W-TinyLFU (Einziger et al., TOS 2017) with exact counts in place of a sketch: a window of 1 %, two segments."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._counts: dict[int, int] = {}
        self._looked_up = 0
        self._window_size = max(1, size // 100)
        self._protected_size = (size - self._window_size) * 4 // 5
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def look_up(self, key: int) -> bool:
        """See `EvictionPolicy`."""
        self._count(key)
        for queue in (self._window, self._protected):
            if key in queue:
                queue.move_to_end(key)
                return True
        if key in self._probation:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > self._protected_size:
                self._probation[self._protected.popitem(last=False)[0]] = None
            return True
        self._window[key] = None
        if len(self._window) > self._window_size:
            self._admit(self._window.popitem(last=False)[0])
        return False

    def _count(self, key: int) -> None:
        self._counts[key] = min(15, self._counts.get(key, 0) + 1)
        self._looked_up += 1
        if self._looked_up >= 10 * self.size:
            self._counts = {known: count // 2 for known, count in self._counts.items() if count > 1}
            self._looked_up //= 2

    def _admit(self, key: int) -> None:
        if len(self._probation) + len(self._protected) >= self.size - self._window_size:
            queue = self._probation or self._protected
            victim = next(iter(queue))
            if self._counts.get(key, 0) <= self._counts.get(victim, 0):
                return
            del queue[victim]
        self._probation[key] = None
