"""The KV cache as kernels of GPUs read it: whole tokens side by side, keys and values alike."""

import torch
from torch import Tensor

from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache


class TokenMajorCache(KVCache):
    """Keys and values, each ``[layers, blocks, block_tokens, kv_heads, head_dim]``.

    It is the layout that FlashInfer calls NHD and that torch's `varlen_attn` takes with a block table. A token of a
    layer is one piece of memory, so what a step writes is written in whole pieces.
    """

    def _sides(self, config: ModelConfig, block_tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        side = (block_tokens, config.kv_heads, config.head_dim)
        return side, side

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """See `KVCache`."""
        for entries, rows in ((self.keys, keys), (self.values, values)):
            entries[layer].flatten(0, 1).index_copy_(0, slots, rows.to(entries.dtype))

    def gather(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """See `KVCache`."""
        return self.keys[layer][tables].flatten(1, 2), self.values[layer][tables].flatten(1, 2)


def make_cache(
    config: ModelConfig,
    num_blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    accelerated: bool,
) -> KVCache:
    """A cache laid out as the kernels of the target read it.

    On an accelerator it has one block more, which the scheduler never hears of: the rows that pad a batch write there.
    """
    if not accelerated:
        return KVCache(config, num_blocks, block_tokens, dtype, device)
    return TokenMajorCache(config, num_blocks + 1, block_tokens, dtype, device)
