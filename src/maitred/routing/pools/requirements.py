"""What a request needs of a pool, and why a pool is not for it."""

from collections.abc import Callable, Set
from enum import StrEnum

from msgspec import Struct

from maitred.routing.pools.config import PoolConfig


class RequestRequirements(Struct, frozen=True):
    """A request, as far as pools differ for it."""

    model: str
    """As the caller names it."""
    capabilities: Set[str] = frozenset()
    local_only: bool = False
    """Nothing of it may leave."""
    regions: Set[str] | None = None
    """Where it may be computed; None: anywhere."""
    allowed: Callable[[str], bool] = lambda name: True
    """Whether a model of that name is open to the caller."""


class ExclusionReason(StrEnum):
    """Why a pool was left out."""

    PRIVACY = "privacy"
    REGION = "region"
    CAPABILITY = "capability"


class ExcludedPool(Struct, frozen=True):
    """A pool that may not serve a request."""

    pool: str
    reason: ExclusionReason
    why: str
    """As the end of a sentence that begins with the pool's name."""


def objection(pool: PoolConfig, needs: RequestRequirements) -> tuple[ExclusionReason, str] | None:
    """Why it may not serve the request: the gravest reason alone, what must never happen before what cannot."""
    if needs.local_only and not pool.local:
        return ExclusionReason.PRIVACY, "is not local, and the request may not leave"
    if needs.regions is not None and pool.region not in needs.regions:
        allowed = ", ".join(sorted(needs.regions)) or "no region"
        return ExclusionReason.REGION, f"is in {pool.region or 'no named region'}, and the request is for {allowed}"
    if pool.capabilities is not None and (lacking := sorted(needs.capabilities - set(pool.capabilities))):
        return ExclusionReason.CAPABILITY, f"has no {', '.join(lacking)}"
    return None
