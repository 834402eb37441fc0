"""Statistics of each sequence from arrival to end, for traces and explanations.

A step records nothing for a sequence that only decodes. Steps and their rows are counted globally, and a sequence
stores the values of these counters at its first token.
"""

from maitred.core.request import SequenceStats
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.sequence import Sequence


class _SequenceNotes:
    """Times and counts of one sequence."""

    __slots__ = (
        *("away_since_s", "began_s", "computed_before", "displaced_s", "first", "first_s", "prefill_steps"),
        *("recomputed", "rows", "steps"),
    )

    def __init__(self, began_s: float, computed_before: int) -> None:
        self.computed_before = computed_before
        """Tokens of the sequence that were computed before its last preemption, or at a lost replica."""
        self.began_s = began_s
        self.first: SequenceStats | None = None
        self.first_s = 0.0
        self.steps = self.rows = self.prefill_steps = self.recomputed = 0
        self.displaced_s = 0.0
        self.away_since_s: float | None = None


class SequenceStatsRecorder:
    """Recorder of the statistics of all running sequences."""

    def __init__(self) -> None:
        self._notes: dict[int, _SequenceNotes] = {}
        self._unanswered: set[int] = set()
        """Keys of running sequences for which this engine has generated no token yet."""
        self._steps = 0
        self._rows = 0
        self._batch = 0

    def on_plan(self, plan: StepPlan, now_s: float) -> None:
        """Records the plan of a step that will be computed."""
        for sequence in plan.preempted:
            if (notes := self._notes.get(sequence.key)) is not None:
                notes.away_since_s, notes.computed_before = now_s, sequence.once_computed
        for chunk in plan.prefills:
            sequence = chunk.sequence
            notes = self._notes.get(sequence.key)
            if notes is None:
                notes = self._notes[sequence.key] = _SequenceNotes(now_s, _computed_elsewhere(sequence))
                self._unanswered.add(sequence.key)
            if notes.away_since_s is not None:
                notes.displaced_s += now_s - notes.away_since_s
                notes.away_since_s = None
            if notes.first is None:
                notes.prefill_steps += 1
            notes.recomputed += max(0, min(chunk.end, notes.computed_before) - chunk.start)
        self._steps += 1
        self._batch = len(plan.decodes) + len(plan.prefills)
        self._rows += self._batch

    def stats(self, sequence: Sequence, now_s: float, *, ended: bool) -> SequenceStats | None:
        """Returns the statistics to send with a step's tokens: at the first tokens and at the end, else None.

        Args:
            sequence: Sequence that was in a plan.
            now_s: Time at which the step was complete.
            ended: Whether these tokens are the sequence's last tokens.
        """
        key = sequence.key
        if not ended and key not in self._unanswered:
            return None
        notes = self._notes.get(key)
        if notes is None:
            return None
        first = notes.first
        if first is None:
            self._unanswered.discard(key)
            first = notes.first = SequenceStats(
                waited_s=notes.began_s - sequence.arrived_s,
                prefill_s=now_s - notes.began_s,
                prefill_steps=notes.prefill_steps,
                prefill_batch=self._batch,
                preemptions=sequence.preemptions,
                displaced_s=notes.displaced_s,
                recomputed_tokens=notes.recomputed,
            )
            notes.first_s, notes.steps, notes.rows = now_s, self._steps, self._rows
        if not ended:
            return first
        steps = self._steps - notes.steps
        return SequenceStats(
            first.waited_s,
            first.prefill_s,
            first.prefill_steps,
            first.prefill_batch,
            decode_s=now_s - notes.first_s,
            decode_steps=steps,
            decode_batch=(self._rows - notes.rows) / steps if steps else 0.0,
            preemptions=sequence.preemptions,
            displaced_s=notes.displaced_s,
            recomputed_tokens=notes.recomputed,
        )

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        self._notes.pop(sequence.key, None)
        self._unanswered.discard(sequence.key)


def _computed_elsewhere(sequence: Sequence) -> int:
    """Returns the tokens that another replica computed, which generated the beginning of the answer."""
    resumes = sequence.request.resumes
    output = 0 if resumes is None else len(resumes[sequence.index])
    return sequence.prompt_tokens + output - 1 if output else 0
