"""Which blocks have become findable, or no longer are, for those who follow the prefix cache from outside.

A change is one entry in a dict, under the block's key: what is stored and evicted before anybody asks is one change and
not two, and the number of entries is bounded. Where there are more, none of them are told and a number is skipped, by
which a follower notices that it has to ask for the whole (`core.prefix.BlockNews`).
"""

MOST_CHANGES = 8192
"""That are told at once: 128 KiB of keys. A step stores fewer blocks than it computes tokens."""


class BlockChanges:
    """Changes since they were last taken.

    Attributes:
        take_update: By key, whether the block can be found now. Written by the pool.
        sequence: Of what was taken last.
    """

    __slots__ = ("sequence", "take_update")

    def __init__(self) -> None:
        self.take_update: dict[bytes, bool] = {}
        self.sequence = 0

    def take(self) -> tuple[bytes, bytes] | None:
        """Takes what was stored and what was removed, as joined keys; None: nothing, or more than is reported."""
        changed = self.take_update
        if not changed:
            return None
        self.sequence += 1
        if len(changed) > MOST_CHANGES:
            changed.clear()
            return None
        stored = b"".join([key for key, there in changed.items() if there])
        removed = b"".join([key for key, there in changed.items() if not there])
        changed.clear()
        return stored, removed
