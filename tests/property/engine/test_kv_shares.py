"""Floors and ceilings of the KV cache against a small batch that knows nothing else.

Sequences of a few tenants wait in order of arrival, are admitted with all their blocks at once, and end. The rule for
admission is the documented one: the head first; when it finds no free blocks, only tenants within their guarantee may
pass it.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.flow import Flow, FlowLevel
from maitred.engine.config import KVShareConfig
from maitred.engine.scheduler.kv_shares import KVShares

TENANTS = ["a", "b", "c", "d"]
MOST_TURNS = 2_000
"""Ends what would never end. Three tenants whose floors are nearly everything let a fourth wait for 235 turns."""


class Batch:
    """Blocks, who holds them, and who waits."""

    def __init__(self, shares, total):
        self.shares, self.total = shares, total
        self.books = KVShares(shares, total)
        self.idle = list(range(total))
        self.waiting = []
        self.running = []

    def held(self, tenant):
        return sum(len(blocks) for flow, blocks in self.running if flow.path[0].id == tenant)

    def add(self, flow, need):
        if need > self.books.most(flow):
            return
        self.waiting.append((flow, need))
        self.books.on_join(flow)

    def admit(self):
        blocked = False
        for flow, need in list(self.waiting):
            if blocked and not self.books.is_entitled(flow, need):
                continue
            if need + self.books.reserved_blocks(flow, len(self.idle)) > len(self.idle):
                blocked = True
                continue
            entitled = self.books.is_entitled(flow, need)
            blocks = [self.idle.pop() for _ in range(need)]
            self.waiting.remove((flow, need))
            self.books.on_dequeue(flow)
            self.books.hold(flow, blocks)
            self.running.append((flow, blocks))
            self.check(flow, entitled)

    def end(self, position):
        flow, blocks = self.running.pop(position % len(self.running))
        self.books.release(flow, blocks)
        self.idle += blocks

    def check(self, took, entitled):
        for tenant, share in self.shares.items():
            assert self.held(tenant) == self.books.held_blocks(tenant)
            assert self.held(tenant) <= max(1, -(-share.ceiling * self.total // 1))
        if not entitled:
            waiting = {flow.path[0].id for flow, _ in self.waiting} - {took.path[0].id}
            owed = [int(self.shares[t].floor * self.total) - self.held(t) for t in waiting if t in self.shares]
            assert len(self.idle) >= sum(short for short in owed if short > 0)


def shares():
    share = st.builds(
        lambda guarantee, more: KVShareConfig(floor=guarantee, ceiling=min(1.0, guarantee + more)),
        st.sampled_from([0.0, 0.1, 0.25, 0.33]),
        st.floats(0.05, 1),
    )
    return st.dictionaries(st.sampled_from(TENANTS[:3]), share)


@settings(max_examples=75, deadline=None)
@given(
    shares=shares(),
    total=st.integers(4, 40),
    moves=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(TENANTS), st.integers(1, 40)),
            st.integers(0, 100),
        ),
        max_size=60,
    ),
)
def test_guarantees_and_ceilings_hold_and_every_sequence_runs_in_the_end(shares, total, moves):
    batch = Batch(shares, total)
    for move in moves:
        if isinstance(move, tuple):
            batch.add(Flow((FlowLevel(move[0]),)), move[1])
        elif batch.running:
            batch.end(move)
        batch.admit()
    rounds = 0
    while batch.waiting or batch.running:
        assert batch.running, "sequences wait, nothing runs, and none is admitted"
        batch.end(0)
        batch.admit()
        rounds += 1
        assert rounds < 1000
    assert all(batch.books.held_blocks(tenant) == 0 for tenant in shares)


@settings(max_examples=40, deadline=None)
@given(shares=shares(), total=st.integers(4, 40), flood=st.lists(st.sampled_from(TENANTS), min_size=1, max_size=4))
def test_a_head_of_any_size_is_admitted_however_much_arrives_behind_it(shares, total, flood):
    batch = Batch(shares, total)
    for tenant in TENANTS:
        for _ in range(5):
            batch.add(Flow((FlowLevel(tenant),)), 2)
    batch.admit()
    patient = Flow((FlowLevel("d"), FlowLevel("patient")))
    need = batch.books.most(patient)
    if not need:
        return
    batch.add(patient, need)
    for turn in range(MOST_TURNS):
        for tenant in flood:
            batch.add(Flow((FlowLevel(tenant),)), 1 + turn % 2)
        batch.admit()
        if (patient, need) not in batch.waiting:
            return
        if batch.running:
            batch.end(turn)
    raise AssertionError("the head of the line is never admitted")
