"""Size of a step: the sequences and prefill tokens that fit into the inter-token latency objective."""

from collections.abc import Iterable

from maitred.core.replica import StepTimes
from maitred.engine.scheduler.batch import RunningBatch
from maitred.engine.scheduler.batch_limit import BatchLimit
from maitred.engine.scheduler.prefill import PrefillBudget
from maitred.engine.scheduler.step_times import StepBudget, StepMeter, StepWork, TimedStep

_DECODES_SHARE = 0.8
"""Share of the objective that predicted decodes may take. A batch whose decodes are predicted to take more gets no
further sequences."""
FIXED_SHARE = 0.1
"""Share of a step's time that its fixed time may be where steps are kept short. On an accelerator the fixed time is
large, so steps stay large."""
_ROUNDING = 1 + 1e-9
"""Factor for a limit in time, so that exactly as many tokens fit as it was computed for."""
_ANY_PAIRS = 1 << 62


class StepSizer:
    """Sizer that learns from measured steps how large the next one may be.

    Args:
        step_tokens: Maximum tokens of a step.
        max_sequences: Maximum running sequences.
        min_sequences: Sequences that may run even if the steps are slow.
        itl_objective_s: Default objective of the engine in seconds; None: steps have the maximum size.
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
        """Number of sequences whose decodes are predicted to keep the objective. The measured limit reacts too late
        when a hundred requests arrive at once, so this prediction also applies."""
        self._meter = StepMeter(known)

    @property
    def times(self) -> StepTimes:
        """Model of step times, fitted to the measured steps."""
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
        """Returns a step's prefill budget.

        A token costs more the further it is into a prompt, and whoever comes during a step waits for its end. So no
        step takes longer than its tokens would in a new prompt. While sequences decode, it keeps their objective too.
        """
        objective_s, times = batch.itl_objective_s, self.times
        left = self._step_tokens - decodes
        longest_s = max(times.chunk(0, left), times.fixed_s / FIXED_SHARE) * _ROUNDING
        if objective_s is None or not decodes:
            return PrefillBudget(left, StepBudget(times, longest_s, left, _ANY_PAIRS))
        return PrefillBudget(left, self._meter.budget(objective_s, decodes, batch.context_tokens, longest_s))

    def drafts(self, batch: RunningBatch, work: StepWork, tokens: int, writing_s: float = 0.0) -> int:
        """Returns the draft rows that a step can have in addition to its work.

        Args:
            batch: Running sequences.
            work: Work of the step.
            tokens: Tokens of the step so far.
            writing_s: Seconds to write one further draft.
        """
        objective_s = batch.itl_objective_s
        left = max(0, self._step_tokens - tokens)
        if objective_s is None:
            return left
        left_s = max(0.0, objective_s / self._meter.margin() - work.seconds(self.times))
        row_s = self.times.token_s + self.times.decode_s + writing_s
        return left if left_s >= left * row_s else int(left_s / row_s)

    def on_step_time(self, work: StepWork, seconds: float, *, running: int, waiting: int) -> None:
        """Records the duration of a step; see `BatchLimit.record` for the arguments."""
        extra_s = work.extra_seconds(self._meter.times)
        self._limit.record(seconds, work.decodes, prefill_s=extra_s, running=running, waiting=waiting)
        self._meter.record(work, seconds)
        if self._itl_objective_s is not None and work.decodes:
            seconds = _DECODES_SHARE * self._itl_objective_s
            self._predicted = self._meter.decodes_within(seconds, work.context_tokens / work.decodes)
