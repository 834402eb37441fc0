"""Whether what a preempted sequence has computed is copied to the host and back, or computed again.

Copying takes time in proportion to the blocks, both ways; computing takes time in proportion to the tokens, and more
for late ones, which attend to more. Both have been measured, the one when the engine started and the other in its
steps. Before any step was measured, nothing is copied.
"""

from collections.abc import Callable

from maitred.core.replica import StepTimes
from maitred.engine.scheduler.sequence import Sequence


class SwapPolicy:
    """The decision.

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
