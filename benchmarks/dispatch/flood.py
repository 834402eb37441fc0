"""A flood: one tenant sends twenty times its share, and nine light tenants must not notice.

Ten tenants of the same weight share a server, so each one's share is a tenth of what it can do. That is measured at the
beginning of each round, with users who keep it busy: a shared machine is a fifth faster or slower a minute later, and
nine tenths of a capacity that is not there any more are an overload. In three situations, which take turns, the nine
send the same requests at the same moments, together 36 % of capacity:

* *polite*: the tenth sends what fills the server to 90 %. This is "alone at the same utilisation below saturation": no
  tenant asks for more than there is. It cannot be the utilisation of the flood itself, which is 100 %, since there no
  time to first token is steady.
* *flood*: the tenth sends 20 times its share, twice what the server can do.
* *flood, fifo*: the same before a server whose two queues are in order of arrival, for contrast.

The queues have no limits here, so that the flood is served late and not turned away. A request without a first token at
the end counts with what it has waited by then, which is less than the truth and only ever flatters FIFO.

Then four tenants with weights 1 to 4 and requests of different forms keep more users each than the server has places,
so that all of them have requests waiting all the time. What each was served (a prompt token 1, an output token 2), over
its weight, goes into Jain's index, on both servers.

Ratios are taken within each round, and the median of the rounds counts: the machine's speed drifts from round to round,
and a pause of it falls on one situation of one round. The same of all rounds together stands beside it. The 0.5B shape
is served in int8, as one would on such a machine; even so there are few requests of the light tenants, and their number
stands beside p99.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.support.backlogged_tenants import WEIGHTS, backlog
from benchmarks.support.figures.flood_plot import plot
from benchmarks.support.installation import Key, Organisation
from benchmarks.support.report import RESULTS, Report, percentiles
from benchmarks.support.shapes import random_qwen, servable
from benchmarks.support.single_request import Client
from benchmarks.support.tenant_gateway import SLOTS, Settings, merged, ordered_by, served, settled, unbounded
from benchmarks.support.traffic import (
    Capacity,
    Length,
    Sort,
    Visit,
    capacity,
    endings,
    of,
    play,
    poisson,
    tokens_per_s,
    ttfts_s,
)
from maitred.load.play.clock import RunClock
from maitred.testing.server_process import ServerProcess

SEED = 20261122
LIGHT = tuple(f"light-{number}" for number in range(1, 10))
HEAVY = "heavy"
SHARE = 1 / (len(LIGHT) + 1)
LIGHT_PART = 0.4
"""Of its share, what a light tenant uses."""
POLITE_UTILISATION = 0.9
FLOOD_SHARES = 20
SITUATIONS = ("polite", "flood", "flood, fifo")


@dataclass(frozen=True)
class Size:
    """How much is done with a model.

    Attributes:
        slots: Sequences at once.
        prompt, output: Tokens of a request.
        capacity_s: For measuring what the server can do, in each round.
        rounds: Of all situations.
        seconds: Of one situation.
        warmup_s: Of these, what is not counted.
        backlog_s: Of the weighted tenants; 0: without them.
        quantization: Of the weights.
    """

    slots: int
    prompt: Length
    output: Length
    capacity_s: float
    rounds: int
    seconds: float
    warmup_s: float
    backlog_s: float = 0.0
    quantization: str = "none"


BUNDLED = Size(SLOTS, (50, 150), (20, 80), capacity_s=7, rounds=6, seconds=18, warmup_s=3, backlog_s=16)
QWEN = Size(8, (6, 16), (4, 10), capacity_s=12, rounds=4, seconds=32, warmup_s=5, quantization="int8")
QUICK = Size(SLOTS, (50, 150), (20, 80), capacity_s=2, rounds=1, seconds=4, warmup_s=0.5, backlog_s=3)


@dataclass(frozen=True)
class Servers:
    """Both servers of one model, by policy; the one that is not asked sleeps."""

    processes: dict[str, ServerProcess]
    clients: dict[str, Client]
    keys: dict[str, str]


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one short round on the bundled model; times and shares have no bars"
    )
    parser.add_argument("--only", choices=["bundled", "qwen2.5-0.5b"], help="one of the two models")
    parser.add_argument("--workers", type=int, default=1, help="API workers of each server")
    arguments = parser.parse_args()
    sizes = {"bundled": QUICK} if arguments.quick else {"bundled": BUNDLED, "qwen2.5-0.5b": QWEN}
    several = arguments.workers > 1
    report = Report("flood_workers" if several else "flood", seed=SEED, quick=arguments.quick)
    curves = {}
    for name, size in sizes.items():
        if arguments.only in (None, name):
            with both_servers(
                size, None if name == "bundled" else servable(random_qwen()), arguments.workers
            ) as servers:
                figures, curves[name] = uvloop.run(run(servers, size))
            report.figures[name] = figures
            require(report, name, figures, quick=arguments.quick)
    if not arguments.quick and not several:
        plot(curves, RESULTS / "flood.svg")
    return report.finish()


@contextmanager
def both_servers(size: Size, model: Path | None, workers: int) -> Iterator[Servers]:
    """One whose queues are fair, one whose queues are in order of arrival."""
    weights = dict.fromkeys((*LIGHT, HEAVY), 1.0) | WEIGHTS
    organisations = {name: Organisation({"key": Key()}, weight=weight) for name, weight in weights.items()}
    engine = {"max_sequences": size.slots, "quantization": size.quantization}
    common: Settings = merged(unbounded(), {"engine": engine, "server": {"workers": workers}})
    clock = RunClock()
    with ExitStack() as stack:
        processes = {
            policy: stack.enter_context(served(organisations, merged(common, ordered_by(policy)), model=model))
            for policy in ("fair", "fifo")
        }
        clients = {policy: Client(server.url, patience_s=3600, clock=clock) for policy, server in processes.items()}
        keys = {name: organisation.keys["key"].secret for name, organisation in organisations.items()}
        yield Servers(processes, clients, keys)


async def run(servers: Servers, size: Size) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """All situations in turns, then the weighted tenants; the figures, and the light tenants' times by situation."""
    everybody = [Sort(name, servers.keys[name], size.prompt, size.output) for name in (*LIGHT, HEAVY)]
    cans: list[Capacity] = []
    seen: dict[str, list[list[Visit]]] = {situation: [] for situation in SITUATIONS}
    speed: dict[str, list[float]] = {situation: [] for situation in SITUATIONS}
    for number in range(size.rounds):
        can = await capacity(
            servers.clients["fair"],
            everybody,
            users=3 * size.slots,
            warmup_s=max(2.0, size.capacity_s / 3),
            seconds=size.capacity_s,
            seed=f"capacity:{number}",
        )
        print("capacity", can, flush=True)
        cans.append(can)
        for situation in (*SITUATIONS[number % 3 :], *SITUATIONS[: number % 3]):
            for process in servers.processes.values():  # what the last one has left behind is cleared away by now
                await settled(process)
            visits = plan(everybody, situation, can, size, number)
            await play(servers.clients["fifo" if "fifo" in situation else "fair"], visits, until_s=size.seconds)
            seen[situation].append(visits)
            speed[situation].append(tokens_per_s(visits, size.warmup_s, size.seconds))
    rounds = {situation: [_light_ttfts_s(visits, size) for visits in each] for situation, each in seen.items()}
    times = {situation: list(chain.from_iterable(each)) for situation, each in rounds.items()}
    figures: dict[str, Any] = {
        "capacity_requests_per_s_by_round": [can.requests_per_s for can in cans],
        "capacity_tokens_per_s_by_round": [can.tokens_per_s for can in cans],
        "slots": size.slots,
        "situations": {
            situation: {
                "light_requests": len(times[situation]),
                "light_ttft_s": percentiles(times[situation]),
                "light_ttft_p99_s_by_round": [
                    percentiles(ttfts_s).get("p99", float("nan")) for ttfts_s in rounds[situation]
                ],
                "tokens_per_s": round(sum(speed[situation]) / len(speed[situation]), 1),
                "tokens_per_s_by_round": [round(rate, 1) for rate in speed[situation]],
                "light_endings": endings(of(chain.from_iterable(each), *LIGHT)),
                "heavy_endings": endings(of(chain.from_iterable(each), HEAVY)),
            }
            for situation, each in seen.items()
        },
    }
    for situation, values in figures["situations"].items():
        print(situation, values, flush=True)
    if size.backlog_s:
        figures["weighted"] = {
            policy: await backlog(servers.processes[policy], client, servers.keys, size.slots, size.backlog_s)
            for policy, client in servers.clients.items()
        }
        print("weighted", figures["weighted"], flush=True)
    for client in servers.clients.values():
        client.close()
    return figures, times


def plan(everybody: Sequence[Sort], situation: str, can: Capacity, size: Size, number: int) -> list[Visit]:
    """Who comes when.

    The light tenants' requests are the same in every situation of a round, but for their words: those of the situation
    before are in the prefix cache.
    """
    light_rate = LIGHT_PART * SHARE * can.requests_per_s
    polite_rate = POLITE_UTILISATION * can.requests_per_s - len(LIGHT) * light_rate
    heavy_rate = polite_rate if situation == "polite" else FLOOD_SHARES * SHARE * can.requests_per_s
    return [
        visit
        for sort in everybody
        for visit in poisson(
            *(sort, heavy_rate if sort.name == HEAVY else light_rate, size.seconds, f"{SEED}:{number}:{sort.name}"),
            words=f"{SEED}:{number}:{sort.name}:{situation}",
        )
    ]


def require(report: Report, name: str, figures: dict[str, Any], *, quick: bool) -> None:
    """Holds the figures of one model against the bars."""
    polite, flood, fifo = (figures["situations"][situation] for situation in SITUATIONS)
    figures["p99_over_polite"] = _ratio(flood, polite, "light_ttft_p99_s_by_round")
    figures["fifo_p99_over_polite"] = _ratio(fifo, polite, "light_ttft_p99_s_by_round")
    figures["speed_over_fifo"] = _ratio(flood, fifo, "tokens_per_s_by_round")
    for situation, among in (("flood", flood), ("fifo", fifo)):
        pooled = among["light_ttft_s"]["p99"] / polite["light_ttft_s"]["p99"]
        figures[f"{situation}_p99_over_polite_of_all_rounds_together"] = round(pooled, 3)
    failed = sum(
        count
        for situation in figures["situations"].values()
        for counts in (situation["light_endings"], situation["heavy_endings"])
        for ending, count in counts.items()
        if ending not in ("whole", "open at the end")
    )
    report.require(f"{name}: requests refused or failed", failed, at_most=0)
    if "weighted" in figures and not quick:
        report.require(f"{name}: Jain index", figures["weighted"]["fair"]["jain"], at_least=0.95)
    if quick:
        print("p99 over polite", figures["p99_over_polite"], "under fifo", figures["fifo_p99_over_polite"])
        return
    report.require(f"{name}: light p99 TTFT over polite", figures["p99_over_polite"], at_most=1.2)
    report.require(f"{name}: throughput over FIFO", figures["speed_over_fifo"], at_least=0.97)


def _ratio(one: dict[str, Any], other: dict[str, Any], figure: str) -> float:
    """Of two situations, round by round; the median, which one pause of the machine in one round does not change."""
    ratios = [float(a / b) for a, b in zip(one[figure], other[figure], strict=True)]
    return round(statistics.median(ratios), 4)


def _light_ttfts_s(visits: Sequence[Visit], size: Size) -> list[float]:
    return ttfts_s(of(visits, *LIGHT, due=(size.warmup_s, size.seconds - size.warmup_s)), open_until_s=size.seconds)


if __name__ == "__main__":
    sys.exit(main())
