"""Session of one tuning from start to end, within a time budget."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from maitred.core.clock import Clock
from maitred.core.errors import InvalidRequest
from maitred.core.replica import Replica
from maitred.tune.growth import BatchGrowth, BatchSizeResult, DecodeSample, Reason
from maitred.tune.prefill import Prefill, step_tokens
from maitred.tune.trial import TrialRunner

SAMPLES = 3
"""Number of samples of a trial."""
REPEATS = 3
"""Number of measurements of each prompt."""
DECODE_SHARE = 0.8
"""Share of the budget for decoding; the rest is for the prompts."""
_LONGEST_SAMPLE_S = 0.7
_SAMPLES_IN_BUDGET = 60
"""Samples are so short that this many fit the budget: two trials of ten sizes."""
_SHORTEST_PROMPT = 32


class TuningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a tuning: the objective, and the bounds of the search.

    Attributes:
        objective_s: Time that 95 % of the times between tokens must stay below.
        prompt_tokens: Length of the prompt of each sequence.
        highest: Number of sequences of the largest batch to try.
        budget_s: Longest duration of the measurement, in seconds.
    """

    objective_s: float
    prompt_tokens: int
    highest: int
    budget_s: float


class TunedLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits to put into the configuration."""

    max_sequences: int
    step_tokens: int | None
    """Limit on the tokens of a step; None: the time was too short to measure it."""
    itl_objective_s: float

    @property
    def settings(self) -> dict[str, int | float]:
        """Returns the known limits by their dotted names."""
        values = msgspec.structs.asdict(self)
        return {f"engine.{name}": value for name, value in values.items() if value is not None}


class TuningResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a tuning.

    Attributes:
        wishes: Request as it could be fulfilled: `highest` and `prompt_tokens` are lowered to the capacity of the
            replica.
        sizes: Measured sizes, the smallest first.
        prefills: Measurements of single prompts, the shortest first.
        reason: Reason why no larger batch was tried.
        chosen: Size to use; None: not even one sequence meets the objective.
        limits: Resulting limits; None: nothing could be measured.
    """

    wishes: TuningRequest
    sizes: list[BatchSizeResult]
    prefills: list[Prefill]
    reason: Reason
    chosen: BatchSizeResult | None
    limits: TunedLimits | None


async def tune(
    replica: Replica,
    wishes: TuningRequest,
    clock: Clock,
    *,
    step_tokens_limit: int,
    watch: Callable[[BatchSizeResult], None] = lambda size: None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> TuningResult:
    """Measures the replica until the best batch size is known, or the time is up.

    Args:
        replica: Ready replica that has no other users.
        wishes: Request for the tuning; see `TuningRequest`.
        clock: Clock for all measured times.
        step_tokens_limit: Current limit on the tokens of a step of the replica; longer prompts need several steps, so
            they are not measured.
        watch: Callback that receives a size after each of its trials.
        sleep: Function that waits while a sample is taken.

    Raises:
        InvalidRequest: The replica cannot hold a single sequence of that prompt.
        ReplicaLost: The replica died.
    """
    card = replica.card()
    most = card.max_sequence_tokens // 2
    prompt_tokens = min(wishes.prompt_tokens, most)
    if prompt_tokens < 1:
        raise InvalidRequest("The model's window is too small to measure anything in it.")
    # Each sequence counts twice its prompt, so that the answers have room to grow during the measurement.
    highest = min(wishes.highest, card.max_sequences, max(1, card.kv_capacity_tokens // (2 * prompt_tokens)))
    wishes = msgspec.structs.replace(wishes, prompt_tokens=prompt_tokens, highest=highest)
    trials = TrialRunner(replica, clock, prompt_tokens=prompt_tokens, sleep=sleep)
    growth = BatchGrowth(objective_s=wishes.objective_s, highest=highest)
    end_s = clock.monotonic_s() + wishes.budget_s
    try:
        async with asyncio.timeout(wishes.budget_s * DECODE_SHARE):
            await _grow(trials, growth, wishes, watch)
    except TimeoutError:
        pass  # the measurements so far decide
    prefills: list[Prefill] = []
    longest = min(step_tokens_limit, card.context_tokens - 1, card.kv_capacity_tokens - 1)
    try:
        async with asyncio.timeout(end_s - clock.monotonic_s()):
            await _lengthen(trials, prefills, longest)
    except TimeoutError:
        pass
    return _outcome(wishes, growth, prefills)


async def _grow(
    trials: TrialRunner, growth: BatchGrowth, wishes: TuningRequest, watch: Callable[[BatchSizeResult], None]
) -> None:
    sample_s = min(_LONGEST_SAMPLE_S, wishes.budget_s * DECODE_SHARE / _SAMPLES_IN_BUDGET)
    while (sequences := growth.next_size()) is not None:
        samples: list[DecodeSample] = []
        try:
            await trials.decode(sequences, samples=SAMPLES, sample_s=sample_s, into=samples)
        finally:
            if samples:
                growth.record(sequences, samples)
                watch(next(size for size in growth.sizes if size.sequences == sequences))
        if not samples:
            raise InvalidRequest(
                f"The window leaves no room to measure answers behind prompts of {wishes.prompt_tokens} tokens. Name "
                "fewer with --prompt-tokens."
            )


async def _lengthen(trials: TrialRunner, prefills: list[Prefill], longest: int) -> None:
    """Measures single prompts, from the shortest on; each is twice as long as the one before."""
    tokens = min(_SHORTEST_PROMPT, longest)
    await trials.prefill(tokens, repeats=1)
    while tokens <= longest:
        prefills.append(await trials.prefill(tokens, repeats=REPEATS))
        tokens *= 2


def _outcome(wishes: TuningRequest, growth: BatchGrowth, prefills: list[Prefill]) -> TuningResult:
    chosen, sizes = growth.best, growth.sizes
    limits = None
    if sizes:
        # At least one sequence must run in any case.
        taken = chosen or sizes[0]
        tokens = step_tokens(
            prefills,
            sequences=taken.sequences,
            decode_s=taken.step_s,
            objective_s=wishes.objective_s,
        )
        limits = TunedLimits(max_sequences=taken.sequences, step_tokens=tokens, itl_objective_s=wishes.objective_s)
    return TuningResult(
        wishes=wishes, sizes=sizes, prefills=prefills, reason=growth.reason, chosen=chosen, limits=limits
    )
