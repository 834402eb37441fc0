"""Misses and replica-hours of the autoscaler beside those of others and of hindsight, in simulated time.

Each trace is played with each policy and lead time, request by request, with the autoscaler of production (`ours`). A
request misses if its time to first token exceeds the objective, or its mean time between tokens does. A replica costs
from its order to the end of its drain. Traces:

* ``deepseek-r1`` and ``m-small`` (alibaba/ServeGen, Apache-2.0): 24 hours and 14 days of a large service, clients drawn
  from its statistics, at a rate that keeps some replicas busy. Answers of m-small are 32 times as long as published
  (550 tokens on average), or there would be ten million;
* ``azure`` (AzurePublicDataset 2023, conversations, CC BY 4.0): one hour as recorded, replicas with half of the slots;
* ``waves``: an hour of calm, then for twenty minutes 2, 3 and 10 times its rate, with flanks of a minute;
* a constant load, for 24 hours, on which no number may change.

The others (`benchmarks.support.scaling.policies`) are played with many settings, and the best of them all, chosen for
this trace and lead time afterwards, is what ours is compared with at as many misses. Hindsight is exact in a fluid
model (`benchmarks.support.scaling.hindsight`); its plan without misses is played, too, which shows what the model is
worth.

    python -m benchmarks autoscaling --data ../shared/data
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.report import Report, load_result
from benchmarks.support.requirements import require_file
from benchmarks.support.scaling import traces
from benchmarks.support.scaling.fleet import Observation, ReplicaKind, RequestTrace, SimulatedFleet
from benchmarks.support.scaling.hindsight import FluidLoad, HindsightPlan, cheapest_plan, fluid_load, part_of
from benchmarks.support.scaling.outcome import LEAD_IN_S, Outcome, Setting, least_on_hull, play
from benchmarks.support.scaling.policies import (
    KedaMetric,
    KnativeConcurrency,
    RayOngoingRequests,
    ScalingPolicy,
    UtilisationHpa,
)
from benchmarks.support.scaling.production import ProductionPolicy
from maitred.core.replica import StepTimes

SEED = 20_261_128
"""Of the draws that judge; policies were tuned on others."""
R1, SMALL = Path("traces/servegen/reason_deepseek-r1.tar.xz"), Path("traces/servegen/language_m-small.tar.xz")
AZURE = Path("traces/azure_2023/AzureLLMInferenceTrace_conv.csv.gz")
ORIGIN = "it is in alibaba/ServeGen or Azure/AzurePublicDataset on GitHub; name the folder above `traces`: --data."
TIMES = StepTimes(fixed_s=0.022, token_s=0.00005, context_token_s=1.2e-7, decode_s=0.0005, chunk_s=0.001)
"""A replica that prefills 20,000 tokens per second, and takes 30 to 40 ms for a step when its 16 slots are taken."""
SLOTS, FEW_SLOTS, STEP_TOKENS = 16, 8, 2048
TTFT_S, ITL_S = 3.0, 0.05
DELAY_S = 2
"""For how long hindsight lets requests wait; the rest of their objective is for the prefill."""
MOST = 64
LEADS_S, QUICK_LEADS_S = (2.0, 30.0, 120.0), (30.0,)
TARGETS, FEW_TARGETS, QUICK_TARGETS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), (0.5, 0.7, 0.9), (0.5, 0.8)
"""Shares of a replica's slots."""
QUEUE_TARGETS = (1.0, 4.0, 16.0)
"""Waiting requests for each replica."""
DAY_S = 86_400.0
CONSTANT_REPLICAS, QUICK_CONSTANT_REPLICAS = (2.4, 5.0), (3.7,)
CONSTANT_S, QUICK_CONSTANT_S = DAY_S, 1800.0
SETTLED_S = 3600.0
"""Of a constant load, before the day in which changes are counted."""
QUICK_S = 36_000.0
"""Longest part of a trace that is played by ``--quick``."""
MOST_MISSED, MOST_OF_HINDSIGHT, MOST_OF_OTHERS, MOST_REACTION_S = 0.01, 1.8, 0.8, 1.0
SHORT_LEAD_S = 30.0
PolicyMaker = Callable[[SimulatedFleet], ScalingPolicy]


@dataclass(frozen=True)
class Workload:
    """What is played.

    Attributes:
        name: Of the trace.
        make: Reads or draws it, up to a time at least.
        slots: Of a replica.
        interval_s: Between two decisions of the autoscaler, unless a request begins to wait.
        is_long: Whether it takes so long that fewer settings of others are played.
        quick_part_s: Begin and end of the part that ``--quick`` plays.
    """

    name: str
    make: Callable[[Path, float], RequestTrace]
    slots: int = SLOTS
    interval_s: float = 1.0
    is_long: bool = False
    quick_part_s: tuple[float, float] = (0.0, 1500.0)

    @property
    def kind(self) -> ReplicaKind:
        """Kind of its replicas."""
        return ReplicaKind(TIMES, self.slots, STEP_TOKENS)


WORKLOADS = {
    "deepseek-r1": Workload(
        "deepseek-r1",
        lambda data, end_s: traces.servegen(data / R1, "deepseek-r1", requests_per_s=1.7, seed=SEED, end_s=end_s),
        interval_s=2.0,
        quick_part_s=(0.0, 3600.0),
    ),
    "m-small": Workload(
        "m-small",
        lambda data, end_s: traces.servegen(
            data / SMALL, "m-small", requests_per_s=3.3, seed=SEED, end_s=end_s, output_scale=32.0
        ),
        quick_part_s=(0.0, QUICK_S),
        interval_s=20.0,
        is_long=True,
    ),
    "azure": Workload("azure", lambda data, _: traces.azure(data / AZURE), slots=FEW_SLOTS),
    "waves": Workload("waves", lambda _, __: traces.waves(6.0, SEED), quick_part_s=(6600.0, 8400.0)),
}


def others(slots: int, targets: Sequence[float], *, few: bool) -> dict[str, PolicyMaker]:
    """Settings of the policies of others; each is made anew for a fleet.

    Args:
        slots: Of a replica.
        targets: Shares of the slots that are aimed at.
        few: Leave out settings that have not been the best at any lead time of the shorter traces.
    """
    made: dict[str, PolicyMaker] = {"Ray Serve, defaults": lambda _: RayOngoingRequests(2.0)}

    def add(name: str, policy: Callable[..., ScalingPolicy], *values: float, **settings: Any) -> None:  # noqa: ANN401
        made[name] = lambda _: policy(*values, **settings)

    for share in targets:
        target, name = share * slots, f"{share:.0%} of slots"
        add(f"Knative, {name}, down after 300 s", KnativeConcurrency, target, down_delay_s=300.0)
        add(f"Ray Serve, {name}, up 5 s, down 120 s", RayOngoingRequests, target, 5.0, 120.0, 10.0, 5.0)
        add(f"Ray Serve, {name}, up 0 s, down 30 s", RayOngoingRequests, target, 0.0, 30.0, 5.0, 1.0)
        add(f"HPA, {name}", UtilisationHpa, share)
        add(f"KEDA, ongoing, {name}", KedaMetric, target, running_too=True)
        if not few:
            add(f"Knative, {name}", KnativeConcurrency, target)
            add(f"Ray Serve, {name}, up 30 s, down 600 s", RayOngoingRequests, target)
            add(f"HPA, {name}, down after 60 s", UtilisationHpa, share, 60.0)
    for waiting in QUEUE_TARGETS:
        add(f"KEDA, queue of {waiting:g}", KedaMetric, waiting)
    return made


class PlannedPolicy:
    """Orders what a plan of hindsight has, early enough."""

    interval_s = 1.0
    at_wait = False

    def __init__(self, plan: HindsightPlan, lead_s: float) -> None:
        self._plan, self._lead_s = plan, lead_s

    def desired(self, seen: Observation) -> int:
        """See `ScalingPolicy`."""
        replicas = self._plan.replicas
        begin, end = (int(at_s - LEAD_IN_S) for at_s in (seen.now_s, seen.now_s + math.ceil(self._lead_s)))
        return int(replicas[max(0, min(begin, len(replicas) - 1)) : max(1, end + 1)].max())


def setting_of(workload: Workload, load: FluidLoad) -> Setting:
    """Objectives and limits, with as many replicas at the beginning as the first ten minutes need."""
    first = math.ceil(1.2 * float(load.replicas[: int(2 * LEAD_IN_S)].mean()))
    return Setting(workload.kind, TTFT_S, ITL_S, max(1, first), MOST)


def figures_of(outcome: Outcome) -> dict[str, Any]:
    """What is written of an outcome."""
    return {
        "missed_percent": round(100 * outcome.missed, 4),
        "slow_percent": round(100 * outcome.slow, 4),
        "replica_hours": round(outcome.replica_hours, 3),
        "starts": outcome.starts,
        "changes": len(outcome.changes),
    }


def play_others(
    workload: Workload, trace: RequestTrace, setting: Setting, lead_s: float, targets: Sequence[float]
) -> dict[str, Any]:
    """Plays a trace with the policies of others: setting -> its figures."""
    makers = others(workload.slots, targets, few=workload.is_long)
    return {name: figures_of(play(trace, setting, make, lead_s=lead_s)[0]) for name, make in makers.items()}


def play_ours(
    workload: Workload, trace: RequestTrace, load: FluidLoad, lead_s: float, others_played: dict[str, Any]
) -> dict[str, Any]:
    """Plays a trace with the autoscaler of production, and compares it with the others and with hindsight."""
    setting = setting_of(workload, load)
    load = part_of(load, int(LEAD_IN_S))

    def make(fleet: SimulatedFleet) -> ScalingPolicy:
        return ProductionPolicy(fleet, setting, interval_s=workload.interval_s)

    ours, _ = play(trace, setting, make, lead_s=lead_s)
    best = cheapest_plan(load, lead_s, least=1)
    same_s = cheapest_plan(load, lead_s, missed=ours.missed, least=1).least_replica_s
    planned, _ = play(trace, setting, lambda _: PlannedPolicy(best, lead_s), lead_s=lead_s)
    points = [(known["missed_percent"] / 100, known["replica_hours"]) for known in others_played.values()]
    others_hours = least_on_hull(points, ours.missed)
    return {
        "ours": figures_of(ours),
        "hindsight": {"replica_hours": round(best.replica_s / 3600, 3), "starts": best.starts},
        "hindsight_played": figures_of(planned),
        "of_hindsight": round(ours.replica_s / best.replica_s, 3),
        "of_hindsight_with_as_many_misses": round(ours.replica_s / same_s, 3),
        "others_hours_with_as_many_misses": round(others_hours, 3),
        "others_fewest_missed_percent": round(100 * min(points)[0], 4),
        "of_others": round(ours.replica_hours / others_hours, 3),
        "others_of_hindsight_with_as_many_misses": round(3600 * others_hours / same_s, 3),
        "longest_reaction_s": round(max(ours.reaction_s, default=0.0), 3),
    }


def changes_at_constant_load(replicas: float, seconds: float, settled_s: float) -> dict[str, Any]:
    """Plays a constant load, and counts the changes after it has settled."""
    kind = WORKLOADS["waves"].kind
    trial = traces.constant(1.0, 36_000.0, SEED)
    rate = replicas / float(fluid_load(trial, kind).replicas.mean())
    trace = traces.constant(rate, settled_s + seconds, SEED)
    setting = Setting(kind, TTFT_S, ITL_S, math.ceil(replicas), MOST)
    outcome, _ = play(
        trace, setting, lambda fleet: ProductionPolicy(fleet, setting, interval_s=2.0), lead_s=SHORT_LEAD_S
    )
    late = [change for change in outcome.changes if change[0] >= settled_s]
    return {
        **figures_of(outcome),
        "changes": len(late),
        "mean_replicas": round(outcome.replica_s / (trace.seconds - LEAD_IN_S), 3),
        "load_replicas": replicas,
    }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--quick", action="store_true", help="a small part of each trace, few settings of others")
    parser.add_argument(
        "--only", nargs="+", choices=[*WORKLOADS, "constant"], help="other traces as in the result file"
    )
    parser.add_argument("--keep-others", action="store_true", help="take the others' figures from the result file")
    options = parser.parse_args()
    for file in (R1, SMALL, AZURE):
        require_file(options.data / file, ORIGIN)
    report = Report("autoscaling", seed=SEED, quick=options.quick)
    known: dict[str, Any] = {"traces": {}, "constant": []}
    if (options.only or options.keep_others) and report.path.exists():
        known = load_result(report.path.stem)["figures"]
    report.figures = {**known, "ttft_s": TTFT_S, "itl_s": ITL_S, "slots": SLOTS}
    chosen = options.only or [*WORKLOADS, "constant"]
    for name in (name for name in WORKLOADS if name in chosen):
        measure(report, WORKLOADS[name], options)
    if "constant" in chosen:
        report.figures["constant"] = []
        levels = QUICK_CONSTANT_REPLICAS if options.quick else CONSTANT_REPLICAS
        seconds = QUICK_CONSTANT_S if options.quick else CONSTANT_S
        for replicas in levels:
            report.figures["constant"].append(changes_at_constant_load(replicas, seconds, min(SETTLED_S, seconds)))
            print("constant", report.figures["constant"][-1], flush=True)
            report.write()
    judge(report)
    return report.finish()


def measure(report: Report, workload: Workload, options: argparse.Namespace) -> None:
    """Plays one trace with all policies."""
    begin_s, end_s = workload.quick_part_s
    end_s = min(end_s, begin_s + QUICK_S) if options.quick else math.inf
    trace = workload.make(options.data, end_s)
    if options.quick:
        trace = trace.part(begin_s, end_s)
    load = fluid_load(trace, workload.kind, delay_s=DELAY_S)
    known = report.figures["traces"].get(workload.name, {})
    figures: dict[str, Any] = {"requests": len(trace.arrived), "mean_replicas": round(float(load.replicas.mean()), 3)}
    report.figures["traces"][workload.name] = figures
    targets = QUICK_TARGETS if options.quick else FEW_TARGETS if workload.is_long else TARGETS
    for lead_s in QUICK_LEADS_S if options.quick else LEADS_S:
        lead = f"lead {lead_s:g} s"
        if options.keep_others and lead in known:
            played = known[lead]["others"]
        else:
            played = play_others(workload, trace, setting_of(workload, load), lead_s, targets)
        figures[lead] = {**play_ours(workload, trace, load, lead_s, played), "others": played}
        shown = {key: value for key, value in figures[lead].items() if key != "others"}
        print(f"{workload.name}, {lead}", shown, flush=True)
        report.write()


def single_setting(figures: dict[str, Any]) -> dict[str, Any] | None:
    """Compares ours, which has one setting for all, with the best setting of others that keeps the objective in all.

    It is the one with the fewest replica-hours, in units of hindsight's, of those that miss at most 1 % on each trace
    with short lead times; if there is none, the one that misses least where it misses most.
    """
    cells = [
        (f"{name}, {lead}", cell)
        for name, leads in figures.items()
        for lead, cell in leads.items()
        if lead in {f"lead {lead_s:g} s" for lead_s in LEADS_S if lead_s <= SHORT_LEAD_S} and "ours" in cell
    ]
    if not cells:
        return None

    def worst(setting: str) -> float:
        return float(max(cell["others"][setting]["missed_percent"] for _, cell in cells))

    def hours(setting: str) -> float:
        ratios = (cell["others"][setting]["replica_hours"] / cell["hindsight"]["replica_hours"] for _, cell in cells)
        return float(sum(ratios)) / len(cells)

    common = set.intersection(*(set(cell["others"]) for _, cell in cells))
    best = min(common, key=lambda setting: (max(100 * MOST_MISSED, worst(setting)), hours(setting)))
    ours = sum(cell["of_hindsight"] for _, cell in cells) / len(cells)
    return {
        "setting": best,
        "most_missed_percent": worst(best),
        "of_hindsight": round(hours(best), 3),
        "ours_most_missed_percent": max(cell["ours"]["missed_percent"] for _, cell in cells),
        "ours_of_hindsight": round(ours, 3),
        "of_others": round(ours / hours(best), 3),
    }


def judge(report: Report) -> None:
    """Holds the figures against the bars."""
    for name, figures in report.figures["traces"].items():
        for lead_s in LEADS_S:
            found = figures.get(f"lead {lead_s:g} s", {})
            if "ours" not in found:
                continue
            where = f"{name}, lead {lead_s:g} s"
            report.require(
                f"{where}: of the best of others at as many misses", found["of_others"], at_most=MOST_OF_OTHERS
            )
            report.require(f"{where}: seconds to a decision", found["longest_reaction_s"], at_most=MOST_REACTION_S)
            if lead_s <= SHORT_LEAD_S:
                missed = round(found["ours"]["missed_percent"] / 100, 6)
                report.require(f"{where}: share of misses", missed, at_most=MOST_MISSED)
                report.require(f"{where}: of hindsight", found["of_hindsight"], at_most=MOST_OF_HINDSIGHT)
    if single := single_setting(report.figures["traces"]):
        report.figures["single_setting"] = single
        print("single setting", single)
        report.require("of the best single setting of others", single["of_others"], at_most=MOST_OF_OTHERS)
    if constant := report.figures["constant"]:
        changes = max(figures["changes"] for figures in constant)
        report.require("changes in 24 h of constant load", changes, at_most=0)


if __name__ == "__main__":
    sys.exit(main())
