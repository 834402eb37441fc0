"""What the scripts are told: their names, and a claim as they read it."""

from maitred.core.counters import LimitClaim
from maitred.store.counters.link import LuaScript

HELLO = LuaScript("hello")
RESERVE = LuaScript("reserve")
SETTLE = LuaScript("settle")
RENEW = LuaScript("renew")
READ = LuaScript("read")
SLICE = LuaScript("slice")
REGISTER = LuaScript("register")
RELEASE = LuaScript("release")


def packed(
    claim: LimitClaim, *, output: int = 0, least: int = 0, known: int = -1, spent: int = -1
) -> tuple[object, ...]:
    """A claim in the order in which `scripts/common.lua` reads it.

    Amounts are computed here, in whole numbers of any size.

    Args:
        claim: The claim.
        output: What is asked for.
        least: The least output that is of use.
        known: Of a budget: what was charged when it was seen last; -1: never seen.
        spent: Of a budget: what the database says was charged; -1: it was not asked.
    """
    return (
        claim.counter,
        claim.kind.value,
        claim.capacity,
        claim.fixed,
        claim.per_output,
        claim.divisor,
        claim.refill_per_s,
        claim.ends_s or 0.0,
        claim.hard,
        claim.clamps,
        claim.amount(output),
        claim.amount(least),
        known,
        spent,
    )
