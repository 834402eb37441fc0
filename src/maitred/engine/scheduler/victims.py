"""Choice of the sequences that give their blocks back when a decode finds none.

The victim is the sequence whose eviction returns the most blocks for the least work to do again, and of similar ones
that of the flow which has had more than its share. A sequence that holds whole blocks for a prompt of which little is
computed is therefore the first to go; a long one near its end the last.
"""

from collections.abc import Callable, Iterable

from maitred.core.flow import Flow
from maitred.core.replica import StepTimes
from maitred.engine.scheduler.sequence import MAX_PREEMPTIONS, Sequence


def choose_victim(
    candidates: Iterable[Sequence], over_service: Callable[[Flow], float], *, service_unit: float
) -> Sequence | None:
    """The candidate to preempt; None if each has been preempted `MAX_PREEMPTIONS` times.

    Args:
        candidates: Running sequences.
        over_service: By how much service a flow leads the least served one.
        service_unit: A lead of so much makes the blocks of a flow twice as good to take.
    """
    leads: dict[int, float] = {}
    best: Sequence | None = None
    best_score = (0.0, -1)
    for sequence in candidates:
        if sequence.preemptions >= MAX_PREEMPTIONS:
            continue
        account = sequence.account
        lead = leads.get(id(account))
        if lead is None:
            lead = leads[id(account)] = over_service(account.flow)
        shared = sequence.table.shared_blocks
        reclaimable = len(sequence.table.blocks) - shared
        block_tokens = sequence.table.block_tokens
        # A block's worth on top: to leave and to come back costs something, however little was computed.
        cost_tokens = max(0, sequence.computed - shared * block_tokens) + block_tokens
        score = (reclaimable / cost_tokens * (1.0 + lead / service_unit), sequence.key)
        if score > best_score:
            best, best_score = sequence, score
    return best


class SwapPolicy:
    """Policy that decides between copying blocks away and computing them again.

    Copying takes time in proportion to the blocks, both ways; computing takes time in proportion to the tokens, and
    more for late ones, which attend to more. Both are measured: copying when the engine starts, computing in its steps.
    Before any step was measured, nothing is copied.

    Args:
        block_copy_s: Seconds to copy a block one way; infinite where there is no room for any.
        times: What steps take, as of now.
    """

    def __init__(self, block_copy_s: float, times: Callable[[], StepTimes]) -> None:
        self._block_copy_s = block_copy_s
        self._times = times

    def pays(self, sequence: Sequence) -> bool:
        """Whether to copy what the sequence has computed, should its blocks be needed."""
        block_tokens = sequence.table.block_tokens
        blocks = sequence.computed // block_tokens
        return blocks > 0 and 2 * blocks * self._block_copy_s <= self._times().chunk(0, blocks * block_tokens)
