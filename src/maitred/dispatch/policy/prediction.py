"""Formulas for predicted waits and prefill times, and their correction.

A request is dispatched once all requests ahead are dispatched and it has capacity itself. Slots become free as running
requests end (`turnover`), and KV blocks with them: enough requests must end to free the missing amount. If the
remaining steps are unknown, the wait is the service ahead plus half a request, divided by the service per second. The
longer of the waits for slots and for blocks is used.

The engine computes a dispatched request in its next steps. Each step has a token budget: first one token per running
sequence, then earlier prompts, then this prompt. The engine's step-time model gives the time of these steps; the time
since the current step began is subtracted. An engine reads new requests between two steps. So an unreported request is
in the current step if it was sent before that step began, and otherwise goes into the next step together with this
request.

Both look at a bounded number of requests, because they run for every arrival, also for rejected ones.

Predicted and actual times are compared as a ratio. Its quantiles are exported as metrics. A factor corrects systematic
errors, because the step-time model does not include the network, the tokeniser or other processes on the same cores.
The factor changes slowly, is bounded, and decays to 1: otherwise predictions that reject all requests could never be
corrected.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from maitred.core.replica import LoadReport
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.turnover import steps_until_place

_FULL_TRUST_SAMPLES = 16
"""Number of comparisons from which on the factor is fully applied."""
_MAX_LOG_FACTOR = math.log(4.0)
_TRUST_TIME_CONSTANT_S = 60.0
"""Time constant with which the factor returns to 1 without comparisons."""
_MIN_COMPARED_S = 0.005
"""Shorter times count as this long in comparisons."""
_MARGIN_QUANTILE = 0.97
"""Share of the last waits that the safety margin covers."""
_MARGIN_SAMPLES = 256
"""Number of waits from which the safety margin is learnt."""


class PredictionCorrection:
    """Correction factor of one kind of prediction: the median of the last ratios.

    The mean would follow a few outliers, such as a request that just misses a step.
    """

    def __init__(self) -> None:
        self._log_ratios = RollingQuantiles(2 * _FULL_TRUST_SAMPLES)
        self._sample_weight = 0.0
        self._last_compared_s = 0.0

    def factor(self, now_s: float) -> float:
        """Returns the factor by which a prediction is multiplied."""
        return math.exp(self._log_ratios.at(0.5, 0.0) * min(1.0, self._evidence(now_s) / _FULL_TRUST_SAMPLES))

    def compare(self, predicted_s: float, actual_s: float, now_s: float) -> None:
        """Adds one comparison of a predicted with an actual time.

        Args:
            predicted_s: Predicted time *without* the factor; with it, the correction would oscillate.
            actual_s: Actual time.
            now_s: Now.
        """
        drift = math.log(max(actual_s, _MIN_COMPARED_S) / max(predicted_s, _MIN_COMPARED_S))
        self._log_ratios.add(min(_MAX_LOG_FACTOR, max(-_MAX_LOG_FACTOR, drift)))
        self._sample_weight = min(float(_FULL_TRUST_SAMPLES), self._evidence(now_s) + 1.0)
        self._last_compared_s = now_s

    def _evidence(self, now_s: float) -> float:
        """Returns the decayed number of comparisons."""
        return self._sample_weight * math.exp(-max(0.0, now_s - self._last_compared_s) / _TRUST_TIME_CONSTANT_S)


class PredictionCalibration:
    """Accuracy of the last predictions.

    Args:
        max_samples: Maximum number of comparisons that are kept.
    """

    def __init__(self, max_samples: int = 512) -> None:
        self._ratios = RollingQuantiles(max_samples)
        self._errors = RollingQuantiles(max_samples)
        self.compared = 0
        """Total number of comparisons."""

    def compare(self, predicted_s: float, actual_s: float) -> None:
        """Adds one comparison of a predicted with an actual time."""
        actual_s, predicted_s = max(actual_s, _MIN_COMPARED_S), max(predicted_s, _MIN_COMPARED_S)
        self._ratios.add(predicted_s / actual_s)
        self._errors.add(abs(predicted_s - actual_s) / actual_s)
        self.compared += 1

    def ratio(self, quantile: float) -> float:
        """Returns a quantile of predicted over actual time; 1 without comparisons."""
        return self._ratios.at(quantile, 1.0)

    def error(self, quantile: float) -> float:
        """Returns a quantile of the relative error; 0 without comparisons."""
        return self._errors.at(quantile, 0.0)


class SafetyMargin:
    """Factor on predicted waits so that most actual waits are shorter.

    The factor is learnt from the last waits, including abandoned ones; otherwise only short waits would count.
    """

    def __init__(self) -> None:
        self._ratios = RollingQuantiles(_MARGIN_SAMPLES)

    def compare(self, predicted_s: float, actual_s: float) -> None:
        """Adds a wait that ended or was abandoned after this time."""
        self._ratios.add(max(actual_s, _MIN_COMPARED_S) / max(predicted_s, _MIN_COMPARED_S))

    @property
    def factor(self) -> float:
        """Safety factor, from 1 to 2."""
        return min(2.0, max(1.0, self._ratios.at(_MARGIN_QUANTILE, 1.0)))


class RollingQuantiles:
    """Quantiles over a sliding window of ratios, of their logarithms, or of errors.

    Args:
        max_values: Maximum number of values.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._by_time: deque[float] = deque()
        self._by_size: list[float] = []

    def add(self, value: float) -> None:
        """Adds a value and drops the oldest if the window is full."""
        if len(self._by_time) == self._max_values:
            del self._by_size[bisect_left(self._by_size, self._by_time.popleft())]
        self._by_time.append(value)
        insort(self._by_size, value)

    def at(self, quantile: float, empty: float) -> float:
        """Returns the value at a quantile; `empty` if there are no values."""
        values = self._by_size
        return values[min(int(quantile * len(values)), len(values) - 1)] if values else empty


class QueueAhead(Struct, frozen=True):
    """Inputs for the prediction of one wait."""

    entries: int
    service: float
    """Service of the requests ahead."""
    free: Cost
    """Free capacity for this request and those ahead; negative if the engine is overcommitted."""
    left: Sequence[Sequence[float]]
    """Samples of the remaining steps of running requests, each ascending."""
    seconds_until_turn: float | None
    """Seconds until dispatch from the simulation; None: not simulated."""
    service_per_place: float
    """Service of a typical request."""
    blocks_per_place: float
    """KV blocks of a typical request."""
    blocks_held: float
    """KV blocks per slot of running requests."""
    steps_per_entry: float
    """Steps for which each request ahead holds its slot."""
    per_s: float | None
    """Service per second; None: unknown."""
    steps_per_s: float | None


class PredictedWait(Struct, frozen=True):
    """Predicted wait until a request is dispatched."""

    at_once: bool
    """Whether the request can be dispatched at once."""
    seconds: float
    """Predicted seconds; also 0 if unknown."""


AT_ONCE = PredictedWait(True, 0.0)


def predict_wait(queue: QueueAhead, own: Cost) -> PredictedWait:
    """Predicts the wait of a request with this cost."""
    slots = queue.entries + own.slots - queue.free.slots
    blocks = queue.entries * queue.blocks_per_place + own.blocks - queue.free.blocks
    if slots <= 0 and blocks <= 0:
        return AT_ONCE
    seconds = 0.0
    if slots > 0 and queue.seconds_until_turn is not None:
        seconds = queue.seconds_until_turn
    elif slots > 0 and queue.steps_per_s and queue.left and queue.left[0]:
        seconds = _seconds_until_slots(queue, queue.free.slots, queue.entries, own.slots)
    elif slots > 0:
        seconds = _seconds_until_served(queue, slots, own)
    if blocks > 0:
        lacking_slots = blocks / max(1.0, queue.blocks_held)
        if queue.steps_per_s and queue.left and queue.left[0]:
            # The blocks of requests ahead are included, so no slot is free until this many requests have ended.
            seconds = max(seconds, _seconds_until_slots(queue, 0, math.ceil(lacking_slots) - 1, 1))
        else:
            seconds = max(seconds, _seconds_until_served(queue, lacking_slots, own))
    return PredictedWait(False, seconds)


def _seconds_until_slots(queue: QueueAhead, free: int, ahead: int, own: int) -> float:
    """Returns the seconds until the request gets its slots, from the remaining steps."""
    assert queue.steps_per_s
    steps = sum(steps_until_place(left, free, ahead, queue.steps_per_entry, own) for left in queue.left)
    return steps / len(queue.left) / queue.steps_per_s


def _seconds_until_served(queue: QueueAhead, lacking: float, own: Cost) -> float:
    """Returns the seconds until enough service is done to free the missing slots."""
    if not queue.per_s:
        return 0.0
    # Use the service of the requests ahead, which may differ from typical requests. Free slots go to them first.
    ahead = queue.service * min(1.0, lacking / queue.entries) if queue.entries else 0.0
    own_place = queue.service_per_place * min(lacking, max(1, own.slots))
    return (ahead + own_place / 2) / queue.per_s


class UnreportedPrompts(Struct, frozen=True):
    """Prompts that were dispatched and that no load report includes yet."""

    count: int
    tokens: float
    """Their uncached prompt tokens together."""


def predict_prefill_s(
    load: LoadReport,
    prompt_tokens: float,
    unreported: UnreportedPrompts,
    before: UnreportedPrompts,
    block_tokens: int,
    since_s: float,
    *,
    held_tokens: float = 0.0,
) -> float:
    """Predicts the seconds from dispatch to the first token; 0 if step times are unknown.

    Args:
        load: The last report.
        prompt_tokens: Uncached prompt tokens of the request.
        unreported: Unreported prompts that were sent before the current step began.
        before: Prompts that were sent since and that the engine reads together with this request.
        block_tokens: Tokens of one KV block.
        since_s: Seconds since the current step began.
        held_tokens: Cached prompt tokens of the request, which only attention reads.
    """
    times = load.times
    context = (load.total_blocks - load.free_blocks) * block_tokens
    decodes_s = times.decoding(load.running, context)
    chunk_tokens = max(1, load.step_tokens - load.running) if load.step_tokens else math.inf
    waiting = load.waiting_prompt_tokens + unreported.tokens
    begun_s = 0.0
    if load.running or waiting:
        now = min(waiting, chunk_tokens)
        chunks = unreported.count + max(load.waiting, load.waiting_prompt_tokens > 0)
        begun_s = max(0.0, decodes_s + times.token_s * now + times.chunk_s * chunks - since_s)
        waiting -= now
    to_compute = prompt_tokens + before.tokens + waiting
    steps = max(1, math.ceil(to_compute / chunk_tokens))
    decodes_s = times.decoding(load.running + unreported.count, context)
    own_s = times.chunk_s * (1 + before.count) + times.pair_s * prompt_tokens * (held_tokens + prompt_tokens / 2)
    return begun_s + steps * decodes_s + times.token_s * to_compute + own_s
