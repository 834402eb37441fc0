"""KV cache: keys and values of all live tokens, in fixed-size blocks that the scheduler allocates.

There is one tensor for values, ``[layers, blocks, kv_heads, block_tokens, head_dim]``, and one for keys whose last two
dimensions are swapped. So a decode computes the scores of all tokens of a block together, one per SIMD lane, and never
sums across lanes. A block of a layer is one piece of memory, so a prefill gathers whole blocks.

In int8, the key and the value of every token and head have a scale of their own, fp32 ``[layers, blocks, kv_heads,
block_tokens]``: the scales of a block are vectors beside it. With one scale per block, the scale would have to grow
while tokens arrive, and the stored values of a token would depend on when the others came. With its own scale, they
depend on the token alone.
"""

import msgspec
import numpy as np
import torch
from torch import Tensor

from maitred.engine.models.config import ModelConfig

_SCALE_BYTES = 4


class KVCache:
    """Memory for the keys and values of ``num_blocks * block_tokens`` tokens.

    Args:
        config: Shape of the model.
        num_blocks: Number of blocks.
        block_tokens: Tokens per block.
        dtype: Type of the entries: fp32, bf16 or int8.
        device: Device of the cache.
        window_blocks: Number of blocks for the layers with a window, which then have a cache of their own with blocks
            of their own (`maitred.engine.kv.window`); 0: these layers use the same blocks as all others.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        window_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.window: KVCache | None = None
        """Cache of the layers with a window; None: this cache has all layers."""
        layers = config.layers
        if window_blocks:
            local = [layer for layer in range(layers) if config.window_of(layer)]
            of_local = msgspec.structs.replace(config, layers=len(local), windows=(), unrotated=())
            self.window = KVCache(of_local, window_blocks, block_tokens, dtype=dtype, device=device)
            whole = [layer for layer in range(layers) if not config.window_of(layer)]
            self._row_of = {layer: row for part in (local, whole) for row, layer in enumerate(part)}
            self._local = frozenset(local)
            layers = len(whole)
        keys, values = self._sides(config, block_tokens)
        # Zeros, not uninitialised memory: a masked value has the weight 0, but 0 * NaN would still be NaN.
        self.keys: Tensor = _zeros((layers, num_blocks, *keys), dtype, device)
        self.values: Tensor = _zeros((layers, num_blocks, *values), dtype, device)
        self.rounded = dtype == torch.int8
        scales = (layers, num_blocks, config.kv_heads, block_tokens if self.rounded else 0)
        self.key_scales: Tensor = _zeros(scales, torch.float32, device)
        self.value_scales: Tensor = _zeros(scales, torch.float32, device)

    def _sides(self, config: ModelConfig, block_tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Returns the shape of a block of one layer: of its keys, and of its values."""
        kv_heads, head_dim = config.kv_heads, config.head_dim
        return (kv_heads, head_dim, block_tokens), (kv_heads, block_tokens, head_dim)

    @property
    def parts(self) -> list[Tensor]:
        """Tensors that consist of blocks, each ``[layers, blocks, …]``."""
        return [self.keys, self.values, *([self.key_scales, self.value_scales] if self.rounded else [])]

    def of(self, layer: int) -> "tuple[KVCache, int]":
        """Returns the cache that has a layer, and the layer's index in it."""
        if self.window is None:
            return self, layer
        return self.window if layer in self._local else self, self._row_of[layer]

    @classmethod
    def bytes_per_block(
        cls, config: ModelConfig, block_tokens: int, dtype: torch.dtype, *, layers: int | None = None
    ) -> int:
        """Returns the memory of one block, keys and values together, over so many layers; None: all of them."""
        head_bytes = config.head_dim * dtype.itemsize + (_SCALE_BYTES if dtype == torch.int8 else 0)
        return 2 * (config.layers if layers is None else layers) * config.kv_heads * head_bytes * block_tokens

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores one layer's keys and values ``[T, kv_heads, head_dim]`` at their slots."""
        own, row = self.of(layer)
        if own is not self:
            own.write(row, keys, values, slots)
            return
        layer = row
        blocks, offsets = slots // self.block_tokens, slots % self.block_tokens
        if self.rounded:
            keys, self.key_scales[layer][blocks, :, offsets] = _quantise(keys)
            values, self.value_scales[layer][blocks, :, offsets] = _quantise(values)
        self.keys[layer][blocks, :, :, offsets] = keys.to(self.keys.dtype)
        self.values[layer][blocks, :, offsets] = values.to(self.values.dtype)

    def touch(self, layers: int, blocks: int) -> None:
        """Writes zeros into the first blocks of the first layers, so that the system allocates their memory.

        The system maps all pages that were never written to one page of zeros. Reading that page takes less time than
        reading a used cache.
        """
        for part in self.parts:
            part[:layers, :blocks].zero_()
        if self.window is not None:
            self.window.touch(layers, blocks)

    def gather(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Reads whole sequences: tables int64 ``[B, n]`` -> ``[B, n * block_tokens, kv_heads, head_dim]``, twice."""
        own, row = self.of(layer)
        if own is not self:
            return own.gather(row, tables)
        layer = row
        keys, values = self.keys[layer][tables], self.values[layer][tables]
        if self.rounded:
            keys = keys * self.key_scales[layer][tables][..., None, :]
            values = values * self.value_scales[layer][tables][..., None]
        return keys.permute(0, 1, 4, 2, 3).flatten(1, 2), values.transpose(2, 3).flatten(1, 2)


def _quantise(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises ``[T, kv_heads, head_dim]`` to integers up to 127, with scales ``[T, kv_heads]``."""
    highest = heads.abs().amax(dim=2).float()
    return (heads.float() * (127 / highest.clamp(min=1e-30))[..., None]).round(), highest / 127


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Allocates zeros; on a CPU, the system provides the memory when it is first written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page. NumPy, which knows no bf16, asks the system for pages that are zero already.
    words = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(shape, words)).view(dtype)
