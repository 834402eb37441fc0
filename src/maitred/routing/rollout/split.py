"""Who is served by which version. Pure: the same key gets the same answer in every process, and after every restart.

A key (of a caller, or of a session) has a place between 0 and 1 that a hash gives it, and the canary serves the places
below its weight. So who has seen the canary keeps seeing it while its weight grows, and the split of one rollout says
nothing of that of another.
"""

import hashlib

import msgspec

from maitred.core.rollout import RolloutVersion

_BUCKETS = 2**64


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests of one model are shared between two versions.

    Blue/green is a split whose weight is 0 or 1; `switched` and `rolled_back` go from one to the other at once.
    """

    rollout: str
    """Names the rollout, so that each draws places of its own."""
    weight: float = 0.0
    """Share of the keys that the canary serves."""
    shadow: float = 0.0
    """Share of the requests served by the stable version that the canary answers as well, for nobody to see."""

    def __post_init__(self) -> None:
        if not (0 <= self.weight <= 1 and 0 <= self.shadow <= 1):
            raise ValueError(f"weight and shadow must lie between 0 and 1; got {self.weight:g} and {self.shadow:g}.")

    def version_for(self, key: str) -> RolloutVersion:
        """Who serves the requests of this key."""
        return RolloutVersion.CANARY if _bucket(self.rollout, "serve", key) < self.weight else RolloutVersion.STABLE

    def shadows(self, request_id: str) -> bool:
        """Whether a request that the stable version serves is copied to the canary.

        By request, not by caller: a copy costs, and nobody shall be the one who is copied always.
        """
        return _bucket(self.rollout, "shadow", request_id) < self.shadow

    def with_weight(self, weight: float) -> "Split":
        """The same rollout with another weight. Only the keys between the old and the new one change sides."""
        return msgspec.structs.replace(self, weight=weight)

    def switched(self) -> "Split":
        """The canary serves everybody."""
        return self.with_weight(1.0)

    def rolled_back(self) -> "Split":
        """The stable version serves everybody, and nothing is copied any more."""
        return msgspec.structs.replace(self, weight=0.0, shadow=0.0)


def _bucket(rollout: str, purpose: str, key: str) -> float:
    """Where the key stands, from 0 to below 1."""
    # The separator is no part of a name, so no two triples make one text.
    digest = hashlib.blake2b(f"{rollout}\0{purpose}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # Rounding to 53 bits keeps 1.0 out of reach.
    return (int.from_bytes(digest, "big") >> 11) / (_BUCKETS >> 11)
