"""KV cache in the layout of GPU kernels: whole tokens side by side, for keys and values alike."""

import torch
from torch import Tensor

from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache


class TokenMajorCache(KVCache):
    """KV cache with keys and values, each ``[layers, blocks, block_tokens, kv_heads, head_dim]``.

    FlashInfer calls this layout NHD, and torch's `varlen_attn` takes it with a block table. A token of a layer is one
    piece of memory, so a step writes whole pieces.
    """

    def _sides(self, config: ModelConfig, block_tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        side = (block_tokens, config.kv_heads, config.head_dim)
        return side, side

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores one layer's keys and values at their slots, as `KVCache.write`."""
        for entries, rows in ((self.keys, keys), (self.values, values)):
            entries[layer].flatten(0, 1).index_copy_(0, slots, rows.to(entries.dtype))

    def gather(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Reads whole sequences of one layer, as `KVCache.gather`."""
        return self.keys[layer][tables].flatten(1, 2), self.values[layer][tables].flatten(1, 2)


def make_cache(
    config: ModelConfig,
    num_blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    accelerated: bool,
    window_blocks: int = 0,
) -> KVCache:
    """Makes a KV cache in the layout of the device's kernels.

    On an accelerator the cache has one additional block, unknown to the scheduler: the rows that pad a batch write
    there.
    """
    if not accelerated:
        return KVCache(config, num_blocks, block_tokens, dtype, device=device, window_blocks=window_blocks)
    return TokenMajorCache(config, num_blocks=num_blocks + 1, block_tokens=block_tokens, dtype=dtype, device=device)
