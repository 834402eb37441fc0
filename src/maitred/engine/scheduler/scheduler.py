"""Continuous batching with one token budget per step, shared by who is owed service.

Each step is planned afresh, in three passes over one budget of tokens (Yu et al., OSDI'22, for batching per iteration;
Agrawal et al., OSDI'24, for mixing chunks of prefill into it; Sheng et al., OSDI'24, for fairness by what was served):

1. **Decodes** of the running sequences (`decodes`): one token each, and where an answer was extended by tokens that no
   step has computed, these too. A stream that has begun must not stall, so these come first; the budget is at least the
   number of sequences, so one token of each fits. Only where tenants that hold few sequences have come as
   `overcommit_slots` are others left out, in turn.
2. **Prompts under way**, whose prefill did not fit into an earlier step (`prompts`).
3. **Admissions** from the line, in its order, while budget, slots and blocks last. Passes 2 and 3 are merged: a
   newcomer whose flow is owed more than those of the prompts under way gets its tokens before them. What is left of the
   budget after the decodes is what fits into the tightest inter-token objective of the sequences that decode.

A sequence gets blocks for everything it is about to compute when it is admitted, so only decodes ever need more. If
they need more than there are, victims give theirs back (`victims`) before anything is planned, and wait in line again.
Their full blocks stay in the prefix cache while nobody needs the room, so often little is lost.

Why nothing starves that was admitted. In every step, every sequence that decodes advances, is preempted, or gives way
in its turn, and at least one is left: the last one always finds a block, for the pool holds a whole context, and pins
give way to it. Of the prompts under way the oldest advances by its floor. A sequence is preempted `MAX_PREEMPTIONS`
times at most; then it is admitted only with all the blocks that it can ever need, so it never lacks one, and those that
lack one always have a victim in themselves. So every running sequence ends, and there comes a step in which the head of
the line fits: nobody passes a head that does not fit (but for tenants that are inside their own floor of the cache, see
`residency`), and in a step that had to preempt nobody is admitted. Who becomes head is the line's affair.

The scheduler is a pure function of what it was told: times are arguments; no randomness, no I/O. One thread calls
`plan`, computes, and calls `commit`; the rest comes in between.
"""

import math
from collections.abc import Iterable, Mapping

from msgspec import Struct

from maitred.core.flow import ServiceWeights
from maitred.core.replica import StepTimes
from maitred.core.request import EngineRequest, FinishReason, WaitCause
from maitred.engine.config import KVShareConfig, PinsConfig
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.accounts import FlowCharges
from maitred.engine.scheduler.batch import RunningBatch
from maitred.engine.scheduler.batching_window import BatchingWindow
from maitred.engine.scheduler.decodes import plan_decodes
from maitred.engine.scheduler.kv_shares import KVShares
from maitred.engine.scheduler.overcommit import OvercommitSlots
from maitred.engine.scheduler.pins import PinTable
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.prompts import PromptPlanner, too_late
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.sequence_factory import SequenceFactory
from maitred.engine.scheduler.state import SchedulerCounters, SchedulerState
from maitred.engine.scheduler.step_size import StepSizer
from maitred.engine.scheduler.step_times import StepWork, TimedStep
from maitred.engine.scheduler.victims import SwapPolicy
from maitred.engine.scheduler.wait_queue import WaitQueue
from maitred.fairness.fair_queue import FairQueue, QueueOrderConfig, make_queue


class SequenceStep(Struct, gc=False):
    """New tokens of one sequence, at least one, and whether it has ended with them. A struct as `Chunk` is."""

    sequence: Sequence
    tokens: list[int]
    finish: FinishReason | None


class Scheduler:
    """Decides what each step computes, and keeps the sequences' books.

    Args:
        pool: The KV blocks.
        block_tokens: Tokens per block.
        max_sequences: Running sequences at most, guests not counted.
        overcommitted: See `OvercommitSlots`; at most so many, and no more than a step has tokens for beside those that
            have places.
        step_tokens: Tokens computed per step at most; at least `max_sequences`.
        context_tokens: Prompt and answer together at most.
        eos_token_ids: How the model ends its turn.
        prefix_cache: Whether requests share prefixes. The choices of one request always do.
        line: In which order the waiting are admitted.
        weights: What a token counts when flows are compared.
        itl_objective_s: For requests that do not bring one; None: steps are as large as `step_tokens` allows.
        min_sequences: That may run however slow the steps are.
        kv_shares: What tenants can count on, and can have, of the blocks.
        window: When a batch may begin.
        known_steps: Steps that were measured before, of this model on this machine.
        block_copy_s: See `SwapPolicy`.
        pins: What pinned prefixes may hold.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        max_sequences: int,
        overcommit_slots: int = 0,
        step_tokens: int,
        context_tokens: int,
        eos_token_ids: tuple[int, ...],
        prefix_cache: bool = True,
        line: QueueOrderConfig = QueueOrderConfig(),  # noqa: B008 - frozen
        weights: ServiceWeights = ServiceWeights(),  # noqa: B008 - frozen
        itl_objective_s: float | None = None,
        min_sequences: int = 1,
        kv_shares: Mapping[str, KVShareConfig] | None = None,
        window: BatchingWindow | None = None,
        known_steps: Iterable[TimedStep] = (),
        block_copy_s: float = math.inf,
        pins: PinsConfig = PinsConfig(),  # noqa: B008 - frozen
    ) -> None:
        if step_tokens < max_sequences:
            raise ValueError("step_tokens must be at least max_sequences: a step decodes every running sequence.")
        self._by_class = line.policy in ("fair", "priority")
        self._step_tokens = step_tokens
        self._service_unit = step_tokens * weights.prompt
        self.block_tokens = block_tokens
        self._window = window or BatchingWindow({}, 2)
        self._pace = StepSizer(
            step_tokens=step_tokens,
            max_sequences=max_sequences,
            min_sequences=min_sequences,
            itl_objective_s=itl_objective_s,
            known=known_steps,
        )
        order: FairQueue[Sequence] = make_queue(line)
        residency = KVShares(kv_shares or {}, pool.total)
        self._intake = SequenceFactory(
            pool,
            residency,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            eos_token_ids=eos_token_ids,
            prefix_cache=prefix_cache,
        )
        wait_queue = WaitQueue(order, weights, residency, block_tokens=block_tokens, by_prefix=line.quantum > 0)
        overcommit = OvercommitSlots(min(overcommit_slots, step_tokens - max_sequences))
        self._state = SchedulerState(
            *(
                pool,
                order,
                wait_queue,
                RunningBatch(itl_objective_s),
                FlowCharges(order, weights),
                residency,
                overcommit,
            ),
            pins=PinTable(pool, residency, pins if prefix_cache else PinsConfig(share=0), block_tokens),
            comes_back=SwapPolicy(block_copy_s, lambda: self._pace.times).pays,
        )
        self._planned_s = 0.0

    # --- where things stand ---

    @property
    def pool(self) -> BlockPool:
        """Pool of the KV blocks."""
        return self._state.pool

    @property
    def pins(self) -> PinTable:
        """The prefixes that stay."""
        return self._state.pins

    @property
    def counters(self) -> SchedulerCounters:
        """Counters of what was done so far."""
        return self._state.counters

    @property
    def times(self) -> StepTimes:
        """Step times, as far as they were measured."""
        return self._pace.times

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._state.batch)

    @property
    def waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self._state.wait_queue)

    @property
    def paused(self) -> int:
        """Sequences whose readers have fallen behind."""
        return len(self._state.paused)

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(len(self._state.batch) or len(self._state.wait_queue))

    @property
    def free_sequences(self) -> int:
        """Sequences that would find a slot now, behind those that wait."""
        return max(0, self._pace.sequences - len(self._state.batch) - len(self._state.wait_queue))

    @property
    def overcommitted(self) -> int:
        """Number of running sequences that have no slot of their own."""
        return self._state.overcommit.count

    @property
    def overcommit_slots(self) -> int:
        """Further guests that there is room for, behind those that wait."""
        return max(0, self._state.overcommit.slots - len(self._state.wait_queue))

    @property
    def promised_blocks(self) -> int:
        """Blocks that what runs and waits is still expected to take."""
        return self._state.wait_queue.blocks + self._state.batch.promised_blocks

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens of what runs and waits that are still to be computed."""
        return self._state.wait_queue.prompt_tokens + self._state.batch.prompt_tokens_left

    @property
    def step_tokens(self) -> int:
        """Tokens that a step may compute now."""
        return self._pace.tokens(self._state.batch)

    def max_idle_s(self, now_s: float) -> float | None:
        """How long the next step may be put off: 0 while it would do something; None: until something comes."""
        state = self._state
        if len(state.batch):
            return 0.0
        held_s = self._held_s(now_s) if len(state.wait_queue) else None
        first = state.deadlines.least()
        due_s = None if first is None or first.deadline_s is None else max(0.0, first.deadline_s - now_s)
        unpin_s = state.pins.ends_in_s(now_s)
        return min((seconds for seconds in (held_s, due_s, unpin_s) if seconds is not None), default=None)

    # --- what comes and goes ---

    def add(self, request: EngineRequest, now_s: float) -> list[Sequence]:
        """Puts a request's choices in line.

        Raises:
            ValueError: The request can never run here; the message says why.
        """
        state = self._state
        sequences = self._intake.sequences(request, now_s)
        state.pins.check(request)
        for sequence in sequences:
            sequence.account = state.accounts.open(request.flow)
            if sequence.deadline_s is not None:
                state.deadlines.push(sequence.deadline_s, sequence.key, sequence)
            state.enter(sequence, now_s)
        self._window.on_join(request.flow.priority, now_s)
        return sequences

    def cancel(self, sequence: Sequence, *, wasted: bool = True) -> None:
        """Ends a sequence that was added and has not finished; its blocks are free at once.

        Args:
            sequence: In whatever state.
            wasted: Whether nobody has a use for what it has generated.
        """
        self._state.end(sequence)
        self.counters.cancelled += 1
        if wasted:
            self.counters.wasted_tokens += sequence.output_tokens

    def pause(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch, or out of the line, until `resume`. Again: nothing.

        Its slot and its blocks are anybody's at once. The full blocks stay in the prefix cache while nobody needs the
        room, so that going on costs little; what is computed again is never billed.
        """
        if sequence.key not in self._state.paused:
            self._state.withdraw(sequence)
            self._state.paused[sequence.key] = sequence

    def resume(self, sequence: Sequence, now_s: float) -> None:
        """Puts a paused sequence back in line, by its age. Any other: nothing."""
        if self._state.paused.pop(sequence.key, None) is not None:
            self._state.enter(sequence, now_s)

    # --- steps ---

    def plan(self, now_s: float) -> StepPlan:
        """Chooses what the next step computes, and takes the blocks for it; ends what is out of time."""
        state, batch = self._state, self._state.batch
        plan = StepPlan()
        self._planned_s = now_s
        state.pins.expire(now_s)
        state.waits.advance(now_s)
        batch.count_skipped(now_s)
        self._end_overdue(plan, now_s)
        state.wait_queue.call_back(now_s)
        slots = self._admit_overcommitted()
        plan_decodes(state, plan, now_s, rows=slots, step_tokens=self._step_tokens, service_unit=self._service_unit)
        hold = None
        if plan.preempted:
            hold = WaitCause.KV_FULL
        elif len(state.wait_queue) and self._held_s(now_s):
            hold = WaitCause.BATCHING_WINDOW
        planner = PromptPlanner(
            state,
            plan,
            self._pace.budget(batch, plan.tokens),
            self._pace.times,
            slots=slots,
            by_class=self._by_class,
            now_s=now_s,
        )
        planner.run(hold)
        if plan and state.pool.swap is not None:
            plan.moves = state.pool.swap.take_moves()
        return plan

    def draft_budget(self, plan: StepPlan, *, writing_s: float = 0.0) -> int:
        """Rows of drafts that a plan can still take, if each takes so long to write; see `engine.speculate`."""
        return self._pace.drafts(self._state.batch, StepWork.of(plan), plan.tokens, writing_s)

    def commit(self, plan: StepPlan, sampled: list[list[int]]) -> list[SequenceStep]:
        """Books what a step computed.

        Args:
            plan: The latest plan, computed in full.
            sampled: For each chunk of `plan.sampling` the tokens that follow it, at least one. What comes behind the
                end of an answer is dropped.

        Returns:
            One advance for each of these chunks, in the same order; finished sequences hold no blocks any more.
        """
        state, sampling = self._state, plan.sampling
        streaming = len(sampling) - sum([chunk.samples for chunk in plan.prefills])
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.start + chunk.length
        advances = [_advance(chunk.sequence, tokens) for chunk, tokens in zip(sampling, sampled, strict=True)]
        for chunk, advance in zip(sampling, advances, strict=True):
            if chunk.drafts:
                state.accept(chunk.sequence, len(chunk.drafts), _agreement(chunk.drafts, advance.tokens))
        left_out: list[Sequence] = []
        if streaming < len(state.batch.decoding):
            served = {chunk.sequence.key for chunk in sampling[:streaming]}
            left_out = [s for key, s in state.batch.decoding.items() if key not in served]
        further = [(a.sequence, len(a.tokens) - 1) for a in advances[:streaming] if len(a.tokens) > 1]
        further += [(a.sequence, len(a.tokens)) for a in advances[streaming:]]
        state.accounts.charge_outputs(further, left_out)
        for advance in [advance for advance in advances if advance.sequence.request.pin is not None]:
            self._pin(advance)
        ended = [advance.sequence for advance in advances if advance.finish is not None]
        for sequence in ended:
            state.end(sequence)
        for advance in advances[streaming:]:
            state.on_sample(advance.sequence)
        self._admit_overcommitted()
        self.counters.output_tokens += sum([len(advance.tokens) for advance in advances])
        self.counters.finished += len(ended)
        return advances

    def clear(self) -> None:
        """Forgets all that is in the KV cache, pins included. Only while nothing runs."""
        self._state.pins.clear()
        self._state.pool.clear()

    def _pin(self, advance: SequenceStep) -> None:
        """Keeps a prompt that has just been computed, if its request asks for that."""
        sequence = advance.sequence
        if sequence.output_tokens == len(advance.tokens):
            count = sequence.prompt_tokens // self.block_tokens
            self._state.pins.hold(sequence.request, sequence.table.find_blocks(sequence.tokens, count), self._planned_s)

    def on_step_time(self, work: StepWork, seconds: float) -> None:
        """A step took so long, from its plan to the next, with all that a reader waits for between two tokens."""
        state = self._state
        waiting = len(state.wait_queue) if state.waits.cause is WaitCause.SLOTS else 0
        self._pace.on_step_time(work, seconds, running=len(state.batch) - state.overcommit.count, waiting=waiting)

    def _end_overdue(self, plan: StepPlan, now_s: float) -> None:
        state = self._state
        while (first := state.deadlines.least()) is not None:
            if first.deadline_s is None or first.deadline_s > now_s:
                break
            state.expire(first, plan)
        for sequence in [s for s in state.batch.prefilling.values() if too_late(s, self._pace.times, now_s)]:
            state.expire(sequence, plan)

    def _admit_overcommitted(self) -> int:
        """Gives guests the slots that have come free; how many slots there are."""
        slots = self._pace.sequences
        self._state.overcommit.on_running(len(self._state.batch), slots)
        return slots

    def _held_s(self, now_s: float) -> float:
        """Seconds for which nobody is admitted yet."""
        return self._window.hold_s(now_s, running=len(self._state.batch), waiting=len(self._state.wait_queue))


def _advance(sequence: Sequence, tokens: list[int]) -> SequenceStep:
    """Appends tokens up to the end of the answer."""
    finish = sequence.append(tokens[0])
    kept = 1
    while finish is None and kept < len(tokens):
        finish = sequence.append(tokens[kept])
        kept += 1
    return SequenceStep(sequence, tokens if kept == len(tokens) else tokens[:kept], finish)


def _agreement(drafts: tuple[int, ...], tokens: list[int]) -> int:
    """How many drafts are the tokens that have come, the last of which no step has computed."""
    agreed = 0
    while agreed < min(len(drafts), len(tokens) - 1) and drafts[agreed] == tokens[agreed]:
        agreed += 1
    return agreed
