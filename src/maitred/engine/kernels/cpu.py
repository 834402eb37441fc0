"""Attention on a CPU: one Numba kernel for all rows of a step, decodes and chunks alike."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from maitred.engine.kernels.paged import (
    RUN_FIELDS,
    Array,
    Kernel,
    attention_kernel,
    rotate_and_round,
    rotate_and_store,
    rows_together,
)
from maitred.engine.kernels.team import Team
from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary import rotary_table, rotate

_WORTH_A_THREAD = 1 << 20
"""Multiply-adds below which handing a share to another thread costs more than it saves."""
_ROWS_WORTH_A_THREAD = 32
"""The same for rows that are rotated and stored."""
_RUN_ROWS = 32
"""A chunk is cut into runs of so many rows, which threads can share out evenly."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """What one thread writes while it computes."""

    packed: Array
    scores: Array
    sums: Array


@dataclass(frozen=True, slots=True)
class CPUPlan:
    """What every layer of a step needs."""

    batch: ForwardBatch
    positions: Array
    slots: Array
    tables: Array
    """Of the decodes, then of the chunks."""
    runs: Array
    keys: Array
    values: Array
    """The whole cache; bf16 as the bits that it is."""
    key_scales: Array
    value_scales: Array
    """Of a cache of int8; otherwise empty."""
    kernel: Kernel
    shares: list[tuple[int, int]]
    """Runs ``first … last - 1`` for each thread."""
    scratch: list[Scratch]


class CPUAttention:
    """The backend for processors.

    Args:
        config: Shape of the model.
        threads: How many share the rows of a step; torch's own number unless given.
    """

    def __init__(self, config: ModelConfig, threads: int | None = None) -> None:
        self._config = config
        self._table = rotary_table(config)
        self._threads = threads or torch.get_num_threads()
        self._team = Team()

    def plan(self, batch: ForwardBatch, cache: KVCache) -> CPUPlan:
        """Cuts the step into runs of rows and shares them out among threads."""
        config = self._config
        tables, runs = _tables(batch), _runs(batch)
        shares = self._shares(runs)
        rows = rows_together(config.group_size) * config.heads
        return CPUPlan(
            batch=batch,
            positions=batch.positions.numpy(),
            slots=batch.slots.numpy(),
            tables=tables,
            runs=runs,
            keys=_array(cache.keys),
            values=_array(cache.values),
            key_scales=cache.key_scales.numpy(),
            value_scales=cache.value_scales.numpy(),
            kernel=attention_kernel(config.head_dim, cache.block_tokens, config.group_size, scaled=cache.rounded),
            shares=shares,
            scratch=[
                Scratch(
                    packed=np.empty(rows * config.head_dim, np.float32),
                    scores=np.empty((rows, tables.shape[1] * cache.block_tokens), np.float32),
                    sums=np.empty(rows * config.head_dim, np.float32),
                )
                for _ in shares
            ],
        )

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: CPUPlan) -> Tensor:
        """Rotates and stores all rows, then computes them."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        queries, keys, values = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        if qkv.dtype == torch.float32:
            self._store(layer, heads.numpy(), cache, plan)
        else:
            angles = self._table[plan.batch.positions]
            queries, keys = rotate(queries, angles), rotate(keys, angles)
            cache.write(layer, keys, values, plan.batch.slots)
        return self._attend(queries.float().flatten(), layer, cache, plan).to(qkv.dtype).view(len(qkv), -1)

    def _store(self, layer: int, heads: Array, cache: KVCache, plan: CPUPlan) -> None:
        """Rotates queries and keys in place and writes keys and values, every thread those of its rows."""
        table, last = self._table.numpy(), (layer, self._config.heads)
        kernel = rotate_and_round if cache.rounded else rotate_and_store
        scales = (plan.key_scales, plan.value_scales) if cache.rounded else ()
        threads = max(1, min(self._threads, len(heads) // _ROWS_WORTH_A_THREAD))
        edges = [len(heads) * part // threads for part in range(threads + 1)]
        self._team.run(
            [
                partial(
                    kernel,
                    *(heads[first:end], table, plan.positions[first:end], plan.slots[first:end]),
                    *(plan.keys, plan.values, *scales, *last),
                )
                for first, end in pairwise(edges)
            ]
        )

    def _attend(self, queries: Tensor, layer: int, cache: KVCache, plan: CPUPlan) -> Tensor:
        """Flat fp32, like the queries."""
        attended = torch.empty_like(queries)
        arrays = (
            queries.numpy(),
            plan.keys.reshape(-1),
            plan.values.reshape(-1),
            plan.key_scales.reshape(-1),
            plan.value_scales.reshape(-1),
            plan.tables,
            plan.runs,
            attended.numpy(),
        )
        first_block = layer * cache.num_blocks
        work = [
            (*arrays, scratch.packed, scratch.scores, scratch.sums, self._config.kv_heads, first_block, first, last)
            for (first, last), scratch in zip(plan.shares, plan.scratch, strict=True)
        ]
        self._team.run([partial(plan.kernel, *share) for share in work])
        return attended

    def _shares(self, runs: Array) -> list[tuple[int, int]]:
        """Consecutive runs with about equally many tokens to attend to."""
        rows, length = runs[:, 2], runs[:, 3]
        ends = np.cumsum(rows * length + rows * (rows - 1) // 2)
        cost = int(ends[-1]) * self._config.heads * self._config.head_dim * 2
        threads = max(1, min(self._threads, len(runs), cost // _WORTH_A_THREAD))
        marks = [int(np.searchsorted(ends, ends[-1] * part / threads)) + 1 for part in range(1, threads)]
        edges = [0, *marks, len(runs)]
        return [(first, last) for first, last in pairwise(edges) if last > first]


def _tables(batch: ForwardBatch) -> Array:
    """The block tables of the decodes, then of the chunks, int32 ``[D + chunks, most blocks]``."""
    # Numba compiles anew for every memory order that it meets, and that must not happen in a request.
    of_decodes: Array = batch.decode_tables.contiguous().numpy()
    if not batch.chunks:
        return of_decodes
    decodes, width = of_decodes.shape
    width = max(width, *(len(chunk.block_table) for chunk in batch.chunks))
    tables = np.zeros((decodes + len(batch.chunks), width), np.int32)
    tables[:decodes, : of_decodes.shape[1]] = of_decodes
    for row, chunk in enumerate(batch.chunks, decodes):
        tables[row, : len(chunk.block_table)] = chunk.block_table
    return tables


def _runs(batch: ForwardBatch) -> Array:
    """All rows of the step, decodes first; see `RUN_FIELDS`."""
    decodes = batch.num_decodes
    of_chunks = [
        (table, chunk.start_row + start, min(_RUN_ROWS, chunk.length - start), chunk.context_before + start + 1)
        for table, chunk in enumerate(batch.chunks, decodes)
        for start in range(0, chunk.length, _RUN_ROWS)
    ]
    runs = np.empty((decodes + len(of_chunks), RUN_FIELDS), np.int64)
    runs[:decodes, 0] = runs[:decodes, 1] = np.arange(decodes)
    runs[:decodes, 2] = 1
    runs[:decodes, 3] = batch.decode_lengths.numpy()
    if of_chunks:
        runs[decodes:] = of_chunks
    return runs


def _array(tensor: Tensor) -> Array:
    """The same memory for Numba, which knows no bf16."""
    array: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
