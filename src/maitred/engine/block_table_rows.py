"""Block tables of the running sequences as rows of one array, from which a step's inputs are gathered.

Each running sequence keeps its row (its *lane*) until it loses its blocks. Its block table is copied only when blocks
are added: one number every `block_tokens` steps. A decode step then needs only a few array operations over all rows,
for any number of sequences.
"""

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from maitred.engine.scheduler.plan import Chunk
from maitred.engine.scheduler.sequence import Sequence


class BlockTableRows:
    """The block tables of all running sequences.

    Args:
        max_sequences: Number of rows of the array.
        context_tokens: Maximum tokens of a sequence.
        block_tokens: Tokens per block.
        of_window: Whether the tables are those of the layers with a window (`WindowTable`).
    """

    def __init__(self, max_sequences: int, context_tokens: int, block_tokens: int, *, of_window: bool = False) -> None:
        self._block_tokens = block_tokens
        self._of_window = of_window
        self._tables = np.zeros((max_sequences, -(-context_tokens // block_tokens)), dtype=np.int32)
        self._filled = [0] * max_sequences
        self._free = list(range(max_sequences))
        self._row_by_sequence: dict[int, int] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._row_by_sequence

    def take(self, sequence: Sequence) -> None:
        """Assigns a row to a sequence that was just admitted."""
        self._row_by_sequence[sequence.key] = self._free.pop()

    def release(self, sequence: Sequence) -> None:
        """Frees the row of a sequence that lost its blocks; a sequence without a row is ignored."""
        lane = self._row_by_sequence.pop(sequence.key, None)
        if lane is not None:
            self._filled[lane] = 0
            self._free.append(lane)

    def blocks(self, sequence: Sequence) -> list[int]:
        """Returns a sequence's blocks, by position."""
        table = sequence.table
        return table.window.blocks if self._of_window and table.window is not None else table.blocks

    def tables(self, chunks: Items[Chunk]) -> NDArray[np.int32]:
        """Returns the chunks' block tables, ``[chunks, most blocks]``; unused ends are undefined."""
        lanes = [self._fresh_row(chunk.sequence) for chunk in chunks]
        widest = max((len(self.blocks(chunk.sequence)) for chunk in chunks), default=1)
        return self._tables[lanes, :widest]

    def _fresh_row(self, sequence: Sequence) -> int:
        lane = self._row_by_sequence[sequence.key]
        blocks = self.blocks(sequence)
        filled = self._filled[lane]
        if filled < len(blocks):
            self._tables[lane, filled : len(blocks)] = blocks[filled:]
            self._filled[lane] = len(blocks)
        return lane
