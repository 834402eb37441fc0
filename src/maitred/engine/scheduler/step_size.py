"""How much a step does: so many sequences, and so many tokens of prompts, as the readers' objective leaves room for."""

from collections.abc import Iterable

from maitred.core.replica import StepTimes
from maitred.engine.scheduler.batch import RunningBatch
from maitred.engine.scheduler.batch_limit import BatchLimit
from maitred.engine.scheduler.prefill import PrefillBudget
from maitred.engine.scheduler.step_times import StepMeter, StepWork, TimedStep

_DECODES_SHARE = 0.8
"""Of the objective. A batch whose decodes alone are predicted to take more is not added to."""


class StepSizer:
    """Learns from measured steps, and sizes the next one.

    Args:
        step_tokens: Tokens in a step at most.
        max_sequences: Sequences that run together at most.
        min_sequences: That may run however slow the steps are.
        itl_objective_s: The engine's own; None: steps are as large as they may be.
        known: Steps that were measured before.
    """

    def __init__(
        self,
        *,
        step_tokens: int,
        max_sequences: int,
        min_sequences: int,
        itl_objective_s: float | None,
        known: Iterable[TimedStep] = (),
    ) -> None:
        self._step_tokens = step_tokens
        self._least = min(min_sequences, max_sequences)
        self._limit = BatchLimit(itl_objective_s, least=self._least, most=max_sequences)
        self._itl_objective_s = itl_objective_s
        self._predicted = max_sequences
        """Sequences whose decodes are predicted to keep the objective. The limit goes by what was seen, which comes
        too late when a hundred requests arrive at once."""
        self._meter = StepMeter(known)

    @property
    def times(self) -> StepTimes:
        """Step times, as far as they were measured."""
        return self._meter.times

    @property
    def sequences(self) -> int:
        """Number of sequences that may run together now."""
        return min(self._limit.limit, max(self._least, self._predicted))

    def tokens(self, batch: RunningBatch) -> int:
        """Returns the tokens that a step with this batch may compute."""
        objective_s = batch.itl_objective_s
        if objective_s is None:
            return self._step_tokens
        decodes = len(batch.decoding)
        return min(self._step_tokens, self._meter.tokens_within(objective_s, decodes, batch.context_tokens))

    def budget(self, batch: RunningBatch, decodes: int) -> PrefillBudget:
        """Returns what a step has left for prompts; it is limited in time only while somebody waits."""
        objective_s = batch.itl_objective_s
        left = self._step_tokens - decodes
        if objective_s is None or not decodes:
            return PrefillBudget(left, None, left)
        fitting = self._meter.tokens_within(objective_s, decodes, batch.context_tokens) - decodes
        time = self._meter.budget(objective_s, decodes, batch.context_tokens)
        return PrefillBudget(left, time, min(left, fitting))

    def drafts(self, batch: RunningBatch, work: StepWork, tokens: int, writing_s: float = 0.0) -> int:
        """Rows that a step can have beside what it computes.

        Args:
            batch: Those that run.
            work: What it computes.
            tokens: Of the step so far.
            writing_s: What it takes to have one more written.
        """
        objective_s = batch.itl_objective_s
        left = max(0, self._step_tokens - tokens)
        if objective_s is None:
            return left
        left_s = max(0.0, objective_s / self._meter.margin() - work.seconds(self.times))
        row_s = self.times.token_s + self.times.decode_s + writing_s
        return left if left_s >= left * row_s else int(left_s / row_s)

    def on_step_time(self, work: StepWork, seconds: float, *, running: int, waiting: int) -> None:
        """A step took so long; see `BatchLimit.record` for the numbers."""
        extra_s = work.extra_seconds(self._meter.times)
        self._limit.record(seconds, work.decodes, prefill_s=extra_s, running=running, waiting=waiting)
        self._meter.record(work, seconds)
        if self._itl_objective_s is not None and work.decodes:
            seconds = _DECODES_SHARE * self._itl_objective_s
            self._predicted = self._meter.decodes_within(seconds, work.context_tokens / work.decodes)
