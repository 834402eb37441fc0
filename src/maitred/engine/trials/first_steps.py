"""Times of the first steps: a few made-up ones are computed and timed when a model starts.

Without them a gateway cannot tell its first clients when their answers will begin, nor an engine how much of a prompt
fits into the time between two tokens; both would learn it from the first requests, at the expense of these. What is
measured here is the beginning of what `maitred.engine.scheduler.step_times` learns from: observations like all others,
which those of real steps outweigh after a few dozen.

A step of a large model takes too long to be tried in all sizes. Its layers are alike, so such a model is tried with one
layer and with a few, and a step through all of them is taken to be as much longer as it has more layers.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.engine import PlanRunner
from maitred.engine.kv.blocks import BlockPool, WindowPool
from maitred.engine.kv.table import BlockTable
from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.sequence import Sequence as Answer
from maitred.engine.scheduler.step_times import StepMeter, StepWork, TimedStep
from maitred.engine.trials.cache import StepTimeCache
from maitred.engine.weights_cache.key import cache_key

MOST_S = 1.0
"""For all of them together, more or less."""
_SHALLOW, _DEEPER = 1, 3
"""Layers with which a model is tried whose steps take long."""
_LONG_S = 0.02
_TIMES = 3
"""A step that is short is tried so often, and the one in the middle counts."""
_SHORT_SHARE = 0.02
_UNDISTURBED_SHARE = 0.5
"""Of the time that trials take, in which the process had a processor."""

logger = logging.getLogger("maitred.engine")


@dataclass(frozen=True, slots=True)
class StepTrial:
    """A step that might be.

    Attributes:
        decodes: Sequences that decode.
        context: Tokens of each of them, the new one included.
        chunk: Tokens of a prompt; 0: there is none.
        before: Tokens of the prompt that are computed already.
    """

    decodes: int = 0
    context: int = 0
    chunk: int = 0
    before: int = 0

    @property
    def tokens(self) -> int:
        """Computed in the step."""
        return self.decodes + self.chunk


TRIALS = (
    StepTrial(1, 32),
    StepTrial(chunk=32),
    StepTrial(8, 96),
    StepTrial(chunk=96),
    StepTrial(32, 96),
    StepTrial(1, 768),
    StepTrial(8, 96, chunk=64),
    StepTrial(chunk=64, before=448),
    StepTrial(chunk=256),
    StepTrial(16, 256),
    StepTrial(96, 48),
)
"""In the order of what is gained by them: the first few tell each part of a step's time from the others."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Bounds of a step: its sequences, tokens and context.

    Attributes:
        sequences: That run together at most.
        step_tokens: Of a step at most.
        context_tokens: Of a sequence at most.
        blocks: Of the KV cache.
        block_tokens: Of a block.
        window_blocks: Of the layers with a window; 0: they use the same blocks as all.
    """

    sequences: int
    step_tokens: int
    context_tokens: int
    blocks: int
    block_tokens: int
    window_blocks: int = 0

    def allow(self, trial: StepTrial) -> bool:
        """Whether there can be such a step."""
        return (
            trial.decodes + bool(trial.chunk) <= self.sequences
            and trial.tokens <= self.step_tokens
            and max(trial.context, trial.before + trial.chunk) <= self.context_tokens
            and self.blocks_of(trial) <= self.blocks
        )

    def blocks_of(self, trial: StepTrial) -> int:
        """Blocks that it takes."""
        of_decodes = trial.decodes * -(-trial.context // self.block_tokens)
        return of_decodes - (-(trial.before + trial.chunk) // self.block_tokens)

    @property
    def tried_blocks(self) -> int:
        """The first so many blocks are written and read by the trials."""
        return max((self.blocks_of(trial) for trial in TRIALS if self.allow(trial)), default=0)


def steps_key(folder: Path, precision: str, device: str, bounds: StepBounds) -> str:
    """The name under which the steps of a model are noted: it holds for all that their times depend on.

    Args:
        folder: The checkpoint.
        precision: What is computed with.
        device: Its name.
        bounds: What steps can be.
    """
    tried = [astuple(trial) for trial in TRIALS]
    return cache_key(folder, {"precision": precision, "device": device, "bounds": astuple(bounds), "tried": tried})


def known_steps(
    notes: StepTimeCache[list[TimedStep]],
    key: str,
    runner_of: Callable[[int], PlanRunner],
    layers: int,
    bounds: StepBounds,
    *,
    now_s: Callable[[], float] = time.perf_counter,
    used_s: Callable[[], float] = time.process_time,
) -> list[TimedStep]:
    """Returns the step times that were stored when this model was started before; otherwise measures and stores them.

    What was measured while other work had the processor is better than nothing now, but not for all later starts.

    Args:
        notes: Where.
        key: All that the times depend on.
        runner_of: Computes plans with so many layers of the model.
        layers: That it has.
        bounds: What steps can be.
        now_s: A clock.
        used_s: The processor time of this process.
    """
    noted = notes.read(key)
    if noted is not None and all(seconds > 0 for _, seconds in noted):
        return noted
    began_s, used_before_s = now_s(), used_s()
    steps = try_steps(runner_of, layers, bounds, now_s=now_s)
    took_s = now_s() - began_s
    disturbed = used_s() - used_before_s < _UNDISTURBED_SHARE * took_s
    if not disturbed:
        notes.write(key, steps)
    logger.info(
        "%d made-up steps were timed in %.2f s, so that the first requests can be told how long they take: %s%s",
        *(len(steps), took_s, _describe_fit(steps)),
        ". Other work had the processor meanwhile, so the next start tries again" if disturbed else "",
    )
    return steps


def try_steps(
    runner_of: Callable[[int], PlanRunner],
    layers: int,
    bounds: StepBounds,
    *,
    most_s: float = MOST_S,
    now_s: Callable[[], float] = time.perf_counter,
) -> list[TimedStep]:
    """Computes steps of many kinds, as many as there is time for.

    Nothing of them is left but what their blocks hold, so call it before the first request.

    Args:
        runner_of: See `known_steps`.
        layers: That the model has.
        bounds: What steps can be.
        most_s: Seconds that it may take after the first few passes, which only warm up.
        now_s: A clock.
    """
    trials = [trial for trial in TRIALS if bounds.allow(trial)]
    if not trials:
        return []
    runners = _warm_runners(runner_of, layers, trials[0], bounds, now_s)
    steps: list[TimedStep] = []
    spent: list[TimedStep] = []
    until_s = now_s() + most_s
    for trial in trials:
        work, began_s = StepWork.of(_plan(trial, bounds)), now_s()
        if began_s + work.seconds(StepMeter(spent).times) > until_s:
            continue
        seconds = _through_all([_time_step(runner, trial, bounds, now_s, most_s) for runner in runners], layers)
        if seconds > 0:
            steps.append(TimedStep(work, seconds))
            spent.append(TimedStep(work, now_s() - began_s))
    return steps


def _warm_runners(
    runner_of: Callable[[int], PlanRunner],
    layers: int,
    trial: StepTrial,
    bounds: StepBounds,
    now_s: Callable[[], float],
) -> list[PlanRunner]:
    """One with all layers, if a step through them is short; otherwise one with few and one with some more."""
    if layers > _DEEPER:
        runners = [runner_of(_SHALLOW), runner_of(_DEEPER)]
        for runner in runners:
            _run(runner, trial, bounds)
        if _through_all([_time_step(runner, trial, bounds, now_s, 0.0) for runner in runners], layers) > _LONG_S:
            return runners
    whole = runner_of(layers)
    _run(whole, trial, bounds)
    return [whole]


def _through_all(seconds: Sequence[float], layers: int) -> float:
    """Returns the seconds of a step through all layers, from those through all, or through a few and some more."""
    if len(seconds) == 1:
        return seconds[0]
    few, more = seconds
    return few + max(0.0, more - few) / (_DEEPER - _SHALLOW) * (layers - _SHALLOW)


def _time_step(
    runner: PlanRunner, trial: StepTrial, bounds: StepBounds, now_s: Callable[[], float], most_s: float
) -> float:
    """Seconds of a step; of some such steps, if they are short."""
    taken: list[float] = []
    while not taken or (len(taken) < _TIMES and sum(taken) < _SHORT_SHARE * most_s):
        began_s = now_s()
        _run(runner, trial, bounds)
        taken.append(now_s() - began_s)
    return sorted(taken)[len(taken) // 2]


def _run(runner: PlanRunner, trial: StepTrial, bounds: StepBounds) -> None:
    plan = _plan(trial, bounds)
    runner.execute(plan)
    for chunk in plan.chunks:
        runner.forget(chunk.sequence)


def _plan(trial: StepTrial, bounds: StepBounds) -> StepPlan:
    """A step as the scheduler would have made it, of sequences that nobody has sent."""
    lengths = [trial.context] * trial.decodes + ([trial.before + trial.chunk] if trial.chunk else [])
    window = WindowPool(BlockPool(1), bounds.context_tokens, 0) if bounds.window_blocks else None
    pool, first, answers = BlockPool(1, window=window), 0, []
    for key, tokens in enumerate(lengths):
        request = EngineRequest(id=str(key), prompt=[0] * tokens, sampling=SamplingParams(max_tokens=1, seed=key))
        table = BlockTable(pool, bounds.block_tokens, "")
        end = first + table.blocks_for(tokens)
        table.blocks = list(range(first, end))
        if table.window is not None:  # made-up sequences may overwrite each other's
            table.window.blocks = [block % bounds.window_blocks for block in table.blocks]
        first = end
        answers.append(Answer(key=-1 - key, request=request, index=0, table=table, eos_token_ids=frozenset()))
    decodes = [Chunk(answer, trial.context - 1, 1) for answer in answers[: trial.decodes]]
    return StepPlan(decodes, [Chunk(answer, trial.before, trial.chunk) for answer in answers[trial.decodes :]])


def _describe_fit(steps: Sequence[TimedStep]) -> str:
    """The fit, in words."""
    times = StepMeter(steps).times
    return (
        f"{1e3 * times.decoding(1, 100):.1f} ms for 1 sequence, {1e3 * times.decoding(32, 3200):.1f} ms for 32, "
        f"{1e3 * times.of(256, 0, chunks=1, pairs=256 * 257 // 2):.0f} ms for 256 tokens of a prompt"
    )
