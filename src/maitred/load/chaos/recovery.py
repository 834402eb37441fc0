"""Promises about recovery after a fault: answers return soon, and are soon as fast as before."""

import math

import numpy as np
from numpy.typing import NDArray

from maitred.load.chaos.evidence import ChaosEvidence
from maitred.load.chaos.outcome import InvariantResult, decide, make_unchecked
from maitred.load.chaos.timeline import FaultLog
from maitred.load.measure.record import RequestRecord, UserOutcome

WINDOW_S = 3.0
"""Length of the window that the speed is measured in; shorter windows give only noise."""
STEP_S = 0.25

Times = NDArray[np.float64]


def first_answer(evidence: ChaosEvidence, bound_s: float) -> InvariantResult:
    """Measures the time from a fault's end to the end of the first complete answer requested after it."""
    name, bound = "recovery", f"a whole answer within {bound_s:g} s of the end of each fault"
    violations: list[str] = []
    took: list[str] = []
    unknown: list[str] = []
    for entry, over_s in _played_faults(evidence):
        after = [record for record in evidence.chaos.records if _asked_s(record) >= over_s]
        answered = [record.ended_s for record in after if record.outcome is UserOutcome.COMPLETE]
        if answered:
            recovery_s = min(answered) - over_s
            took.append(f"{entry.name} {recovery_s:.1f} s")
            if recovery_s > bound_s:
                violations.append(f"{entry.name}: {recovery_s:.1f} s.")
        elif wanted := sum(record.outcome is not UserOutcome.CANCELLED for record in after):
            violations.append(f"{entry.name}: none of the {wanted} requests sent after it was answered.")
        else:
            unknown.append(f"no request that wanted to be answered was sent after {entry.name}")
    return _verdict(name, bound, took, unknown, violations)


def throughput(evidence: ChaosEvidence, bound_s: float, share: float) -> InvariantResult:
    """Measures the time from each fault's end until text arrives as fast as in the calm run.

    An open loop is compared with the calm run at the same time of the run, but with no more than its average: the load
    is the same, and a burst that comes late is not slow. A closed loop is compared with the average of the calm run.
    """
    name = "throughput recovery"
    bound = f"{share:.0%} of the calm run's text per second within {bound_s:g} s of the end of each fault"
    calm, now = _arrivals(evidence.calm.records), _arrivals(evidence.chaos.records)
    from_s, until_s = evidence.spec.bounds.warmup_s, max((r.intended_s for r in evidence.calm.records), default=0.0)
    if until_s - from_s < WINDOW_S or not len(calm):
        return make_unchecked(
            name, bound, f"The calm run is too short for an average: {until_s - from_s:.1f} s of load."
        )
    average = _count(calm, from_s, until_s) / (until_s - from_s) * WINDOW_S
    end_s = max((record.intended_s for record in evidence.chaos.records), default=0.0)
    violations: list[str] = []
    took: list[str] = []
    unknown: list[str] = []
    for entry, over_s in _played_faults(evidence):
        starts = np.arange(over_s, min(end_s - WINDOW_S, over_s + bound_s) + STEP_S / 2, STEP_S)
        back = (float(at_s) for at_s in starts if _as_fast(evidence, calm, now, float(at_s), average, share))
        at_s = next(back, math.nan)
        if not math.isnan(at_s):
            took.append(f"{entry.name} {at_s - over_s:.1f} s")
        elif end_s >= over_s + bound_s + WINDOW_S:
            violations.append(f"{entry.name}: still slower than {share:.0%} of calm after {bound_s:g} s.")
        else:
            unknown.append(f"the load ended {max(0.0, end_s - over_s):.1f} s after {entry.name}, still slower")
    return _verdict(name, bound, took, unknown, violations)


def _as_fast(evidence: ChaosEvidence, calm: Times, now: Times, at_s: float, average: float, share: float) -> bool:
    expected = average
    if evidence.spec.arrivals.users is None:
        expected = min(average, _count(calm, at_s, at_s + WINDOW_S))
    return _count(now, at_s, at_s + WINDOW_S) >= share * expected


def _asked_s(record: RequestRecord) -> float:
    """Returns when a request was sent; if no connection was possible, when it was due."""
    return record.intended_s if math.isnan(record.sent_s) else record.sent_s


def _played_faults(evidence: ChaosEvidence) -> list[tuple[FaultLog, float]]:
    """Returns the faults that happened, and when each one was over."""
    return [(entry, entry.ended_s) for entry in evidence.faults if not entry.error and entry.ended_s is not None]


def _verdict(name: str, bound: str, took: list[str], unknown: list[str], violations: list[str]) -> InvariantResult:
    found = "; ".join(took + unknown) or ("none in time" if violations else "no fault was played")
    if not violations and (unknown or not took):
        return make_unchecked(name, bound, found)
    return decide(name, bound, found, violations)


def _arrivals(records: list[RequestRecord]) -> Times:
    times = [np.frombuffer(record.arrivals_s, dtype=np.float64) for record in records if record.arrivals_s]
    return np.sort(np.concatenate(times)) if times else np.empty(0)


def _count(times: Times, from_s: float, until_s: float) -> float:
    first, last = np.searchsorted(times, (from_s, until_s))
    return float(last - first)
