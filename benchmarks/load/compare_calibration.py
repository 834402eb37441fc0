"""Whether `maitred load compare` cries wolf, and whether it sees one.

Simulated runs whose truth is known: log-normal times to first token that remember their neighbours, as queues make
them, and answers whose pace is their own. The same server compared with itself must leave the whole table untouched in
19 of 20 cases; a server that has become 10 % slower must be found where a run of that size can show it.

Where that is follows from the size alone. The mean of `n` times with coefficient of variation `cv`, each correlated
with its neighbour by `memory`, has a standard error of about ``cv √((1 + memory) / (1 - memory) / n)``, relative; the
difference of two runs has √2 times that, less whatever they share by playing the same load. To be found nearly
always, a change must be some five of those: 600 requests with CV 0.4 and memory 0.7 cannot show 10 % to anybody.

    python -m benchmarks compare_calibration [--quick]
"""

import argparse
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.support.report import Report
from maitred.load.analysis.compare import compare
from maitred.load.measure.record import RequestRecord, RunData, UserOutcome
from maitred.load.measure.result import LoadResult
from maitred.load.measure.times import Floats
from maitred.load.spec import ArrivalsSpec, LoadSpec, ObjectivesSpec, StopCondition


@dataclass(frozen=True)
class Server:
    """What is simulated.

    Attributes:
        requests: Of a run.
        memory: Correlation of a request's time to first token with its neighbour's.
        cv: Coefficient of variation of the time to first token.
        slower: Factor on it.
        drift: Standard deviation, relative, of a run's level.
        load_share: Share of the variance of log TTFT that comes from the load (who arrives when, with which length),
            and so is the same in a run that plays the same load.
        gaps: Of an answer.
    """

    requests: int = 600
    memory: float = 0.7
    cv: float = 0.4
    slower: float = 1.0
    drift: float = 0.0
    load_share: float = 0.0
    gaps: int = 6

    def run(self, load_seed: int, seed: int) -> LoadResult:
        """One run: the load from one seed, the server's chance from another."""
        load, chance = np.random.default_rng([1, load_seed]), np.random.default_rng([2, seed])
        rate_per_s = 50.0
        due_s = np.cumsum(load.exponential(1 / rate_per_s, self.requests))
        tokens = np.clip(load.geometric(1 / self.gaps, self.requests), 2, 10 * self.gaps)
        shared, own = (self._remembering(rng) for rng in (load, chance))
        queue = np.sqrt(self.load_share) * shared + np.sqrt(1 - self.load_share) * own
        level = np.exp(self.drift * chance.standard_normal())
        ttft_s = 0.4 * self.slower * level * np.exp(np.sqrt(np.log1p(self.cv**2)) * queue)
        pace_s = 0.03 * np.exp(0.05 * queue + 0.1 * chance.standard_normal(self.requests)) * level
        records = []
        for number in range(self.requests):
            gaps = pace_s[number] * chance.lognormal(0, 0.3, tokens[number] - 1)
            at_s = due_s[number] + ttft_s[number] + np.concatenate([[0.0], np.cumsum(gaps)])
            failed = chance.random() < 0.005
            records.append(
                RequestRecord(
                    session=number,
                    turn=0,
                    tenant="default",
                    intended_s=float(due_s[number]),
                    asked_tokens=int(tokens[number]),
                    sent_s=float(due_s[number]),
                    headers_s=float(at_s[0]),
                    ended_s=float(at_s[-1]),
                    arrivals_s=array("d") if failed else array("d", at_s.tolist()),
                    prompt_tokens=200,
                    output_tokens=0 if failed else int(tokens[number]),
                    attempts=1,
                    status=500 if failed else 200,
                    outcome=UserOutcome.FAILED if failed else UserOutcome.COMPLETE,
                )
            )
        spec = LoadSpec(
            arrivals=ArrivalsSpec(rate_per_s=rate_per_s),
            bounds=StopCondition(requests=self.requests),
            objectives=ObjectivesSpec(ttft_s=0.8, tpot_s=0.05),
            seed=load_seed,
        )
        data = RunData(records=records, samples=[], seconds=records[-1].ended_s, started_unix_s=0.0)
        return LoadResult.of(spec, data, command="", workload="simulated")

    def _remembering(self, rng: np.random.Generator) -> Floats:
        """Normal values, each correlated with the one before by `memory`."""
        steps = rng.standard_normal(self.requests)
        steps[1:] *= np.sqrt(1 - self.memory**2)
        states = [float(steps[0])]
        for step in steps[1:]:
            states.append(self.memory * states[-1] + float(step))
        return np.array(states)


@dataclass
class ComparisonCounts:
    """What came of many comparisons."""

    repeats: int
    alarms: float
    """Share of them that called any metric better or worse."""
    alarms_within: tuple[float, float]
    """Where that share may lie for ever more repeats (95 %, Wilson)."""
    found: float
    """Share that called the TTFT's median worse."""
    seen: float
    """Share that called any figure of the TTFT worse."""
    width: float
    """Mean width of the interval of the TTFT's median."""
    rows: Counter[str]
    """How often each metric was called."""


def compare_repeatedly(
    before: Server, after: Server, *, repeats: int, seed: int, runs: int = 1, same_load: bool = False
) -> ComparisonCounts:
    """Compares fresh runs again and again."""
    alarms, found, seen, width = 0, 0, 0, 0.0
    rows: Counter[str] = Counter()
    for repeat in range(repeats):
        base = seed + 1000 * repeat
        first = [before.run(base + n, base + n) for n in range(runs)]
        second = [after.run(base + n + (0 if same_load else 100), base + n + 100) for n in range(runs)]
        table = compare(first, second, seed=repeat)
        called = [row.metric for row in table.rows if row.verdict in ("better", "worse")]
        rows.update(called)
        alarms += bool(called)
        median = table.rows[0]
        found += median.verdict == "worse"
        seen += any(row.verdict == "worse" for row in table.rows if row.metric.startswith("ttft"))
        width += (median.high or 0) - (median.low or 0)
    return ComparisonCounts(
        repeats, alarms / repeats, _wilson(alarms, repeats), found / repeats, seen / repeats, width / repeats, rows
    )


def _wilson(hits: int, repeats: int) -> tuple[float, float]:
    z = 1.96
    centre = (hits + z**2 / 2) / (repeats + z**2)
    reach = z / (repeats + z**2) * (hits * (1 - hits / repeats) + z**2 / 4) ** 0.5
    return round(max(0.0, centre - reach), 4), round(min(1.0, centre + reach), 4)


Case = tuple[Server, int, bool]
"""Server, runs of each side, whether both sides play the same load."""

SAME: dict[str, Case] = {
    "300 requests, independent": (Server(requests=300, memory=0.0), 1, False),
    "300 requests": (Server(requests=300), 1, False),
    "600 requests, independent": (Server(memory=0.0), 1, False),
    "600 requests": (Server(), 1, False),
    "600 requests, same load": (Server(load_share=0.7), 1, True),
    "2,000 requests": (Server(requests=2000), 1, False),
    "3 runs of 300, drift 2 %": (Server(requests=300, drift=0.02), 3, False),
}

SLOWER: dict[str, Case] = {
    "600 requests, same load, CV 0.3, memory 0.5": (Server(cv=0.3, memory=0.5, load_share=0.7), 1, True),
    "2,000 requests, same load, memory 0.5": (Server(requests=2000, memory=0.5, load_share=0.7), 1, True),
    "2,000 requests, independent": (Server(requests=2000, memory=0.0), 1, False),
    "600 requests, CV 0.3, independent": (Server(cv=0.3, memory=0.0), 1, False),
    "600 requests, same load, memory 0.5": (Server(memory=0.5, load_share=0.7), 1, True),
    "600 requests, memory 0.5": (Server(memory=0.5), 1, False),
    "2,000 requests, memory 0.5": (Server(requests=2000, memory=0.5), 1, False),
}

MUST_FIND = tuple(SLOWER)[:3]
"""Bars for these; the others show where the information ends."""


ENOUGH = 100
"""Repeats from which on a case has a bar of its own. With fewer, chance alone would miss it too often; they count in
the bar for all cases together."""


def repeats_of(case: Case, repeats: int) -> int:
    """Fewer of large runs, in proportion to the work, but not so few that they say nothing."""
    server, runs, _ = case
    return min(repeats, max(20, repeats * 600 // (server.requests * runs)))


def main() -> int:
    """Runs the study and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="bounded run, under 45 s")
    parser.add_argument("--seed", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=100, help="of each case of up to 600 requests, without --quick")
    arguments = parser.parse_args()
    report = Report("compare_calibration", seed=arguments.seed, quick=arguments.quick)
    repeats = 4 if arguments.quick else arguments.repeats
    alarms, tables = 0.0, 0
    for name, case in SAME.items():
        server, runs, same_load = case
        it = compare_repeatedly(
            server, server, repeats=repeats_of(case, repeats), seed=arguments.seed, runs=runs, same_load=same_load
        )
        alarms, tables = alarms + it.alarms * it.repeats, tables + it.repeats
        report.figures[f"same: {name}"] = it.__dict__
        print(f"same: {name}: alarms {it.alarms:.3f} {it.alarms_within}, {it.repeats} repeats, ", end="")
        print(f"width {it.width:.3f}, {dict(it.rows)}", flush=True)
        if it.repeats >= ENOUGH:
            report.require(f"false alarms, {name}", it.alarms, at_most=0.05)
    # A quick run repeats too seldom to tell 5 % from 15 %: it only shows a table that is plainly wrong.
    report.require("false alarms, all cases", alarms / tables, at_most=0.2 if arguments.quick else 0.05)
    for name, case in SLOWER.items():
        server, runs, same_load = case
        slower = replace(server, slower=1.1)
        it = compare_repeatedly(
            server,
            slower,
            repeats=repeats_of(case, max(2, 3 * repeats // 10)),
            seed=arguments.seed,
            runs=runs,
            same_load=same_load,
        )
        report.figures[f"10 % slower: {name}"] = it.__dict__
        print(f"10 % slower: {name}: found {it.found:.3f}, seen {it.seen:.3f}, {it.repeats} repeats, ", end="")
        print(f"width {it.width:.3f}, {dict(it.rows)}", flush=True)
        if name in MUST_FIND:
            report.require(f"10 % seen, {name}", it.seen, at_least=0.5 if arguments.quick else 0.95)
    large = [Server(requests=2000, gaps=200).run(n, n) for n in range(2)]
    started_s = time.process_time()
    compare(large[:1], large[1:])
    seconds = time.process_time() - started_s
    report.require("processor seconds for 2,000 requests of 200 tokens", seconds, at_most=2.0)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
