"""What a long queue costs the gateway: CPU time per request while thousands wait, and while most are refused.

A real gateway stands before an engine that sleeps instead of computing (see `benchmarks.support.paced_engine`), so what
is counted is the gateway's own work, in CPU seconds of its process, which mean the same whatever else the machine does.
Two situations, each with fair queues and with queues in order of arrival:

* *flood*: one tenant sends requests that wait, then goes on at twice what the engine can do; nine light tenants send a
  little beside it. In the end everybody who still waits hangs up at once.
* *overload*: callers of five tenants come at ten times capacity, and each names the time by which its first token must
  come; most are refused.

The parts of the flood are counted apart: requests that join, requests that come and are served while they wait, and the
requests that leave. Gateways take turns, and the median of the rounds counts.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop

from benchmarks.dispatch.overload import OBJECTIVE_S, REFUSALS
from benchmarks.support.gateways.measured_gateway import MeasuredGateway, gateway, write_config
from benchmarks.support.installation import MODEL, Key, Organisation, declared
from benchmarks.support.report import Report, percentiles
from benchmarks.support.single_request import Client
from benchmarks.support.tenant_gateway import merged, ordered_by, unbounded
from benchmarks.support.traffic import Sort, Visit, poisson
from benchmarks.support.traffic import play as play_all
from maitred.core.parent_watch import LIFELINE_VARIABLE
from maitred.load.play.clock import RunClock
from maitred.wire.address import UnixAddress

SEED = 20261122
HEAVY, LIGHT = "heavy", tuple(f"light-{number}" for number in range(1, 10))
HURRIED = tuple(f"tenant-{number}" for number in range(5))
POLICIES = ("fair", "fifo")
CAPACITY_PER_S = 40.0
"""Of the paced engine, for the flood's requests; roughly."""
REFUSED_PER_S = 240.0
"""About ten times its capacity for those of the overload."""


@dataclass(frozen=True)
class Size:
    """How much is done.

    Attributes:
        rounds: Of all situations.
        waiting: Requests that wait.
        joining_s, waiting_s, refusing_s: Of each part.
    """

    rounds: int
    waiting: int
    joining_s: float
    waiting_s: float
    refusing_s: float


FULL = Size(rounds=3, waiting=4000, joining_s=20, waiting_s=10, refusing_s=10)
QUICK = Size(rounds=1, waiting=500, joining_s=4, waiting_s=4, refusing_s=4)


@dataclass
class Served:
    """A gateway before an engine of its own, who calls it, and with which keys."""

    gateway: MeasuredGateway
    client: Client
    keys: dict[str, str]

    def sort(self, name: str, *, hurried: bool = False) -> Sort:
        """The requests of one tenant; lengths as in `flood` and in `overload`."""
        if hurried:
            return Sort(name, self.keys[name], (40, 80), (60, 140), {"x-maitred-ttft-ms": f"{OBJECTIVE_S * 1e3:.0f}"})
        return Sort(name, self.keys[name], (50, 150), (20, 80))


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, 500 waiting requests")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", choices=["flood", "overload"])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    report = Report("queue_cost", seed=SEED, quick=arguments.quick)
    situations = [arguments.only] if arguments.only else ["flood", "overload"]
    uvloop.run(_run(size, arguments.rounds or size.rounds, situations, arguments.policies, report))
    return report.finish()


async def _run(size: Size, rounds: int, situations: list[str], policies: list[str], report: Report) -> None:
    costs_us: dict[str, list[float]] = {}
    refusals_s: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        gateways = {policy: await stack.enter_async_context(_served(policy)) for policy in policies}
        for number in range(rounds):
            for situation in situations:
                for policy, served in gateways.items():
                    if situation == "flood":
                        costs = await _flood(served, size, number)
                    else:
                        costs, waited_s = await _overload(served, size, number)
                        refusals_s.setdefault(policy, []).extend(waited_s)
                    for name, cost_us in costs.items():
                        costs_us.setdefault(f"{policy}: {name}", []).append(cost_us)
                    print(number, policy, {name: round(cost) for name, cost in costs.items()}, flush=True)
    report.figures["cpu_us_per_request"] = {name: round(statistics.median(each), 1) for name, each in costs_us.items()}
    report.figures["refusal_s"] = {policy: percentiles(each) for policy, each in refusals_s.items()}
    print(report.figures, flush=True)


async def _flood(served: Served, size: Size, number: int) -> dict[str, float]:
    """Microseconds per request of each part."""
    seed = f"{SEED}:{number}"
    heavy = served.sort(HEAVY)
    joining = poisson(heavy, size.waiting / size.joining_s, size.joining_s, f"{seed}:crowd")
    until_s = size.joining_s + size.waiting_s
    later = poisson(heavy, 2 * CAPACITY_PER_S, size.waiting_s, f"{seed}:heavy")
    for name in LIGHT:
        later += poisson(served.sort(name), 0.04 * CAPACITY_PER_S, size.waiting_s, f"{seed}:{name}")
    for visit in later:
        visit.due_s += size.joining_s
    spent = [served.gateway.cpu_s()]
    marks = asyncio.create_task(_mark(served, (size.joining_s, until_s), spent))
    visits = [*joining, *later]
    await play_all(served.client, visits, until_s=until_s + 0.2)
    await marks
    left = await _until_empty(served)
    spent.append(left)
    waited = sum(not visit.whole for visit in visits)
    parts = (("joining", len(joining)), ("coming", len(later)), ("leaving", waited))
    return {
        f"flood, {name}": (after - before) / count * 1e6
        for (name, count), (before, after) in zip(parts, itertools.pairwise(spent), strict=True)
    }


async def _overload(served: Served, size: Size, number: int) -> tuple[dict[str, float], list[float]]:
    """Microseconds per request, and how long each refusal took."""
    visits: list[Visit] = []
    for name in HURRIED:
        sort = served.sort(name, hurried=True)
        visits += poisson(sort, REFUSED_PER_S / len(HURRIED), size.refusing_s, f"{SEED}:{number}:{name}")
    before_s = served.gateway.cpu_s()
    await play_all(served.client, visits, until_s=size.refusing_s + 8.0)
    after_s = await _until_empty(served)
    cost_us = (after_s - before_s) / len(visits) * 1e6
    return {"overload": cost_us}, [visit.reply.seconds for visit in visits if visit.reply.status in REFUSALS]


async def _mark(served: Served, at_s: tuple[float, ...], spent: list[float]) -> None:
    """Notes what the gateway has spent at these times from now."""
    clock = served.client.clock
    zero_s = clock.now_s()
    for mark_s in at_s:
        await asyncio.sleep(max(0.0, zero_s + mark_s - clock.now_s()))
        spent.append(served.gateway.cpu_s())


async def _until_empty(served: Served) -> float:
    """Waits until the gateway does nothing more; what it has spent then."""
    before_s = served.gateway.cpu_s()
    while True:
        await asyncio.sleep(0.3)
        after_s = served.gateway.cpu_s()
        if after_s - before_s < 0.02:
            return after_s
        before_s = after_s


@asynccontextmanager
async def _served(policy: str) -> AsyncIterator[Served]:
    """A gateway whose queues are ordered so."""
    organisations = {name: Organisation({"key": Key()}) for name in (HEAVY, *LIGHT, *HURRIED)}
    environment: dict[str, str] = {}
    with TemporaryDirectory(prefix="maitred-") as folder, _engine(Path(folder) / "engine.sock", policy) as address:
        config = Path(folder) / "maitred.yaml"
        settings = merged(unbounded(), {"dispatch": ordered_by(policy)["dispatch"]})
        model = {"engine_address": str(address), "served_name": MODEL}
        write_config(config, address, **settings, model=model, tenants=declared(organisations, environment))
        async with gateway(config, environment) as measured:
            client = Client(measured.url, patience_s=3600, clock=RunClock())
            keys = {name: organisation.keys["key"].secret for name, organisation in organisations.items()}
            yield Served(measured, client, keys)
            client.close()


@contextmanager
def _engine(socket: Path, policy: str) -> Iterator[UnixAddress]:
    """A paced engine in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.support.paced_engine", "--socket", str(socket), "--policy", policy]
    environment = {**os.environ, LIFELINE_VARIABLE: "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    try:
        yield UnixAddress(str(socket))
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
