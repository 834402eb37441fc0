"""Attention on a CPU: a Numba kernel for all decodes of a step, torch's fused kernel for the chunks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from maitred.engine.kernels.paged import Array, Kernel, decode_kernel, rotate_and_store
from maitred.engine.kernels.prefill import Bucket, plan_buckets
from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary import rotary_table, rotate

_WORTH_A_THREAD = 1 << 20
"""Multiply-adds below which handing a share to another thread costs more than it saves."""


@dataclass(frozen=True, slots=True)
class CPUPlan:
    """What every layer of a step needs."""

    batch: ForwardBatch
    positions: Array
    slots: Array
    tables: Array
    lengths: Array
    keys: Array
    values: Array
    """The whole cache; bf16 as the bits that it is."""
    kernel: Kernel
    shares: list[tuple[int, int]]
    """Decodes ``first … last - 1`` for each thread."""
    scores: list[Array]
    """Scratch of each thread."""
    buckets: list[Bucket]


class CPUAttention:
    """The backend for processors.

    Args:
        config: Shape of the model.
        threads: How many share the decodes of a step; torch's own number unless given.
    """

    def __init__(self, config: ModelConfig, threads: int | None = None) -> None:
        self._config = config
        self._table = rotary_table(config)
        self._threads = threads or torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads - 1, "decode-attention") if self._threads > 1 else None

    def plan(self, batch: ForwardBatch, cache: KVCache) -> CPUPlan:
        """Shares the decodes out among threads and sorts the chunks into buckets."""
        lengths = batch.decode_lengths.numpy()
        shares = self._shares(lengths)
        width = batch.decode_tables.shape[1] * cache.block_tokens
        return CPUPlan(
            batch=batch,
            positions=batch.positions.numpy(),
            slots=batch.slots.numpy(),
            # Numba compiles anew for every memory order that it meets, and that must not happen in a request.
            tables=batch.decode_tables.contiguous().numpy(),
            lengths=lengths,
            keys=_array(cache.keys),
            values=_array(cache.values),
            kernel=decode_kernel(self._config.head_dim, cache.block_tokens, self._config.group_size),
            shares=shares,
            scores=[np.empty((self._config.heads, width), np.float32) for _ in shares],
            buckets=plan_buckets(batch.chunks, cache.block_tokens, cache.keys.dtype, torch.device("cpu")),
        )

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: CPUPlan) -> Tensor:
        """Rotates and stores all rows, then computes decodes and buckets."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        queries, keys, values = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        if qkv.dtype == torch.float32:
            table = self._table.numpy()
            rotate_and_store(
                heads.numpy(), table, plan.positions, plan.slots, plan.keys, plan.values, layer, config.heads
            )
        else:
            angles = self._table[plan.batch.positions]
            queries, keys = rotate(queries, angles), rotate(keys, angles)
            cache.write(layer, keys, values, plan.batch.slots)
        attended = torch.empty(queries.shape, dtype=qkv.dtype)
        if count := plan.batch.num_decodes:
            attended[:count] = self._decode(layer, queries[:count], cache, plan)
        for bucket in plan.buckets:
            bucket.attend(queries, keys, values, layer, cache, attended)
        return attended.flatten(1)

    def _decode(self, layer: int, queries: Tensor, cache: KVCache, plan: CPUPlan) -> Tensor:
        """``[D, heads, head_dim]`` fp32."""
        attended = torch.empty(queries.shape, dtype=torch.float32)
        arrays = (
            queries.float().flatten().numpy(),
            plan.keys.reshape(-1),
            plan.values.reshape(-1),
            plan.tables,
            plan.lengths,
            attended.view(-1).numpy(),
        )
        first_block = layer * cache.num_blocks
        work = [
            (*arrays, scores, self._config.kv_heads, first_block, first, last)
            for (first, last), scores in zip(plan.shares, plan.scores, strict=True)
        ]
        others = [self._pool.submit(plan.kernel, *share) for share in work[1:]] if self._pool else []
        plan.kernel(*work[0])
        for other in others:
            other.result()
        return attended

    def _shares(self, lengths: Array) -> list[tuple[int, int]]:
        """Runs of decodes with about equally many tokens to attend to."""
        count = len(lengths)
        if not count:
            return []
        ends = np.cumsum(lengths, dtype=np.int64)
        cost = int(ends[-1]) * self._config.heads * self._config.head_dim * 2
        threads = max(1, min(self._threads, count, cost // _WORTH_A_THREAD))
        marks = [int(np.searchsorted(ends, ends[-1] * part / threads)) + 1 for part in range(1, threads)]
        edges = [0, *marks, count]
        return [(first, last) for first, last in pairwise(edges) if last > first]


def _array(tensor: Tensor) -> Array:
    """The same memory for Numba, which knows no bf16."""
    array: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
