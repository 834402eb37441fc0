"""Second and third pass of a plan: running prefills and admissions, in the order of owed service."""

from maitred.core.replica import StepTimes
from maitred.core.request import WaitCause
from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.prefill import PrefillBudget, ServiceOwed
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.state import SchedulerState
from maitred.engine.scheduler.step_size import FIXED_SHARE

_CERTAINLY = 0.5
"""Share of the predicted prefill time that is treated as certain. A prompt with a tighter deadline than this share is
expired; other prompts are tried, because predictions are inexact."""
_OLDEST_SKIPS = 7
"""Number of steps in a row that may have nothing for the oldest prompt. The next one is for it alone, whatever others
are owed. So the oldest prefill ends in a bounded number of steps, and then the next one, until all have ended."""
_PASSES = 8
"""Number of sequences that are tried behind a head of the queue that finds no blocks."""


class PromptPlanner:
    """Planner that spends the prefill budget of one step.

    Args:
        state: State of the scheduler.
        plan: Contains the decodes; receives the prefills.
        budget: Budget of the step for prefill.
        times: Model of step times.
        slots: Maximum running sequences.
        claims: Service that is owed to flows.
        now_s: The time.
    """

    def __init__(
        self,
        state: SchedulerState,
        plan: StepPlan,
        budget: PrefillBudget,
        times: StepTimes,
        *,
        slots: int,
        claims: ServiceOwed,
        now_s: float,
    ) -> None:
        self._state = state
        self._plan = plan
        self._budget = budget
        self._times = times
        self._slots = slots
        self._now_s = now_s
        self._claims = claims
        self._chunks: dict[int, Chunk] = {}
        self._ending: set[int] = set()
        """Accounts with a prompt that ends in this step, by their ids."""
        self._refused: WaitCause | None = None
        self._passed: list[Sequence] = []
        """Sequences that found no blocks, and are out of the queue while others are tried."""

    def run(self, hold: WaitCause | None) -> None:
        """Plans the prompts of one step.

        Args:
            hold: Reason why this step admits no sequence; None: it admits sequences.
        """
        state, budget, claims = self._state, self._budget, self._claims
        prefilling = sorted(state.batch.prefilling.values(), key=lambda s: (claims.claim_of(s), s.key), reverse=True)
        oldest = min(prefilling, key=lambda sequence: sequence.key, default=None)
        if oldest is not None and state.batch.oldest_skips >= _OLDEST_SKIPS:
            self._extend(oldest, oldest.pending)
        self._refused = hold
        while not budget.spent:
            head = self._head() if self._refused is None else None
            admits = head is not None and (not prefilling or claims.claim_of(head) < claims.claim_of(prefilling[-1]))
            following = head if admits else prefilling[-1] if prefilling else None
            if following is None or (self._ending and self._delays(following)):
                break
            if admits:
                self._try(following)
            else:
                prefilling.pop()
                self._extend(following, following.pending)
            claims.on_charge(following)
        for sequence in self._passed:
            state.wait_queue.enter(sequence, self._now_s)
            self._refused = WaitCause.KV_FULL
        state.waits.cause = self._refused or WaitCause.PREFILL_BUDGET
        skipped = oldest is not None and oldest.key not in self._chunks
        state.batch.oldest_skips = state.batch.oldest_skips + 1 if skipped else 0
        state.batch.skipped = [
            s for s in state.batch.prefilling.values() if s.key not in self._chunks and not s.output_tokens
        ]

    def _delays(self, sequence: Sequence) -> bool:
        """Returns whether a piece of this prompt costs the prompts that end in this step more time than it saves.

        Without the piece the step ends earlier, and so do the first answers of these prompts. The piece is computed in
        a step of its own instead, whose fixed time is lost. So a processor, for which each token costs the same, ends
        the step, and an accelerator, on which a larger step is hardly longer, fills it. A piece that ends its own
        prompt, which then has its first answer at once too, may cost more.
        """
        if id(sequence.account) in self._ending:
            return False
        length = min(sequence.pending, self._budget.tokens)
        worth_s = self._times.fixed_s / (FIXED_SHARE if length == sequence.pending else 1.0)
        return self._times.chunk(sequence.computed, length) > worth_s

    def _head(self) -> Sequence | None:
        while (head := self._state.wait_queue.head(self._now_s)) is not None and too_late(
            head, self._times, self._now_s
        ):
            self._state.expire(head, self._plan)
        return head

    def _try(self, head: Sequence) -> None:
        """Admits the head of the waiting queue, sets it aside, or ends the admissions of this step."""
        refused = self._admit(head)
        while refused is WaitCause.KV_FULL and self._unpin_for(head):
            refused = self._admit(head)
        residency = self._state.residency
        if refused is WaitCause.KV_FULL and residency.active:
            if residency.is_capped(head.account.flow, head.table.blocks_for(head.admission_tokens)):
                self._state.wait_queue.set_aside(head)
                return
            if len(self._passed) < _PASSES:
                self._state.wait_queue.leave(head)
                self._passed.append(head)
                return
        self._refused = refused

    def _unpin_for(self, head: Sequence) -> bool:
        """Releases a pin where waiting would not free blocks; see `PinTable`."""
        state, flow = self._state, head.account.flow
        if state.residency.is_capped(flow, head.table.blocks_for(head.admission_tokens)) and state.pins.evict(flow):
            return True
        return not len(state.batch) and state.pins.evict()

    def _admit(self, sequence: Sequence) -> WaitCause | None:
        """Takes blocks for all tokens of a sequence, and leaves a next block for each running one.

        Returns:
            Reason why the sequence was not admitted; None if it was admitted with its first chunk.
        """
        state, table = self._state, sequence.table
        running = len(state.batch)
        overcommitted = running >= self._slots
        if overcommitted and not state.overcommit.admits(sequence, state.batch):
            return WaitCause.SLOTS
        flow = sequence.account.flow
        if self._passed and not state.residency.is_entitled(flow, table.blocks_for(sequence.admission_tokens)):
            return WaitCause.KV_FULL
        reserved = max(running, state.residency.reserved_blocks(flow, state.pool.idle))
        cached = table.open(
            sequence.tokens,
            sequence.reusable_tokens,
            capacity_tokens=sequence.admission_tokens,
            reserved=reserved,
        )
        if cached is None:
            return WaitCause.KV_FULL
        length = self._budget.take(cached, len(sequence.tokens) - cached, scored=sequence.is_scoring)
        if length == 0:
            table.release()
            return WaitCause.PREFILL_BUDGET
        state.admit(sequence, cached, self._now_s)
        if overcommitted:
            state.overcommit.on_admit()
        chunk = self._chunks[sequence.key] = Chunk(sequence, cached, length)
        if chunk.samples:
            self._ending.add(id(sequence.account))
        (self._plan.decodes if sequence.pending == 1 else self._plan.prefills).append(chunk)
        state.book(sequence, cached, cached + length)
        return None

    def _extend(self, sequence: Sequence, wanted: int) -> None:
        """Gives a prefill up to `wanted` further tokens in this step."""
        chunk = self._chunks.get(sequence.key)
        start = sequence.computed if chunk is None else chunk.end
        length = self._budget.take(start, min(wanted, len(sequence.tokens) - start), scored=sequence.is_scoring)
        if length == 0:
            return
        if chunk is None:
            chunk = self._chunks[sequence.key] = Chunk(sequence, start, length)
            self._plan.prefills.append(chunk)
        else:
            chunk.length += length
        if chunk.samples:
            self._ending.add(id(sequence.account))
        self._state.book(sequence, start, start + length)


def too_late(sequence: Sequence, times: StepTimes, now_s: float) -> bool:
    """Returns whether the sequence will certainly miss its deadline before its first token."""
    deadline_s = sequence.deadline_s
    if deadline_s is None or sequence.output_tokens:
        return False

    def late(computed: int) -> bool:
        return now_s + _CERTAINLY * times.chunk(computed, len(sequence.tokens) - computed) > deadline_s

    # The prefix cache is searched only where the result matters.
    return late(sequence.computed) and (
        bool(sequence.table.blocks) or late(sequence.table.cached_tokens(sequence.tokens, sequence.reusable_tokens))
    )
