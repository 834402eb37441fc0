"""First pass of a plan: decodes of the running sequences, and KV blocks for those that need them.

A decode usually has one token. An answer that was extended by tokens without computed KV has more pending tokens. It
gets at least one of them, and as many as the step has room for.
"""

from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.state import SchedulerState
from maitred.engine.scheduler.victims import choose_victim


def plan_decodes(
    state: SchedulerState, plan: StepPlan, now_s: float, *, rows: int, step_tokens: int, service_unit: float
) -> None:
    """Plans the decodes of all decoding sequences that keep their blocks and their rows in this step.

    Args:
        state: State of the scheduler.
        plan: Receives the decodes, and the sequences that are preempted for them.
        now_s: The time.
        rows: Maximum decodes in a step, if overcommitted sequences run.
        step_tokens: Tokens in a step. One token is reserved for each sequence in prefill.
        service_unit: See `choose_victim`.
    """
    decoding = state.batch.decoding
    left_out = state.overcommit.excluded_keys(decoding, rows)
    chosen = [s for s in decoding.values() if s.key not in left_out] if left_out else list(decoding.values())
    eventful = [s for s in chosen if len(s.tokens) > s.plain_until]
    growing = [s for s in eventful if len(s.tokens) > s.table.capacity_tokens]
    # Victims are chosen before any decode is planned, because all blocks that a plan publishes must be computed.
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
    """Shortens chunks to the tokens left in the step, at least one each, the oldest sequences first.

    Args:
        chunks: Chunks in the order of their sequences' age, the oldest first.
        left: Tokens that the step can compute beyond one for each chunk.
    """
    for chunk in chunks:
        more = min(chunk.length - 1, max(0, left))
        chunk.length = 1 + more
        left -= more


def _book(state: SchedulerState, chunk: Chunk) -> None:
    """Charges a decode that fills or needs a block or is in the prompt, and finds the next such position."""
    sequence, end = chunk.sequence, chunk.start + chunk.length
    state.book(sequence, chunk.start, end)
    table = sequence.table
    fills_next = (end // table.block_tokens + 1) * table.block_tokens - 1
    writable = table.capacity_tokens if table.window is None else table.writable_tokens
    sequence.plain_until = min(fills_next, writable)


def _preempt_for(
    state: SchedulerState, plan: StepPlan, growing: list[Sequence], now_s: float, service_unit: float
) -> None:
    """Gives every growing sequence its blocks or preempts it; pins are evicted for a last sequence."""
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
        # If a tenant would exceed its ceiling, the sequence that would exceed it is preempted.
        if lacks:
            state.preempt(sequence, plan, now_s)
        else:
            state.grow(sequence)


def _missing(sequence: Sequence) -> int:
    """Number of further blocks that the sequence needs."""
    table = sequence.table
    return table.blocks_for(len(sequence.tokens)) - len(table.blocks)
