"""Continuous batching with one token budget per step.

Each step is planned afresh, in three passes over one budget of tokens (Yu et al., OSDI'22, for batching per iteration;
Agrawal et al., OSDI'24, for mixing chunks of prefill into it):

1. **Decodes** of the running sequences, one token each. A stream that has begun must not stall, so these come first;
   the budget is at least the number of sequences, so all of them fit.
2. **Prefill chunks** of running sequences whose prompt did not fit into an earlier step, oldest first.
3. **Admissions** from the waiting line in order of arrival, while budget, sequence slots and blocks last.

A sequence gets blocks for everything it is about to compute when it is admitted, so only decodes ever need more. When
one finds none, the youngest running sequence is preempted: it gives its blocks back and waits at the head of the line,
to be recomputed. Its full blocks stay in the prefix cache while nobody needs the room, so often little is lost. Age is
never lost, so the oldest sequence always advances, and with it, in the end, everyone: nothing starves.

The scheduler is a pure function of what it was told: no clock, no randomness, no I/O. One thread calls `plan`,
computes, and calls `commit`; `add` and `cancel` come in between.
"""

from collections import deque
from dataclasses import dataclass
from itertools import chain

from maitred.core.request import FinishReason, Request
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.kv.table import BlockTable
from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.sequence import Sequence


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


@dataclass(frozen=True, slots=True)
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
    ) -> None:
        if step_tokens < max_sequences:
            raise ValueError("step_tokens must be at least max_sequences: a step decodes every running sequence.")
        if context_tokens > pool.total * block_tokens:
            raise ValueError("The KV pool must hold at least one sequence of context_tokens.")
        self.pool = pool
        self.counters = Counters()
        self._block_tokens = block_tokens
        self._max_sequences = max_sequences
        self.step_tokens = step_tokens
        self._context_tokens = context_tokens
        self._eos = frozenset(eos_token_ids)
        self._prefix_cache = prefix_cache
        self._running: list[Sequence] = []
        """Oldest first."""
        self._waiting: deque[Sequence] = deque()
        """Oldest first, preempted ones before all that never ran."""
        self._paused: dict[int, Sequence] = {}
        self._next_key = 0

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences in line."""
        return len(self._waiting)

    @property
    def paused(self) -> int:
        """Sequences whose readers have fallen behind."""
        return len(self._paused)

    @property
    def free_sequences(self) -> int:
        """Sequences that would find a slot now, behind those that wait."""
        return max(0, self._max_sequences - len(self._running) - len(self._waiting))

    @property
    def promised_blocks(self) -> int:
        """Blocks that what runs and waits is still expected to take."""
        return sum(
            max(0, -(-sequence.expected_total // self._block_tokens) - len(sequence.table.blocks))
            for sequence in chain(self._running, self._waiting)
        )

    @property
    def waiting_prompt_tokens(self) -> int:
        """Prompt tokens of what runs and waits that are still to be computed."""
        return sum(
            max(0, sequence.prompt_tokens - sequence.computed) for sequence in chain(self._running, self._waiting)
        )

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> list[Sequence]:
        """Puts a request's choices at the end of the line.

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
        scope = f"shared:{request.cache_scope}" if self._prefix_cache else f"request:{self._next_key}"
        sequences = []
        for index in range(sampling.n):
            table = BlockTable(self.pool, self._block_tokens, scope)
            sequences.append(Sequence(self._next_key, request, index, table, self._eos))
            self._next_key += 1
        self._waiting.extend(sequences)
        return sequences

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence that was added and has not finished; its blocks are free at once."""
        self._withdraw(sequence)
        self.counters.cancelled += 1

    def pause(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch, or out of the line, until `resume`. Again: nothing.

        Its slot and its blocks are anybody's at once. The full blocks stay in the prefix cache while nobody needs the
        room, so that going on costs little; what is computed again is never billed.
        """
        if sequence.key not in self._paused:
            self._withdraw(sequence)
            self._paused[sequence.key] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Puts a paused sequence back in line, by its age. Any other: nothing."""
        if self._paused.pop(sequence.key, None) is not None:
            older = sum(waiting.key < sequence.key for waiting in self._waiting)
            self._waiting.insert(older, sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        if sequence.table.blocks:
            self._running.remove(sequence)
            sequence.table.release()
            sequence.computed = 0
        elif self._paused.pop(sequence.key, None) is None:
            self._waiting.remove(sequence)

    def plan(self) -> StepPlan:
        """Chooses what the next step computes, and takes the blocks for it."""
        plan = StepPlan()
        self._plan_decodes(plan)
        budget = self.step_tokens - len(plan.decodes)
        budget = self._plan_prefills(plan, budget)
        if not plan.preempted:
            self._plan_admissions(plan, budget)
        return plan

    def commit(self, plan: StepPlan, sampled: list[int]) -> list[Advance]:
        """Books what a step computed.

        Args:
            plan: The latest plan, computed in full.
            sampled: A token for each chunk of `plan.chunks` that samples, in their order.

        Returns:
            One advance per sampled token, in the same order; finished sequences hold no blocks any more.
        """
        advances = []
        tokens = iter(sampled)
        finished = False
        for chunk in plan.chunks:
            sequence = chunk.sequence
            samples = chunk.samples
            self.counters.recomputed_tokens += max(0, min(chunk.end, sequence.once_computed) - chunk.start)
            sequence.computed = chunk.end
            sequence.once_computed = max(sequence.once_computed, chunk.end)
            if not samples:
                continue
            token = next(tokens)
            finish = sequence.append(token)
            if finish is not None:
                sequence.table.release()
                finished = True
                self.counters.finished += 1
            advances.append(Advance(sequence, token, finish))
        self.counters.output_tokens += len(advances)
        if finished:
            self._running = [sequence for sequence in self._running if sequence.table.blocks]
        return advances

    def _plan_decodes(self, plan: StepPlan) -> None:
        # Oldest first, and victims are taken from the young end: a sequence that is already in the plan is never
        # preempted, so what it publishes below is certain to be computed.
        position = 0
        while position < len(self._running):
            sequence = self._running[position]
            position += 1
            if sequence.pending != 1:
                continue
            while not sequence.table.grow(len(sequence.tokens)):
                victim = self._running.pop()
                self._preempt(victim, plan)
                if victim is sequence:
                    return
            plan.decodes.append(self._chunk(sequence, 1))

    def _plan_prefills(self, plan: StepPlan, budget: int) -> int:
        for sequence in self._running:
            if budget == 0:
                break
            if sequence.pending > 1:
                length = min(sequence.pending, budget)
                plan.prefills.append(self._chunk(sequence, length))
                budget -= length
        return budget

    def _plan_admissions(self, plan: StepPlan, budget: int) -> None:
        while budget and self._waiting and len(self._running) < self._max_sequences:
            sequence = self._waiting[0]
            if not self._admit(sequence):
                break
            self._waiting.popleft()
            self._running.append(sequence)
            length = min(sequence.pending, budget)
            chunk = self._chunk(sequence, length)
            (plan.decodes if sequence.pending == 1 else plan.prefills).append(chunk)
            budget -= length

    def _admit(self, sequence: Sequence) -> bool:
        """Takes blocks for all the sequence's tokens, leaving the running ones room for their next block."""
        cached = sequence.table.open(sequence.tokens, spare=len(self._running))
        if cached is None:
            return False
        sequence.computed = cached
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.cached_tokens += cached
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        victim.table.release()
        victim.computed = 0
        victim.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(victim)
        plan.preempted.append(victim)

    def _chunk(self, sequence: Sequence, length: int) -> Chunk:
        chunk = Chunk(sequence, sequence.computed, length)
        sequence.table.publish(sequence.tokens, chunk.end)
        return chunk
