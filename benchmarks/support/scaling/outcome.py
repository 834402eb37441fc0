"""What a policy makes of a trace, and what the best of others would have paid for as few misses."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.support.scaling.fleet import ReplicaKind, RequestTrace, SimulatedFleet
from benchmarks.support.scaling.policies import ScalingPolicy

AFTERWARDS_S = 36_000.0
"""For what is still in the fleet at the end of a trace. It costs nothing."""


@dataclass(frozen=True)
class Setting:
    """What is the same for all policies.

    Attributes:
        kind: Of the replicas.
        ttft_s: Objective of the time to first token.
        itl_s: Objective of the mean time between tokens of a request.
        first: Replicas at the beginning.
        most: Most replicas.
    """

    kind: ReplicaKind
    ttft_s: float
    itl_s: float
    first: int
    most: int


@dataclass(frozen=True)
class Outcome:
    """What became of a trace.

    Attributes:
        late: Share of the requests whose TTFT missed its objective.
        slow: Share of the others whose time between tokens missed its objective.
        replica_s: Seconds of replicas, from order to end of drain.
        starts: Replicas that were ordered.
        changes: Decisions that changed the number: time and number.
        reaction_s: For each request that had to wait while no replica was starting: seconds until more were ordered.
    """

    late: float
    slow: float
    replica_s: float
    starts: int
    changes: list[tuple[float, int]]
    reaction_s: list[float]

    @property
    def missed(self) -> float:
        """Share of the requests that missed an objective."""
        return self.late + self.slow

    @property
    def replica_hours(self) -> float:
        """Hours of replicas."""
        return self.replica_s / 3600


def play(
    trace: RequestTrace, setting: Setting, make: Callable[[SimulatedFleet], ScalingPolicy], *, lead_s: float
) -> tuple[Outcome, SimulatedFleet]:
    """Plays a trace with a policy; the fleet comes back as it was at the end."""
    fleet = SimulatedFleet(trace, setting.kind, lead_s=lead_s, replicas=setting.first, most=2 * setting.most)
    policy = make(fleet)
    number, due_s, changes, reaction_s = setting.first, 0.0, [], []
    wait_began_s: float | None = None
    while True:
        seen = fleet.observe()
        desired = min(setting.most, max(1, policy.desired(seen)))
        if seen.waiting and seen.starting == 0 and wait_began_s is None:
            wait_began_s = seen.now_s - seen.oldest_wait_s
        if wait_began_s is not None and (desired > number or not seen.waiting):
            if desired > number:
                reaction_s.append(seen.now_s - wait_began_s)
            wait_began_s = None
        if desired != number:
            number = desired
            changes.append((seen.now_s, number))
            fleet.scale(number)
        if seen.now_s >= due_s:
            due_s = seen.now_s + policy.interval_s
        if fleet.advance(min(due_s, trace.seconds), stop_at_wait=policy.at_wait) >= trace.seconds:
            break
    replica_s, starts = fleet.replica_seconds(), fleet.starts
    fleet.scale(max(1, number))
    fleet.advance(trace.seconds + AFTERWARDS_S)
    late, slow = fleet.missed(ttft_s=setting.ttft_s, itl_s=setting.itl_s)
    outcome = Outcome(float(late.mean()), float(slow.mean()), replica_s, starts, changes, reaction_s)
    return outcome, fleet


def least_replica_s(others: Iterable[Outcome], missed: float) -> float:
    """Returns what the best of others pays for a share of misses, on the lower hull of their outcomes.

    Whoever takes turns between two settings is between them in both, so the hull can be had. If none has so few misses,
    it is what the one with the fewest pays.
    """
    points = sorted((outcome.missed, outcome.replica_s) for outcome in others)
    hull: list[tuple[float, float]] = []
    for x, y in points:
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    shares, costs = zip(*hull, strict=True)
    return float(np.interp(missed, shares, costs))
