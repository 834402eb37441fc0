"""How far a draft model has read each sequence, and which blocks hold what it has read.

The draft model keeps its keys and values under the block numbers of the model that it drafts for: a sequence has one
block table, and each block is there twice. So the draft model needs no pool, and nobody has to preempt, free or evict
on its behalf. What it needs to know instead is what is in its half of a block, for it reads only what it drafts for: a
block that the model has found in the prefix cache may never have been read, or has been, for another sequence. So the
key of what was read into it is kept of each block that was read to the end. Keys are chained, so an equal key means
equal text from the first token on.
"""

from maitred.engine.scheduler.sequence import Sequence


class DraftModelPosition:
    """Positions of the draft model in all sequences.

    Args:
        block_tokens: Tokens per block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._read: dict[int, int] = {}
        """By sequence: so many leading tokens of it."""
        self._ahead: dict[int, list[int]] = {}
        """By sequence: drafts that were read behind them."""
        self._content: dict[int, bytes] = {}
        """By block: the key of what was read into it, from its first token to its last."""

    def position(self, sequence: Sequence) -> int:
        """How many leading tokens are read; all but one at most, for of the last one it is asked what follows."""
        tokens = sequence.tokens
        read = self._read.get(sequence.key)
        if read is None:
            read = self._shared_tokens(sequence)
        for token in self._ahead.pop(sequence.key, ()):
            if read >= len(tokens) or tokens[read] != token:
                break
            read += 1
        read = min(read, len(tokens) - 1)
        self._read[sequence.key] = read
        return read

    def begin(self, sequence: Sequence, start: int, end: int) -> None:
        """Positions are about to be written: what was in their blocks is not there any more."""
        for block in sequence.table.blocks[start // self._block_tokens : -(-end // self._block_tokens)]:
            self._content.pop(block, None)

    def done(self, sequence: Sequence, end: int, ahead: list[int]) -> None:
        """Notes that so many tokens of a sequence are read, and drafts behind them."""
        before = self._read[sequence.key] // self._block_tokens
        full = end // self._block_tokens
        if full > before:
            keys = sequence.table.keys(sequence.tokens, full)
            self._content |= zip(sequence.table.blocks[before:full], keys[before:full], strict=True)
        self._read[sequence.key] = end
        if ahead:
            self._ahead[sequence.key] = ahead

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that lost its blocks; what is in them may serve another, or itself."""
        self._read.pop(sequence.key, None)
        self._ahead.pop(sequence.key, None)

    def clear(self) -> None:
        """Nothing is read of anything any more."""
        self._read.clear()
        self._ahead.clear()
        self._content.clear()

    def _shared_tokens(self, sequence: Sequence) -> int:
        """Tokens at its beginning that were read for others, or before it was preempted; all but one at most."""
        blocks = (len(sequence.tokens) - 1) // self._block_tokens
        found = 0
        for block, key in zip(sequence.table.blocks, sequence.table.keys(sequence.tokens, blocks), strict=False):
            if self._content.get(block) != key:
                break
            found += 1
        return found * self._block_tokens
