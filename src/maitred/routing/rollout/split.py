"""Traffic split of a rollout: which version serves a request. Pure.

The same key gets the same version in every process, and after every restart. A hash gives each key (of a caller, or of
a session) a position between 0 and 1, and the canary serves the positions below its weight. So a caller who has seen
the canary keeps seeing it while its weight grows, and the split of one rollout is independent of that of another.
"""

import hashlib

import msgspec

from maitred.core.rollout import RolloutVersion

_HASH_RANGE = 2**64


class TrafficSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Split of the requests of one model between two versions.

    Blue/green is a split whose weight is 0 or 1; `to_canary` and `to_stable` go from one to the other at once.
    """

    rollout: str
    """Name of the rollout; it makes the positions of its keys independent of those in other rollouts."""
    weight: float = 0.0
    """Share of the keys that the canary serves."""
    shadow: float = 0.0
    """Share of the stable version's requests that the canary answers as well; these answers are only compared."""

    def __post_init__(self) -> None:
        if not (0 <= self.weight <= 1 and 0 <= self.shadow <= 1):
            raise ValueError(f"weight and shadow must lie between 0 and 1; got {self.weight:g} and {self.shadow:g}.")

    def version_for(self, key: str) -> RolloutVersion:
        """Returns the version that serves the requests of this key."""
        return (
            RolloutVersion.CANARY if _hash_position(self.rollout, "serve", key) < self.weight else RolloutVersion.STABLE
        )

    def is_shadowed(self, request_id: str) -> bool:
        """Returns whether a request that the stable version serves is copied to the canary.

        The choice goes by request and not by caller: a copy costs, and no caller shall be the one that is always
        copied.
        """
        return _hash_position(self.rollout, "shadow", request_id) < self.shadow

    def with_weight(self, weight: float) -> "TrafficSplit":
        """Returns the split with another weight. Only the keys between the old and the new weight change sides."""
        return msgspec.structs.replace(self, weight=weight)

    def to_canary(self) -> "TrafficSplit":
        """Returns the split in which the canary serves every request."""
        return self.with_weight(1.0)

    def to_stable(self) -> "TrafficSplit":
        """Returns the split in which the stable version serves every request, and none is copied."""
        return msgspec.structs.replace(self, weight=0.0, shadow=0.0)


def _hash_position(rollout: str, purpose: str, key: str) -> float:
    """Returns the position of a key, from 0 to below 1."""
    # No name contains the separator, so no two triples make one text.
    digest = hashlib.blake2b(f"{rollout}\0{purpose}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # Rounding to 53 bits keeps 1.0 out of reach.
    return (int.from_bytes(digest, "big") >> 11) / (_HASH_RANGE >> 11)
