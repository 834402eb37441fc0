"""What a policy makes of a trace, and what the best of others would have paid for as few misses."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.support.scaling.fleet import ReplicaKind, RequestTrace, SimulatedFleet
from benchmarks.support.scaling.fleet_kernels import Floats
from benchmarks.support.scaling.policies import ScalingPolicy

LEAD_IN_S = 300.0
"""So long the first number of replicas stays, whatever a policy says, because an empty fleet is no usual state. Nothing
counts in that time."""
SIGNAL, SIGNAL_S = 5, 10.0
"""So many late requests in so many seconds, and no longer pause between two, call for an order."""
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
        reaction_s: See `reactions`.
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
    """Plays a trace with a policy; the fleet comes back as it was at the end.

    Args:
        trace: Requests; what comes before `LEAD_IN_S` does not count.
        setting: Of all policies.
        make: Makes the policy for a fleet.
        lead_s: Seconds of a start.
    """
    fleet = SimulatedFleet(trace, setting.kind, lead_s=lead_s, replicas=setting.first, most=2 * setting.most)
    policy = make(fleet)
    number, due_s, before_s = setting.first, 0.0, 0.0
    changes: list[tuple[float, int]] = []
    orders_s: list[float] = []
    while True:
        seen = fleet.observe()
        desired = min(setting.most, max(1, policy.desired(seen)))
        if seen.now_s < LEAD_IN_S:
            desired, before_s = number, fleet.replica_seconds()
        if desired != number:
            if desired > number:
                orders_s.append(seen.now_s)
            number = desired
            changes.append((seen.now_s, number))
            fleet.scale(number)
        if seen.now_s >= due_s:
            due_s = seen.now_s + policy.interval_s
        if fleet.advance(min(due_s, trace.seconds), stop_at_wait=policy.at_wait) >= trace.seconds:
            break
    replica_s, starts = fleet.replica_seconds() - before_s, fleet.starts
    fleet.scale(max(1, number))
    fleet.advance(trace.seconds + AFTERWARDS_S)
    counted = trace.arrived >= LEAD_IN_S
    late, slow = (missed[counted] for missed in fleet.missed(ttft_s=setting.ttft_s, itl_s=setting.itl_s))
    reaction_s = reactions(trace.arrived[counted][late], orders_s, lead_s, setting.ttft_s)
    return Outcome(float(late.mean()), float(slow.mean()), replica_s, starts, changes, reaction_s), fleet


def reactions(late_s: Floats, orders_s: Sequence[float], lead_s: float, ttft_s: float) -> list[float]:
    """Returns how long it took to order more replicas for requests that came too late to be served in time.

    The signal is the arrival of the fifth request within ten seconds that will be late: a single one is chance, and no
    replica is worth it. It calls for an order only if one could still help: late requests must go on to arrive, without
    a pause of ten seconds, until a replica that is ordered at the signal could serve one within its objective. A queue
    that is gone before that would get replicas that find nothing to do.

    An order in the lead time before the signal was made for it, too, or for those before it. Otherwise the reaction is
    the time until the next order, or until no more requests are late if there is none. Nothing of this depends on what
    the policy predicts, so a policy that sees nothing is slow.

    Args:
        late_s: Arrivals of late requests.
        orders_s: Times at which more replicas were ordered.
        lead_s: Seconds of a start.
        ttft_s: Objective of the time to first token.
    """
    found: list[float] = []
    pauses = np.append(np.flatnonzero(np.diff(late_s) > SIGNAL_S), len(late_s) - 1)
    at = 0
    while at + SIGNAL <= len(late_s):
        fifth = at + SIGNAL - 1
        signal_s = float(late_s[fifth])
        if signal_s > late_s[at] + SIGNAL_S:
            at += 1
            continue
        place = bisect_right(orders_s, signal_s)
        if place and orders_s[place - 1] >= signal_s - lead_s:
            at = int(np.searchsorted(late_s, orders_s[place - 1] + lead_s, side="right"))
            continue
        last = int(pauses[np.searchsorted(pauses, fifth)])
        ordered_s = orders_s[place] if place < len(orders_s) else float(late_s[last])
        if late_s[last] + ttft_s >= signal_s + lead_s:
            found.append(ordered_s - signal_s)
            at = int(np.searchsorted(late_s, ordered_s + lead_s, side="right"))
        else:
            at = last + 1
    return found


def least_on_hull(points: Iterable[tuple[float, float]], missed: float) -> float:
    """Returns what the best of others pays for a share of misses, on the lower hull of shares and costs.

    Whoever takes turns between two settings is between them in both, so the hull can be had. If none has so few misses,
    it is what the one with the fewest pays.
    """
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    shares, costs = zip(*hull, strict=True)
    return float(np.interp(missed, shares, costs))
