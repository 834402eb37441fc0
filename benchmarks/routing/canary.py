"""Canaries with planted faults: how many requests it takes to abort them, and how often a sound one is aborted.

Simulated traffic through the real split and the real trial (`maitred.routing.rollout`). Sessions come with Zipf's
popularity; those whose place lies below the weight get the canary. Times are log-normal, as first tokens and gaps of
real services roughly are; all canaries but the one with the fault are exactly the stable version. Each trial ends with
its verdict, or unresolved after `MOST_REQUESTS`. Nothing is measured here, so the machine does not matter.
"""

import argparse
import random
import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.support.report import Report
from maitred.core.rollout import RolloutVersion
from maitred.routing.rollout.split import TrafficSplit
from maitred.routing.rollout.trial import CanaryTrial, TrialDecision, TrialObservation, TrialResult, TrialRules

SEED = 20_261
WEIGHT = 0.1
SESSIONS = 2_000
MOST_REQUESTS = 60_000
TRIALS_OF_A_FAULT = 20
QUICK_TRIALS = (5, 20)
"""Of a fault, and of a sound canary."""


@dataclass(frozen=True)
class Behaviour:
    """How a version behaves."""

    slower: float = 1.0
    failing: float = 0.005
    refusing: float = 0.01
    disagreeing: float = 0.02

    def answer(self, chance: random.Random) -> TrialObservation:
        """One request of it."""
        if chance.random() < self.refusing:
            return TrialObservation(refused=True)
        if chance.random() < self.failing:
            return TrialObservation(failed=True)
        return TrialObservation(
            ttft_s=self.slower * chance.lognormvariate(-1.2, 0.5),
            itl_s=self.slower * chance.lognormvariate(-3.5, 0.3),
            tokens=round(chance.lognormvariate(5.0, 0.8)),
            agreed=chance.random() >= self.disagreeing,
        )


STABLE = Behaviour()
PLANTED = {
    "30 % slower": Behaviour(slower=1.3),
    "5 % errors": Behaviour(failing=0.05),
    "20 % wrong answers": Behaviour(disagreeing=0.22),
}


def trial_of(canary: Behaviour, number: int) -> TrialResult:
    """Runs one trial to its end."""
    chance = random.Random(SEED * 1_000_003 + number)
    split, trial = TrafficSplit(rollout=f"canary-{number}", weight=WEIGHT), CanaryTrial(TrialRules())
    versions = [split.version_for(f"session-{session}") for session in range(SESSIONS)]
    popularity = list(accumulate(1 / (10 + session) for session in range(SESSIONS)))
    for _ in range(MOST_REQUESTS):
        (version,) = chance.choices(versions, cum_weights=popularity)
        if version is RolloutVersion.STABLE:
            trial.observe(version, STABLE.answer(chance))
            continue
        trial.observe(version, canary.answer(chance))
        verdict = trial.result()
        if verdict.decision is not TrialDecision.CONTINUE:
            return verdict
    return trial.result()


def summary(verdicts: list[TrialResult]) -> dict[str, object]:
    """Decisions, their reasons, and what they took."""
    canary, in_all = (
        sorted(counts)
        for counts in (
            [verdict.canary_requests for verdict in verdicts],
            [verdict.canary_requests + verdict.stable_requests for verdict in verdicts],
        )
    )
    return {
        "trials": len(verdicts),
        "decisions": Counter(str(verdict.decision) for verdict in verdicts),
        "faults": Counter(str(fault) for verdict in verdicts for fault in verdict.faults),
        "canary_requests": {"median": statistics.median(canary), "most": canary[-1]},
        "requests": {"median": statistics.median(in_all), "most": in_all[-1]},
    }


def main() -> int:
    """Runs all trials."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer trials, in under 45 s")
    parser.add_argument("--null", type=int, default=200, help="sound canaries")
    options = parser.parse_args()
    faulty, sound = QUICK_TRIALS if options.quick else (TRIALS_OF_A_FAULT, options.null)
    report = Report("canary", seed=SEED, quick=options.quick)
    for name, behaviour in PLANTED.items():
        verdicts = [trial_of(behaviour, number) for number in range(faulty)]
        report.figures[name] = summary(verdicts)
        print(name, report.figures[name])
        aborted = sum(verdict.decision is TrialDecision.ABORT for verdict in verdicts) / faulty
        report.require(f"{name}: aborted", aborted, at_least=1.0)
    verdicts = [trial_of(STABLE, number) for number in range(sound)]
    report.figures["sound"] = summary(verdicts)
    print("sound", report.figures["sound"])
    decisions = Counter(verdict.decision for verdict in verdicts)
    report.require("sound: false alarms", decisions[TrialDecision.ABORT] / sound, at_most=0.05)
    report.require("sound: promoted", decisions[TrialDecision.PROMOTE] / sound, at_least=0.95)
    return report.finish()


if __name__ == "__main__":
    raise SystemExit(main())
