"""Prediction of step times, learnt from earlier steps, and the prefill tokens that fit into a step.

Two tokens can cost very different amounts. A decode shares the reading of the weights with few other tokens, is
sampled, and reads all keys and values of its sequence. A token of a prefill chunk is one row of a large matrix product,
and attends to every token before it. So a `StepWork` describes the quantities that a step's time depends on, and a
`StepMeter` learns `maitred.core.replica.StepTimes` from measured steps. The meter also records its errors, so that
predictions can have a safety margin.

A meter trusts its predictions only near the measured step sizes. A step is at most twice as large as the largest
measured one. So a wrong first prediction costs one step that is somewhat too long, instead of one that is extremely
long.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from maitred.core.replica import StepTimes, pairs_of
from maitred.engine.scheduler.least_squares import LeastSquares
from maitred.engine.scheduler.plan import StepPlan

_MEMORY_STEPS = 200
_FIT_EVERY = 16
"""Number of steps between two fits; at first, every step is followed by a fit."""
_KNOWN_SHARE = 0.05
_ERRORS = 256
_FEW_ERRORS = 32
_FIRST_PREFILL_TOKENS = 64
_FIRST_PAIRS = 1 << 13
_FIRST_DECODES = 8
_LEAST_PREFILL_TOKENS = 16
"""Minimum prefill tokens of a step whose decodes alone take too long, so that prefills still end."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work that the time of a step depends on; see `StepTimes` for the units."""

    decodes: int = 0
    context_tokens: int = 0
    """Context tokens of the decoding sequences, new tokens included."""
    chunks: int = 0
    prefill_tokens: int = 0
    pairs: int = 0
    drafts: int = 0
    """Number of draft tokens; each costs as much as a decode, but attends like a token of a chunk."""
    scored: int = 0
    """Number of prefill tokens behind which log-probabilities are computed."""

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        """Computes the work of a plan."""
        # In a decode with several tokens, the last one counts as a decode; the tokens before it count as prefill rows.
        longer = [(chunk.start, chunk.length - 1) for chunk in plan.decodes if chunk.length > 1]
        drafts = [(chunk.end, len(chunk.drafts)) for chunk in plan.decodes if chunk.drafts]
        prompts = [(chunk.start, chunk.length) for chunk in plan.prefills]
        return cls(
            len(plan.decodes),
            sum([chunk.start + chunk.length for chunk in plan.decodes]),
            len(prompts),
            sum([length for _, length in prompts + longer]),
            sum([pairs_of(start, length) for start, length in prompts + longer + drafts]),
            sum([length for _, length in drafts]),
            sum([len(chunk.scored_rows) for chunk in plan.prefills]),
        )

    @classmethod
    def of_decodes(cls, plan: StepPlan) -> "StepWork":
        """Computes the work of a plan's decodes alone, if each has one token."""
        return cls(len(plan.decodes), sum([chunk.start + chunk.length for chunk in plan.decodes]))

    def seconds(self, times: StepTimes) -> float:
        """Returns the seconds that the step takes."""
        _, tokens, context_tokens, decodes, chunks, pairs, scored = self.features
        return times.of(tokens, context_tokens, decodes=decodes, chunks=chunks, pairs=pairs, scored=scored)

    def extra_seconds(self, times: StepTimes) -> float:
        """Returns the seconds that the prefill and the drafts of the step add."""
        decodes = StepWork(self.decodes, self.context_tokens)
        return self.seconds(times) - decodes.seconds(times)

    @property
    def features(self) -> tuple[int, int, int, int, int, int, int]:
        """Returns the factors for the fields of `StepTimes`, in their order."""
        sampled = self.decodes + self.drafts
        tokens = sampled + self.prefill_tokens
        return 1, tokens, self.context_tokens, sampled, self.chunks, self.pairs, self.scored


class TimedStep(NamedTuple):
    """Work and duration of a measured step."""

    work: StepWork
    seconds: float


class StepMeter:
    """Meter that learns step times. The meter is deterministic; the engine measures the times.

    Args:
        known: Steps that were measured earlier. Each has a small share of the weight of a newly recorded step, so new
            steps soon outweigh them. Where no new steps are recorded, they stay valid.
    """

    def __init__(self, known: Iterable[TimedStep] = ()) -> None:
        self.times = StepTimes()
        """Coefficients of the latest fit."""
        self._model = LeastSquares(len(StepTimes.__struct_fields__), _MEMORY_STEPS)
        self._steps = 0
        self._mixed = _Ratios()
        """Measured over predicted, of steps with prefill..."""
        self._decoding = _Ratios()
        """...and of those without, which are much more even."""
        self._most_decodes = 0
        self._most_prefill_tokens = 0
        self._most_pairs = 0
        for work, seconds in known:
            self._learn(work, seconds, _KNOWN_SHARE)
        if self._steps:
            self._fit()
        self._steps = 0

    def record(self, work: StepWork, seconds: float) -> None:
        """Records a measured step.

        Args:
            work: Work of the step; at least one token.
            seconds: Time from one plan to the next, with all that delays a client's tokens; more than 0.
        """
        predicted_s = work.seconds(self.times)
        if predicted_s > 0:
            (self._mixed if work.chunks else self._decoding).add(seconds / predicted_s)
        self._learn(work, seconds)
        if self._steps <= _FIT_EVERY or self._steps % _FIT_EVERY == 0:
            self._fit()

    def _learn(self, work: StepWork, seconds: float, share: float = 1.0) -> None:
        stratum = ((work.decodes + work.drafts).bit_length(), work.prefill_tokens.bit_length())
        self._model.observe(stratum, work.features, seconds, share)
        self._steps += 1
        self._most_decodes = max(self._most_decodes, work.decodes)
        self._most_prefill_tokens = max(self._most_prefill_tokens, work.prefill_tokens)
        self._most_pairs = max(self._most_pairs, work.pairs)

    def _fit(self) -> None:
        self._model.fit()
        self.times = StepTimes(*self._model.coefficients)

    def margin(self, share: float = 0.95) -> float:
        """Returns the factor (at least 1) by which to extend predictions to cover this share of the steps.

        The factor comes from the last steps with prefill and the predictions before them. While such steps are few, it
        comes from all steps.
        """
        ratios = self._mixed if len(self._mixed) >= _FEW_ERRORS else self._mixed + self._decoding
        return max(1.0, ratios.quantile(share))

    def error(self, share: float = 0.9) -> float:
        """Returns the relative error that this share of the last predictions did not exceed."""
        return (self._mixed + self._decoding).error(share)

    def budget(
        self, objective_s: float, decodes: int, context_tokens: int, longest_s: float = inf, share: float = 0.95
    ) -> "StepBudget":
        """Returns a step's budget for prefill, so that `share` of the steps keep the objective.

        Args:
            objective_s: Maximum seconds of the step.
            decodes: Number of decoding sequences in the step.
            context_tokens: Context tokens of the decoding sequences, new tokens included.
            longest_s: Maximum seconds for prefill.
            share: Share of the steps that keep the objective, if their decodes alone do not exceed it.
        """
        left_s = objective_s / self.margin(share) - self.times.decoding(decodes, context_tokens)
        tokens = max(_FIRST_PREFILL_TOKENS, 2 * self._most_prefill_tokens)
        pairs = max(_FIRST_PAIRS, 4 * self._most_pairs)  # a prompt of double length has four times as many pairs
        return StepBudget(self.times, min(left_s, longest_s), tokens, pairs)

    def decodes_within(self, seconds: float, context_tokens: float) -> int:
        """Returns how many sequences, each with this context, a step of this duration usually decodes."""
        times = self.times
        each_s = times.token_s + times.decode_s + times.context_token_s * context_tokens
        known = max(_FIRST_DECODES, 2 * self._most_decodes)
        left_s = seconds - times.fixed_s
        if left_s <= 0:
            return 0
        return known if left_s >= known * each_s else int(left_s / each_s)

    def tokens_within(self, seconds: float, decodes: int, context_tokens: int) -> int:
        """Returns the tokens, decodes included, of a step that fits into a time with one new prompt."""
        return decodes + self.budget(seconds, decodes, context_tokens).take(0, 1 << 30)


class _Ratios:
    """Sorted window of the latest ratios."""

    def __init__(self) -> None:
        self._in_time: deque[float] = deque()
        self._by_size: list[float] = []

    def __len__(self) -> int:
        return len(self._in_time)

    def __add__(self, other: "_Ratios") -> "_Ratios":
        both = _Ratios()
        both._by_size = sorted(self._by_size + other._by_size)
        return both

    def add(self, ratio: float) -> None:
        if len(self._in_time) == _ERRORS:
            del self._by_size[bisect_left(self._by_size, self._in_time.popleft())]
        self._in_time.append(ratio)
        insort(self._by_size, ratio)

    def quantile(self, share: float) -> float:
        """Returns a quantile of the ratios; 1 without ratios."""
        return _quantile(self._by_size, share, 1.0)

    def error(self, share: float) -> float:
        return _quantile(sorted(abs(1.0 - 1.0 / ratio) for ratio in self._by_size), share, 0.0)


def _quantile(ordered: Sequence[float], share: float, of_nothing: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else of_nothing


class StepBudget:
    """Budget of a step's remaining time, which is spent chunk by chunk.

    Args:
        times: Model of step times.
        left_s: Seconds for prefill; negative if the decodes alone take too long.
        tokens: Maximum prefill tokens, independent of the time.
        pairs: Maximum attention pairs beyond a small number of tokens.
    """

    __slots__ = ("_least", "_left_s", "_pairs", "_times", "_tokens")

    def __init__(self, times: StepTimes, left_s: float, tokens: int, pairs: int) -> None:
        self._times = times
        self._left_s = left_s
        self._tokens = tokens
        self._pairs = pairs
        self._least = _LEAST_PREFILL_TOKENS

    @property
    def spent(self) -> bool:
        """Whether no further token fits."""
        return not self._least and not (self._tokens and self._times.longest_chunk(self._left_s, 0, 1))

    def take(self, start: int, wanted: int, *, scored: bool = False) -> int:
        """Spends budget for a chunk after `start` earlier tokens; returns how many of `wanted` tokens fit.

        The first few tokens of a step always fit.

        Args:
            start: Tokens before the chunk.
            wanted: Tokens that it would have.
            scored: Whether log-probabilities are computed behind each of them.
        """
        fits = self._times.longest_chunk(self._left_s, start, min(wanted, self._tokens), scored=scored)
        while fits and pairs_of(start, fits) > self._pairs:
            fits //= 2
        length = max(fits, min(wanted, self._least))
        if length:
            self._left_s -= self._times.chunk(start, length) + (self._times.scored_s * length if scored else 0.0)
            self._tokens -= length
            self._pairs -= pairs_of(start, length)
            self._least = max(0, self._least - length)
        return length
