"""Redis is killed while a budget is spent, and comes back empty.

What gateways give from their slices meanwhile may be charged twice, where one tells it after another has already found
it in the ledger: that errs on the safe side, and by no more than the slices.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import islice

from benchmarks.support.concurrent_callers import ConcurrentCallers, calls
from benchmarks.support.installation import Gateway, Installation, Key
from benchmarks.support.report import Report
from benchmarks.support.spending import Account, drain, require_sound, statement_of

SLICE_SHARE = 0.02
"""Of every limit, and of what remains of every budget, for each gateway: what it may give while Redis is away."""
ENDS_WITHIN_S = 10.0
"""Every request, with Redis away too."""
NORMAL_WITHIN_S = 10.0
"""Redis decides again so soon after it is back."""
KILLED_AT = (0.05, 0.3)
"""Part of the requests."""
AWAY_S = (1.0, 3.0)
_POLL_S = 0.05


async def outage(
    report: Report,
    installation: Installation,
    callers: ConcurrentCallers,
    account: Account,
    admin: Key,
    rng: random.Random,
    *,
    settled_within_s: float,
) -> None:
    """Spends one budget with such an outage in the middle."""
    redis, gateways = installation.redis, installation.gateways
    assert redis is not None, "there is no Redis"
    started_s = time.monotonic()
    requests = islice(calls(account.id, [account.limited.secret, account.free.secret], rng), account.requests)
    asking = asyncio.create_task(callers.ask_all(requests))
    await callers.has_asked(round(account.requests * rng.uniform(*KILLED_AT)))
    redis.kill()
    away_s = rng.uniform(*AWAY_S)
    noticed = await _noticed(gateways, within_s=away_s)
    await asyncio.to_thread(redis.start)
    normal_s = await _normal_after(gateways)
    await asking
    last = await drain(callers, f"{account.id}-rest", account.free, rng)
    seconds = time.monotonic() - started_s
    statement = await statement_of(installation, account, admin, within_s=settled_within_s)

    limit = statement.budget.limit
    report.figures[account.id] = {
        "seconds": round(seconds, 1),
        "away_s": round(away_s, 2),
        "normal_after_s": round(normal_s, 2),
        "slowest_s": round(max(reply.seconds for reply in callers.replies), 2),
        **statement.figures(callers.replies),
        "overshoot_share": round(max(0, statement.spent - limit) / limit, 5),
    }
    print(report.figures[account.id], flush=True)
    slices = len(gateways) * SLICE_SHARE
    require_sound(report, account, statement, callers.replies, last, losses=1, slices=slices)
    report.require(f"{account.id}: requests that did not end", sum(r.left for r in callers.replies), at_most=0)
    report.require(f"{account.id}: gateways that said that Redis is away", noticed, at_least=len(gateways))
    report.require(f"{account.id}: s until Redis decides again", normal_s, at_most=NORMAL_WITHIN_S)


async def _noticed(gateways: Sequence[Gateway], *, within_s: float) -> int:
    """How many gateways say within a time that Redis is away; waits until it is over."""
    ends_s = time.monotonic() + within_s
    noticed_by: set[int] = set()
    while time.monotonic() < ends_s:
        for number, gateway in enumerate(gateways):
            if not await asyncio.to_thread(_counters_up, gateway):
                noticed_by.add(number)
        await asyncio.sleep(_POLL_S)
    return len(noticed_by)


async def _normal_after(gateways: Sequence[Gateway]) -> float:
    """Seconds until Redis decides again for all gateways."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < 2 * NORMAL_WITHIN_S:
        if all([await asyncio.to_thread(_counters_up, gateway) for gateway in gateways]):
            break
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - started_s


def _counters_up(gateway: Gateway) -> bool:
    return gateway.metrics()['maitred_store_up{store="counters"}'] == 1
