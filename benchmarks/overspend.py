"""No race and no crash spends more than a budget has, and none holds money back.

64 callers send requests of random sizes, streamed and whole, against one hard budget and one limit on tokens per
minute. Some leave early, some answers fail in the engine, and the gateway is killed (``kill -9``) and started again at
random moments. First all callers use the key that is limited, so that its rate binds; then they spend what is left of
the budget, until nothing but ``insufficient_quota`` is answered. At the end the ledger must hold every answer that a
client has seen whole, once and at its price; their sum must not exceed the budget, must be what the administration
shows as charged, and at least 99 % of the budget, for nothing may be held back for requests that are no more.

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

from benchmarks.books import (
    Budget,
    ledger_of,
    require_spent_within,
    require_true_lines,
    settled,
    tokens_beyond,
)
from benchmarks.caller import Client, Reply
from benchmarks.crowd import Crowd, calls, counted, ending_of
from benchmarks.installation import Gateway, Installation, Key, Organisation, Plan, installed
from benchmarks.report import Report
from maitred.core.money import Price, usd_of
from maitred.core.usage import UsageEvent
from maitred.testing.script import Answer, Fault, Script

SEED = 20261121
CALLERS = 64
PRICE = {"prompt": 2.0, "cached": 0.5, "output": 6.0}
LIMITED_SHARE = 0.4
"""Of the requests, those that only the limited key sends."""
USD_PER_REQUEST = 60e-6
"""Of the budget: about a quarter of what an average answer costs, so that it runs out before the requests do."""
LEASE_S = 3.0
SLICE_LEASE_S = 3.0
SLICE_SHARE = 0.02
GATEWAYS = 2
ANSWER_TIMEOUT_S = 0.25
BURSTS_PER_RESTART = 1
"""Counters in memory, and a Redis that comes back empty, begin with full buckets: each start may give another burst."""
SETTLED_WITHIN_S = LEASE_S + SLICE_LEASE_S + 5.0
LEFT_EARLY = 0.04
PATIENCE_S = 2.0
"""Longer than any answer takes whose engine does not stall."""
ENDS_WITHIN_S = 10.0
"""Every request, with Redis away too."""
NORMAL_WITHIN_S = 10.0
FAULTS = (Fault.DROP, Fault.HALF_FRAME, Fault.GARBAGE, *[Fault.REJECT] * 20)
STALLS = (Fault.STALL,) * 3
ANSWERS = 997
"""After these the engine begins anew; among them are the faults."""
LEAST_USED = 0.99
"""Of a budget, once it refuses everything."""
QUOTA_IN_A_ROW = 64
SHOWN = 5


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

    @property
    def burst(self) -> int:
        """Tokens that the limited key may have at once."""
        return max(1000, self.requests // 2)

    @property
    def tokens_per_minute(self) -> int:
        """Its rate."""
        return self.requests * 6

    @property
    def outage_tokens_per_minute(self) -> int:
        """The rate of the limited key in an outage."""
        return self.outage_requests * 6


FULL = Size(requests=100_000, kills=10, outages=6, outage_requests=6_000)
QUICK = Size(requests=5_000, kills=2, outages=1, outage_requests=1_000)


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.requests} requests")
    parser.add_argument("--shared", action="store_true", help="two gateways on one Redis and one PostgreSQL")
    parser.add_argument("--requests", type=int, help=f"in place of {FULL.requests}")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    if arguments.requests:
        size = Size(arguments.requests, size.kills, size.outages, size.outage_requests)
    name = "overspend_shared" if arguments.shared else "overspend"
    report = Report(name, seed=arguments.seed, quick=arguments.quick)
    uvloop.run(Overspend(size, report, arguments.seed, shared=arguments.shared).run())
    return report.finish()


class Overspend:
    """One run.

    Args:
        size: How much is done.
        report: Gets figures and bars.
        seed: Of everything that is drawn.
        shared: Whether two gateways share what they count.
    """

    def __init__(self, size: Size, report: Report, seed: int, *, shared: bool) -> None:
        self._size = size
        self._report = report
        self._rng = random.Random(seed)
        self._shared = shared
        self._admin = Key(scopes=["admin"])
        self._organisations = {
            "acme": _organisation(size.requests, size.tokens_per_minute, size.burst),
            "operators": Organisation({"admin": self._admin}),
        }
        if shared:
            for number in range(size.outages):
                self._organisations[f"outage-{number}"] = _organisation(
                    size.outage_requests, size.outage_tokens_per_minute, max(1000, size.outage_requests // 2)
                )

    async def run(self) -> None:
        """All of it."""
        plan = Plan(
            self._organisations,
            settings={
                "admission": {"lease_s": LEASE_S, "prices": {"*": PRICE}},
                "counters": {
                    "slice_lease_s": SLICE_LEASE_S,
                    "slice_share": SLICE_SHARE,
                    "answer_timeout_s": ANSWER_TIMEOUT_S,
                },
            },
            script=script(self._rng, FAULTS if self._shared else [*FAULTS, *STALLS]),
            gateways=GATEWAYS if self._shared else 1,
            shared=self._shared,
        )
        async with installed(plan) as installation:
            clients = [Client(gateway.url, patience_s=ENDS_WITHIN_S) for gateway in installation.gateways]
            await self._spend(installation, clients)
            if self._shared:
                for number in range(self._size.outages):
                    await self._outage(installation, clients, f"outage-{number}")
            for client in clients:
                client.close()

    async def _spend(self, installation: Installation, clients: Sequence[Client]) -> None:
        """The part in which gateways are killed."""
        size, report, keys = self._size, self._report, self._organisations["acme"].keys
        limited, free = keys["limited"].secret, keys["free"].secret
        crowd = Crowd(clients, CALLERS)
        # Those who wait for an engine that stalls leave at last, too.
        patience_s = None if self._shared else PATIENCE_S
        rated = calls("rate", [limited], self._rng, leaving=LEFT_EARLY, patience_s=patience_s)
        mixed = calls("spend", [limited, free, free, free], self._rng, leaving=LEFT_EARLY, patience_s=patience_s)
        started_s = time.monotonic()
        killer = asyncio.create_task(self._kill(installation.gateways, crowd))
        at_first = round(size.requests * LIMITED_SHARE)
        with_rate = await crowd.ask_all(islice(rated, at_first))
        rated_s = time.monotonic() - started_s
        await crowd.ask_all(islice(mixed, size.requests - at_first))
        await killer
        last = await self._drain(crowd, "rest", free)
        seconds = time.monotonic() - started_s
        budget, leases = await settled(installation, "acme", self._admin.secret, within_s=SETTLED_WITHIN_S)
        everything = await ledger_of(installation)
        lines = [line for line in everything if line.organisation == "acme"]
        starts = sum(gateway.lives for gateway in installation.gateways)

        report.figures["spend"] = {
            "requests": crowd.asked,
            "seconds": round(seconds, 1),
            "seconds_under_the_rate": round(rated_s, 1),
            "kills": starts - len(installation.gateways),
            "endings": counted(crowd.replies),
            "endings_under_the_rate": counted(with_rate),
            "ledger_lines": len(lines),
            "budget_usd": usd_of(budget.limit),
            "spent_usd": usd_of(sum(line.cost_nusd for line in lines)),
        }
        print(report.figures["spend"], flush=True)
        require_spent_within(report, "spend", lines, budget, leases)
        report.require("spend: part of the budget used", _used(lines, budget), at_least=LEAST_USED)
        require_true_lines(report, "spend", lines, crowd.replies, _price())
        bursts = 1 if self._shared else 1 + BURSTS_PER_RESTART * (starts - 1)
        limited_lines = [line for line in lines if line.key == keys["limited"].id]
        beyond = tokens_beyond(limited_lines, burst=bursts * size.burst, per_s=size.tokens_per_minute / 60)
        report.require("spend: tokens beyond burst and rate", beyond, at_most=0)
        refused = sum(ending_of(reply) == "rate_limit_exceeded" for reply in with_rate)
        report.require("spend: part refused while the rate binds", refused / len(with_rate), at_least=0.05)
        self._require_known(crowd.replies, "spend")
        report.require("spend: kills", starts - len(installation.gateways), at_least=size.kills)
        _require_refused(report, "spend", last)

    async def _outage(self, installation: Installation, clients: Sequence[Client], tenant: str) -> None:
        """The part in which Redis is killed."""
        size, report, keys = self._size, self._report, self._organisations[tenant].keys
        limited, free = keys["limited"].secret, keys["free"].secret
        crowd = Crowd(clients, CALLERS)
        redis = installation.redis
        assert redis is not None
        started_s = time.monotonic()
        asking = asyncio.create_task(
            crowd.ask_all(islice(calls(tenant, [limited, free], self._rng), size.outage_requests))
        )
        await crowd.has_asked(round(size.outage_requests * self._rng.uniform(0.1, 0.3)))
        redis.kill()
        away_s = self._rng.uniform(1.0, 3.0)
        noticed = await _noticed(installation.gateways, within_s=away_s)
        await asyncio.to_thread(redis.start)
        normal_s = await _normal_after(installation.gateways)
        await asking
        last = await self._drain(crowd, f"{tenant}-rest", free)
        seconds = time.monotonic() - started_s
        budget, leases = await settled(installation, tenant, self._admin.secret, within_s=SETTLED_WITHIN_S)
        lines = [line for line in await ledger_of(installation) if line.organisation == tenant]
        spent = sum(line.cost_nusd for line in lines)

        slices = GATEWAYS * SLICE_SHARE
        report.figures[tenant] = {
            "requests": crowd.asked,
            "seconds": round(seconds, 1),
            "away_s": round(away_s, 2),
            "normal_after_s": round(normal_s, 2),
            "slowest_s": round(max(reply.seconds for reply in crowd.replies), 2),
            "endings": counted(crowd.replies),
            "ledger_lines": len(lines),
            "budget_usd": usd_of(budget.limit),
            "spent_usd": usd_of(spent),
            "overshoot_share": round(max(0, spent - budget.limit) / budget.limit, 5),
        }
        print(tenant, report.figures[tenant], flush=True)
        require_spent_within(report, tenant, lines, budget, leases, overshoot=round(slices * budget.limit))
        report.require(f"{tenant}: part of the budget used", _used(lines, budget), at_least=LEAST_USED)
        require_true_lines(report, tenant, lines, crowd.replies, _price())
        limited_lines = [line for line in lines if line.key == keys["limited"].id]
        burst = max(1000, size.outage_requests // 2)
        beyond = tokens_beyond(
            limited_lines,
            burst=(1 + BURSTS_PER_RESTART + slices) * burst,
            per_s=(1 + slices) * size.outage_tokens_per_minute / 60,
        )
        report.require(f"{tenant}: tokens beyond burst, rate and slices", beyond, at_most=0)
        self._require_known(crowd.replies, tenant)
        report.require(f"{tenant}: requests that did not end", sum(r.left for r in crowd.replies), at_most=0)
        report.require(f"{tenant}: gateways that said that Redis is away", noticed, at_least=GATEWAYS)
        report.require(f"{tenant}: s until Redis decides again", normal_s, at_most=NORMAL_WITHIN_S)
        _require_refused(report, tenant, last)

    async def _kill(self, gateways: Sequence[Gateway], crowd: Crowd) -> None:
        """Kills at random moments, a gateway at a time."""
        for requests in sorted(self._rng.sample(range(CALLERS, self._size.requests), self._size.kills)):
            await crowd.has_asked(requests)
            gateway = self._rng.choice(gateways)
            gateway.kill()
            await asyncio.sleep(self._rng.uniform(0, 0.3))
            await gateway.start()

    async def _drain(self, crowd: Crowd, name: str, key: str) -> list[Reply]:
        """Spends what is left of the budget; the last replies, which all should be refusals."""
        last: list[Reply] = []

        def refused_often(reply: Reply) -> bool:
            last.append(reply)
            return all(ending_of(each) == "insufficient_quota" for each in last[-QUOTA_IN_A_ROW:]) and (
                len(last) >= QUOTA_IN_A_ROW
            )

        most = max(2000, self._size.requests)
        await crowd.ask_all(islice(calls(name, [key], self._rng), most), refused_often)
        return last[-QUOTA_IN_A_ROW:]

    def _require_known(self, replies: Sequence[Reply], name: str) -> None:
        unknown = [reply for reply in replies if reply.status in (401, 403)]
        print(*unknown[:SHOWN], sep="\n")
        self._report.require(f"{name}: valid keys refused", len(unknown), at_most=0)


def script(rng: random.Random, faults: Sequence[Fault]) -> Script:
    """Answers of an engine: shorter than asked or cut by `max_tokens`, at several speeds, some with a fault."""
    left = list(faults)
    answers = [
        Answer(
            tokens=rng.choices(range(300, 340), k=rng.randint(1, 128)) if rng.random() < 0.6 else None,
            tokens_per_step=rng.randint(2, 16),
            wait_steps=rng.randint(0, 3),
            cached_tokens=rng.choice((0, 0, 4)),
            fault=left.pop() if left else None,
            fault_after=rng.randint(0, 20),
            retryable=rng.random() < 0.5,
        )
        for _ in range(ANSWERS)
    ]
    rng.shuffle(answers)
    return Script(answers=answers, again=True, step_s=0.004)


def _organisation(requests: int, tokens_per_minute: int, burst: int) -> Organisation:
    rate = {"tokens_per_minute": tokens_per_minute, "burst": {"tokens_per_minute": burst}}
    return Organisation(
        {"limited": Key(limits=rate), "free": Key()}, limits={"usd_total": round(requests * USD_PER_REQUEST, 6)}
    )


def _used(lines: Sequence[UsageEvent], budget: Budget) -> float:
    return sum(line.cost_nusd for line in lines) / budget.limit


def _price() -> Price:
    return Price.per_million_usd(**PRICE)


def _require_refused(report: Report, name: str, last: Sequence[Reply]) -> None:
    quota = sum(ending_of(reply) == "insufficient_quota" and reply.should_retry == b"false" for reply in last)
    report.require(f"{name}: last requests refused with insufficient_quota", quota, at_least=QUOTA_IN_A_ROW)


async def _noticed(gateways: Sequence[Gateway], *, within_s: float) -> int:
    """How many gateways say within a time that Redis is away."""
    ends_s = time.monotonic() + within_s
    said: set[int] = set()
    while time.monotonic() < ends_s:
        for number, gateway in enumerate(gateways):
            if not await asyncio.to_thread(_counters_up, gateway):
                said.add(number)
        await asyncio.sleep(0.05)
    return len(said)


async def _normal_after(gateways: Sequence[Gateway]) -> float:
    """Seconds until Redis decides again for all gateways."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < 2 * NORMAL_WITHIN_S:
        if all([await asyncio.to_thread(_counters_up, gateway) for gateway in gateways]):
            break
        await asyncio.sleep(0.05)
    return time.monotonic() - started_s


def _counters_up(gateway: Gateway) -> bool:
    return gateway.metrics()['maitred_store_up{store="counters"}'] == 1


if __name__ == "__main__":
    sys.exit(main())
