"""Does the load tester tell the truth? Its figures against those of a server whose every event is known.

The scripted server and the tester each have a process and a core. Five questions:

* truth: is every percentile what the server did, seen from when the request was due?
* pause: does a server that is silent for two seconds show in the percentiles by as much as it must? (Measured from when
  a request was *sent*, over few connections, it would not.)
* limit: does the tester say so when it, or its machine, was too slow; and keep quiet when neither was?
* cost: 5,000 streams of 20 tokens per second on one core, no event lost. Over a Unix socket, so that what is measured
  is the tester, and over TCP, whose own work fills two such cores by itself.
* compare: of 20 comparisons of a server with itself, how many find a difference; of 20 with 10 % more time to the
  first token, how many find it?

    python -m benchmarks tester [--quick] [--only truth …]
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from benchmarks.support.report import Report
from benchmarks.support.scripted_load import RANKS, TESTER_CORE, Floats, Played, play, quantiles
from maitred.load.analysis.compare import compare
from maitred.load.measure.result import LoadResult
from maitred.load.spec import ArrivalsSpec, ClientsSpec, LoadSpec, ShapeSpec, StopCondition
from maitred.testing.scripted_openai import DelayDistribution, ScriptedPause, ServerScript

SEED = 20261121
TOLERATED_SHARE, TOLERATED_S = 0.03, 0.002
"""A percentile may be off by the larger of the two."""
TRUTH, QUICK_TRUTH = (1000, 20.0, 60), (200, 2.5, 20)
"""Streams, seconds, and tokens of each stream."""
PAUSE, QUICK_PAUSE = (15.0, 2.0, 2.0), (3.0, 1.0, 1.0)
"""Seconds, when the server falls silent, and for how long."""
LIMIT, QUICK_LIMIT = (8.0, 4.0), (2.0, 1.0)
"""Seconds of the loads that are played, and of the one that is too much."""
HOGS = 4
"""Processes that burn the tester's core."""
COST, QUICK_COST = (5000, 600, 10.0), (500, 60, 1.0)
"""Streams, tokens of each, and the seconds in which they begin."""
COMPARED, QUICK_COMPARED = (20, 9.0, 50.0), (2, 4.0, 50.0)
"""Runs of each server, the seconds of each, and requests per second."""
RATE_PER_S = 20
"""Tokens of each stream where the tester's cost is measured."""
CHANGED = ("worse", "better")


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer streams, shorter, two comparisons")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=" ".join(PARTS))
    arguments = parser.parse_args()
    report = Report("tester", seed=SEED, quick=arguments.quick)
    for name in arguments.only:
        PARTS[name](report, arguments.quick)
        print(name, report.figures[name], flush=True)
    return report.finish()


# --- truth ---


def truth(report: Report, quick: bool) -> None:
    """Every percentile against the server's log, in a closed and in an open loop."""
    streams, seconds, tokens = QUICK_TRUTH if quick else TRUTH
    script = ServerScript(
        ttft=DelayDistribution(mean_s=0.2, cv=0.5), itl=DelayDistribution(mean_s=0.05, cv=0.3), seed=SEED
    )
    answer_s = script.ttft.mean_s + (tokens - 1) * script.itl.mean_s
    loops = {
        "closed": ArrivalsSpec(users=streams, spread_s=answer_s),
        "open": ArrivalsSpec(rate_per_s=streams / answer_s, process="poisson"),
    }
    figures = report.figures["truth"] = {}
    for name, arrivals in loops.items():
        played = play(script, load(arrivals, tokens, seconds))
        figures[name] = truthfulness(report, f"truth, {name} loop", played)
        report.require(f"truth, {name} loop: limit is none", calm(played), at_least=1)


def truthfulness(report: Report, name: str, played: Played) -> dict[str, object]:
    """Holds what a run reports against what the server did and what the script wanted."""
    summary = played.result.summary
    reported = {time: getattr(summary, time) for time in ("ttft", "itl", "tpot", "e2e")}
    table: dict[str, object] = {}
    for source, true in (("done", played.true_times()), ("scheduled", played.true_times(scheduled=True))):
        worst = 0.0
        for time, values in true.items():
            expected = quantiles(values)
            row = {rank: (round(getattr(reported[time], rank), 6), round(expected[rank], 6)) for rank in RANKS}
            table[f"{time}, reported and {source}"] = row
            worst = max(worst, *(off(got, want) for got, want in row.values()))
        report.require(f"{name}: worst percentile against what was {source}, in tolerances", worst, at_most=1)
    delays = played.reading_delays()
    table["event sent to event noted, s"] = {
        **quantiles(delays),
        "least": float(delays.min()),
        "max": float(delays.max()),
    }
    report.require(f"{name}: events lost", played.lost_events, at_most=0)
    return {
        "requests": summary.requests,
        "outcomes": summary.outcomes,
        **table,
        "tester": played.tester(),
        "server": played.server(),
    }


def off(got_s: float, want_s: float) -> float:
    """A difference as a multiple of what is tolerated."""
    return round(abs(got_s - want_s) / max(TOLERATED_SHARE * want_s, TOLERATED_S), 4)


# --- pause ---


def pause(report: Report, quick: bool) -> None:
    """The server is silent for a while under an open loop that does not care."""
    rate_per_s, ttft_s = 200.0, 0.03
    seconds, at_s, for_s = QUICK_PAUSE if quick else PAUSE
    script = ServerScript(
        ttft=DelayDistribution(mean_s=ttft_s),
        itl=DelayDistribution(mean_s=0.01),
        pauses=[ScriptedPause(at_s=at_s, for_s=for_s)],
        seed=SEED,
    )
    arrivals = ArrivalsSpec(rate_per_s=rate_per_s, process="constant")
    free = play(script, load(arrivals, 3, seconds))
    bound = play(script, load(arrivals, 3, seconds, clients=ClientsSpec(max_open=20)))
    # Of the requests due in the pause, those of its first three quarters wait at least a quarter of it.
    threshold_s = ttft_s + for_s / 4
    must = 0.75 * for_s / seconds
    expected = {rank: expected_ttft(share, ttft_s, for_s, seconds) for rank, share in RANKS.items()}
    seen = share_above(free.result.ttft_s(), threshold_s)
    naive_s = bound.result.column("first_s") - bound.result.column("sent_s")
    naive = share_above(naive_s, threshold_s)
    report.figures["pause"] = {
        "share above threshold": {
            "threshold_s": threshold_s,
            "least expected": must,
            "reported": seen,
            "reported with 20 connections": share_above(bound.result.ttft_s(), threshold_s),
            "naive (since sent, 20 connections)": naive,
        },
        "least expected": expected,
        "reported": quantiles(free.result.ttft_s()),
        "reported with 20 connections": quantiles(bound.result.ttft_s()),
        "naive": quantiles(naive_s),
        "longest": {
            "least expected": ttft_s + for_s,
            "reported": free.result.summary.ttft.max,
            "naive": float(np.nanmax(naive_s)),
        },
        "tester": free.tester(),
        "server": free.server(),
    }
    report.require("pause: share of slow requests, of the least expected", seen / must, at_least=0.97)
    for rank in ("p95", "p99"):
        shown = quantiles(free.result.ttft_s())[rank] / expected[rank]
        report.require(f"pause: {rank} of TTFT, of the least expected", shown, at_least=0.97)
    done = quantiles(free.true_times()["ttft"])
    worst = max(off(quantiles(free.result.ttft_s())[rank], done[rank]) for rank in RANKS)
    report.require("pause: worst percentile of TTFT against what was done, in tolerances", worst, at_most=1)
    report.require("pause: share that a naive measure finds, of the least expected", naive / must, at_most=0.5)


def expected_ttft(share: float, ttft_s: float, pause_s: float, seconds: float) -> float:
    """A quantile of the TTFT of evenly spaced requests of which those due in a pause wait for its end.

    It is the least: what has piled up until then takes the server a moment to work off.
    """
    slowest = (1 - share) * seconds  # so many seconds' worth of requests are above the quantile
    return ttft_s + max(0.0, pause_s - slowest)


def share_above(values_s: Floats, threshold_s: float) -> float:
    """Of all requests, those that took longer."""
    return float((values_s > threshold_s).mean())


# --- limit ---


def limit(report: Report, quick: bool) -> None:
    """Calm, on a core that others burn, and with more requests than one tester can make."""
    seconds, overloaded_s = QUICK_LIMIT if quick else LIMIT
    script = ServerScript(ttft=DelayDistribution(mean_s=0.05), itl=DelayDistribution(mean_s=0.02), seed=SEED)
    calm_load = load(ArrivalsSpec(rate_per_s=50), 20, seconds)
    calm_run = play(script, calm_load)
    with hogs(HOGS):
        starved = play(script, calm_load)
    overloaded = play(script, load(ArrivalsSpec(rate_per_s=4000, process="constant"), 2, overloaded_s))
    runs = {"calm": calm_run, f"core shared with {HOGS} others": starved, "4,000 requests per second": overloaded}
    report.figures["limit"] = {name: played.tester() for name, played in runs.items()}
    report.require("limit: none when calm", calm(calm_run), at_least=1)
    report.require("limit: not none on a burnt core", 1 - calm(starved), at_least=1)
    report.require("limit: not none with too many requests", 1 - calm(overloaded), at_least=1)


def calm(played: Played) -> int:
    """1 when neither the tester nor its machine was the limit, by its own verdict; else 0."""
    return int(played.result.tester.limit == "none")


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Others who burn the tester's core."""
    burn = f"import os; os.sched_setaffinity(0, {{{TESTER_CORE}}})\nwhile os.getppid() != 1: pass"
    processes = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# --- cost ---


def cost(report: Report, quick: bool) -> None:
    """What so many streams at once take of a core, over TCP and without it."""
    streams, tokens, ramp_s = QUICK_COST if quick else COST
    script = ServerScript(ttft=DelayDistribution(mean_s=0.2), itl=DelayDistribution(mean_s=1 / RATE_PER_S), seed=SEED)
    spec = load(ArrivalsSpec(users=streams, spread_s=ramp_s), tokens, requests=streams)
    figures = report.figures["cost"] = {"streams": streams, "tokens_per_s_each": RATE_PER_S}
    for name, unix in (("unix socket", True), ("tcp", False)):
        played = play(script, spec, unix=unix)
        tester = played.result.tester
        # From when all are open until before the first ends.
        rate_per_s = played.events_per_s(ramp_s + 1, tokens / RATE_PER_S - 1)
        figures[name] = {
            "outcomes": played.result.summary.outcomes,
            "events": played.truth.events,
            "events_lost": played.lost_events,
            "tokens_per_s_each_while_all_open": round(rate_per_s / streams, 2),
            "event sent to event noted, s": quantiles(played.reading_delays()),
            "cpu_us_per_event": round(tester.cpu_seconds / played.truth.events * 1e6, 2),
            "server_cpu_us_per_event": round(played.truth.cpu_seconds / played.truth.events * 1e6, 2),
            "memory_bytes_per_event": round(tester.peak_memory_bytes / played.truth.events, 1),
            "tester": played.tester(),
            "server": played.server(),
        }
        report.require(f"cost, {name}: events lost", played.lost_events, at_most=0)
        report.require(f"cost, {name}: complete answers", played.result.summary.outcomes["complete"], at_least=streams)
        report.require(f"cost, {name}: most streams at once", tester.peak_open, at_least=streams)
        if unix:
            report.require(
                "cost, unix socket: tokens/s of each stream", rate_per_s / streams, at_least=RATE_PER_S * 0.95
            )


# --- compare ---


def comparison(report: Report, quick: bool) -> None:
    """A server against itself, and against itself with 10 % more TTFT; every run with draws of its own."""
    repeats, seconds, rate_per_s = QUICK_COMPARED if quick else COMPARED
    spec = load(ArrivalsSpec(rate_per_s=rate_per_s), 10, seconds)

    def one(number: int) -> LoadResult:
        factor = 1.1 if number % 3 == 2 else 1.0
        script = ServerScript(
            ttft=DelayDistribution(mean_s=0.2, cv=0.2, factor=factor),
            itl=DelayDistribution(mean_s=0.02, cv=0.3),
            seed=SEED + number,
        )
        return play(script, spec).result

    # Each run needs a few hundredths of a core. Those that are compared run side by side: a disturbance meets them all.
    with ThreadPoolExecutor(6 if quick else 3) as threads:
        results = list(threads.map(one, range(3 * repeats)))
    before, same, slower = results[::3], results[1::3], results[2::3]
    figures = report.figures["compare"] = {"requests": before[0].summary.requests, "same": [], "slower": []}
    for name, after in (("same", same), ("slower", slower)):
        for one_before, one_after in zip(before, after, strict=True):
            rows = compare([one_before], [one_after], seed=SEED).rows
            figures[name].append({row.metric: [row.verdict, row.change, row.low, row.high] for row in rows})
    false = sum(any(row[0] in CHANGED for row in rows.values()) for rows in figures["same"])
    found = sum(rows["ttft_mean"][0] == "worse" for rows in figures["slower"])
    figures["limits"] = dict(Counter(result.tester.limit for result in results))
    report.require("compare: the same called different", false, at_most=1)
    report.require("compare: 10 % slower first tokens found", found, at_least=repeats if quick else repeats - 1)


def load(
    arrivals: ArrivalsSpec,
    tokens: int,
    seconds: float | None = None,
    *,
    requests: int | None = None,
    clients: ClientsSpec | None = None,
) -> LoadSpec:
    """A load of equal questions."""
    return LoadSpec(
        arrivals=arrivals,
        shape=ShapeSpec(prompt_tokens="50", output_tokens=str(tokens)),
        clients=clients or ClientsSpec(),
        bounds=StopCondition(duration_s=seconds, requests=requests),
        seed=SEED,
    )


PARTS: dict[str, Callable[[Report, bool], None]] = {
    "truth": truth,
    "pause": pause,
    "limit": limit,
    "cost": cost,
    "compare": comparison,
}

if __name__ == "__main__":
    sys.exit(main())
