"""Keys and values of all tokens that live, in fixed-size blocks that the scheduler hands out.

One tensor for values, ``[layers, blocks, kv_heads, block_tokens, head_dim]``, and one for keys whose last two sides are
swapped: a decode then computes the scores of a whole block's tokens at once, one per SIMD lane, and never sums across
lanes. A block of a layer is one piece of memory, so a prefill gathers whole blocks.
"""

import numpy as np
import torch
from torch import Tensor

from maitred.engine.models.config import ModelConfig


class KVCache:
    """Room for ``num_blocks * block_tokens`` tokens.

    Args:
        config: Shape of the model.
        num_blocks: Blocks to hold.
        block_tokens: Tokens per block.
        dtype: Type of the entries.
        device: Where they live.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        shape = (config.layers, num_blocks, config.kv_heads)
        # Zeros, not whatever was there: a masked-out value weighs nothing, but 0 * NaN would still be NaN.
        self.keys: Tensor = _zeros((*shape, config.head_dim, block_tokens), dtype, device)
        self.values: Tensor = _zeros((*shape, block_tokens, config.head_dim), dtype, device)

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
        """Memory of one block over all layers, keys and values together."""
        return 2 * config.layers * config.kv_heads * config.head_dim * block_tokens * dtype.itemsize

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores one layer's keys and values ``[T, kv_heads, head_dim]`` at their slots."""
        blocks, offsets = slots // self.block_tokens, slots % self.block_tokens
        self.keys[layer][blocks, :, :, offsets] = keys.to(self.keys.dtype)
        self.values[layer][blocks, :, offsets] = values.to(self.values.dtype)

    def gather(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Reads whole sequences: tables int64 ``[B, n]`` -> ``[B, n * block_tokens, kv_heads, head_dim]``, twice."""
        keys, values = self.keys[layer][tables], self.values[layer][tables]
        return keys.permute(0, 1, 4, 2, 3).flatten(1, 2), values.transpose(2, 3).flatten(1, 2)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros; on a CPU in memory that is handed out when it is first written, so that a cache costs what is used."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page. NumPy, which knows no bf16, asks the system for pages that are zero already.
    words = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, words)).view(dtype)
