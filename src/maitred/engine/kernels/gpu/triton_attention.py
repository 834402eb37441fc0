"""Attention backend in our own Triton kernels; prompts without context use torch's `varlen_attn` where possible."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maitred.engine.kernels.gpu.tiles import Tiles, chunk_tiles, decode_tiles
from maitred.engine.kernels.gpu.triton_kernels import attend_tile, combine, rotate_and_store
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary import RotaryTables

_LEAST_SIDE = 16
"""Smallest side of a matrix that Triton multiplies."""
_TILE_PLACES = 64
"""Queries that a program computes together: rows times the query heads of a group."""
_STRIDE_TOKENS = 64
_MOST_SPLITS = 32
_LEAST_SPLIT_TOKENS = 256
_VARLEN_HEAD_DIM = 256
_VARLEN_CAPABILITY = (8, 0)
_FACTORS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_LOG2_E = 1.4426950408889634


class FreshPrompts(NamedTuple):
    """Prompts that begin in this step, so that they attend only to the step's own keys and values."""

    rows: Tensor
    """int64 ``[N]``: rows of the step."""
    edges: Tensor
    """int32 ``[prompts + 1]``: start of each prompt in `rows`, and the end of the last one."""
    longest: int


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """Plan of a step for `TritonAttention`."""

    positions: Tensor
    slots: Tensor
    decodes: Tiles | None
    splits: int
    chunks: Tiles | None
    fresh: FreshPrompts | None


class TritonAttention:
    """Paged attention for fp32 and 16-bit floats, over a `TokenMajorCache`.

    A plan of decodes alone is made of tensors on the device, so steps of decodes can be captured in a graph.

    Args:
        config: Shape of the model.
        device: Device of the model. A CPU is possible with Triton's interpreter (``TRITON_INTERPRET=1``).
        dtype: Type of the activations.
    """

    graphable = True

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._device = device
        self._dtype = dtype
        self._rotary = RotaryTables(config, device)
        self._dim = max(_LEAST_SIDE, triton.next_power_of_2(config.head_dim))
        # Triton's interpreter multiplies the bits of bf16 as integers.
        self._factor = _FACTORS[torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype]
        # The size of a split depends on the model alone: the sums of a row must not depend on its neighbours.
        shortest = -(-config.context_tokens // _MOST_SPLITS)
        self._split_tokens = max(_LEAST_SPLIT_TOKENS, triton.next_power_of_2(shortest))
        self._decode_places = max(_LEAST_SIDE, triton.next_power_of_2(config.group_size))
        self._tile_rows = max(1, _TILE_PLACES // config.group_size)
        self._varlen_attn = _find_varlen_attn(config, device, dtype)

    def plan(self, batch: ForwardBatch, cache: KVCache) -> TritonPlan:
        """Cuts the step into tiles of decodes, tiles of chunks, and fresh prompts."""
        fresh = [chunk for chunk in batch.chunks if not chunk.context_before] if self._varlen_attn is not None else []
        others = [chunk for chunk in batch.chunks if chunk.context_before] if fresh else batch.chunks
        reach = batch.decode_tables.shape[1] * cache.block_tokens if batch.num_decodes else 0
        return TritonPlan(
            positions=batch.positions,
            slots=batch.slots,
            decodes=decode_tiles(batch) if batch.num_decodes else None,
            splits=-(-reach // self._split_tokens),
            chunks=chunk_tiles(others, self._tile_rows, self._device) if others else None,
            fresh=self._fresh(fresh) if fresh else None,
        )

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: TritonPlan) -> Tensor:
        """Rotates and stores all rows, then attends; the context of decodes is computed in splits."""
        config = self._config
        self._store(layer, qkv, cache, plan)
        attended = qkv.new_empty(len(qkv), config.heads * config.head_dim)
        if plan.decodes is not None:
            self._attend(qkv, cache, layer, plan.decodes, attended, self._decode_places, plan.splits)
        if plan.chunks is not None:
            places = max(_LEAST_SIDE, triton.next_power_of_2(self._tile_rows * config.group_size))
            self._attend(qkv, cache, layer, plan.chunks, attended, places, 1)
        if plan.fresh is not None:
            self._attend_fresh(layer, qkv, plan.fresh, attended)
        return attended

    def _store(self, layer: int, qkv: Tensor, cache: KVCache, plan: TritonPlan) -> None:
        config = self._config
        rotate_and_store[(len(qkv),)](
            *(
                qkv,
                self._rotary.of(layer),
                plan.positions,
                plan.slots,
                cache.keys[layer],
                cache.values[layer],
                qkv.stride(0),
            ),
            HEADS=config.heads,
            KV_HEADS=config.kv_heads,
            PADDED_HEADS=triton.next_power_of_2(config.heads + config.kv_heads),
            PADDED_KV_HEADS=triton.next_power_of_2(config.kv_heads),
            HEAD_DIM=config.head_dim,
            PADDED_HALF=triton.next_power_of_2(config.head_dim // 2),
        )

    def _attend_fresh(self, layer: int, qkv: Tensor, fresh: FreshPrompts, attended: Tensor) -> None:
        assert self._varlen_attn is not None
        config = self._config
        own = qkv[fresh.rows].view(len(fresh.rows), -1, config.head_dim)
        queries, keys, values = own.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        edges, longest = fresh.edges, fresh.longest
        result = self._varlen_attn(
            *(queries, keys, values, edges, edges, longest, longest),
            scale=config.scale,
            window_size=(config.window_of(layer) - 1, 0),
            enable_gqa=True,
        )
        assert isinstance(result, Tensor)
        attended[fresh.rows] = result.flatten(1)

    def _attend(
        self, qkv: Tensor, cache: KVCache, layer: int, tiles: Tiles, attended: Tensor, places: int, splits: int
    ) -> None:
        config, count = self._config, len(tiles.fields)
        several = splits > 1
        sums = attended.new_empty((count, config.heads, splits, config.head_dim) if several else 0, dtype=torch.float32)
        extremes = attended.new_empty((count, config.heads, splits, 2) if several else 0, dtype=torch.float32)
        attend_tile[(count, config.kv_heads, splits)](
            *(qkv, cache.keys[layer], cache.values[layer], tiles.tables, tiles.fields, attended, sums, extremes),
            *(qkv.stride(0), tiles.tables.stride(0), config.scale * _LOG2_E),
            KV_HEADS=config.kv_heads,
            GROUP=config.group_size,
            HEAD_DIM=config.head_dim,
            PADDED_DIM=self._dim,
            PADDED_ROWS=places,
            BLOCK_TOKENS=cache.block_tokens,
            STRIDE_TOKENS=_STRIDE_TOKENS,
            SPLIT_TOKENS=self._split_tokens if several else 1 << 30,
            SPLITS=splits,
            FACTOR=self._factor,
            WINDOW=config.window_of(layer),
            CAP=config.score_cap * _LOG2_E,
        )
        if several:
            combine[(count, config.heads)](
                *(sums, extremes, tiles.fields, attended),
                HEADS=config.heads,
                HEAD_DIM=config.head_dim,
                PADDED_DIM=self._dim,
                SPLIT_TOKENS=self._split_tokens,
                SPLITS=splits,
                WINDOW=config.window_of(layer),
            )

    def _fresh(self, chunks: list[BatchChunk]) -> FreshPrompts:
        rows = torch.cat([torch.arange(chunk.start_row, chunk.end_row) for chunk in chunks])
        lengths = torch.tensor([0, *(chunk.length for chunk in chunks)], dtype=torch.int32)
        edges = lengths.cumsum(0, dtype=torch.int32)
        return FreshPrompts(rows.to(self._device), edges.to(self._device), max(chunk.length for chunk in chunks))


def _find_varlen_attn(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Callable[..., Tensor | tuple[Tensor, ...]] | None:
    """Returns torch's `varlen_attn` if it supports this model on this device."""
    if (
        device.type != "cuda"
        or config.score_cap
        or dtype != torch.bfloat16
        or config.head_dim % 8
        or config.head_dim > _VARLEN_HEAD_DIM
        or torch.cuda.get_device_capability(device) < _VARLEN_CAPABILITY
    ):
        return None
    # Only here: it imports torch's compiler, which takes a second.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
