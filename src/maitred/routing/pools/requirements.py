"""Requirements of a request on a pool, and the reason why a pool does not meet them."""

from collections.abc import Callable, Set
from enum import StrEnum

from msgspec import Struct

from maitred.routing.pools.config import PoolConfig


class RequestRequirements(Struct, frozen=True):
    """Requirements of a request by which pools differ for it."""

    model: str
    """Model name as the caller wrote it."""
    capabilities: Set[str] = frozenset()
    local_only: bool = False
    """Whether no part of it may leave our own machines."""
    regions: Set[str] | None = None
    """Regions where it may be computed; None: anywhere."""
    allowed: Callable[[str], bool] = lambda name: True
    """Returns whether the caller may use a model of that name."""


class ExclusionReason(StrEnum):
    """Reason why a pool was excluded."""

    PRIVACY = "privacy"
    REGION = "region"
    CAPABILITY = "capability"


class ExcludedPool(Struct, frozen=True):
    """Pool that may not serve a request."""

    pool: str
    reason: ExclusionReason
    explanation: str
    """Reason, as the end of a sentence that begins with the pool's name."""


def find_exclusion(pool: PoolConfig, needs: RequestRequirements) -> tuple[ExclusionReason, str] | None:
    """Returns why the pool may not serve the request; None: it may.

    Only the gravest reason is returned: a rule (privacy, region) comes before a missing capability.
    """
    if needs.local_only and not pool.local:
        return ExclusionReason.PRIVACY, "is not local, and the request may not leave"
    if needs.regions is not None and pool.region not in needs.regions:
        allowed = ", ".join(sorted(needs.regions)) or "no region"
        return ExclusionReason.REGION, f"is in {pool.region or 'no named region'}, and the request is for {allowed}"
    if pool.capabilities is not None and (missing := sorted(needs.capabilities - set(pool.capabilities))):
        return ExclusionReason.CAPABILITY, f"has no {', '.join(missing)}"
    return None
