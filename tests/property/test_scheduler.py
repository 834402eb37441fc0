"""The scheduler against a KV cache made of paper.

A model of the cache holds, for every block and slot, the prefix of tokens whose KV was written there. Each planned
chunk first writes, as the runner does, then reads its whole context back; a wrong reuse, a lost write or a block given
to two owners shows up as a wrong prefix. At the end everything is cancelled or finished and the books must be empty.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maitred.core.request import FinishReason, Request, SamplingParams
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.sequence import Sequence

EOS = 7
VOCABULARY = 8


class PaperCache:
    """Slot -> the tokens up to and including the one whose KV is there."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}

    def write(self, sequence: Sequence, start: int, end: int, block_tokens: int) -> None:
        for position in range(start, end):
            block = sequence.table.blocks[position // block_tokens]
            self.slots[block, position % block_tokens] = tuple(sequence.tokens[: position + 1])

    def check(self, sequence: Sequence, end: int, block_tokens: int) -> None:
        for position in range(end):
            block = sequence.table.blocks[position // block_tokens]
            assert self.slots[block, position % block_tokens] == tuple(sequence.tokens[: position + 1])


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, steps and cancellations."""

    @initialize(
        block_tokens=st.integers(1, 4),
        blocks=st.integers(8, 24),
        max_sequences=st.integers(1, 6),
        extra_budget=st.integers(0, 12),
        prefix_cache=st.booleans(),
    )
    def make(self, block_tokens, blocks, max_sequences, extra_budget, prefix_cache):
        self.block_tokens = block_tokens
        self.max_sequences = max_sequences
        self.step_tokens = max_sequences + extra_budget
        self.context = min(blocks * block_tokens, 30)
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_tokens=block_tokens,
            max_sequences=max_sequences,
            step_tokens=self.step_tokens,
            context_tokens=self.context,
            eos_token_ids=(EOS,),
            prefix_cache=prefix_cache,
        )
        self.cache = PaperCache()
        self.live: list[Sequence] = []
        self.added = 0
        self.produced = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        scope=st.sampled_from(["", "a"]),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
    )
    def add(self, prompt, max_tokens, n, scope, ignore_eos, min_tokens):
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, n=n, ignore_eos=ignore_eos, min_tokens=min_tokens)
        request = Request(id=str(self.added), prompt=prompt, sampling=sampling, cache_scope=scope)
        if len(prompt) + max_tokens > self.context:
            before = self.scheduler.waiting
            with pytest.raises(ValueError, match="exceed the context"):
                self.scheduler.add(request)
            assert self.scheduler.waiting == before
            return
        self.live += self.scheduler.add(request)
        self.added += n

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.scheduler.cancel(sequence)
        assert sequence.table.blocks == []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data):
        oldest = min(self.live, key=lambda sequence: sequence.key)
        progress_before = (oldest.computed, len(oldest.tokens))
        plan = self.scheduler.plan()

        assert plan, "work is waiting, yet the step is empty"
        assert plan.tokens <= self.step_tokens
        assert len({chunk.sequence.key for chunk in plan.chunks}) == len(plan.chunks)
        assert self.scheduler.running <= self.max_sequences
        assert oldest.key in {chunk.sequence.key for chunk in plan.chunks}, "the oldest sequence stands still"
        for chunk in plan.chunks:
            assert chunk.length >= 1
            assert chunk.start == chunk.sequence.computed
            self.cache.write(chunk.sequence, chunk.start, chunk.end, self.block_tokens)
        for chunk in plan.chunks:
            self.cache.check(chunk.sequence, chunk.end, self.block_tokens)
        assert all(chunk.samples for chunk in plan.decodes)

        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        tokens = [data.draw(st.integers(0, VOCABULARY - 1)) for _ in sampling]
        advances = self.scheduler.commit(plan, tokens)

        assert [advance.token for advance in advances] == tokens
        self.produced += len(tokens)
        for chunk, advance in zip(sampling, advances, strict=True):
            sequence = advance.sequence
            assert sequence is chunk.sequence
            params = sequence.sampling
            if advance.token == EOS and not params.ignore_eos and sequence.output_tokens > params.min_tokens:
                assert advance.finish is FinishReason.STOP
            elif sequence.output_tokens == params.max_tokens:
                assert advance.finish is FinishReason.LENGTH
            else:
                assert advance.finish is None
            if advance.finish is not None:
                self.live.remove(sequence)
        assert (oldest.computed, len(oldest.tokens)) > progress_before

    @invariant()
    def books_balance(self):
        if not hasattr(self, "pool"):
            return
        held: dict[int, int] = {}
        for sequence in self.live:
            for block in sequence.table.blocks:
                held[block] = held.get(block, 0) + 1
        for block in range(self.pool.total):
            assert self.pool.holders(block) == held.get(block, 0)
        assert self.pool.idle + len(held) == self.pool.total
        assert self.scheduler.running + self.scheduler.waiting == len(self.live)
        assert self.scheduler.busy == bool(self.live)
        counters = self.scheduler.counters
        assert counters.output_tokens == self.produced
        assert counters.finished + counters.cancelled + len(self.live) == self.added

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        steps = 0
        while self.live:
            plan = self.scheduler.plan()
            advances = self.scheduler.commit(plan, [0 for chunk in plan.chunks if chunk.samples])
            self.live = [s for s in self.live if s not in {a.sequence for a in advances if a.finish}]
            steps += 1
            assert steps < 10_000, "the scheduler does not come to an end"
        assert self.pool.idle == self.pool.total


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
