"""No race and no crash spends more than a budget has, and none holds money back.

64 callers send requests of random sizes, streamed and whole, against one hard budget and one limit on tokens per
minute. Some leave early, some answers fail in the engine, and the gateway is killed (``kill -9``) and started again at
random moments. First all callers use the key that is limited, so that its rate binds; then they spend what is left of
the budget, until nothing but ``insufficient_quota`` is answered. At the end the ledger must hold every answer that a
client has seen whole, once and at its price; their sum must not exceed the budget, must be what the administration
shows as charged, and at least 99 % of the budget, for nothing may be held back for requests that are no more.

With ``--workers 2`` the gateway has two API workers, and of the kills some are of its controller alone.

With ``--shared`` the callers use two gateways on one Redis and one PostgreSQL. Afterwards, each time against a fresh
budget, Redis is killed in the middle and started again, empty: what is spent beyond the budget must lie within the
slices that the gateways hold in advance, every request must end, no key may be refused as unknown, and Redis must
decide again by itself.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import uvloop

from benchmarks.support.concurrent_callers import ConcurrentCallers, calls, counted, ending_of
from benchmarks.support.installation import Gateway, Installation, Key, Organisation, Plan, installed
from benchmarks.support.redis_outage import ENDS_WITHIN_S, SLICE_SHARE, outage
from benchmarks.support.report import Report
from benchmarks.support.single_request import Client
from benchmarks.support.spending import FAULTS, PRICE, STALLS, Account, drain, require_sound, script, statement_of

SEED = 20261121
CALLERS = 64
LIMITED_SHARE = 0.4
"""Of the requests, those that only the limited key sends."""
CONTROLLER_SHARE = 0.6
"""Of the kills, those of a controller alone, where there is one."""
LEASE_S = 3.0
SLICE_LEASE_S = 3.0
GATEWAYS = 2
SETTLED_WITHIN_S = LEASE_S + SLICE_LEASE_S + 5.0
LEFT_EARLY = 0.04
PATIENCE_S = 2.0
"""Longer than any answer takes whose engine does not stall."""


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        requests: Before what is left of the budget is spent.
        kills: Of a gateway.
        outages: Of Redis.
        outage_requests: During each of them.
    """

    requests: int
    kills: int
    outages: int
    outage_requests: int


FULL = Size(requests=100_000, kills=10, outages=6, outage_requests=6_000)
QUICK = Size(requests=3_000, kills=2, outages=1, outage_requests=1_000)


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.requests} requests")
    parser.add_argument("--shared", action="store_true", help="two gateways on one Redis and one PostgreSQL")
    parser.add_argument("--workers", type=int, default=1, help="API workers of each gateway")
    parser.add_argument("--requests", type=int, help="against the first budget")
    parser.add_argument("--kills", type=int, help="of a gateway")
    parser.add_argument("--outages", type=int, help="of Redis")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    size = Size(
        requests=arguments.requests or size.requests,
        kills=size.kills if arguments.kills is None else arguments.kills,
        outages=size.outages if arguments.outages is None else arguments.outages,
        outage_requests=size.outage_requests,
    )
    name = "_".join(
        ["overspend", *(["shared"] if arguments.shared else []), *(["workers"] if arguments.workers > 1 else [])]
    )
    report = Report(name, seed=arguments.seed, quick=arguments.quick)
    rng = random.Random(arguments.seed)
    uvloop.run(run(report, size, rng, shared=arguments.shared, workers=arguments.workers))
    return report.finish()


async def run(report: Report, size: Size, rng: random.Random, *, shared: bool, workers: int) -> None:
    """All of it."""
    admin = Key(scopes=["admin"])
    account = Account.open("spend", size.requests)
    outages = [Account.open(f"outage-{n}", size.outage_requests) for n in range(size.outages if shared else 0)]
    plan = Plan(
        {each.id: each.organisation for each in (account, *outages)} | {"staff": Organisation({"admin": admin})},
        settings={
            "server": {"workers": workers},
            "admission": {"lease_s": LEASE_S, "prices": {"*": PRICE}},
            "counters": {"slice_lease_s": SLICE_LEASE_S, "slice_share": SLICE_SHARE},
        },
        # Who waits for an engine that stalls cannot tell that from a gateway that hangs.
        script=script(rng, FAULTS if shared else (*FAULTS, *STALLS)),
        gateways=GATEWAYS if shared else 1,
        shared=shared,
    )
    async with installed(plan) as installation:
        clients = [Client(gateway.url, patience_s=ENDS_WITHIN_S) for gateway in installation.gateways]
        callers = ConcurrentCallers(clients, CALLERS)
        patience_s = None if shared else PATIENCE_S
        await spend(report, installation, callers, account, admin, rng, kills=size.kills, patience_s=patience_s)
        for each in outages:
            callers = ConcurrentCallers(clients, CALLERS)
            await outage(report, installation, callers, each, admin, rng, settled_within_s=SETTLED_WITHIN_S)
        for client in clients:
            client.close()


async def spend(
    report: Report,
    installation: Installation,
    callers: ConcurrentCallers,
    account: Account,
    admin: Key,
    rng: random.Random,
    *,
    kills: int,
    patience_s: float | None,
) -> None:
    """Spends one budget while gateways are killed."""
    limited, free = account.limited.secret, account.free.secret
    started_s = time.monotonic()
    killing = asyncio.create_task(_kill(installation.gateways, callers, account.requests, kills, rng))
    at_first = round(account.requests * LIMITED_SHARE)
    rated = calls("rate", [limited], rng, leaving=LEFT_EARLY, patience_s=patience_s)
    under_the_rate = await callers.ask_all(islice(rated, at_first))
    rated_s = time.monotonic() - started_s
    mixed = calls("spend", [limited, free, free, free], rng, leaving=LEFT_EARLY, patience_s=patience_s)
    await callers.ask_all(islice(mixed, account.requests - at_first))
    await killing
    last = await drain(callers, "rest", account.free, rng, patience_s=patience_s)
    seconds = time.monotonic() - started_s
    statement = await statement_of(installation, account, admin, within_s=SETTLED_WITHIN_S)
    killed = sum(gateway.lives + gateway.controllers_killed - 1 for gateway in installation.gateways)

    report.figures[account.id] = {
        "seconds": round(seconds, 1),
        "seconds_under_the_rate": round(rated_s, 1),
        "kills": killed,
        **statement.figures(callers.replies),
        "endings_under_the_rate": counted(under_the_rate),
    }
    print(report.figures[account.id], flush=True)
    require_sound(report, account, statement, callers.replies, last)
    refused = sum(ending_of(reply) == "rate_limit_exceeded" for reply in under_the_rate)
    report.require(f"{account.id}: part refused while the rate binds", refused / at_first, at_least=0.05)
    report.require(f"{account.id}: kills", killed, at_least=kills)


async def _kill(
    gateways: Sequence[Gateway], callers: ConcurrentCallers, requests: int, kills: int, rng: random.Random
) -> None:
    """Kills at random moments, a gateway or its controller at a time."""
    for moment in sorted(rng.sample(range(CALLERS, requests), kills)):
        await callers.has_asked(moment)
        gateway = rng.choice(gateways)
        if gateway.controllers and rng.random() < CONTROLLER_SHARE:
            await gateway.replace_controller()
        else:
            gateway.kill()
            await asyncio.sleep(rng.uniform(0, 0.3))
            await gateway.start()


if __name__ == "__main__":
    sys.exit(main())
