"""Keys and values of all tokens that live, in fixed-size blocks that the scheduler hands out.

One tensor for keys and one for values, ``[layers, blocks, kv_heads, block_tokens, head_dim]``: within a block, one
head's tokens lie side by side, so that a decode streams through memory, and a block of a layer is one piece, so that
a prefill gathers whole blocks.
"""

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
        shape = (config.layers, num_blocks, config.kv_heads, block_tokens, config.head_dim)
        # Zeros, not whatever was there: a masked-out key weighs nothing, but 0 * NaN would still be NaN.
        self.keys: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.values: Tensor = torch.zeros(shape, dtype=dtype, device=device)

    @classmethod
    def bytes_per_block(cls, config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> int:
        """Memory of one block over all layers, keys and values together."""
        return 2 * config.layers * config.kv_heads * config.head_dim * block_tokens * dtype.itemsize

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores one layer's keys and values ``[T, kv_heads, head_dim]`` at their slots."""
        blocks, offsets = slots // self.block_tokens, slots % self.block_tokens
        self.keys[layer][blocks, :, offsets] = keys.to(self.keys.dtype)
        self.values[layer][blocks, :, offsets] = values.to(self.values.dtype)
