"""Invariants that must hold in every case, judged from the evidence alone.

Each promise is a function that reports the bound and what was found. If the evidence does not suffice (a server without
metrics, a load that ended before it could recover), the function reports that the promise could not be checked.
"""

from collections.abc import Mapping

from maitred.load.chaos.accounts import bounded_overshoot, budgets_kept, no_double_bill
from maitred.load.chaos.answers import every_request_ends, same_answers
from maitred.load.chaos.evidence import ChaosEvidence, EndState
from maitred.load.chaos.outcome import InvariantResult, decide, make_unchecked
from maitred.load.chaos.plan import Invariants
from maitred.load.chaos.recovery import first_answer, throughput

KV_FREE, KV_TOTAL = "maitred_engine_kv_blocks_free", "maitred_engine_kv_blocks_total"
MUST_BE_ZERO = {
    "maitred_in_flight": "in flight",
    "maitred_engine_running": "running",
    "maitred_engine_waiting": "waiting",
}


def judge(evidence: ChaosEvidence, invariants: Invariants) -> list[InvariantResult]:
    """Judges all promises that the plan keeps enabled."""
    verdicts = [faults_played(evidence)]
    if invariants.same_answers:
        verdicts.append(same_answers(evidence))
    if invariants.ends_within_s is not None:
        verdicts.append(every_request_ends(evidence, invariants.ends_within_s))
    if invariants.no_double_bill:
        verdicts.append(no_double_bill(evidence))
    if invariants.overshoot_tokens is not None:
        verdicts += [bounded_overshoot(evidence, invariants.overshoot_tokens), budgets_kept()]
    if invariants.recovery_s is not None:
        verdicts.append(first_answer(evidence, invariants.recovery_s))
    if invariants.throughput_recovery_s is not None:
        verdicts.append(throughput(evidence, invariants.throughput_recovery_s, invariants.recovered_share))
    if invariants.nothing_left_s is not None:
        verdicts.append(nothing_left(evidence.end, invariants.nothing_left_s))
    if invariants.clean_end:
        verdicts.append(clean_end(evidence.end))
    return verdicts


def faults_played(evidence: ChaosEvidence) -> InvariantResult:
    """Checks that the faults happened: a rehearsal without them proves nothing."""
    failed = [f"fault {entry.number} ({entry.kind}): {entry.error}" for entry in evidence.faults if entry.error]
    played = len(evidence.faults) - len(failed)
    return decide("faults played", "every fault of the plan", f"{played} of {len(evidence.faults)}", failed)


def nothing_left(end: EndState, bound_s: float) -> InvariantResult:
    """Checks that the server holds nothing when all clients have left."""
    name, bound = "nothing left", f"in flight, running, waiting 0 and all KV blocks free within {bound_s:g} s"
    if not end.answers:
        return decide(name, bound, "the server does not answer any more", ["The server does not answer any more."])
    left = remains(end.gauges)
    if left is None:
        return make_unchecked(name, bound, "The server shows none of this in its /metrics.")
    if end.settled_s is None:
        return decide(name, bound, ", ".join(left) or "it came too late", left or ["It came too late."])
    return decide(name, bound, f"nothing, {end.settled_s:.1f} s after the load", [])


def remains(gauges: Mapping[str, float]) -> list[str] | None:
    """Describes what the server still holds; None: the gauges do not say."""
    if not MUST_BE_ZERO.keys() & gauges.keys():
        return None
    left = [f"{gauges[name]:g} {word}" for name, word in MUST_BE_ZERO.items() if gauges.get(name)]
    if gauges.get(KV_FREE, 0.0) != gauges.get(KV_TOTAL, 0.0):
        left.append(f"{gauges[KV_TOTAL] - gauges[KV_FREE]:g} KV blocks held")
    return left


def clean_end(end: EndState) -> InvariantResult:
    """Checks that the installation ends on request, without an error and without leftover processes."""
    name, bound = "clean end", "exit code 0 after SIGTERM, no process left behind"
    if not end.started_here:
        return make_unchecked(name, bound, "It ran before and goes on running.")
    violations = [f"{leftover}." for leftover in end.leftovers]
    if end.exit_code != 0:
        violations.insert(0, f"Its exit code was {end.exit_code}.")
    return decide(name, bound, f"exit code {end.exit_code}, {len(end.leftovers)} left behind", violations)
