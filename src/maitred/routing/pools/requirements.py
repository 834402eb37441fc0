"""Requirements of a request for a pool, and the reason why a pool does not meet them."""

from collections.abc import Callable, Set
from enum import StrEnum

from msgspec import Struct

from maitred.routing.pools.config import PoolConfig


class RequestRequirements(Struct, frozen=True):
    """Requirements of a request that decide which pools may serve it."""

    model: str
    """Model name as the caller wrote it."""
    capabilities: Set[str] = frozenset()
    local_only: bool = False
    """Whether all parts of the request must stay on our own machines."""
    regions: Set[str] | None = None
    """Regions in which the request may be computed, or None for all regions."""
    allowed: Callable[[str], bool] = lambda name: True
    """Function that returns whether the caller may use a model of that name."""


class ExclusionReason(StrEnum):
    """Reason why a pool was excluded."""

    PRIVACY = "privacy"
    REGION = "region"
    CAPABILITY = "capability"


class ExcludedPool(Struct, frozen=True):
    """Pool that is excluded for a request."""

    pool: str
    reason: ExclusionReason
    explanation: str
    """Reason text that continues a sentence whose subject is the name of the pool."""


def find_exclusion(pool: PoolConfig, needs: RequestRequirements) -> tuple[ExclusionReason, str] | None:
    """Returns the reason why the pool may not serve the request, or None if it may serve it.

    The function returns only the most important reason: a rule (privacy, region) comes before a missing capability.
    """
    if needs.local_only and not pool.local:
        return ExclusionReason.PRIVACY, "is not local, and the request may not leave"
    if needs.regions is not None and not pool.is_in(needs.regions):
        allowed = ", ".join(sorted(needs.regions)) or "no region"
        places = {pool.region} if pool.current_regions is None else pool.current_regions()
        place = ", ".join(sorted(filter(None, places))) or "no named region"
        return ExclusionReason.REGION, f"is in {place}, and the request is for {allowed}"
    if pool.capabilities is not None and (missing := sorted(needs.capabilities - set(pool.capabilities))):
        return ExclusionReason.CAPABILITY, f"has no {', '.join(missing)}"
    return None
