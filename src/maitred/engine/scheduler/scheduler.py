"""Continuous batching with one token budget per step, shared by who is owed service.

Each step is planned afresh, in three passes over one budget of tokens (Yu et al., OSDI'22, for batching per iteration;
Agrawal et al., OSDI'24, for mixing chunks of prefill into it; Sheng et al., OSDI'24, for fairness by what was served):

1. **Decodes** of the running sequences, one token each. A stream that has begun must not stall, so these come first;
   the budget is at least the number of sequences, so all of them fit.
2. **Prompts under way**, whose prefill did not fit into an earlier step.
3. **Admissions** from the line, in its order, while budget, slots and blocks last. Passes 2 and 3 are merged: a
   newcomer whose flow is owed more than those of the prompts under way gets its tokens before them. What is left of the
   budget after the decodes is what fits into the tightest inter-token objective of the sequences that decode.

A sequence gets blocks for everything it is about to compute when it is admitted, so only decodes ever need more. If
they need more than there are, victims give theirs back (see `victims`) before anything is planned, and wait in line
again. Their full blocks stay in the prefix cache while nobody needs the room, so often little is lost.

Why nothing starves, once it was admitted. Every step, every sequence that decodes advances or is preempted, and at
least one is left: the last one always finds a block, for the pool holds a whole context. Of the prompts under way the
oldest advances by its floor. A sequence is preempted `MAX_PREEMPTIONS` times at most; then it is admitted only with all
the blocks that it can ever need, so it never lacks one, and those that lack one always have a victim in themselves.
So every running sequence ends, and there comes a step in which the head of the line fits: nobody passes a head that
does not fit, and while a victim has just been made room for, nobody is admitted. Who becomes head is the line's affair.

The scheduler is a pure function of what it was told: times are arguments; no randomness, no I/O. One thread calls
`plan`, computes, and calls `commit`; the rest comes in between.
"""

from dataclasses import dataclass
from itertools import chain

from maitred.core.request import FinishReason, Request, WaitCause
from maitred.core.service import ServiceWeights
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable
from maitred.engine.scheduler.accounts import Accounts
from maitred.engine.scheduler.batch import Batch
from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.prefill import FLOOR_SHARE, Claims, PrefillBudget
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.step_times import StepMeter
from maitred.engine.scheduler.victims import MAX_PREEMPTIONS, choose_victim
from maitred.engine.scheduler.wait_clock import WaitClock
from maitred.engine.scheduler.waiting_room import WaitingRoom
from maitred.fairness.heap import Heap
from maitred.fairness.line import Line, LineConfig, make_line

_CERTAINLY = 0.5
"""Of the time that a prompt is predicted to take. A prediction that is off by more than this is worth a try."""


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler was made, in tokens and sequences."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    cancelled: int = 0
    wasted_tokens: int = 0


@dataclass(slots=True)
class Advance:
    """One new token of one sequence, and whether it was the last."""

    sequence: Sequence
    token: int
    finish: FinishReason | None


class Scheduler:
    """Decides what each step computes, and keeps the sequences' books.

    Args:
        pool: The KV blocks.
        block_tokens: Tokens per block.
        max_sequences: Running sequences at most.
        step_tokens: Tokens computed per step at most; at least `max_sequences`.
        context_tokens: Prompt and answer together at most.
        eos_token_ids: How the model ends its turn.
        prefix_cache: Whether requests share prefixes. The choices of one request always do.
        line: In which order the waiting are admitted.
        weights: What a token counts when flows are compared.
        itl_objective_s: For requests that do not bring one; None: steps are as large as `step_tokens` allows.
        meter: What steps take, as far as it is known; whoever runs the steps records them there.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_tokens: int,
        max_sequences: int,
        step_tokens: int,
        context_tokens: int,
        eos_token_ids: tuple[int, ...],
        prefix_cache: bool = True,
        line: LineConfig = LineConfig(),  # noqa: B008 - frozen
        weights: ServiceWeights = ServiceWeights(),  # noqa: B008 - frozen
        itl_objective_s: float | None = None,
        meter: StepMeter | None = None,
    ) -> None:
        if step_tokens < max_sequences:
            raise ValueError("step_tokens must be at least max_sequences: a step decodes every running sequence.")
        if context_tokens > pool.total * block_tokens:
            raise ValueError("The KV pool must hold at least one sequence of context_tokens.")
        self.pool = pool
        self.counters = Counters()
        self.meter = meter or StepMeter()
        self._block_tokens = block_tokens
        self._max_sequences = max_sequences
        self._step_tokens = step_tokens
        self._context_tokens = context_tokens
        self._eos = frozenset(eos_token_ids)
        self._prefix_cache = prefix_cache
        self._line: Line[Sequence] = make_line(line)
        self._accounts = Accounts(self._line, weights)
        self._room = WaitingRoom(self._line, weights, block_tokens=block_tokens, by_prefix=line.quantum > 0)
        self._by_class = line.policy in ("fair", "priority")
        self._waits = WaitClock()
        self._batch = Batch(itl_objective_s)
        self._paused: dict[int, Sequence] = {}
        self._deadlines: Heap[Sequence] = Heap()
        self._next_key = 0

    # --- where things stand ---

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._batch)

    @property
    def waiting(self) -> int:
        """Sequences in line."""
        return len(self._room)

    @property
    def paused(self) -> int:
        """Sequences whose readers have fallen behind."""
        return len(self._paused)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(len(self._batch) or len(self._room))

    @property
    def free_sequences(self) -> int:
        """Sequences that would find a slot now, behind those that wait."""
        return max(0, self._max_sequences - len(self._batch) - len(self._room))

    @property
    def promised_blocks(self) -> int:
        """Blocks that what runs and waits is still expected to take."""
        return self._room.blocks + self._batch.promised_blocks(self._block_tokens)

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens of what runs and waits that are still to be computed."""
        return self._room.prompt_tokens + self._batch.prompt_tokens_left

    @property
    def step_tokens(self) -> int:
        """Tokens that a step may compute now."""
        objective_s = self._batch.itl_objective_s
        if objective_s is None:
            return self._step_tokens
        decodes = len(self._batch.decoding)
        return min(self._step_tokens, self.meter.tokens_within(objective_s, decodes, self._batch.context_tokens))

    def next_deadline_s(self) -> float | None:
        """When a `plan` will have something to end, if nothing happens before."""
        first = self._deadlines.least()
        return None if first is None else first.deadline_s

    # --- what comes and goes ---

    def add(self, request: Request, now_s: float) -> list[Sequence]:
        """Puts a request's choices in line.

        Raises:
            ValueError: The request can never run here; the message says why.
        """
        sampling = request.sampling
        if not request.prompt:
            raise ValueError("The prompt has no tokens.")
        if sampling.max_tokens < 1 or sampling.n < 1:
            raise ValueError("max_tokens and n must be at least 1.")
        total = len(request.prompt) + sampling.max_tokens
        if total > self._context_tokens:
            raise ValueError(
                f"The prompt's {len(request.prompt)} tokens and max_tokens {sampling.max_tokens} exceed "
                f"the context of {self._context_tokens} tokens."
            )
        self._waits.advance(now_s)
        scope = f"shared:{request.cache_scope}" if self._prefix_cache else f"request:{self._next_key}"
        sequences = []
        for index in range(sampling.n):
            table = BlockTable(self.pool, self._block_tokens, scope)
            sequence = Sequence(self._next_key, request, index, table, self._eos)
            self._next_key += 1
            sequence.account = self._accounts.open(request.flow)
            sequence.arrived_s = now_s
            sequence.arrival = self._waits.arrival()
            if request.deadline_in_s is not None:
                sequence.deadline_s = now_s + request.deadline_in_s
                self._deadlines.push(sequence.deadline_s, sequence.key, sequence)
            self._room.enter(sequence, now_s)
            sequences.append(sequence)
        return sequences

    def cancel(self, sequence: Sequence, *, wasted: bool = True) -> None:
        """Ends a sequence that was added and has not finished; its blocks are free at once.

        Args:
            sequence: In whatever state.
            wasted: Whether nobody has a use for what it has generated.
        """
        self._withdraw(sequence)
        self._forget(sequence)
        self.counters.cancelled += 1
        if wasted:
            self.counters.wasted_tokens += sequence.output_tokens

    def pause(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch, or out of the line, until `resume`. Again: nothing.

        Its slot and its blocks are anybody's at once. The full blocks stay in the prefix cache while nobody needs the
        room, so that going on costs little; what is computed again is never billed.
        """
        if sequence.key not in self._paused:
            self._withdraw(sequence)
            self._paused[sequence.key] = sequence

    def resume(self, sequence: Sequence, now_s: float) -> None:
        """Puts a paused sequence back in line, by its age. Any other: nothing."""
        if self._paused.pop(sequence.key, None) is not None:
            self._waits.advance(now_s)
            sequence.arrival = self._waits.arrival()
            self._room.enter(sequence, now_s)

    # --- steps ---

    def plan(self, now_s: float) -> StepPlan:
        """Chooses what the next step computes, and takes the blocks for it; ends what is out of time."""
        plan = StepPlan()
        self._waits.advance(now_s)
        self._batch.count_skipped(now_s)
        self._end_overdue(plan, now_s)
        self._plan_decodes(plan, now_s)
        self._plan_prompts(plan, now_s)
        return plan

    def commit(self, plan: StepPlan, sampled: list[int], now_s: float) -> list[Advance]:
        """Books what a step computed.

        Args:
            plan: The latest plan, computed in full.
            sampled: A token for each chunk of `plan.chunks` that samples, in their order.
            now_s: When it was computed.

        Returns:
            One advance per sampled token, in the same order; finished sequences hold no blocks any more.
        """
        advances = []
        tokens = iter(sampled)
        charge = self._accounts.charge_output
        ended = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = end = chunk.start + chunk.length
            if end == len(sequence.tokens):
                token = next(tokens)
                finish = sequence.append(token)
                charge(sequence.account)
                advances.append(Advance(sequence, token, finish))
                if finish is not None:
                    ended.append(sequence)
        self._accounts.settle()
        self.counters.output_tokens += len(advances)
        self.counters.finished += len(ended)
        for sequence in ended:
            self._withdraw(sequence)
            self._forget(sequence)
        for chunk in plan.prefills:
            self._batch.computed(chunk.sequence)
        return advances

    def _end_overdue(self, plan: StepPlan, now_s: float) -> None:
        while (first := self._deadlines.least()) is not None and first.deadline_s is not None:
            if first.deadline_s > now_s:
                break
            self._expire(first, plan)
        for sequence in [s for s in self._batch.prefilling.values() if self._too_late(s, now_s)]:
            self._expire(sequence, plan)

    def _too_late(self, sequence: Sequence, now_s: float) -> bool:
        """Whether the sequence will certainly not even begin its answer before its deadline."""
        if sequence.deadline_s is None or sequence.output_tokens:
            return False
        least_s = _CERTAINLY * self.meter.times.chunk(sequence.computed, sequence.pending)
        return now_s + least_s > sequence.deadline_s

    def _expire(self, sequence: Sequence, plan: StepPlan) -> None:
        self._withdraw(sequence)
        self._forget(sequence)
        plan.expired.append(sequence)
        self.counters.finished += 1
        if not sequence.request.partial:
            self.counters.wasted_tokens += sequence.output_tokens

    def _plan_decodes(self, plan: StepPlan, now_s: float) -> None:
        decoding = self._batch.decoding
        growing = [s for s in decoding.values() if len(s.tokens) > s.table.capacity_tokens]
        # Victims are found before anything is planned: what a plan publishes is certain to be computed.
        while len(growing) > self.pool.idle:
            victim = choose_victim(
                chain(decoding.values(), self._batch.prefilling.values()),
                self._line.over_service,
                service_unit=self._step_tokens * self._accounts.weights.prompt,
            )
            self._preempt(victim, plan, now_s)
            growing = [sequence for sequence in growing if sequence is not victim]
        for sequence in growing:
            sequence.table.grow(len(sequence.tokens))
        block_tokens = self._block_tokens
        decodes = plan.decodes
        context = 0
        for sequence in decoding.values():
            start = sequence.computed
            end = start + 1
            context += end
            if end % block_tokens == 0 or start < sequence.prompt_tokens or start < sequence.once_computed:
                self._book(sequence, start, end)
            else:
                sequence.once_computed = end
            decodes.append(Chunk(sequence, start, 1))
        self._batch.context_tokens = context

    def _plan_prompts(self, plan: StepPlan, now_s: float) -> None:
        budget = self._budget(plan)
        batch = self._batch
        claims = Claims(self._line.over_service, by_class=self._by_class)
        under_way = sorted(batch.prefilling.values(), key=lambda s: (claims.of(s), s.key), reverse=True)
        chunks: dict[int, Chunk] = {}
        if under_way:
            oldest = min(under_way, key=lambda sequence: sequence.key)
            self._extend(plan, chunks, oldest, max(1, budget.tokens // FLOOR_SHARE), budget)
        refused: WaitCause | None = WaitCause.KV_FULL if plan.preempted else None
        while budget.tokens > 0:
            head = self._head(plan, now_s) if refused is None else None
            if head is not None and (not under_way or claims.of(head) < claims.of(under_way[-1])):
                refused = self._admit(plan, chunks, head, budget, now_s)
                claims.changed(head)
            elif under_way:
                sequence = under_way.pop()
                self._extend(plan, chunks, sequence, sequence.pending, budget)
                claims.changed(sequence)
            else:
                break
        self._waits.cause = refused or WaitCause.PREFILL_BUDGET
        batch.skipped = [s for s in batch.prefilling.values() if s.key not in chunks and not s.output_tokens]

    def _budget(self, plan: StepPlan) -> PrefillBudget:
        decodes = len(plan.decodes)
        objective_s = self._batch.itl_objective_s
        time = None
        if objective_s is not None and decodes:
            time = self.meter.budget(objective_s, decodes, self._batch.context_tokens)
        return PrefillBudget(self._step_tokens - decodes, time)

    def _head(self, plan: StepPlan, now_s: float) -> Sequence | None:
        while (head := self._room.head(now_s)) is not None and self._too_late(head, now_s):
            self._expire(head, plan)
        return head

    def _admit(
        self, plan: StepPlan, chunks: dict[int, Chunk], sequence: Sequence, budget: PrefillBudget, now_s: float
    ) -> WaitCause | None:
        """Takes blocks for all the sequence's tokens, leaving the running ones room for their next block.

        Returns:
            Why it could not be admitted; None if it was, with its first chunk.
        """
        if len(self._batch) >= self._max_sequences:
            return WaitCause.SLOTS
        table = sequence.table
        final = sequence.preemptions >= MAX_PREEMPTIONS
        room_tokens = sequence.prompt_tokens + sequence.max_tokens if final else 0
        cached = table.open(sequence.tokens, room_tokens=room_tokens, spare=len(self._batch))
        if cached is None:
            return WaitCause.KV_FULL
        length = budget.take(cached, len(sequence.tokens) - cached)
        if length == 0:
            table.release()
            return WaitCause.PREFILL_BUDGET
        self._room.take(sequence, now_s)
        self._book_admission(sequence, cached)
        chunk = Chunk(sequence, cached, length)
        self._batch.enter(sequence)
        (plan.decodes if sequence.pending == 1 else plan.prefills).append(chunk)
        chunks[sequence.key] = chunk
        self._book(sequence, cached, cached + length)
        return None

    def _book_admission(self, sequence: Sequence, cached: int) -> None:
        sequence.computed = cached
        if sequence.cached_tokens is None:
            sequence.cached_tokens = 0
            self.counters.prompt_tokens += sequence.prompt_tokens
        found = self._accounts.charge_prompt(sequence, cached, cached=True)
        sequence.cached_tokens += found
        self.counters.cached_tokens += found
        sequence.once_computed = max(sequence.once_computed, cached)
        if not sequence.output_tokens:
            waited = self._waits.admitted(sequence.key, sequence.arrival)
            if sequence.displaced:
                waited = {WaitCause.KV_FULL.value: sum(waited.values())}
            for cause, seconds in waited.items():
                sequence.waited_s[cause] = sequence.waited_s.get(cause, 0.0) + seconds
        sequence.displaced = False

    def _extend(
        self, plan: StepPlan, chunks: dict[int, Chunk], sequence: Sequence, wanted: int, budget: PrefillBudget
    ) -> None:
        """Gives a prompt under way up to so many tokens (more) in this step."""
        chunk = chunks.get(sequence.key)
        start = sequence.computed if chunk is None else chunk.end
        length = budget.take(start, min(wanted, len(sequence.tokens) - start))
        if length == 0:
            return
        if chunk is None:
            chunk = chunks[sequence.key] = Chunk(sequence, start, length)
            plan.prefills.append(chunk)
        else:
            chunk.length += length
        self._book(sequence, start, start + length)

    def _book(self, sequence: Sequence, start: int, end: int) -> None:
        """Charges a planned run of tokens, and makes the blocks findable that it fills."""
        once = sequence.once_computed
        if start < once:
            self.counters.recomputed_tokens += min(end, once) - start
        if end > once:
            self._accounts.charge_prompt(sequence, end)
            sequence.once_computed = end
        sequence.table.publish(sequence.tokens, end)

    def _preempt(self, victim: Sequence, plan: StepPlan, now_s: float) -> None:
        self._batch.leave(victim)
        victim.table.release()
        victim.computed = 0
        victim.preemptions += 1
        victim.displaced = True
        victim.arrival = self._waits.arrival()
        self.counters.preemptions += 1
        self._room.put_back(victim, now_s)
        plan.preempted.append(victim)

    def _withdraw(self, sequence: Sequence) -> None:
        """Takes a sequence out of wherever it is."""
        if self._batch.leave(sequence):
            sequence.table.release()
            sequence.computed = 0
            self._line.done(sequence.account.flow)
        elif self._paused.pop(sequence.key, None) is None:
            self._room.leave(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._accounts.close(sequence.account)
        self._deadlines.discard(sequence)
