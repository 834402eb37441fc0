"""Compiled events of a simulated fleet: arrivals, steps of replicas, starts that end.

Between two events nothing changes at a replica but the contexts of its sequences, so steps without prefill are one jump
whose time has a closed form: the k-th of them takes ``fixed + tokens + context * (c + k * d)``. A request that comes in
the meantime cuts the jump at the end of the step under way. So the result is that of a simulation step by step, up to
the rounding of sums; a test compares both.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.engine.compiled import compiled

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

ABSENT, STARTING, SERVING, DRAINING = range(4)
"""Phases of a replica."""
NOW, RUNNING_S, SERVING_S, PAID_S = range(4)
"""Places in `FleetState.sums`."""
HEAD, ARRIVED, FINISHED, STARTS, ROWS = range(5)
"""Places in `FleetState.counts`; all rows from `ROWS` on have never been used."""
FIXED, TOKEN, CONTEXT, DECODE, CHUNK, PAIR = range(6)
"""Places in `FleetState.times`, which are those of `StepTimes`."""


class FleetState(NamedTuple):
    """State of a simulated fleet; rows are replicas, columns their slots."""

    arrived: Floats
    prompts: Counts
    outputs: Counts
    first: Floats
    """Time of the first token; NaN before it."""
    finished: Floats
    output_sums: Counts
    """Output tokens of the requests that finished first: of none, of one, of two..."""
    times: Floats
    sums: Floats
    counts: Counts
    phase: Counts
    ordered: Floats
    ready: Floats
    """Time at which a start is complete."""
    running: Counts
    steps: Counts
    """Completed steps."""
    run_began: Floats
    run_steps: Counts
    run_ends: Floats
    """End of the jump under way; infinite while the replica idles."""
    decoding: Counts
    context: Counts
    """Context tokens of the decoding sequences."""
    request: Counts
    """Request of a slot, or -1."""
    left: Counts
    """Prompt tokens of a slot that are not computed yet."""
    chunk: Counts
    """Prompt tokens of a slot in the step under way."""
    last_step: Counts
    """Step with which a decoding slot finishes."""
    leads: Floats
    """Seconds of the starts to come, used in turns."""
    step_tokens: int


@compiled
def _run_s(s: FleetState, r: int, k: int) -> float:
    """Returns the seconds of `k` steps that only decode."""
    d, c = s.decoding[r], s.context[r]
    each_s = s.times[FIXED] + (s.times[TOKEN] + s.times[DECODE]) * d
    return float(k * each_s + s.times[CONTEXT] * (k * c + d * (k * (k - 1) // 2)))


@compiled
def _plan(s: FleetState, r: int, now: float) -> None:
    """Plans the next step of a replica, or all steps until a sequence finishes if no prompt is left."""
    slots = s.request.shape[1]
    s.run_began[r] = now
    if s.running[r] == 0:
        s.run_ends[r] = math.inf
        return
    budget = s.step_tokens - s.decoding[r]
    tokens, chunks, pairs = 0, 0, 0
    while budget > 0:
        oldest = -1
        for j in range(slots):
            if s.left[r, j] > 0 and s.chunk[r, j] == 0 and (oldest < 0 or s.request[r, j] < s.request[r, oldest]):
                oldest = j
        if oldest < 0:
            break
        length = min(budget, s.left[r, oldest])
        start = s.prompts[s.request[r, oldest]] - s.left[r, oldest]
        s.chunk[r, oldest] = length
        budget -= length
        tokens += length
        chunks += 1
        pairs += length * start + length * (length + 1) // 2
    if chunks > 0:
        s.run_steps[r] = 1
        extra_s = s.times[TOKEN] * tokens + s.times[CHUNK] * chunks + s.times[PAIR] * pairs
        s.run_ends[r] = now + _run_s(s, r, 1) + extra_s
        return
    last = np.iinfo(np.int64).max
    for j in range(slots):
        if s.request[r, j] >= 0 and s.last_step[r, j] < last:
            last = s.last_step[r, j]
    s.run_steps[r] = last - s.steps[r]
    s.run_ends[r] = now + _run_s(s, r, s.run_steps[r])


@compiled
def _cut(s: FleetState, r: int, now: float) -> None:
    """Ends a jump with the step under way, so that a new request joins the next one."""
    if s.run_ends[r] == -math.inf or s.run_steps[r] <= 1:
        return
    passed = now - s.run_began[r]
    low, high = 1, s.run_steps[r]
    while low < high:
        middle = (low + high) // 2
        if _run_s(s, r, middle) < passed:
            low = middle + 1
        else:
            high = middle
    s.run_steps[r] = low
    s.run_ends[r] = s.run_began[r] + _run_s(s, r, low)


@compiled
def _assign(s: FleetState, r: int, now: float) -> None:
    """Gives the oldest waiting request to a replica with a free slot."""
    request = s.counts[HEAD]
    s.counts[HEAD] += 1
    for j in range(s.request.shape[1]):
        if s.request[r, j] < 0:
            s.request[r, j] = request
            s.left[r, j] = s.prompts[request]
            s.chunk[r, j] = 0
            break
    s.running[r] += 1
    if s.running[r] == 1:
        s.run_ends[r] = -math.inf
    else:
        _cut(s, r, now)


@compiled
def _take(s: FleetState, r: int, now: float) -> None:
    """Fills the free slots of a serving replica from the queue, and plans its next step if it stands still."""
    slots = s.request.shape[1]
    while s.phase[r] == SERVING and s.running[r] < slots and s.counts[HEAD] < s.counts[ARRIVED]:
        _assign(s, r, now)
    if s.run_ends[r] == -math.inf:
        _plan(s, r, now)


@compiled
def _finish(s: FleetState, r: int, j: int, now: float) -> None:
    request = s.request[r, j]
    s.finished[request] = now
    s.request[r, j] = -1
    s.running[r] -= 1
    s.counts[FINISHED] += 1
    number = s.counts[FINISHED]
    s.output_sums[number] = s.output_sums[number - 1] + s.outputs[request]


@compiled
def _end_run(s: FleetState, r: int, now: float) -> None:
    """Ends the jump under way: answers get their tokens, some finish, and others take their slots."""
    k, d = s.run_steps[r], s.decoding[r]
    s.steps[r] += k
    s.context[r] += k * d
    for j in range(s.request.shape[1]):
        request = s.request[r, j]
        if request < 0:
            continue
        if s.chunk[r, j] > 0:
            s.left[r, j] -= s.chunk[r, j]
            s.chunk[r, j] = 0
            if s.left[r, j] == 0:
                s.first[request] = now
                if s.outputs[request] == 1:
                    _finish(s, r, j, now)
                else:
                    s.decoding[r] += 1
                    s.context[r] += s.prompts[request] + 1
                    s.last_step[r, j] = s.steps[r] + s.outputs[request] - 1
        elif s.left[r, j] == 0 and s.last_step[r, j] <= s.steps[r]:
            s.decoding[r] -= 1
            s.context[r] -= s.prompts[request] + s.outputs[request]
            _finish(s, r, j, now)
    s.run_ends[r] = -math.inf
    _take(s, r, now)
    if s.run_ends[r] == -math.inf:
        _plan(s, r, now)
    if s.phase[r] == DRAINING and s.running[r] == 0:
        remove(s, r, now)


@compiled
def _pass_time(s: FleetState, until: float) -> None:
    running, serving = 0, 0
    for r in range(s.counts[ROWS]):
        if s.phase[r] == SERVING:
            serving += 1
            running += s.running[r]
    passed = until - s.sums[NOW]
    s.sums[RUNNING_S] += passed * running
    s.sums[SERVING_S] += passed * serving
    s.sums[NOW] = until


@compiled
def order(s: FleetState, r: int, now: float, lead_s: float) -> None:
    """Orders a replica in an absent row."""
    s.counts[ROWS] = max(s.counts[ROWS], r + 1)
    s.phase[r] = STARTING
    s.ordered[r] = now
    s.ready[r] = now + lead_s
    s.running[r] = 0
    s.steps[r] = 0
    s.decoding[r] = 0
    s.context[r] = 0
    s.run_ends[r] = math.inf
    s.request[r, :] = -1
    s.left[r, :] = 0
    s.chunk[r, :] = 0


@compiled
def remove(s: FleetState, r: int, now: float) -> None:
    """Removes a replica that runs nothing; it was paid for since its order."""
    s.phase[r] = ABSENT
    s.sums[PAID_S] += now - s.ordered[r]
    s.run_ends[r] = math.inf


@compiled
def serve(s: FleetState, r: int, now: float) -> None:
    """Lets a replica take requests, after its start or while it drains."""
    s.phase[r] = SERVING
    _take(s, r, now)


@compiled
def advance(s: FleetState, until: float, stop_at_wait: bool) -> float:
    """Lets time pass, and returns the time that is reached.

    Args:
        s: State that changes.
        until: Time at which to stop.
        stop_at_wait: Stop also as soon as a request finds no free slot while none waited before.
    """
    slots, requests = s.request.shape[1], s.arrived.shape[0]
    while True:
        event, row, at = 0, -1, until
        if s.counts[ARRIVED] < requests and s.arrived[s.counts[ARRIVED]] < at:
            event, at = 1, s.arrived[s.counts[ARRIVED]]
        for r in range(s.counts[ROWS]):
            if s.phase[r] == ABSENT:
                continue
            if s.phase[r] == STARTING:
                if s.ready[r] < at:
                    event, row, at = 2, r, s.ready[r]
            elif s.run_ends[r] < at:
                event, row, at = 3, r, s.run_ends[r]
        _pass_time(s, at)
        if event == 0:
            return at
        if event == 1:
            s.counts[ARRIVED] += 1
            best = -1
            if s.counts[HEAD] == s.counts[ARRIVED] - 1:
                for r in range(s.counts[ROWS]):
                    if s.phase[r] == SERVING and s.running[r] < slots and (best < 0 or s.running[r] < s.running[best]):
                        best = r
            if best >= 0:
                _take(s, best, at)
            elif stop_at_wait and s.counts[HEAD] == s.counts[ARRIVED] - 1:
                return at
        elif event == 2:
            serve(s, row, at)
        else:
            _end_run(s, row, at)


@compiled
def scale(s: FleetState, desired: int) -> int:
    """Orders, takes back or drains replicas until so many serve or start; returns how many do so then.

    More: draining replicas are taken back, then others are ordered. Fewer: the latest starts are given up, then those
    that run least are drained.
    """
    now, rows = s.sums[NOW], s.phase.shape[0]
    have = 0
    for r in range(rows):
        have += s.phase[r] == STARTING or s.phase[r] == SERVING
    while have != desired:
        best = -1
        if have < desired:
            for r in range(rows):
                if s.phase[r] == DRAINING and (best < 0 or s.running[r] > s.running[best]):
                    best = r
            if best >= 0:
                serve(s, best, now)
                have += 1
                continue
            for r in range(rows):
                if s.phase[r] == ABSENT:
                    best = r
                    break
            if best < 0:
                break
            order(s, best, now, s.leads[s.counts[STARTS] % s.leads.shape[0]])
            s.counts[STARTS] += 1
            have += 1
            continue
        for r in range(rows):
            if s.phase[r] == STARTING and (best < 0 or s.ordered[r] >= s.ordered[best]):
                best = r
        if best >= 0:
            remove(s, best, now)
        else:
            for r in range(rows):
                if s.phase[r] == SERVING and (best < 0 or s.running[r] < s.running[best]):
                    best = r
            s.phase[best] = DRAINING
            if s.running[best] == 0:
                remove(s, best, now)
        have -= 1
    return have


@compiled
def observe(s: FleetState) -> tuple[int, float, int, int, int]:
    """Returns what waits, for how long the oldest has waited, what runs, and how many replicas serve and start."""
    waiting = s.counts[ARRIVED] - s.counts[HEAD]
    oldest_s = s.sums[NOW] - s.arrived[s.counts[HEAD]] if waiting > 0 else 0.0
    running, serving, starting = 0, 0, 0
    for r in range(s.counts[ROWS]):
        serving += s.phase[r] == SERVING
        starting += s.phase[r] == STARTING
        running += s.running[r]
    return waiting, oldest_s, running, serving, starting
