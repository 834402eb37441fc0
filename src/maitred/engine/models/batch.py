"""Batch of one step: the tokens of all sequences side by side, and the KV slot of each token.

Rows are tokens, decodes first::

    row      0   1   2 | 3   4   5   6 | 7   8  …
             decode ×3 | chunk 0       | chunk 1      (each chunk: consecutive tokens of one sequence)

The KV of every row is written, layer by layer, before any row of that layer attends. So a chunk may use blocks that
another chunk of the same step fills. In this way requests that arrive together share a prefix.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """Consecutive prompt tokens of one sequence in a step."""

    start_row: int
    length: int
    context_before: int
    """Tokens of the sequence whose KV is in the cache already, or is written by another chunk of the step."""
    block_table: list[int]
    """Blocks of the sequence, in order of position; at least as many as its tokens need."""

    @property
    def end_row(self) -> int:
        """Index of the row after the last one."""
        return self.start_row + self.length

    @property
    def context(self) -> int:
        """Number of tokens that the last row attends to: all before it, and itself."""
        return self.context_before + self.length


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """Places of a step's tokens in the blocks of the layers with a window, where these have blocks of their own.

    Positions are those of `ForwardBatch`; entries of blocks outside the window are any valid block.
    """

    slots: Tensor
    """int64 ``[T]``"""
    decode_tables: Tensor
    """int32 ``[D, max_blocks]``"""
    chunk_tables: list[list[int]]
    """Block table of each chunk."""


_PIECE_BYTES, _DEVICE_PIECE_BYTES = 32 << 20, 128 << 20
"""Memory of the logits that are computed together for `ScoredRows`, on a CPU and on an accelerator: enough rows for a
fast product, which on an accelerator are more."""


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows whose logits are read a piece at a time, because those of a whole prompt would fill the memory."""

    rows: Tensor
    """int64 ``[S]``"""
    read: Callable[[Tensor], None]
    """Gets the logits, fp32 ``[piece, vocab_size]``, in the order of the rows; the next piece reuses the memory."""

    def pieces(self, vocab_size: int) -> Iterator[slice]:
        """Returns the pieces of the rows, so that the logits of each take little memory."""
        piece_bytes = _PIECE_BYTES if self.rows.device.type == "cpu" else _DEVICE_PIECE_BYTES
        step = max(1, piece_bytes // (4 * vocab_size))
        return (slice(start, start + step) for start in range(0, len(self.rows), step))


@dataclass(slots=True)
class ForwardBatch:
    """Batch of one step with ``T`` tokens: ``D`` decodes and any number of chunks."""

    token_ids: Tensor
    """int64 ``[T]``"""
    positions: Tensor
    """int64 ``[T]``"""
    slots: Tensor
    """int64 ``[T]``: slot of each token's KV, ``block * block_tokens + offset``."""
    logit_rows: Tensor
    """int64 ``[R]``: rows whose logits are computed."""
    num_decodes: int = 0
    decode_tables: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int32))
    """int32 ``[D, max_blocks]``, rows padded with any valid block."""
    decode_lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    """int32 ``[D]``: tokens to attend to, the new one included."""
    chunks: list[BatchChunk] = field(default_factory=list)
    greedy: bool = False
    """Whether only the largest logit of each row is needed; then others may be minus infinity."""
    window: WindowBlocks | None = None
    """Blocks of the layers with a window; None: they use the same as all layers."""
    scored: ScoredRows | None = None
    """Further rows whose logits are read while the step is computed."""

    def to(self, device: torch.device) -> "ForwardBatch":
        """Returns the batch with its tensors on a device; the lists of its chunks stay on the host."""
        if self.token_ids.device.type == device.type:
            return self
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            logit_rows=self.logit_rows.to(device),
            decode_tables=self.decode_tables.to(device),
            decode_lengths=self.decode_lengths.to(device),
            scored=None if self.scored is None else replace(self.scored, rows=self.scored.rows.to(device)),
        )

    def without_chunks(self) -> "ForwardBatch":
        """Returns the batch with its decodes alone; the tensors of the rows keep their length."""
        return replace(self, chunks=[])
