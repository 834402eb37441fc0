"""Overload: up to ten times what the server can do, and it must go on doing what it can.

Capacity is measured first, with users who keep the server as busy as it can be. Then callers come at random moments
(Poisson, whatever the server does) at 0.5 to 10 times capacity, in rounds. Each says how long it waits for the first
token (``x-maitred-ttft-ms``) and does not come back when it is refused. An answer is *good* when all of it came and its
first token came in time; goodput is good answers per second, counted where they end, after a warm-up.

* *Wasted* are tokens that the engine generated and that are in no complete answer: its own count, less what was read.
* A *refusal* is timed from sending the request to the end of the response. Who is let in and has nothing when time is
  up was not refused but *expired*: that the prediction was wrong shows there.
* The *prediction* is the header ``x-maitred-predicted-ttft-ms``. Of every request that got a first token, the error is
  the difference from what its caller saw, over what it saw. Those who come in the warm-up, to a server that was empty,
  are counted beside.

For contrast the same callers without a limit to their patience come to a server whose queues are in order of arrival
and as long as they get: there good answers are those that would have been good. Who still waits at the end hangs up.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import uvloop

from benchmarks.support.figures.overload_plot import plot
from benchmarks.support.installation import Key, Organisation
from benchmarks.support.report import RESULTS, Report, percentiles
from benchmarks.support.single_request import Client
from benchmarks.support.tenant_gateway import SLOTS, merged, ordered_by, served, settled, unbounded
from benchmarks.support.traffic import Sort, Visit, capacity, endings, play, poisson
from maitred.testing.server_process import ServerProcess

SEED = 20261123
LOADS = (0.5, 0.8, 1.0, 1.5, 2.0, 5.0, 10.0)
NAIVE_LOADS = (1.0, 2.0, 10.0)
OBJECTIVE_S = 1.0
PROMPT, OUTPUT = (40, 80), (60, 140)
TENANTS = 5
PREDICTED = b"x-maitred-predicted-ttft-ms"
REFUSALS = (429, 503)
EXPIRED = "deadline_exceeded"
"""Who was let in, on a prediction that came out wrong, and had nothing when time was up."""
DRAIN_S = 8.0
"""For the last answers to come to their end; none takes so long once it has begun."""


@dataclass(frozen=True)
class Size:
    """How much is done: rounds of all loads, seconds of each load, and of these the warm-up."""

    rounds: int
    seconds: float
    warmup_s: float
    capacity_s: float
    loads: tuple[float, ...] = LOADS
    naive: tuple[float, ...] = NAIVE_LOADS


FULL = Size(rounds=2, seconds=10, warmup_s=3, capacity_s=10)
QUICK = Size(rounds=1, seconds=4, warmup_s=1.5, capacity_s=3, loads=(0.8, 2.0, 10.0), naive=(2.0,))


@dataclass(frozen=True)
class Server:
    """One server, who calls it, and what their requests are like."""

    process: ServerProcess
    client: Client
    sorts: list[Sort]


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three loads; goodput and times have no bars")
    parser.add_argument("--rounds", type=int, help="of all loads")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    if arguments.rounds:
        size = replace(size, rounds=arguments.rounds)
    report = Report("overload", seed=SEED, quick=arguments.quick)
    organisations = {f"tenant-{number}": Organisation({"key": Key()}) for number in range(TENANTS)}
    keys = [organisation.keys["key"].secret for organisation in organisations.values()]
    hurried = {"x-maitred-ttft-ms": f"{OBJECTIVE_S * 1e3:.0f}"}
    with ExitStack() as stack:
        servers = {}
        for name, settings, headers in (
            ("maitred", ordered_by("fair"), hurried),
            ("naive", merged(ordered_by("fifo"), unbounded()), {}),
        ):
            process = stack.enter_context(served(organisations, settings))
            sorts = [Sort(f"tenant-{n}", key, PROMPT, OUTPUT, headers) for n, key in enumerate(keys)]
            servers[name] = Server(process, Client(process.url, patience_s=600), sorts)
        uvloop.run(run(report, servers, size))
    require(report, size, quick=arguments.quick)
    if not arguments.quick:
        plot(report.figures, RESULTS / "overload.svg")
    return report.finish()


async def run(report: Report, servers: dict[str, Server], size: Size) -> None:
    """Capacity, then every load on both servers, in rounds."""
    naive = servers["naive"]
    can = await capacity(  # without hurry, so that nobody is refused
        naive.client,
        naive.sorts,
        users=3 * SLOTS,
        warmup_s=size.capacity_s / 2,
        seconds=size.capacity_s,
        seed="capacity",
    )
    print("capacity", can, flush=True)
    report.figures |= {"capacity_per_s": can.requests_per_s, "objective_s": OBJECTIVE_S, "slots": SLOTS}
    loads = [("maitred", load) for load in size.loads] + [("naive", load) for load in size.naive]
    parts: dict[tuple[str, float], list[Part]] = {load: [] for load in loads}
    for number in range(size.rounds):
        for name, load in loads if number % 2 == 0 else reversed(loads):
            parts[name, load].append(await once(servers[name], load, can.requests_per_s, size, number))
    for (name, load), rounds in parts.items():
        figures = figures_of(rounds, size)
        report.figures.setdefault(name, {})[f"{load:g}"] = figures
        print(name, load, figures, flush=True)
    for server in servers.values():
        server.client.close()
    served_visits = [
        visit for (name, _), rounds in parts.items() if name == "maitred" for p in rounds for visit in p.visits
    ]
    report.figures["prediction"] = prediction([visit for visit in served_visits if visit.due_s >= size.warmup_s])
    report.figures["prediction_in_the_warm_up"] = prediction([v for v in served_visits if v.due_s < size.warmup_s])
    report.figures["refusal_s"] = percentiles([v.reply.seconds for v in served_visits if v.reply.status in REFUSALS])
    for name in ("prediction", "prediction_in_the_warm_up", "refusal_s"):
        print(name, report.figures[name], flush=True)


@dataclass(frozen=True)
class Part:
    """One load, once: everybody who came, and what the engine generated for them."""

    visits: list[Visit]
    generated_tokens: float
    tester_share: float
    """Of a core, that the callers took while they came."""


async def once(server: Server, load: float, capacity_per_s: float, size: Size, number: int) -> Part:
    """Callers of all tenants together, until the last of them has an answer or has waited long enough.

    No prompt is one of another load: what the cache has of that would make its answer cheaper.
    """
    before = await settled(server.process)
    visits = [
        visit
        for sort in server.sorts
        for visit in poisson(
            sort,
            load * capacity_per_s / TENANTS,
            size.seconds,
            f"{SEED}:{number}:{sort.name}",
            words=f"{SEED}:{number}:{sort.name}:{load:g}",
        )
    ]
    wall_s, busy_s = time.perf_counter(), time.process_time()
    await play(server.client, visits, until_s=size.seconds + DRAIN_S)
    share = (time.process_time() - busy_s) / (time.perf_counter() - wall_s)
    after = await settled(server.process)
    name = "maitred_engine_output_tokens_total"
    return Part(visits, after[name] - before[name], share)


def figures_of(rounds: list[Part], size: Size) -> dict[str, Any]:
    """What came of one load."""
    visits = [visit for part in rounds for visit in part.visits]
    inside = [visit for visit in visits if size.warmup_s <= visit.ended_s < size.seconds]
    good = [visit for visit in inside if is_good(visit)]
    seconds = len(rounds) * (size.seconds - size.warmup_s)
    generated = sum(part.generated_tokens for part in rounds)
    delivered = sum(visit.reply.output_tokens for visit in visits if visit.whole)
    late = sum(visit.reply.output_tokens for visit in visits if visit.whole and not is_good(visit))
    return {
        "requests": len(visits),
        "goodput_per_s": round(len(good) / seconds, 3),
        "good_tokens_per_s": round(sum(visit.reply.output_tokens for visit in good) / seconds, 1),
        "ttft_s": percentiles([visit.ttft_s for visit in visits if visit.reply.arrivals_s]),
        "wasted_share": round(1 - delivered / generated, 4) if generated else 0.0,
        "late_share": round(late / generated, 4) if generated else 0.0,
        "expired_share": round(sum(visit.reply.code == EXPIRED for visit in visits) / len(visits), 4),
        "tester_cpu_share": round(max(part.tester_share for part in rounds), 3),
        "endings": endings(visits),
        "prediction": prediction([visit for visit in visits if visit.due_s >= size.warmup_s]),
    }


def is_good(visit: Visit) -> bool:
    """Whether all of the answer came, and its first token in time."""
    return visit.whole and visit.ttft_s <= OBJECTIVE_S


def prediction(visits: list[Visit]) -> dict[str, float]:
    """How far the predicted time to first token was from what came, and the one over the other.

    The error over the objective forgives more where the time is short.
    """
    errors, of_objective, ratios = [], [], []
    for visit in visits:
        predicted_ms = visit.reply.headers.get(PREDICTED)
        if predicted_ms is not None and visit.reply.arrivals_s:
            seen_s = visit.reply.arrivals_s[0] - visit.reply.sent_s
            error_s = abs(float(predicted_ms) / 1e3 - seen_s)
            errors.append(error_s / seen_s)
            ratios.append(float(predicted_ms) / 1e3 / seen_s)
            of_objective.append(error_s / OBJECTIVE_S)
    return {
        "requests": len(errors),
        **{f"error_{rank}": value for rank, value in _ranks(errors).items()},
        **{f"ratio_{rank}": value for rank, value in _ranks(ratios).items()},
        **{f"error_over_objective_{rank}": value for rank, value in _ranks(of_objective).items()},
    }


def _ranks(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(ordered[int(len(ordered) * p / 100)], 4) for p in (50, 90)} if ordered else {}


def require(report: Report, size: Size, *, quick: bool) -> None:
    """Holds what came against the bars."""
    ours = report.figures["maitred"]
    peak = max(figures["goodput_per_s"] for figures in ours.values())
    for load, least in (("2", 0.90), ("10", 0.85)):
        share = round(ours[load]["goodput_per_s"] / peak, 4)
        report.figures[f"goodput_share_at_{load}"] = share
        if not quick:
            report.require(f"goodput at {load}x over its peak", share, at_least=least)
    wasted = max(figures["wasted_share"] for figures in ours.values())
    report.require("most wasted tokens of a load", wasted, at_most=0.03)
    if quick:
        return
    report.require("refusals, p99, s", report.figures["refusal_s"].get("p99", float("inf")), at_most=0.05)
    error = report.figures["prediction"].get("error_p90", float("inf"))
    report.require("error of predicted TTFT, p90", error, at_most=0.2)


if __name__ == "__main__":
    sys.exit(main())
