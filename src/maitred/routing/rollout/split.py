"""Traffic split of a rollout: selects the version of each request; pure code.

The same key gets the same version in every process, and after every restart. A hash gives each key (of a caller, or of
a session) a position between 0 and 1, and the canary serves the positions below its weight. A caller who has seen the
canary therefore continues to see it while its weight grows, and the splits of different rollouts are independent.
"""

import hashlib

import msgspec

from maitred.core.rollout import RolloutVersion

_HASH_RANGE = 2**64


class TrafficSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Split of the requests of one model between two versions.

    Blue/green deployment is a split with a weight of 0 or 1; `to_canary` and `to_stable` switch completely.
    """

    rollout: str
    """Name of the rollout; key positions are therefore independent of those in other rollouts."""
    weight: float = 0.0
    """Share of the keys that the canary serves."""
    shadow: float = 0.0
    """Share of the stable version's requests that are also copied to the canary, for comparison only."""

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

        The choice depends on the request and not on the caller, because a copy costs capacity and no caller should
        always be the one that is copied.
        """
        return _hash_position(self.rollout, "shadow", request_id) < self.shadow

    def with_weight(self, weight: float) -> "TrafficSplit":
        """Returns the split with another weight.

        Only the keys between the old and the new weight change their version.
        """
        return msgspec.structs.replace(self, weight=weight)

    def to_canary(self) -> "TrafficSplit":
        """Returns the split in which the canary serves every request."""
        return self.with_weight(1.0)

    def to_stable(self) -> "TrafficSplit":
        """Returns the split in which the stable version serves every request, without copies."""
        return msgspec.structs.replace(self, weight=0.0, shadow=0.0)


def _hash_position(rollout: str, purpose: str, key: str) -> float:
    """Returns the position of a key in the range [0, 1)."""
    # Names never contain the separator, so different triples always give different texts.
    digest = hashlib.blake2b(f"{rollout}\0{purpose}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # The result has 53 bits, so that it is always below 1.0.
    return (int.from_bytes(digest, "big") >> 11) / (_HASH_RANGE >> 11)
