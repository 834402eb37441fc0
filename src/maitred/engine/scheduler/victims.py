"""Choice of the sequences to preempt when a decode finds no free blocks.

The victim is the sequence that frees the most blocks for the least recomputation. Among similar sequences, the one
whose flow had more than its share of service is chosen. So a sequence with blocks for a mostly uncomputed prompt is
preempted first, and a long sequence near its end last.
"""

from collections.abc import Callable, Iterable

from maitred.core.flow import Flow
from maitred.core.replica import StepTimes
from maitred.engine.scheduler.sequence import MAX_PREEMPTIONS, Sequence


def choose_victim(
    candidates: Iterable[Sequence], over_service: Callable[[Flow], float], *, service_unit: float
) -> Sequence | None:
    """Returns the candidate to preempt; None if each was preempted `MAX_PREEMPTIONS` times.

    Args:
        candidates: Running sequences.
        over_service: Returns the lead in service of a flow over the least served flow.
        service_unit: Lead in service that doubles the value of a flow's blocks in the choice.
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
        # The cost of one block is added, because each preemption costs something even if little was computed.
        cost_tokens = max(0, sequence.computed - shared * block_tokens) + block_tokens
        score = (reclaimable / cost_tokens * (1.0 + lead / service_unit), sequence.key)
        if score > best_score:
            best, best_score = sequence, score
    return best


class SwapPolicy:
    """Policy that decides between copying blocks away and computing them again.

    The time for copying is proportional to the blocks, in both directions. The time for computing is proportional to
    the tokens, and late tokens take longer because they attend to more. Both times are measured: copying when the
    engine starts, computing in its steps. Before any step was measured, nothing is copied.

    Args:
        block_copy_s: Seconds to copy a block in one direction; infinite without swap space.
        times: Returns the current model of step times.
    """

    def __init__(self, block_copy_s: float, times: Callable[[], StepTimes]) -> None:
        self._block_copy_s = block_copy_s
        self._times = times

    def pays(self, sequence: Sequence) -> bool:
        """Returns whether the sequence's blocks should be copied when others need them."""
        block_tokens = sequence.table.block_tokens
        blocks = sequence.computed // block_tokens
        return blocks > 0 and 2 * blocks * self._block_copy_s <= self._times().chunk(0, blocks * block_tokens)
