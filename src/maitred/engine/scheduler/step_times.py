"""Time of the next step, learnt from the steps before it, and the prefill tokens that it leaves room for.

Two tokens can cost very different amounts. A decode shares its reading of the weights with few others and is sampled;
it reads all the keys and values of its sequence. A token of a prefill chunk is one row of a large product; it attends
to every token before it. So a step is described by what its time depends on (`StepWork`), and a `StepMeter` learns
`maitred.core.replica.StepTimes` from measured steps. It also keeps how wrong it was, so that a promise can have a
margin.

A meter believes itself only near what it has seen. Until a step of some size was measured, the next one is at most
twice as large: a wrong first guess then costs one step that is somewhat too long, instead of one that is endless.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maitred.core.replica import StepTimes, pairs_of
from maitred.engine.scheduler.least_squares import LeastSquares
from maitred.engine.scheduler.plan import StepPlan

_MEMORY_STEPS = 200
_FIT_EVERY = 16
"""Steps from one fit to the next; at first, after every step."""
_KNOWN_SHARE = 0.05
_ERRORS = 256
_FEW_ERRORS = 32
_FIRST_PREFILL_TOKENS = 64
_FIRST_PAIRS = 1 << 13
_FIRST_DECODES = 8
_LEAST_PREFILL_TOKENS = 16
"""Prefill in a step whose decodes alone take too long: prompts must come to an end all the same."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work that the time of a step depends on; see `StepTimes` for the units."""

    decodes: int = 0
    context_tokens: int = 0
    """Of the sequences that decode, the new tokens included."""
    chunks: int = 0
    prefill_tokens: int = 0
    pairs: int = 0
    drafts: int = 0
    """Tokens that are guessed; each costs what a decode does, but it attends as a token of a chunk."""

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        """The work of a plan."""
        # Of a decode with several tokens the last one is as any decode's; those before it are rows of a prompt.
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
        )

    @classmethod
    def of_decodes(cls, plan: StepPlan) -> "StepWork":
        """The work of its decodes alone, if each has one token."""
        return cls(len(plan.decodes), sum([chunk.start + chunk.length for chunk in plan.decodes]))

    def seconds(self, times: StepTimes) -> float:
        """Returns the seconds that the step takes."""
        _, tokens, context_tokens, decodes, chunks, pairs = self.features
        return times.of(tokens, context_tokens, decodes=decodes, chunks=chunks, pairs=pairs)

    def extra_seconds(self, times: StepTimes) -> float:
        """Returns the seconds that its prefill and its drafts add."""
        decodes = StepWork(self.decodes, self.context_tokens)
        return self.seconds(times) - decodes.seconds(times)

    @property
    def features(self) -> tuple[int, int, int, int, int, int]:
        """Factors for the fields of `StepTimes`, in their order."""
        sampled = self.decodes + self.drafts
        return 1, sampled + self.prefill_tokens, self.context_tokens, sampled, self.chunks, self.pairs


class TimedStep(NamedTuple):
    """A step that was measured."""

    work: StepWork
    seconds: float


class StepMeter:
    """Learns what steps take. Deterministic; the times are measured by whoever runs the steps.

    Args:
        known: Steps that were measured before, to begin with. Each counts for a part of one that is recorded from now
            on, which so outweighs it soon; where nothing is recorded they go on to be believed.
    """

    def __init__(self, known: Iterable[TimedStep] = ()) -> None:
        self.times = StepTimes()
        """The latest fit."""
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
        """A step was measured.

        Args:
            work: What it computed; at least one token.
            seconds: From one plan to the next, with all that a reader waits for between two tokens. More than 0.
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
        """By how much a prediction must be stretched so that this share of the steps takes no longer; at least 1.

        It goes by the last steps with prefill, as it was predicted before they were run; and while these are few, by
        all.
        """
        ratios = self._mixed if len(self._mixed) >= _FEW_ERRORS else self._mixed + self._decoding
        return max(1.0, ratios.quantile(share))

    def error(self, share: float = 0.9) -> float:
        """The error that this share of the last predictions did not exceed, relative to what was measured."""
        return (self._mixed + self._decoding).error(share)

    def budget(self, objective_s: float, decodes: int, context_tokens: int, share: float = 0.95) -> "StepBudget":
        """Returns what a step has left for prefill if, in `share` of the cases, it shall keep an objective.

        Args:
            objective_s: The most that the step should take.
            decodes: Sequences that decode in it.
            context_tokens: Their context, the new tokens included.
            share: Of the steps that keep the objective, if their decodes alone do not break it.
        """
        left_s = objective_s / self.margin(share) - self.times.decoding(decodes, context_tokens)
        tokens = max(_FIRST_PREFILL_TOKENS, 2 * self._most_prefill_tokens)
        pairs = max(_FIRST_PAIRS, 4 * self._most_pairs)  # twice as long a prompt has four times as many
        return StepBudget(self.times, left_s, tokens, pairs)

    def decodes_within(self, seconds: float, context_tokens: float) -> int:
        """How many sequences, each with so much context, a step of so many seconds decodes, as a rule."""
        times = self.times
        each_s = times.token_s + times.decode_s + times.context_token_s * context_tokens
        known = max(_FIRST_DECODES, 2 * self._most_decodes)
        left_s = seconds - times.fixed_s
        if left_s <= 0:
            return 0
        return known if left_s >= known * each_s else int(left_s / each_s)

    def tokens_within(self, seconds: float, decodes: int, context_tokens: int) -> int:
        """Tokens, decodes included, of a step that takes so long at most, if its prefill is one prompt's first part."""
        return decodes + self.budget(seconds, decodes, context_tokens).take(0, 1 << 30)


class _Ratios:
    """The last ratios, of some number, by size."""

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
        """1 when there are none."""
        return _quantile(self._by_size, share, 1.0)

    def error(self, share: float) -> float:
        return _quantile(sorted(abs(1.0 - 1.0 / ratio) for ratio in self._by_size), share, 0.0)


def _quantile(ordered: Sequence[float], share: float, of_nothing: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else of_nothing


class StepBudget:
    """The rest of a step's time, spent chunk by chunk.

    Args:
        times: What steps take.
        left_s: Seconds for prefill; below 0 when the decodes alone take too long.
        tokens: Prefill tokens at most, whatever the time.
        pairs: Pairs that they attend to at most, beyond a small number of tokens.
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
        """Whether not even one token fits any more."""
        return not self._least and not (self._tokens and self._times.longest_chunk(self._left_s, 0, 1))

    def take(self, start: int, wanted: int) -> int:
        """Spends what a chunk takes: how many of the `wanted` tokens after `start` earlier ones fit; 0 if none does.

        The first few tokens of a step always fit.
        """
        fits = self._times.longest_chunk(self._left_s, start, min(wanted, self._tokens))
        while fits and pairs_of(start, fits) > self._pairs:
            fits //= 2
        length = max(fits, min(wanted, self._least))
        if length:
            self._left_s -= self._times.chunk(start, length)
            self._tokens -= length
            self._pairs -= pairs_of(start, length)
            self._least = max(0, self._least - length)
        return length
