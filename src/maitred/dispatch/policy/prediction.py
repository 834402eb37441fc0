"""Prediction of when a request is dispatched and when its first token comes, and a slow correction of it.

**The wait.** A request is released when what is ahead of it has been released and there is room for itself. Places come
free as the running answers end (`turnover`), and KV blocks with them: as many answers have to end as hold what is
lacking. While nothing is known of them, the wait is the service ahead, and half a request's more, over the service per
second. The longer wait counts.

**The prefill.** A released request is computed in the engine's next steps, each of which takes at most so many tokens:
first a token for each sequence that runs there, then the prompts before it, then its own. The engine's model of its
step times says how long such steps take, and the time since the present one began how much of it is over. An engine
reads what was sent to it between two steps, and reports on a step before that: so what was released and is in no report
is in the present step if it was sent before that began, and else goes into the next one with the request itself.

Neither looks at more than a bounded number of requests, for it is asked for every one that arrives, also for those that
are refused.

**The correction.** What is predicted and what came are compared as a ratio. Its quantiles are exported; its drift is
followed by a factor, for a model of step times knows nothing of the network, the tokeniser, or a neighbour on the same
cores. The factor is
slow, bounded, and forgets: predictions that refuse everybody could never be proved wrong.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from maitred.core.replica import LoadReport
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.turnover import steps_until_place

_ENOUGH = 16
"""Comparisons from which on the factor is believed in full."""
_FARTHEST = math.log(4.0)
_FORGET_S = 60.0
"""Without comparisons the factor returns to 1 with this time constant."""
_LEAST_S = 0.005
"""Shorter times are compared as if they were this long: nobody plans by less."""


class PredictionCorrection:
    """A factor on one sort of prediction: the median of the last ratios.

    Their mean would follow the few that go far astray, such as a request that just misses a step, and put all others
    wrong.
    """

    def __init__(self) -> None:
        self._drifts = RatioQuantiles(2 * _ENOUGH)
        self._trust = 0.0
        self._moved_s = 0.0

    def factor(self, now_s: float) -> float:
        """By what a prediction is to be multiplied."""
        return math.exp(self._drifts.at(0.5, 0.0) * min(1.0, self._evidence(now_s) / _ENOUGH))

    def compare(self, predicted_s: float, actual_s: float, now_s: float) -> None:
        """Compares a prediction with what came.

        Args:
            predicted_s: What had been predicted *without* the factor: it may have changed since, and to correct what
                it was then would make it swing.
            actual_s: What came.
            now_s: Now.
        """
        drift = math.log(max(actual_s, _LEAST_S) / max(predicted_s, _LEAST_S))
        self._drifts.add(min(_FARTHEST, max(-_FARTHEST, drift)))
        self._trust = min(float(_ENOUGH), self._evidence(now_s) + 1.0)
        self._moved_s = now_s

    def _evidence(self, now_s: float) -> float:
        """How many comparisons there were, less what was forgotten since."""
        return self._trust * math.exp(-max(0.0, now_s - self._moved_s) / _FORGET_S)


class PredictionCalibration:
    """The last predictions beside what came.

    Args:
        most: So many are kept.
    """

    def __init__(self, most: int = 512) -> None:
        self._ratios = RatioQuantiles(most)
        self._errors = RatioQuantiles(most)
        self.compared = 0
        """In all."""

    def compare(self, predicted_s: float, actual_s: float) -> None:
        """Something came that had been predicted."""
        actual_s, predicted_s = max(actual_s, _LEAST_S), max(predicted_s, _LEAST_S)
        self._ratios.add(predicted_s / actual_s)
        self._errors.add(abs(predicted_s - actual_s) / actual_s)
        self.compared += 1

    def ratio(self, quantile: float) -> float:
        """A quantile of predicted over actual; 1 before anything was compared."""
        return self._ratios.at(quantile, 1.0)

    def error(self, quantile: float) -> float:
        """A quantile of the relative error; 0 before anything was compared."""
        return self._errors.at(quantile, 0.0)


class SafetyMargin:
    """How much longer than predicted a wait may be, so that a promise about it is mostly kept.

    Learnt from the last waits, those included that were given up: without them only those would count that turned out
    short enough.
    """

    def __init__(self, kept: float = 0.97, most: int = 256) -> None:
        self._kept = kept
        self._ratios = RatioQuantiles(most)

    def compare(self, predicted_s: float, actual_s: float) -> None:
        """A wait is over, or has been given up after this time."""
        self._ratios.add(max(actual_s, _LEAST_S) / max(predicted_s, _LEAST_S))

    @property
    def factor(self) -> float:
        """From 1 to 2."""
        return min(2.0, max(1.0, self._ratios.at(self._kept, 1.0)))


class RatioQuantiles:
    """Quantiles of the last ratios of outcome to prediction.

    Args:
        most: So many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_time: deque[float] = deque()
        self._by_size: list[float] = []

    def add(self, value: float) -> None:
        """One more; the oldest may go."""
        if len(self._by_time) == self._most:
            del self._by_size[bisect_left(self._by_size, self._by_time.popleft())]
        self._by_time.append(value)
        insort(self._by_size, value)

    def at(self, quantile: float, empty: float) -> float:
        """The value at a quantile; `empty` before there was one."""
        values = self._by_size
        return values[min(int(quantile * len(values)), len(values) - 1)] if values else empty


class QueueAhead(Struct, frozen=True):
    """Queue that a request would find before it."""

    entries: int
    service: float
    """Of these."""
    free: Cost
    """That it and they may use; below zero when the engine is overcommitted."""
    left: Sequence[Sequence[float]]
    """Steps that the running answers still take, the fewest first; in several ways in which it may turn out."""
    seconds_until_turn: float | None
    """Until the request is released, where the line was played through."""
    service_per_place: float
    """Of a typical request."""
    blocks_per_place: float
    """Of a typical request."""
    blocks_held: float
    """Per place of those that run: so many come free with one."""
    steps_per_entry: float
    """For which those ahead will keep their places."""
    per_s: float | None
    """Service per second; None: unknown."""
    steps_per_s: float | None


class PredictedWait(Struct, frozen=True):
    """Until a request is released."""

    at_once: bool
    """There is a place for it, and nobody has to have one first."""
    seconds: float
    """0 also where nobody can tell."""


AT_ONCE = PredictedWait(True, 0.0)


def predict_wait(queue: QueueAhead, own: Cost) -> PredictedWait:
    """When a request is released that needs so much."""
    slots = queue.entries + own.slots - queue.free.slots
    blocks = queue.entries * queue.blocks_per_place + own.blocks - queue.free.blocks
    if slots <= 0 and blocks <= 0:
        return AT_ONCE
    seconds = 0.0
    if slots > 0 and queue.seconds_until_turn is not None:
        seconds = queue.seconds_until_turn
    elif slots > 0 and queue.steps_per_s and queue.left and queue.left[0]:
        seconds = _until_places(queue, queue.free.slots, queue.entries, own.slots)
    elif slots > 0:
        seconds = _until_served(queue, slots, own)
    if blocks > 0:
        lacking = blocks / max(1.0, queue.blocks_held)
        if queue.steps_per_s and queue.left and queue.left[0]:
            # Those ahead are counted in what is lacking: nothing is free until so many answers have ended.
            seconds = max(seconds, _until_places(queue, 0, math.ceil(lacking) - 1, 1))
        else:
            seconds = max(seconds, _until_served(queue, lacking, own))
    return PredictedWait(False, seconds)


def _until_places(queue: QueueAhead, free: int, ahead: int, own: int) -> float:
    """Seconds until so many places have come free in turn, by what each running answer has left."""
    assert queue.steps_per_s
    steps = sum(steps_until_place(left, free, ahead, queue.steps_per_entry, own) for left in queue.left)
    return steps / len(queue.left) / queue.steps_per_s


def _until_served(queue: QueueAhead, lacking: float, own: Cost) -> float:
    """Seconds until so many places' worth of service is done."""
    if not queue.per_s:
        return 0.0
    # Those ahead are known by their own service, and need not be as long as the typical ones that run now. What is free
    # now is theirs first.
    ahead = queue.service * min(1.0, lacking / queue.entries) if queue.entries else 0.0
    own_place = queue.service_per_place * min(lacking, max(1, own.slots))
    return (ahead + own_place / 2) / queue.per_s


class UnreportedPrompts(Struct, frozen=True):
    """Prompts that were dispatched and are in no report yet."""

    count: int
    tokens: float
    """Of all together, as far as they have to be computed."""


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
    """Seconds from the release of a request until its first token; 0 before the engine has measured its steps.

    Args:
        load: The last report.
        prompt_tokens: Of the request, as far as they have to be computed.
        unreported: Those that were sent before the present step began.
        before: Those that were sent since, and are read with it.
        block_tokens: Of one KV block.
        since_s: Since the present step began.
        held_tokens: Of the request, those that need not be computed, and are only looked back at.
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
