"""The cheapest numbers of replicas for a load that is known beforehand, exact in a fluid model.

The model has seconds. In each of them a load asks for so many replicas, a real number; a start costs its lead time, in
replica-seconds, as a replica is paid for from its order on; the order may come as early as needed. What exceeds the
replicas of a second is a share of its requests that miss the objective and leave no work behind.

A number of replicas over time splits into levels: level k is on while there are at least k replicas. Its seconds, its
starts and its misses are sums over levels, so each level is a problem of its own: on or off in each second, a start
between off and on. Without misses, a gap is bridged if it is shorter than a start. With misses, each has a price, and
two states need one pass through the seconds. For a given share of misses, the price is chosen by bisection; the sum of
cost and price of misses, less the price of those allowed, bounds the cost from below at any price (Lagrange), and the
plan itself bounds it from above.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.support.scaling.fleet import ReplicaKind, RequestTrace
from benchmarks.support.scaling.fleet_kernels import Counts, Floats
from maitred.engine.compiled import compiled

MIX_S = 600.0
"""Span over which the mix of a load is taken as one."""
ROUNDS = 25
"""Of the bisection."""


@dataclass(frozen=True)
class FluidLoad:
    """Load of each second.

    Attributes:
        replicas: Replicas that it keeps busy.
        requests: Requests that arrive.
    """

    replicas: Floats
    requests: Floats


@dataclass(frozen=True)
class HindsightPlan:
    """Cheapest plan for a load.

    Attributes:
        replicas: Number of each second.
        starts: Starts after the first second.
        replica_s: Seconds of replicas, lead times of starts included.
        least_replica_s: No plan with as few misses costs less.
        missed: Share of the requests that miss.
    """

    replicas: Counts
    starts: int
    replica_s: float
    least_replica_s: float
    missed: float


def part_of(load: FluidLoad, begin_s: int) -> FluidLoad:
    """Returns the load from a second on."""
    return FluidLoad(load.replicas[begin_s:], load.requests[begin_s:])


def fluid_load(trace: RequestTrace, kind: ReplicaKind, *, delay_s: int = 0) -> FluidLoad:
    """Returns the load of a trace: each request holds a slot for as many steps as it has tokens.

    The time of a step is that of a replica whose slots are all taken, by the mix of the ten minutes around.

    Args:
        trace: Requests.
        kind: Of the replicas.
        delay_s: Requests may wait, within their objective, and do so for 0 to this many seconds in equal parts, which
            flattens the peaks.
    """
    seconds = int(np.ceil(trace.seconds))
    windows = (trace.arrived / MIX_S).astype(np.int64)
    number = np.maximum(1, np.bincount(windows))
    prompt, output = (np.bincount(windows, weights=tokens) / number for tokens in (trace.prompts, trace.outputs))
    output = np.maximum(1.0, output)
    context = np.bincount(windows, weights=(trace.prompts + trace.outputs / 2) * trace.outputs) / (number * output)
    times, slots = kind.times, kind.slots
    step_s = times.fixed_s + slots * (
        times.token_s * (1 + prompt / output)
        + times.decode_s
        + times.context_token_s * context
        + times.chunk_s / output
    )
    ends = trace.arrived + step_s[windows] * (trace.outputs + np.ceil(trace.prompts / kind.step_tokens))
    # The integral of the requests inside, at whole seconds: each has been inside for min(t, end) - arrived.
    held = np.diff(_integral(trace.arrived, seconds) - _integral(ends, seconds))
    held = np.convolve(held, np.full(delay_s + 1, 1 / (delay_s + 1)))[:seconds]
    requests = np.bincount(np.minimum(trace.arrived.astype(np.int64), seconds - 1), minlength=seconds)
    return FluidLoad(np.maximum(0.0, held) / slots, requests.astype(float))


def _integral(moments: Floats, seconds: int) -> Floats:
    """Returns for each whole second the sum over earlier moments of the time since then."""
    ordered = np.sort(moments)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    grid = np.arange(seconds + 1, dtype=float)
    before = np.searchsorted(ordered, grid)
    held: Floats = before * grid - sums[before]
    return held


@compiled
def _cheapest(load: Floats, requests: Floats, level: int, lead_s: float, price: float, on: Counts) -> None:
    """Decides for each second whether a level is on: 1, or 0. The first second is on for free if it is needed.

    Args:
        load: Replicas that each second asks for.
        requests: Requests of each second.
        level: From 0.
        lead_s: Cost of a start.
        price: Of a missed request.
        on: Result. Before it is final, bits say from which state each state came.
    """
    cost_off, cost_on = 0.0, 0.0
    for t in range(load.shape[0]):
        share = min(1.0, max(0.0, load[t] - level))
        missed = requests[t] * share / load[t] * price if share > 0 else 0.0
        from_on_to_off = cost_on < cost_off
        from_off_to_on = cost_off + lead_s < cost_on
        off = (cost_on if from_on_to_off else cost_off) + missed
        cost_on = (cost_off + lead_s if from_off_to_on else cost_on) + 1.0
        cost_off = off
        on[t] = from_on_to_off + 2 * from_off_to_on
    state = 1 if cost_on < cost_off else 0
    for t in range(load.shape[0] - 1, -1, -1):
        bits = on[t]
        on[t] = state
        if bits & (1 + state):
            state = 1 - state


def plan_at(load: FluidLoad, lead_s: float, price: float, *, least: int = 0) -> HindsightPlan:
    """Returns the plan whose cost, with a price in replica-seconds on each missed request, is least.

    Args:
        load: Load of each second.
        lead_s: Seconds of a start.
        price: Of a miss.
        least: Fewest replicas at any time.
    """
    seconds = len(load.replicas)
    replicas = np.full(seconds, least, np.int64)
    on = np.zeros(seconds, np.int64)
    for level in range(least, int(np.ceil(load.replicas.max(initial=0.0)))):
        _cheapest(load.replicas, load.requests, level, lead_s, price, on)
        if not on.any():
            break
        replicas += on
    starts = int(np.maximum(0, np.diff(replicas)).sum())
    replica_s = float(replicas.sum() + lead_s * starts)
    over = np.maximum(0.0, load.replicas - replicas)
    missed = float((load.requests * np.divide(over, load.replicas, out=np.zeros(seconds), where=over > 0)).sum())
    return HindsightPlan(replicas, starts, replica_s, replica_s, missed / max(1.0, float(load.requests.sum())))


def cheapest_plan(load: FluidLoad, lead_s: float, *, missed: float = 0.0, least: int = 0) -> HindsightPlan:
    """Returns the cheapest plan that misses at most a share of the requests; see `plan_at`."""
    allowed = missed * float(load.requests.sum())
    low, high = 0.0, 1e12
    best = plan_at(load, lead_s, high, least=least)
    if missed <= 0:
        return best
    bound = 0.0
    low, high = 1e-3, 1e6
    for _ in range(ROUNDS):
        price = float(np.sqrt(low * high))
        plan = plan_at(load, lead_s, price, least=least)
        bound = max(bound, plan.replica_s + price * (plan.missed * float(load.requests.sum()) - allowed))
        if plan.missed <= missed:
            high, best = price, plan
        else:
            low = price
    return HindsightPlan(best.replicas, best.starts, best.replica_s, min(bound, best.replica_s), best.missed)
