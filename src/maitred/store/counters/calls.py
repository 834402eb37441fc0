"""Arguments of the Lua scripts: their names, and claims in the format that the scripts read."""

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


def pack_claim(
    claim: LimitClaim, *, output: int = 0, least_output: int = 0, last_charged: int = -1, spent: int = -1
) -> tuple[object, ...]:
    """Packs a claim in the order in which `scripts/common.lua` reads it.

    Amounts are computed here, in whole numbers of any size.

    Args:
        claim: The claim.
        output: Number of output tokens that the request asks for.
        least_output: Smallest number of output tokens that is useful to the request.
        last_charged: For a budget: the charged total that this gateway saw last; -1 if it never saw one.
        spent: For a budget: the charged total in the database; -1 if the database was not asked.
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
        claim.amount(least_output),
        last_charged,
        spent,
    )
