"""The first pass of a plan: what is pending of every stream that has begun, and blocks for those that need some.

As a rule that is one token. An answer that was extended by tokens which no step has computed has more of them; it gets
all that the step has room for, and at least one.
"""

from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.state import SchedulerState
from maitred.engine.scheduler.victims import choose_victim


def plan_decodes(
    state: SchedulerState, plan: StepPlan, now_s: float, *, rows: int, step_tokens: int, service_unit: float
) -> None:
    """Plans a decode for each sequence that decodes, keeps its blocks and does not give way to a guest.

    Args:
        state: Of the scheduler.
        plan: Gets the decodes, and the sequences that are preempted for them.
        now_s: The time.
        rows: Decodes in a step, if guests run.
        step_tokens: Tokens in a step. One of them is left for each prompt under way.
        service_unit: See `choose_victim`.
    """
    decoding = state.batch.decoding
    left_out = state.overcommit.excluded_keys(decoding, rows)
    chosen = [s for s in decoding.values() if s.key not in left_out] if left_out else list(decoding.values())
    eventful = [s for s in chosen if len(s.tokens) > s.plain_until]
    growing = [s for s in eventful if len(s.tokens) > s.table.capacity_tokens]
    # Victims are found before anything is planned: what a plan publishes is certain to be computed.
    if growing:
        _preempt_for(state, plan, growing, now_s, service_unit)
        if plan.preempted:
            chosen = [s for s in chosen if s.key in decoding]
    plan.decodes = [Chunk(s, s.computed, len(s.tokens) - s.computed) for s in chosen]
    if plan.tokens > len(chosen):
        _shorten(plan.decodes, step_tokens - len(chosen) - len(state.batch.prefilling))
    if eventful:
        for chunk in plan.decodes:
            if len(chunk.sequence.tokens) > chunk.sequence.plain_until:
                _book(state, chunk)
    state.batch.context_tokens = sum([chunk.start + chunk.length for chunk in plan.decodes])


def _shorten(chunks: list[Chunk], left: int) -> None:
    """Leaves every chunk one token, and of the others no more than there is room for; the oldest sequences come first.

    Args:
        chunks: By the age of their sequences.
        left: The room, beyond one token each.
    """
    for chunk in chunks:
        more = min(chunk.length - 1, max(0, left))
        chunk.length = 1 + more
        left -= more


def _book(state: SchedulerState, chunk: Chunk) -> None:
    """Books a decode that fills a block, or had to get one, or is of the prompt; and finds when the next such comes."""
    sequence, end = chunk.sequence, chunk.start + chunk.length
    state.book(sequence, chunk.start, end)
    table = sequence.table
    fills_next = (end // table.block_tokens + 1) * table.block_tokens - 1
    sequence.plain_until = min(fills_next, table.capacity_tokens)


def _preempt_for(
    state: SchedulerState, plan: StepPlan, growing: list[Sequence], now_s: float, service_unit: float
) -> None:
    """Gives every growing sequence its blocks, or preempts it; to the only one that runs, pins give way."""
    pool, batch, residency = state.pool, state.batch, state.residency
    while sum([_missing(sequence) for sequence in growing]) > pool.idle:
        if len(batch) == 1 and state.pins.evict():
            continue
        running = list(batch)
        unprotected = [sequence for sequence in running if not residency.protects(sequence.account.flow)]
        victim = choose_victim(unprotected, state.line.over_service, service_unit=service_unit) or choose_victim(
            running, state.line.over_service, service_unit=service_unit
        )
        assert victim is not None, "those that cannot be preempted have all the blocks they need"
        state.preempt(victim, plan, now_s)
        if victim in growing:
            growing.remove(victim)
    for sequence in growing:
        flow = sequence.account.flow
        while lacks := residency.available_blocks(flow, pool.idle) < _missing(sequence):
            if len(batch) > 1 or not state.pins.evict(flow):
                break
        # What a tenant may not hold one of its own gives up: the one that would have exceeded it.
        if lacks:
            state.preempt(sequence, plan, now_s)
        else:
            state.grow(sequence)


def _missing(sequence: Sequence) -> int:
    """Blocks that it needs more than it has."""
    table = sequence.table
    return table.blocks_for(len(sequence.tokens)) - len(table.blocks)
