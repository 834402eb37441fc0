"""What a request needs of a pool, and why a pool is not for it."""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from maitred.routing.pools.config import PoolConfig

_MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Needs:
    """A request, as far as pools differ for it."""

    model: str
    """As the caller names it."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """The least that must fit behind the prompt: `max_tokens` where the caller names it."""
    capabilities: Set[str] = frozenset()
    local_only: bool = False
    """Nothing of it may leave."""
    regions: Set[str] | None = None
    """Where it may be computed; None: anywhere."""
    most_usd: float | None = None
    """What it may cost at most."""


class Ground(StrEnum):
    """Why a pool was left out."""

    PRIVACY = "privacy"
    REGION = "region"
    CAPABILITY = "capability"
    CONTEXT_LENGTH = "context_length"
    COST = "cost"
    HEALTH = "health"
    """No replica of it takes requests now."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A pool that may not serve a request."""

    pool: str
    model: str
    ground: Ground
    why: str
    """As the end of a sentence that begins with the pool's name."""


def cost_usd(pool: PoolConfig, needs: Needs) -> float:
    """What the request costs there at most."""
    tokens_usd = pool.prompt_usd_per_million * needs.prompt_tokens + pool.output_usd_per_million * needs.output_tokens
    return tokens_usd / _MILLION


def objection(pool: PoolConfig, needs: Needs) -> tuple[Ground, str] | None:
    """Why it may not serve the request: the gravest reason alone, what must never happen before what cannot."""
    if needs.local_only and not pool.local:
        return Ground.PRIVACY, "is not local, and the request may not leave"
    if needs.regions is not None and pool.region not in needs.regions:
        allowed = ", ".join(sorted(needs.regions)) or "no region"
        return Ground.REGION, f"is in {pool.region or 'no named region'}, and the request is for {allowed}"
    if pool.capabilities is not None and (lacking := sorted(needs.capabilities - set(pool.capabilities))):
        return Ground.CAPABILITY, f"has no {', '.join(lacking)}"
    tokens = needs.prompt_tokens + needs.output_tokens
    if pool.context_tokens is not None and tokens > pool.context_tokens:
        return Ground.CONTEXT_LENGTH, f"takes {pool.context_tokens} tokens, and the request has {tokens}"
    if needs.most_usd is not None and (usd := cost_usd(pool, needs)) > needs.most_usd:
        return Ground.COST, f"may cost ${usd:.4g}, and the request may cost ${needs.most_usd:.4g}"
    return None
