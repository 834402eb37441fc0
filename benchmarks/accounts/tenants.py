"""Many tenants: 10,000 of them with 30,000 keys and 20,000 limits, and what that many cost a gateway.

Organisations with nine teams each, three keys and two limits to a tenant, are loaded into a store. One gateway starts
on it, another one on an empty store, and the two are compared: how long they take to start, how much memory they hold,
and how long a short request takes, with keys that are drawn from all of them and with always the same key. Before that,
every tenant is used once: the first request of each asks the ledger what its budgets have been charged. At last keys
are revoked in the store, as by another gateway, and the time until they are refused is taken.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import uvloop

from benchmarks.support.gateways.measured_gateway import MODEL, InstantReplica, MeasuredGateway, gateway, write_config
from benchmarks.support.lean_connections import drive, request_of
from benchmarks.support.report import Report, percentiles
from maitred.core.clock import SystemClock
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import ApiKey, Tenant
from maitred.core.usage import to_nano_usd
from maitred.identity.keys import make_key
from maitred.store.config import StoreConfig
from maitred.store.database import open_database
from maitred.store.directory import DirectoryStore
from maitred.wire.address import UnixAddress

SEED = 20261121
CHAT = "/v1/chat/completions"
BODY = msgspec.json.encode({"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "A table?"}]})
TEAMS = 9
KEYS = 3
LANES = 2
"""Modest load: nobody waits for anybody else."""
LOOKS_EVERY_S = 0.02


@dataclass(frozen=True)
class Population:
    """All who may call.

    Attributes:
        plaintexts: Every key, those of one tenant together.
    """

    tenants: Sequence[Tenant]
    keys: Sequence[ApiKey]
    limits: Sequence[Limit]
    plaintexts: Sequence[str]


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests and starts; no fewer tenants")
    parser.add_argument("--tenants", type=int, default=10_000)
    arguments = parser.parse_args()
    report = Report("tenants", seed=SEED, quick=arguments.quick)
    with TemporaryDirectory(prefix="maitred-") as folder:
        uvloop.run(_run(Path(folder), arguments.tenants, report, quick=arguments.quick))
    print(report.figures)
    return report.finish()


async def _run(folder: Path, count: int, report: Report, *, quick: bool) -> None:
    population = make_population(count)
    full, empty = StoreConfig(folder=str(folder / "full")), StoreConfig(folder=str(folder / "empty"))
    started_s = time.perf_counter()
    async with open_database(full) as database:
        await DirectoryStore(database, SystemClock()).add_many(population.tenants, population.keys, population.limits)
    report.figures["loaded"] = {
        "tenants": len(population.tenants),
        "keys": len(population.keys),
        "limits": len(population.limits),
        "seconds": round(time.perf_counter() - started_s, 2),
    }
    address = UnixAddress(str(folder / "replica.sock"))
    config = folder / "maitred.yaml"
    write_config(config, address, admission={"prices": {"*": {"prompt": 0.5, "output": 1.5}}})
    async with InstantReplica(address, tokens=4):
        starts: dict[str, list[float]] = {"none": [], "all": []}
        for store, name in [(empty, "none"), (full, "all")] * (0 if quick else 4):
            async with gateway(config, _kept_in(store)) as served:
                starts[name].append(served.start_s)
        async with AsyncExitStack() as stack:
            without = await stack.enter_async_context(gateway(config, _kept_in(empty)))
            served = await stack.enter_async_context(gateway(config, _kept_in(full)))
            starts["none"].append(without.start_s)
            starts["all"].append(served.start_s)
            start_s = {name: round(statistics.median(seconds), 2) for name, seconds in starts.items()}
            report.figures["start_s"] = start_s
            await _use(without, served, population, report, quick=quick)
            await _revoke(served, full, population, 5 if quick else 40, report)
    report.require("start-up added, s", start_s["all"] - start_s["none"], at_most=5)


async def _use(
    without: MeasuredGateway, served: MeasuredGateway, population: Population, report: Report, *, quick: bool
) -> None:
    """Latencies and memory, before and after every tenant has been there."""
    draw = random.Random(SEED)
    rss_mib = {"none": round(without.rss_mib(), 1), "all": round(served.rss_mib(), 1)}
    latencies_s: dict[str, list[float]] = {"one key, no others": [], "one key": [], "all keys": []}
    each = population.plaintexts[::KEYS]
    answers = await drive(served.port, _requests(each, len(each)), lanes=LANES)
    _expect(set(answers.statuses), {200})
    latencies_s["first of each tenant"] = answers.latencies_s
    rss_mib["all, each used once"] = round(served.rss_mib(), 1)
    report.figures["rss_mib"] = rss_mib
    first = population.plaintexts[0]
    count = 200 if quick else 2_000
    for _ in range(3 if quick else 10):
        for name, target, keys in (
            ("one key, no others", without, [""]),  # its store has no key: on a loopback address, none is needed
            ("one key", served, [first]),
            ("all keys", served, draw.choices(population.plaintexts, k=count)),
        ):
            answers = await drive(target.port, _requests(keys, count), lanes=LANES)
            _expect(set(answers.statuses), {200})
            latencies_s[name] += answers.latencies_s[LANES:]
    figures = {
        name: {percentile: round(1e3 * seconds, 3) for percentile, seconds in percentiles(values).items()}
        for name, values in latencies_s.items()
    }
    report.figures["latency_ms"] = figures
    for percentile, most_ms in (("p50", 0.5), ("p99", 5.0)):
        added_ms = figures["all keys"][percentile] - figures["one key"][percentile]
        report.require(f"latency added by many keys, {percentile}, ms", round(added_ms, 3), at_most=most_ms)
    report.require("memory added, MiB", rss_mib["all"] - rss_mib["none"], at_most=250)
    used_mib = rss_mib["all, each used once"] - rss_mib["none"]
    report.require("memory added when each was used, MiB", used_mib, at_most=400)


async def _revoke(
    served: MeasuredGateway, store: StoreConfig, population: Population, keys: int, report: Report
) -> None:
    """Revokes keys where another gateway would, and asks until they are refused."""
    seconds = []
    async with open_database(store) as database:
        directory = DirectoryStore(database, SystemClock())
        for index in range(keys):
            key, plaintext = population.keys[-1 - index], population.plaintexts[-1 - index]
            _expect(await _statuses(served, plaintext), {200})
            await directory.revoke_key(key.id)
            revoked_s = time.perf_counter()
            while await _statuses(served, plaintext) != {401}:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(LOOKS_EVERY_S)
            seconds.append(time.perf_counter() - revoked_s)
    report.figures["revoked_s"] = {"median": round(statistics.median(seconds), 3), "most": round(max(seconds), 3)}
    report.require("longest use of a revoked key, s", round(max(seconds), 3), at_most=1)


def make_population(count: int) -> Population:
    """That many tenants: of ten, one is an organisation and the others are its teams."""
    tenants: list[Tenant] = []
    keys: list[ApiKey] = []
    limits: list[Limit] = []
    plaintexts: list[str] = []
    for number in range(count):
        organisation, team = divmod(number, TEAMS + 1)
        parent = f"org-{organisation:05}"
        tenant = Tenant(id=f"{parent}-team-{team}", parent=parent) if team else Tenant(id=parent)
        tenants.append(tenant)
        subject = f"tenant:{tenant.id}"
        rate = Limit(id=f"{tenant.id}-rate", subject=subject, kind=LimitKind.REQUESTS_PER_MINUTE, value=10**6)
        budget = Limit(id=f"{tenant.id}-budget", subject=subject, kind=LimitKind.USD_PER_MONTH, value=to_nano_usd(1e6))
        limits += [rate, budget]
        for _ in range(KEYS):
            made = make_key()
            keys.append(ApiKey(id=made.public_id, tenant=tenant.id, secrets=(made.secret,)))
            plaintexts.append(made.plaintext)
    return Population(tenants, keys, limits, plaintexts)


def _requests(keys: Sequence[str], count: int) -> Iterator[bytes]:
    return (request_of(CHAT, BODY, key) for key in itertools.islice(itertools.cycle(keys), count))


async def _statuses(served: MeasuredGateway, key: str) -> set[int]:
    return set((await drive(served.port, _requests([key], 1), lanes=1)).statuses)


def _expect(statuses: set[int], wanted: set[int]) -> None:
    if statuses != wanted:
        raise RuntimeError(f"Expected {wanted}, got {statuses}.")


def _kept_in(store: StoreConfig) -> dict[str, str]:
    return {"MAITRED__STORE__FOLDER": store.folder}


if __name__ == "__main__":
    sys.exit(main())
