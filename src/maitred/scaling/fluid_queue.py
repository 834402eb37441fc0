"""The queue of a model played forward: requests as a fluid, replicas that come ready one after the other.

As at the dispatcher, requests wait in one queue until a replica has a slot, and a slot is free again when an answer is
complete. An answer takes longer beside more others and beside prefill, by the linear model of step times.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from maitred.scaling.capacity import ReplicaCapacity
from maitred.scaling.demand import Demand, RequestMix

_STEPS = 40
_LEAST_PREFILL_SHARE = 0.05
"""Share of the time that prefill gets at least, however many sequences run."""


class QueuePlayback(msgspec.Struct, frozen=True):
    """Course of the queue over the horizon, with some number of replicas."""

    missed: float
    """Requests whose wait exceeded the longest that meets the objective."""
    longest_wait_s: float
    itl_s: float
    """Longest time between tokens."""


class FluidQueue:
    """Queue of a model with a forecast of arrivals, to be played with different numbers of replicas.

    Args:
        capacity: Capacity of one replica.
        mix: Sizes of the requests.
        itl_s: Objective of the time between tokens: replicas run no more sequences than it allows; infinite: as many as
            there are slots.
        demand: What waits and runs.
        knots: Times from now in seconds, ascending from 0; the last one is the end of the horizon.
        rates: Requests per second at these times.
        longest_wait_s: Longest wait of a request that meets the objective of the TTFT.
    """

    def __init__(
        self,
        capacity: ReplicaCapacity,
        mix: RequestMix,
        *,
        itl_s: float,
        demand: Demand,
        knots: Sequence[float],
        rates: Sequence[float],
        longest_wait_s: float,
    ) -> None:
        self._alone_s = capacity.alone_itl_s(mix)
        self._decode_s = capacity.decode_s(mix)
        self._prefill_s = max(1e-9, capacity.prefill_s(mix))
        self._output_tokens = mix.output_tokens
        self._overhead_s = capacity.overhead_s
        self.requests_per_s = capacity.requests_per_s(mix, itl_s)
        """Requests per second that one replica serves at the objective."""
        step_s = self._alone_s / max(1e-9, 1 - self.requests_per_s * capacity.work_s(mix))
        self._step_s = step_s
        resident_s = mix.output_tokens * step_s + capacity.overhead_s
        self.batch = max(1.0, self.requests_per_s * resident_s)
        """Requests that one replica has at most."""
        self._computed_share = mix.output_tokens * step_s / resident_s if resident_s > 0 else 1.0
        """Share of them that steps compute."""
        self.queued = _queued_requests(demand, mix, capacity)
        self._running = float(demand.running)
        self._oldest_wait_s = demand.oldest_wait_s
        self._longest_wait_s = longest_wait_s
        self.end_s = knots[-1]
        self._dt_s = self.end_s / _STEPS
        self._arrivals = [self._dt_s * rate for rate in _interpolate(knots, rates, self._dt_s)]
        self._played: dict[tuple[float, ...], QueuePlayback] = {}

    @property
    def total_requests(self) -> float:
        """Requests that there are over the horizon."""
        return self.queued + self._running + sum(self._arrivals)

    def play(self, ready_s: Sequence[float]) -> QueuePlayback:
        """Plays the queue with replicas that are ready after so many seconds each, ascending."""
        key = tuple(ready for ready in ready_s if ready < self.end_s)
        if (played := self._played.get(key)) is None:
            played = self._played[key] = self._play(key)
        return played

    def _play(self, ready_s: tuple[float, ...]) -> QueuePlayback:
        queued, running, dt_s = self.queued, self._running, self._dt_s
        alone_s, decode_s, prefill_s, tokens = self._alone_s, self._decode_s, self._prefill_s, self._output_tokens
        decode_s *= self._computed_share
        come, gone = queued, 0.0
        came, went = [come], [gone]
        admitted_per_s = longest_itl_s = 0.0
        rate = 0.0
        for index, arrived in enumerate(self._arrivals):
            serving = bisect_right(ready_s, index * dt_s)
            queued += arrived
            come += arrived
            if serving:
                step_s = alone_s + decode_s * running / serving
                left = max(0.05, 1 - admitted_per_s * prefill_s / serving)
                itl_s = step_s / left
                longest_itl_s = max(longest_itl_s, itl_s)
                # Requests come and go evenly within the time, which may be many times as long as one of them runs:
                # slots that become free take further requests.
                turns = dt_s / (tokens * itl_s + self._overhead_s)
                gone_share = -math.expm1(-turns)
                slots = (serving * self.batch - running * (1 - gone_share)) * turns / gone_share
                rate = serving * max(_LEAST_PREFILL_SHARE, 1 - step_s / self._step_s) / prefill_s
                admitted = max(0.0, min(queued, slots, rate * dt_s))
                running += admitted * gone_share / turns - running * gone_share
                queued -= admitted
                gone += admitted
                admitted_per_s = admitted / dt_s
            came.append(come)
            went.append(gone)
        return self._waits(came, went, longest_itl_s, len(ready_s))

    def _waits(self, came: list[float], went: list[float], itl_s: float, replicas: int) -> QueuePlayback:
        """Compares what has come with what has left the queue: the wait is the horizontal distance of both curves."""
        dt_s, end = self._dt_s, len(went) - 1
        rest_per_s = max(replicas * self.requests_per_s, 1e-9)
        missed = longest_s = 0.0
        at = 0
        for index, total in enumerate(came):
            requests = total - came[index - 1] if index else total
            if requests <= 1e-9:
                continue
            while at < end and went[at] < total - 1e-6:
                at += 1
            if went[at] >= total - 1e-6:
                step = went[at] - went[at - 1] if at else 0.0
                left_s = dt_s * (at - (went[at] - total) / step) if step > 0 else at * dt_s
            else:
                left_s = end * dt_s + (total - went[end]) / rest_per_s
            if index:
                wait_s = max(0.0, left_s - index * dt_s)
                longest_s = max(longest_s, wait_s)
                missed += requests if wait_s > self._longest_wait_s else 0.0
            elif left_s > 0:
                # The requests that wait already have come one after the other.
                longest_s = max(self._oldest_wait_s, left_s)
                missed += requests * _missed_share(self._oldest_wait_s, left_s, self._longest_wait_s)
        return QueuePlayback(missed, longest_s, itl_s)


def _queued_requests(demand: Demand, mix: RequestMix, capacity: ReplicaCapacity) -> float:
    """Returns the waiting requests as a number of typical ones with the same work."""
    if not demand.waiting or not demand.waiting_prompt_tokens + demand.waiting_output_tokens:
        return float(demand.waiting)
    prompts = demand.waiting_prompt_tokens / max(1.0, mix.prompt_tokens) * capacity.prefill_s(mix)
    outputs = demand.waiting_output_tokens * capacity.decode_s(mix)
    return (prompts + outputs) / capacity.work_s(mix)


def _missed_share(oldest_wait_s: float, left_s: float, longest_wait_s: float) -> float:
    """Returns which share of a queue waits too long: the first has waited longest, the last waits until `left_s`."""
    first_s, last_s = oldest_wait_s, left_s
    if max(first_s, last_s) <= longest_wait_s:
        return 0.0
    if min(first_s, last_s) > longest_wait_s:
        return 1.0
    return (max(first_s, last_s) - longest_wait_s) / abs(first_s - last_s)


def _interpolate(knots: Sequence[float], values: Sequence[float], dt_s: float) -> list[float]:
    """Returns the values in the middle of each step, on the lines between the knots."""
    found, index = [], 0
    for step in range(_STEPS):
        at_s = (step + 0.5) * dt_s
        while index + 2 < len(knots) and knots[index + 1] < at_s:
            index += 1
        share = (at_s - knots[index]) / (knots[index + 1] - knots[index])
        found.append(values[index] + share * (values[index + 1] - values[index]))
    return found
