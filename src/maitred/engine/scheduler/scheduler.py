"""Scheduler for continuous batching, which divides one token budget per step by owed service.

Each step is planned afresh, in three passes over one budget of tokens (Yu et al., OSDI'22, for batching per iteration;
Agrawal et al., OSDI'24, for mixing chunks of prefill into it; Sheng et al., OSDI'24, for fairness by what was served):

1. **Decodes** of the running sequences (`decodes`): one token each, plus tokens that an answer was extended by and that
   no step has computed. Decodes come first, because an answer that has begun must not stall. The budget is at least the
   number of sequences, so one token of each fits. Sequences are left out, in turn, only while overcommitted sequences
   of tenants with few slots run (`overcommit`).
2. **Running prefills**, which did not fit into an earlier step (`prompts`).
3. **Admissions** from the waiting queue, in its order, while budget, slots and blocks last. Passes 2 and 3 are merged:
   the flow whose prompt ends at the smallest lead in service goes first, so short prompts are not computed in pieces
   beside long ones. The prefill budget after the decodes is limited to what fits into the tightest inter-token
   objective of the decoding sequences. A step in which a prompt ends takes no pieces of other flows' prompts, unless
   they cost less time than a step of their own (`PromptPlanner`).

A sequence gets blocks for all its known tokens when it is admitted, so only decodes need further blocks. If too few
blocks are free, victims are preempted (`victims`) before any decode is planned, and wait again. Their full blocks stay
in the prefix cache until the blocks are needed, so often little is lost.

No admitted sequence starves, for the following reasons. In every step, each decoding sequence advances, is preempted,
or is left out in turn. At least one sequence advances: the last one always finds a block, because the pool holds a
whole context and pins are released for it. The oldest prefill always advances by its guaranteed tokens. A sequence is
preempted at most `MAX_PREEMPTIONS` times. After that it is admitted only with all blocks that it can ever need, so it
never needs another. Any sequence that does need a block can itself be preempted. So every running sequence ends, and
after some step the head of the queue fits. No sequence passes a head that does not fit, except those of tenants inside
their own floor of the KV cache (see `kv_shares`). A step that preempts admits no sequence. The fair queue decides which
sequence becomes the head.

The scheduler is deterministic: it gets times as arguments and uses no randomness and no I/O. One thread calls `plan`,
computes the step, and calls `commit`; all other calls come between steps.
"""

import math
from collections.abc import Iterable

from msgspec import Struct

from maitred.core.flow import ServiceWeights
from maitred.core.replica import StepTimes
from maitred.core.request import EngineRequest, FinishReason, WaitCause
from maitred.engine.config import EngineConfig, PinsConfig
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.accounts import FlowCharges
from maitred.engine.scheduler.batch import RunningBatch
from maitred.engine.scheduler.batching_window import BatchingWindow
from maitred.engine.scheduler.decodes import plan_decodes
from maitred.engine.scheduler.kv_shares import KVShares
from maitred.engine.scheduler.overcommit import OvercommitSlots
from maitred.engine.scheduler.pins import PinTable
from maitred.engine.scheduler.plan import StepPlan
from maitred.engine.scheduler.prefill import ServiceOwed
from maitred.engine.scheduler.prompts import PromptPlanner, too_late
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.sequence_factory import SequenceFactory
from maitred.engine.scheduler.state import SchedulerCounters, SchedulerState
from maitred.engine.scheduler.step_size import StepSizer
from maitred.engine.scheduler.step_times import StepWork, TimedStep
from maitred.engine.scheduler.victims import SwapPolicy
from maitred.engine.scheduler.wait_queue import WaitQueue
from maitred.fairness.fair_queue import FairQueue, make_queue

_TURNS = 0.25
"""Share of the slots that is reported as free while a request with more sequences waits for its turns."""


class SequenceStep(Struct, gc=False):
    """New tokens of one sequence (at least one, unless its request wants none), and whether they end it.

    This is a struct for the same reason as `Chunk`.
    """

    sequence: Sequence
    tokens: list[int]
    finish: FinishReason | None


class Scheduler:
    """Scheduler that plans each step and records its results.

    Args:
        pool: The KV blocks.
        config: The `engine` section, for its settings of batch, queue order, KV shares and pins.
        context_tokens: Maximum tokens of prompt and answer together.
        eos_token_ids: End-of-sequence tokens of the model.
        weights: Service per token when flows are compared.
        known_steps: Steps of this model on this machine that were measured before.
        block_copy_s: See `SwapPolicy`.
    """

    def __init__(
        self,
        pool: BlockPool,
        config: EngineConfig,
        *,
        context_tokens: int,
        eos_token_ids: tuple[int, ...],
        weights: ServiceWeights = ServiceWeights(),  # noqa: B008 - frozen
        known_steps: Iterable[TimedStep] = (),
        block_copy_s: float = math.inf,
    ) -> None:
        block_tokens, step_tokens, max_sequences = config.block_tokens, config.step_tokens, config.max_sequences
        if step_tokens < max_sequences:
            raise ValueError("step_tokens must be at least max_sequences: a step decodes every running sequence.")
        self._by_class = config.line.policy in ("fair", "priority")
        self._step_tokens = step_tokens
        self._service_unit = step_tokens * weights.prompt
        # The other policies are orders of arrival, or of turns.
        self._token_service = weights.prompt if config.line.policy == "fair" else 0.0
        self.block_tokens = block_tokens
        self._window = BatchingWindow(config.batching_window_s, config.batching_window_requests)
        self._pace = StepSizer(
            step_tokens=step_tokens,
            max_sequences=max_sequences,
            min_sequences=config.min_sequences,
            itl_objective_s=config.itl_objective_s,
            known=known_steps,
        )
        order: FairQueue[Sequence] = make_queue(config.line)
        residency = KVShares(config.kv_shares, pool.total)
        self._intake = SequenceFactory(
            pool,
            residency,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            eos_token_ids=eos_token_ids,
            prefix_cache=config.prefix_cache,
        )
        wait_queue = WaitQueue(order, weights, residency, block_tokens=block_tokens, by_prefix=config.line.quantum > 0)
        overcommit = OvercommitSlots(min(config.most_overcommit_slots, step_tokens - max_sequences))
        self._state = SchedulerState(
            pool,
            fair_queue=order,
            wait_queue=wait_queue,
            batch=RunningBatch(config.itl_objective_s),
            accounts=FlowCharges(order, weights),
            residency=residency,
            overcommit=overcommit,
            pins=PinTable(pool, residency, config.pins if config.prefix_cache else PinsConfig(share=0), block_tokens),
            comes_back=SwapPolicy(block_copy_s, lambda: self._pace.times).pays,
        )
        self._planned_s = 0.0

    # --- state ---

    @property
    def pool(self) -> BlockPool:
        """Pool of the KV blocks."""
        return self._state.pool

    @property
    def pins(self) -> PinTable:
        """Table of the pinned prefixes."""
        return self._state.pins

    @property
    def counters(self) -> SchedulerCounters:
        """Counters of the scheduler since its start."""
        return self._state.counters

    @property
    def times(self) -> StepTimes:
        """Model of step times, fitted to the measured steps."""
        return self._pace.times

    @property
    def running(self) -> int:
        """Number of sequences that hold blocks."""
        return len(self._state.batch)

    @property
    def waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self._state.wait_queue)

    @property
    def paused(self) -> int:
        """Number of paused sequences, whose clients read too slowly."""
        return len(self._state.paused)

    @property
    def busy(self) -> bool:
        """Whether any sequence is running or waiting."""
        return bool(len(self._state.batch) or len(self._state.wait_queue))

    @property
    def free_sequences(self) -> int:
        """Number of free slots that remain after the waiting sequences have theirs.

        While requests have many sequences waiting for their turns, some slots are reported as free for others: they
        wait here then, where the fair order gives each slot that a sequence leaves to whoever is next.
        """
        wait_queue, slots = self._state.wait_queue, self._pace.sequences
        free = slots - len(self._state.batch) - len(wait_queue)
        if free >= 0:
            return free
        turns, large = self._turns, self._taking_turns
        return max(0, turns - (len(wait_queue) - large)) if large > turns else 0

    @property
    def overcommitted(self) -> int:
        """Number of running sequences that have no slot of their own."""
        return self._state.overcommit.count

    @property
    def overcommit_slots(self) -> int:
        """Number of free overcommit slots that remain after the waiting sequences have theirs.

        Of requests with many waiting sequences none counts: they wait for their turns.
        """
        return max(0, self._state.overcommit.slots - (len(self._state.wait_queue) - self._taking_turns))

    @property
    def promised_blocks(self) -> int:
        """Number of further blocks that running sequences, and those that are admitted next, are expected to take."""
        wait_queue = self._state.wait_queue
        return self._state.batch.promised_blocks + math.ceil(wait_queue.blocks * self._share_admitted_next())

    @property
    def waiting_prompt_tokens(self) -> int:
        """Number of uncomputed prompt tokens of running sequences, and of those that are admitted next."""
        wait_queue = self._state.wait_queue
        prompt_tokens = math.ceil(wait_queue.prompt_tokens * self._share_admitted_next())
        return prompt_tokens + self._state.batch.prompt_tokens_left

    @property
    def _turns(self) -> int:
        """Number of slots that are reported as free while requests take turns."""
        return math.ceil(self._pace.sequences * _TURNS)

    @property
    def _taking_turns(self) -> int:
        """Number of waiting sequences of requests that have more than others can find slots for meanwhile."""
        return self._state.wait_queue.taking_turns(self._turns)

    def _share_admitted_next(self) -> float:
        """Returns the share of the waiting sequences that find a slot before a running one ends.

        Requests with more sequences than there are slots wait here for their turns. What they will need then is not in
        the way of others now.
        """
        waiting = len(self._state.wait_queue)
        free = max(0, self._pace.sequences - len(self._state.batch))
        if waiting <= free:
            return 1.0
        others = waiting - self._taking_turns
        return min(1.0, (free + min(self._state.overcommit.slots, others)) / waiting)

    @property
    def step_tokens(self) -> int:
        """Maximum tokens that a step may compute now."""
        return self._pace.tokens(self._state.batch)

    def max_idle_s(self, now_s: float) -> float | None:
        """Returns the seconds until the next step is due; 0 while it has work, None until an event comes."""
        state = self._state
        if len(state.batch):
            return 0.0
        held_s = self._held_s(now_s) if len(state.wait_queue) else None
        first = state.deadlines.least()
        due_s = None if first is None or first.deadline_s is None else max(0.0, first.deadline_s - now_s)
        unpin_s = state.pins.ends_in_s(now_s)
        return min((seconds for seconds in (held_s, due_s, unpin_s) if seconds is not None), default=None)

    # --- requests ---

    def add(self, request: EngineRequest, now_s: float) -> list[Sequence]:
        """Enqueues the choices of a request.

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
        """Cancels an unfinished sequence and frees its blocks at once.

        Args:
            sequence: Sequence in any state.
            wasted: Whether its generated tokens count as wasted.
        """
        self._state.end(sequence)
        self.counters.cancelled += 1
        if wasted:
            self.counters.wasted_tokens += sequence.output_tokens

    def pause(self, sequence: Sequence) -> None:
        """Takes a sequence out of the running batch or the waiting queue until `resume`. A second call has no effect.

        Its slot and its blocks are free at once. The full blocks stay in the prefix cache until the blocks are needed,
        so resuming costs little. Recomputed tokens are never billed.
        """
        if sequence.key not in self._state.paused:
            self._state.withdraw(sequence)
            self._state.paused[sequence.key] = sequence

    def resume(self, sequence: Sequence, now_s: float) -> None:
        """Returns a paused sequence to the waiting queue, in the order of its arrival.

        The call has no effect on other sequences.
        """
        if self._state.paused.pop(sequence.key, None) is not None:
            self._state.enter(sequence, now_s)

    # --- steps ---

    def plan(self, now_s: float) -> StepPlan:
        """Plans the next step, takes its blocks, and ends sequences past their deadlines."""
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
            claims=ServiceOwed(state.line.over_service, self._token_service, self._pace.times, by_class=self._by_class),
            now_s=now_s,
        )
        planner.run(hold)
        if plan and state.pool.swap is not None:
            plan.moves = state.pool.swap.take_moves()
            if (window := state.pool.window) is not None and window.pool.swap is not None:
                plan.window_moves = window.pool.swap.take_moves()
        return plan

    def draft_budget(self, plan: StepPlan, *, writing_s: float = 0.0) -> int:
        """Returns the draft rows that a plan can still take, if writing each takes `writing_s`."""
        return self._pace.drafts(self._state.batch, StepWork.of(plan), plan.tokens, writing_s)

    def commit(self, plan: StepPlan, sampled: list[list[int]]) -> list[SequenceStep]:
        """Records the results of a computed step.

        Args:
            plan: The latest plan, computed in full.
            sampled: For each chunk of `plan.sampling` the tokens that follow it, at least one unless its request wants
                no output. Tokens behind the end of an answer are dropped.

        Returns:
            One `SequenceStep` for each of these chunks, in the same order; finished sequences no longer hold blocks.
        """
        state, sampling = self._state, plan.sampling
        streaming = len(sampling) - sum([chunk.samples for chunk in plan.prefills])
        for chunk in plan.chunks:
            chunk.sequence.computed = chunk.start + chunk.length
        if state.pool.window is not None:
            for chunk in plan.chunks:
                window = chunk.sequence.table.window
                if (
                    window is not None and chunk.length > 1
                ):  # what a long chunk leaves behind must not wait for the next
                    window.cover(chunk.sequence.computed, chunk.sequence.computed)
        for chunk in plan.prefills:
            if (scored := chunk.sequence.scored) is not None:
                chunk.sequence.scored = max(scored, min(chunk.end, chunk.sequence.prompt_tokens - 1))
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
        """Clears the KV cache and the pins. Call this only while no sequence runs."""
        self._state.pins.clear()
        self._state.pool.clear()

    def _pin(self, advance: SequenceStep) -> None:
        """Pins a prompt that was just computed, if its request asks for it."""
        sequence = advance.sequence
        if sequence.output_tokens == len(advance.tokens):
            count = sequence.prompt_tokens // self.block_tokens
            blocks = sequence.table.find_blocks(sequence.tokens, count)
            of_window = sequence.table.find_window_blocks(sequence.tokens, len(blocks))
            self._state.pins.hold(sequence.request, blocks, self._planned_s, of_window)

    def on_step_time(self, work: StepWork, seconds: float) -> None:
        """Records a step's duration from its plan to the next one, with all that delays a client's tokens."""
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
        """Gives free slots to overcommitted sequences; returns the number of slots."""
        slots = self._pace.sequences
        self._state.overcommit.on_running(len(self._state.batch), slots)
        return slots

    def _held_s(self, now_s: float) -> float:
        """Returns the seconds for which no sequence is admitted yet."""
        return self._window.hold_s(now_s, running=len(self._state.batch), waiting=len(self._state.wait_queue))


def _advance(sequence: Sequence, tokens: list[int]) -> SequenceStep:
    """Appends tokens up to the end of the answer."""
    if not tokens:
        return SequenceStep(sequence, tokens, FinishReason.LENGTH)
    finish = sequence.append(tokens[0])
    kept = 1
    while finish is None and kept < len(tokens):
        finish = sequence.append(tokens[kept])
        kept += 1
    return SequenceStep(sequence, tokens if kept == len(tokens) else tokens[:kept], finish)


def _agreement(drafts: tuple[int, ...], tokens: list[int]) -> int:
    """Returns how many drafts match the new tokens, without the last token, which has no KV yet."""
    agreed = 0
    while agreed < min(len(drafts), len(tokens) - 1) and drafts[agreed] == tokens[agreed]:
        agreed += 1
    return agreed
