"""Read position of a draft model in each sequence, and the content of its KV blocks.

The draft model's KV cache uses the block numbers of the target model. A sequence has one block table, and each block
exists in both caches. So the draft model needs no block pool and no preemption or eviction of its own. Instead it
records the content of its blocks, because it reads only sequences that get drafts. A block that the target model found
in the prefix cache may be unread, or read for another sequence. So the key of the content is stored for each block that
was read completely. Keys are chained, so an equal key means equal text from the first token on.
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
        """Sequence key -> number of leading tokens that are read."""
        self._ahead: dict[int, list[int]] = {}
        """Sequence key -> drafts that were read behind these tokens."""
        self._content: dict[int, bytes] = {}
        """Block -> key of the content that was read into the whole block."""

    def position(self, sequence: Sequence) -> int:
        """Returns how many leading tokens are read; never the last one, whose logits are needed."""
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
        """Notes that positions will be written, so the old content of their blocks is lost."""
        for block in sequence.table.blocks[start // self._block_tokens : -(-end // self._block_tokens)]:
            self._content.pop(block, None)

    def done(self, sequence: Sequence, end: int, ahead: list[int]) -> None:
        """Notes that a sequence is read up to `end`, with the drafts behind it."""
        before = self._read[sequence.key] // self._block_tokens
        full = end // self._block_tokens
        if full > before:
            keys = sequence.table.keys(sequence.tokens, full)
            self._content |= zip(sequence.table.blocks[before:full], keys[before:full], strict=True)
        self._read[sequence.key] = end
        if ahead:
            self._ahead[sequence.key] = ahead

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that lost its blocks; their content stays usable for any sequence."""
        self._read.pop(sequence.key, None)
        self._ahead.pop(sequence.key, None)

    def clear(self) -> None:
        """Clears the positions and the block contents of all sequences."""
        self._read.clear()
        self._ahead.clear()
        self._content.clear()

    def _shared_tokens(self, sequence: Sequence) -> int:
        """Returns how many leading tokens were read for others or before a preemption, without the last."""
        blocks = (len(sequence.tokens) - 1) // self._block_tokens
        found = 0
        for block, key in zip(sequence.table.blocks, sequence.table.keys(sequence.tokens, blocks), strict=False):
            if self._content.get(block) != key:
                break
            found += 1
        return found * self._block_tokens
