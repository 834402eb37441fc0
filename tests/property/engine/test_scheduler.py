"""The scheduler against a KV cache made of paper.

A model of the cache holds, for every block and slot, the prefix of tokens whose KV was written there. Each planned
chunk first writes, as the runner does, then reads its whole context back; a wrong reuse, a lost write or a block given
to two owners shows up as a wrong prefix. At the end everything is cancelled or finished and the books must be empty.

Each request has a flow of its own, so that what the line was charged for it can be compared with what it is billed.
"""

import math
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maitred.core.flow import Flow, FlowLevel, PriorityClass, ServiceWeights
from maitred.core.request import EngineRequest, FinishReason, PinRequest, SamplingParams
from maitred.engine.config import BatchLineConfig, KVShareConfig, PinsConfig
from maitred.engine.kv.blocks import BlockPool, WindowPool
from maitred.engine.kv.swap import BlockCopy, SwapSpace
from maitred.engine.kv.window import window_blocks_needed
from maitred.engine.scheduler.sequence import MAX_PREEMPTIONS, Sequence
from tests.support.charges import listen
from tests.support.schedulers import make_scheduler

EOS = 7
VOCABULARY = 8


class PaperCache:
    """Slot -> the scope and the tokens up to and including the one whose KV is there; and what is swapped out.

    With a window, it is the cache of the layers that have one, and only what the window covers is read.
    """

    def __init__(self, window: int = 0) -> None:
        self.window = window
        self.slots: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.host: dict[int, list[tuple[str, tuple[int, ...]]]] = {}

    def move(self, moves: list[BlockCopy], block_tokens: int) -> None:
        for block, slot, out in moves:
            if out:
                self.host[slot] = [self.slots[block, offset] for offset in range(block_tokens)]
            else:
                for offset, content in enumerate(self.host[slot]):
                    self.slots[block, offset] = content

    def write(self, sequence: Sequence, start: int, end: int, block_tokens: int, drafts: tuple[int, ...] = ()) -> None:
        tokens = [*sequence.tokens[:end], *drafts]
        for position in range(start, len(tokens)):
            block = self.blocks(sequence)[position // block_tokens]
            self.slots[block, position % block_tokens] = sequence.request.cache_scope, tuple(tokens[: position + 1])

    def blocks(self, sequence: Sequence) -> list[int]:
        return sequence.table.window.blocks if self.window else sequence.table.blocks

    def check(self, sequence: Sequence, start: int, end: int, block_tokens: int) -> None:
        """What the tokens from `start` to `end` read."""
        for position in range(max(0, start - self.window + 1) if self.window else 0, end):
            assert not self.window or position // block_tokens >= sequence.table.window.first, (
                "a seen block is returned"
            )
            block = self.blocks(sequence)[position // block_tokens]
            scope, tokens = self.slots[block, position % block_tokens]
            assert scope == sequence.request.cache_scope
            assert tokens == tuple(sequence.tokens[: position + 1])


def agreement(drafts, tokens):
    """How many drafts were computed as what has come; the last token that has come never is."""
    agreed = [draft == token for draft, token in zip(drafts, tokens[:-1], strict=False)]
    return agreed.index(False) if False in agreed else len(agreed)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, steps and cancellations."""

    @initialize(
        block_tokens=st.integers(1, 4),
        blocks=st.integers(8, 24),
        max_sequences=st.integers(1, 6),
        overcommit_slots=st.integers(0, 3),
        extra_budget=st.integers(0, 12),
        prefix_cache=st.booleans(),
        swap_slots=st.sampled_from([0, 1, 3, 20]),
        policy=st.sampled_from(["fair", "fair", "fifo", "priority", "deficit"]),
        shares=st.dictionaries(
            st.sampled_from("ab"),
            st.builds(
                KVShareConfig, floor=st.sampled_from([0.0, 0.25, 0.5]), ceiling=st.sampled_from([0.5, 0.75, 1.0])
            ),
        )
        | st.just({}),
        window=st.sampled_from([0, 0, 1, 2, 5, 9]),
        scarce=st.booleans(),
    )
    def make(
        self,
        block_tokens,
        blocks,
        max_sequences,
        overcommit_slots,
        extra_budget,
        prefix_cache,
        swap_slots,
        policy,
        shares,
        window,
        scarce,
    ):
        self.shares = shares
        self.block_tokens = block_tokens
        self.max_sequences = max_sequences
        self.overcommit_slots = overcommit_slots
        self.left_out: dict[int, int] = {}
        self.step_tokens = max_sequences + extra_budget
        self.context = min(blocks * block_tokens, 30)
        self.swap = SwapSpace(swap_slots) if swap_slots else None
        self.window = self.window_swap = None
        if window:
            self.window_swap = SwapSpace(swap_slots) if swap_slots else None
            needed = window_blocks_needed(
                *(window, block_tokens), sequences=max_sequences + overcommit_slots, step_tokens=self.step_tokens
            )
            # As few as running sequences can hold, or no more than all other layers have.
            total = needed + 2 if scarce else blocks
            self.window = WindowPool(BlockPool(total, self.window_swap), window, 2 if scarce else total)
        self.pool = BlockPool(blocks, self.swap, self.window)
        self.scheduler = make_scheduler(
            self.pool,
            block_tokens=block_tokens,
            max_sequences=max_sequences,
            guests=overcommit_slots,
            step_tokens=self.step_tokens,
            context_tokens=self.context,
            eos_token_ids=(EOS,),
            prefix_cache=prefix_cache,
            line=BatchLineConfig(policy=policy),
            kv_shares=shares,
            block_copy_s=0.0,
            pins=PinsConfig(share=0.6, share_each=0.4),
        )
        self.pinned: dict = {}
        """Pin -> itself, and what is in its slots."""
        self.now_s = 0.0
        self.charged: dict[Flow, float] = defaultdict(float)
        self.billed: dict[Flow, float] = defaultdict(float)
        listen(self.scheduler._state.line, self.note_charge)
        self.caches = [PaperCache(), *([PaperCache(window)] if window else [])]
        self.live: list[Sequence] = []
        self.paused: list[Sequence] = []
        self.streams: set[int] = set()
        self.oldest_skips = 0
        """Number of the last steps that had nothing for the oldest prompt under way."""
        """Have got a token since they were admitted."""
        self.added = 0
        self.produced = 0

    def note_charge(self, flow, service):
        assert service > 0
        self.charged[flow] += service

    def end(self, sequence):
        """What is billed for a sequence: of its prompt what it has got to, and its whole answer."""
        self.live.remove(sequence)
        if sequence in self.paused:
            self.paused.remove(sequence)
        prompt = min(sequence.once_computed, sequence.prompt_tokens)
        if sequence.output_tokens:
            assert prompt == sequence.prompt_tokens
        service = ServiceWeights().service(prompt, sequence.cached_tokens or 0, sequence.output_tokens)
        self.billed[sequence.request.flow] += service

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        scope=st.sampled_from(["", "a"]),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 3),
        org=st.sampled_from("abc"),
        priority=st.sampled_from(PriorityClass),
        deadline_in_s=st.none() | st.integers(0, 20),
        expected=st.none() | st.integers(0, 5),
        pin=st.none() | st.builds(PinRequest, st.sampled_from("xy"), st.sampled_from([5.0, 50.0])),
    )
    def add(self, prompt, max_tokens, n, scope, ignore_eos, min_tokens, org, priority, deadline_in_s, expected, pin):
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, n=n, ignore_eos=ignore_eos, min_tokens=min_tokens)
        flow = Flow((FlowLevel(org, 2.0 if org == "a" else 1.0), FlowLevel(str(self.added))), priority)
        request = EngineRequest(
            *(str(self.added), prompt, sampling, scope, flow),
            deadline_in_s=deadline_in_s,
            expected_tokens=expected,
            pin=pin,
        )
        most = self.scheduler._state.residency.most(flow) * self.block_tokens
        before = self.scheduler.waiting
        if len(prompt) + max_tokens > min(self.context, most):
            with pytest.raises(ValueError, match="exceed the"):
                self.scheduler.add(request, self.now_s)
            assert self.scheduler.waiting == before
            return
        try:
            self.live += self.scheduler.add(request, self.now_s)
        except ValueError as refusal:
            assert pin is not None
            assert "pin" in str(refusal)  # noqa: PT017
            assert self.scheduler.waiting == before
            return
        self.added += n

    @rule(scope=st.sampled_from(["", "a"]), name=st.sampled_from("xy"))
    def unpin(self, scope, name):
        self.scheduler.pins.release(scope, name)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        wasted = self.scheduler.counters.wasted_tokens
        self.scheduler.cancel(sequence)
        assert sequence.table.blocks == []
        assert self.scheduler.counters.wasted_tokens - wasted == sequence.output_tokens
        self.end(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pause(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        self.scheduler.pause(sequence)
        self.streams.discard(sequence.key)
        if sequence not in self.paused:
            self.paused.append(sequence)
        assert sequence.table.blocks == []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def resume(self, data):
        sequence = data.draw(st.sampled_from(self.live))
        self.scheduler.resume(sequence, self.now_s)
        if sequence in self.paused:
            self.paused.remove(sequence)

    @rule(elapsed_s=st.integers(1, 10))
    def wait(self, elapsed_s):
        self.now_s += elapsed_s

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step(self, data):
        self.now_s += 0.01
        running_before = [sequence for sequence in self.live if sequence.table.blocks]
        plan = self.scheduler.plan(self.now_s)

        for sequence in plan.expired:
            assert sequence.deadline_s is not None
            assert sequence.deadline_s <= self.now_s
            assert sequence.table.blocks == []
            self.end(sequence)
        assert all(s.deadline_s is None or s.deadline_s > self.now_s for s in self.live)
        assert plan or len(self.live) == len(self.paused), "work is waiting, yet the step is empty"
        if not plan:
            return
        planned = {chunk.sequence.key for chunk in plan.chunks}
        self.streams -= {sequence.key for sequence in plan.preempted}
        going_on = [s for s in running_before if s in self.live and s not in plan.preempted]
        self.check_left_out([s for s in going_on if s.key in self.streams and s.key not in planned], planned)
        prompts = [sequence.key for sequence in going_on if sequence.key not in self.streams]
        self.oldest_skips = self.oldest_skips + 1 if prompts and min(prompts) not in planned else 0
        assert self.oldest_skips < 8, "the oldest prompt under way stands still"
        assert self.oldest_skips or not going_on or planned & {sequence.key for sequence in going_on}
        assert not planned & {sequence.key for sequence in plan.preempted + self.paused}
        assert all(sequence.preemptions <= MAX_PREEMPTIONS for sequence in self.live)
        assert plan.tokens <= self.step_tokens
        assert len({chunk.sequence.key for chunk in plan.chunks}) == len(plan.chunks)
        assert self.scheduler.running <= self.max_sequences + self.scheduler.overcommitted
        assert self.scheduler.overcommitted <= self.overcommit_slots
        self.draft(plan, data)
        for cache, moves in zip(self.caches, (plan.moves, plan.window_moves), strict=False):
            cache.move(moves, self.block_tokens)
        for chunk in plan.chunks:
            assert chunk.length >= 1
            assert chunk.start == chunk.sequence.computed
            assert chunk.end <= len(chunk.sequence.tokens) <= chunk.sequence.table.capacity_tokens
            for cache in self.caches:
                cache.write(chunk.sequence, chunk.start, chunk.end, self.block_tokens, chunk.drafts)
        for chunk in plan.chunks:
            for cache in self.caches:
                cache.check(chunk.sequence, chunk.start, chunk.end, self.block_tokens)
        unused = self.step_tokens - plan.tokens
        assert all(chunk.samples for chunk in plan.decodes) or unused <= 0, "there was room for what is pending"

        sampling = plan.sampling
        sampled = []
        for chunk in sampling:
            right = data.draw(st.integers(0, len(chunk.drafts)))
            further = data.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
            sampled.append([*chunk.drafts[:right], *further])
        computed = [agreement(chunk.drafts, tokens) for chunk, tokens in zip(sampling, sampled, strict=True)]
        drafted, accepted = (self.scheduler.counters.drafted_tokens, self.scheduler.counters.accepted_tokens)
        before = [list(chunk.sequence.tokens) for chunk in sampling]
        advances = self.scheduler.commit(plan, sampled)

        assert self.scheduler.counters.drafted_tokens - drafted == sum(len(chunk.drafts) for chunk in sampling)
        assert self.scheduler.counters.accepted_tokens - accepted <= sum(computed)
        for chunk, old, tokens, agreed, advance in zip(sampling, before, sampled, computed, advances, strict=True):
            sequence = advance.sequence
            assert sequence is chunk.sequence
            assert sequence.tokens == old + advance.tokens
            assert advance.tokens == tokens[: len(advance.tokens)]
            assert len(advance.tokens) == len(tokens) or advance.finish is not None, "a token is lost"
            self.produced += len(advance.tokens)
            for position, token in enumerate(advance.tokens, len(old) - sequence.prompt_tokens):
                last = position + 1 == sequence.output_tokens
                self.check_end(sequence, token, position, advance.finish if last else None)
            if advance.finish is None:
                self.streams.add(sequence.key)
                assert sequence.computed == chunk.end + agreed
                for cache in self.caches:
                    cache.check(sequence, sequence.computed, sequence.computed, self.block_tokens)
            else:
                self.end(sequence)

    def draft(self, plan, data):
        """Guesses at what follows some of the decodes, where there is room for them."""
        budget = self.scheduler.draft_budget(plan)
        assert budget == self.step_tokens - plan.tokens
        for chunk in plan.decodes:
            sequence = chunk.sequence
            behind = sequence.table.writable_tokens - len(sequence.tokens)
            if chunk.samples and min(budget, behind) > 0:
                drafts = st.lists(st.integers(0, VOCABULARY - 1), max_size=min(budget, behind, 4))
                chunk.drafts = tuple(data.draw(drafts))
                budget -= len(chunk.drafts)

    def check_end(self, sequence, token, position, finish):
        """Whether the answer had to end with this token."""
        params = sequence.sampling
        if token == EOS and not params.ignore_eos and position >= params.min_tokens:
            assert finish is FinishReason.STOP
        elif position + 1 == params.max_tokens:
            assert finish is FinishReason.LENGTH
        else:
            assert finish is None

    def check_left_out(self, left_out, planned):
        """Streams pause only for overcommitted sequences, each in its turn, and no tenant alone gives its last row."""
        assert len(left_out) <= self.scheduler.overcommitted, "a stream stalls"
        self.left_out = {s.key: self.left_out.get(s.key, 0) + 1 for s in left_out}
        assert all(times < len(self.live) for times in self.left_out.values()), "a stream starves"
        rows: dict[str, int] = defaultdict(int)
        for sequence in self.live:
            if sequence.key in planned and sequence.output_tokens:
                rows[sequence.request.flow.path[0].id] += 1
        for sequence in left_out:
            assert rows[sequence.request.flow.path[0].id] or max(rows.values()) <= 1

    @invariant()
    def books_balance(self):
        if not hasattr(self, "pool"):
            return
        held: dict[int, int] = {}
        for sequence in self.live:
            for block in sequence.table.blocks:
                held[block] = held.get(block, 0) + 1
        pins = self.scheduler.pins._pins
        for pin in pins.values():
            for block in pin.blocks:
                held[block] = held.get(block, 0) + 1
        self.check_pinned(pins)
        for block in range(self.pool.total):
            assert self.pool.reference_count(block) == held.get(block, 0)
        assert self.pool.idle + len(held) == self.pool.total
        self.check_window()
        assert self.scheduler.running + self.scheduler.waiting + self.scheduler.paused == len(self.live)
        assert self.scheduler.paused == len(self.paused)
        assert self.scheduler.busy == (len(self.live) > len(self.paused))
        for tenant, share in self.shares.items():
            own = {b for s in self.live if s.request.flow.path[0].id == tenant for b in s.table.blocks}
            assert len(own) <= math.ceil(share.ceiling * self.pool.total)
            own |= {b for pin in pins.values() if pin.flow.path[0].id == tenant for b in pin.blocks}
            assert self.scheduler._state.residency.held_blocks(tenant) == len(own)
        for flow, billed in self.billed.items():
            if not any(sequence.request.flow == flow for sequence in self.live):
                assert self.charged[flow] == pytest.approx(billed), "charged is something else than billed"
        for swap in filter(None, (self.swap, self.window_swap)):
            kept = swap._slot_of
            assert sorted([*kept.values(), *swap._free]) == list(range(swap.total)), "a slot is lost or shared"
            waiting = {s.key for s in self.live if not s.table.blocks}
            assert all(key in swap._wanted for key in kept)
            assert waiting or not kept, "what nobody waits for is kept"
        counters = self.scheduler.counters
        assert counters.output_tokens == self.produced
        assert counters.finished + counters.cancelled + len(self.live) == self.added

    def check_window(self):
        """Sequences hold what their next tokens see, and little more; whatever nobody holds is idle."""
        if self.window is None:
            return
        pool, held = self.window.pool, defaultdict(int)
        for sequence in self.live:
            table = sequence.table.window
            most = (self.window.tokens + 2 * self.block_tokens - 1) // self.block_tokens + 3
            assert len(table.held) <= most, "blocks outside the window are kept"
            for block in table.held:
                held[block] += 1
        pinned = [block for pin in self.scheduler.pins._pins.values() for block in pin.of_window]
        assert len({*pinned}) <= self.window.pin_blocks
        for block in pinned:
            held[block] += 1
        for block in range(pool.total):
            assert pool.reference_count(block) == held.get(block, 0)
        assert pool.idle + len(held) == pool.total
        assert pool.cached == sum(pool._keys[block] is not None for block in pool._idle)

    def check_pinned(self, pins):
        """What is pinned stays as it was, and can be found; and is no more than it may be."""
        total = self.pool.total
        for scope in ("", "a"):
            assert len({b for key, pin in pins.items() if key[0] == scope for b in pin.blocks}) <= 0.4 * total
        assert self.scheduler.pins.blocks == len({b for pin in pins.values() for b in pin.blocks}) <= 0.6 * total
        known, self.pinned = self.pinned, {}
        for key, pin in pins.items():
            slots = {(b, at): self.caches[0].slots[b, at] for b in pin.blocks for at in range(self.block_tokens)}
            before = known.get(key, (None, None))
            assert before[0] is not pin or before[1] == slots, "a pinned block was written to"
            assert all(self.pool._keys[block] is not None for block in pin.blocks), "a pinned block cannot be found"
            self.pinned[key] = pin, slots

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for sequence in self.paused:
            self.scheduler.resume(sequence, self.now_s)
        steps = 0
        while self.live:
            plan = self.scheduler.plan(self.now_s)
            advances = self.scheduler.commit(plan, [[0] for chunk in plan.sampling])
            for sequence in plan.expired + [advance.sequence for advance in advances if advance.finish]:
                self.live.remove(sequence)
            steps += 1
            assert steps < 10_000, "the scheduler does not come to an end"
        self.scheduler.pins.clear()
        assert self.scheduler.promised_blocks == 0
        assert self.scheduler.waiting_prompt_tokens == 0
        assert self.scheduler.max_idle_s(self.now_s) is None
        assert self.pool.idle == self.pool.total
        assert self.window is None or self.window.pool.idle == self.window.pool.total
        for swap in filter(None, (self.swap, self.window_swap)):
            assert swap.free == swap.total


SchedulerMachine.TestCase.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
