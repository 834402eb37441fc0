"""The first pass of a plan: one token for every stream that has begun, and blocks for those that need one."""

from maitred.engine.scheduler.plan import Chunk, StepPlan
from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.scheduler.state import State
from maitred.engine.scheduler.victims import choose_victim


def plan_decodes(state: State, plan: StepPlan, now_s: float, *, rows: int, service_unit: float) -> None:
    """Plans a decode for each sequence that decodes, keeps its blocks and does not give way to a guest.

    Args:
        state: Of the scheduler.
        plan: Gets the decodes, and the sequences that are preempted for them.
        now_s: The time.
        rows: Decodes in a step, if guests run.
        service_unit: See `choose_victim`.
    """
    decoding = state.batch.decoding
    left_out = state.guests.left_out(decoding, rows)
    chosen = [s for s in decoding.values() if s.key not in left_out] if left_out else list(decoding.values())
    eventful = [s for s in chosen if s.computed >= s.plain_until]
    growing = [s for s in eventful if len(s.tokens) > s.table.capacity_tokens]
    # Victims are found before anything is planned: what a plan publishes is certain to be computed.
    if growing:
        _make_room(state, plan, growing, now_s, service_unit)
        if plan.preempted:
            chosen = [s for s in chosen if s.key in decoding]
            eventful = [s for s in eventful if s.key in decoding]
    for sequence in eventful:
        _book(state, sequence)
    plan.decodes = [Chunk(s, s.computed, 1) for s in chosen]
    state.batch.context_tokens = sum([chunk.start for chunk in plan.decodes]) + len(plan.decodes)


def _book(state: State, sequence: Sequence) -> None:
    """Books a decode that fills a block, or had to get one, or is of the prompt; and finds when the next such comes."""
    end = sequence.computed + 1
    state.book(sequence, end - 1, end)
    table = sequence.table
    fills_next = (end // table.block_tokens + 1) * table.block_tokens - 1
    sequence.plain_until = min(fills_next, table.capacity_tokens)


def _make_room(state: State, plan: StepPlan, growing: list[Sequence], now_s: float, service_unit: float) -> None:
    """Gives every growing sequence its block, or preempts it."""
    pool, batch, residency = state.pool, state.batch, state.residency
    while len(growing) > pool.idle:
        running = list(batch)
        beyond_floor = [sequence for sequence in running if not residency.protects(sequence.account.flow)]
        victim = choose_victim(beyond_floor, state.line.over_service, service_unit=service_unit) or choose_victim(
            running, state.line.over_service, service_unit=service_unit
        )
        assert victim is not None, "those that cannot be preempted have all the blocks they need"
        state.preempt(victim, plan, now_s)
        if victim in growing:
            growing.remove(victim)
    for sequence in growing:
        # What a tenant may not hold one of its own gives up: the one that would have exceeded it.
        if residency.room(sequence.account.flow, pool.idle):
            state.grow(sequence)
        else:
            state.preempt(sequence, plan, now_s)
