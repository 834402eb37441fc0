"""Attention backend for CPUs: one compiled kernel for all rows of a step, decodes and chunks alike."""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from maitred.engine.kernels.job import BF16, FP32, INT8, CompiledEntry
from maitred.engine.kernels.paged import RUN_FIELDS, STEP_FIELDS, Array, attention, rotation, scratch_bytes
from maitred.engine.kernels.tape import Tape
from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary import rotary_table, rotate

_WORTH_A_THREAD = 1 << 20
"""Minimum multiply-adds of a thread's share; below it, waking the thread costs more than it saves."""
_ROWS_WORTH_A_THREAD = 32
"""Minimum rows of a thread's share when rows are rotated and stored."""
_RUN_ROWS = 32
"""Maximum rows of a run; chunks are cut into runs, which threads can share out evenly."""


_KINDS = {torch.float32: FP32, torch.bfloat16: BF16, torch.int8: INT8}
_Step = ctypes.c_int64 * len(STEP_FIELDS)
_PLACES = {name: STEP_FIELDS.index(name) for name in STEP_FIELDS}


@dataclass(frozen=True, slots=True)
class CPUPlan:
    """Memory that the step's fields point to; it lives as long as the step is computed."""

    batch: ForwardBatch
    tables: Array
    """Block tables of the decodes, then of the chunks."""
    runs: Array


class CPUAttention:
    """Attention backend for CPUs.

    Args:
        config: Shape of the model.
        threads: Number of threads that share the rows of a step; torch's own number unless given.
    """

    graphable = False

    def __init__(self, config: ModelConfig, threads: int | None = None) -> None:
        self.threads = threads or torch.get_num_threads()
        self._config = config
        self._table = rotary_table(config)
        self._step = _Step()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def plan(self, batch: ForwardBatch, cache: KVCache) -> CPUPlan:
        """Cuts the step into runs of rows, and stores their addresses in the step's fields."""
        config, step = self._config, self._step
        tables, runs = _tables(batch), _runs(batch)
        rows, length = runs[:, 2], runs[:, 3]
        own = scratch_bytes(config.head_dim, config.group_size, cache.block_tokens, tables.shape[1])
        if own * self.threads > len(self._scratch):
            self._scratch = torch.empty(2 * own * self.threads, dtype=torch.uint8)
        step[:] = [
            *(len(batch.positions), len(runs), int(rows @ length) + int(rows @ (rows - 1)) // 2),
            *(batch.positions.data_ptr(), batch.slots.data_ptr(), _address(tables), tables.shape[1]),
            *(_address(runs), self._scratch.data_ptr(), own),
        ]
        return CPUPlan(batch, tables, runs)

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: CPUPlan) -> Tensor:
        """Rotates and stores all rows, then attends; `plan` must be the latest plan of this backend."""
        config = self._config
        if qkv.dtype == torch.float32:
            queries = qkv
        else:
            heads = qkv.view(len(qkv), -1, config.head_dim)
            unturned, keys, values = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
            angles = self._table[plan.batch.positions]
            cache.write(layer, rotate(keys, angles), values, plan.batch.slots)
            queries = rotate(unturned, angles).float().flatten(1)
        attended = torch.empty(len(qkv), config.heads * config.head_dim)
        calls = self._calls(layer, queries.data_ptr(), queries.shape[1], attended.data_ptr(), cache)
        for entry, fields, counter, worth in calls if queries is qkv else calls[1:]:
            count = self._step[_PLACES[counter]]
            entry.run(count, fields, max(1, min(self.threads, count // worth)))
        return attended.to(qkv.dtype)

    def counter(self, name: str) -> int:
        """Returns the address of one of the step's fields."""
        return ctypes.addressof(self._step) + 8 * _PLACES[name]

    def record(self, tape: Tape, layer: int, qkv: int, attended: int, cache: KVCache) -> None:
        """Adds the attention of one layer to a tape; `plan` must be called before the tape is played.

        Args:
            tape: Tape that is played no longer than the backend and the cache live.
            layer: Index of the layer.
            qkv: Address of fp32 ``[T, (heads + 2 * kv_heads) * head_dim]``.
            attended: Address of fp32 ``[T, heads * head_dim]``.
            cache: Cache that is written and read.
        """
        for entry, fields, counter, worth in self._calls(layer, qkv, self._config.qkv_features, attended, cache):
            tape.add(entry, fields, self.counter(counter), worth)

    def _calls(
        self, layer: int, heads: int, stride: int, attended: int, cache: KVCache
    ) -> list[tuple[CompiledEntry, list[int], str, int]]:
        """Returns the calls of a layer: entry, fields, name of the part counter, and minimum parts per thread."""
        config, kind = self._config, _KINDS[cache.keys.dtype]
        parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        fields = [ctypes.addressof(self._step), heads, stride, attended]
        fields += [part[layer].data_ptr() for part in parts] + [config.kv_heads]
        shape = [self._table.data_ptr(), config.heads, config.head_dim, cache.block_tokens]
        attend = attention(config.head_dim, cache.block_tokens, config.group_size, kind)
        worth = max(1, _WORTH_A_THREAD // (2 * config.heads * config.head_dim))
        return [
            (rotation(kind), fields + shape, "rows", _ROWS_WORTH_A_THREAD),
            (attend, fields, "attended", worth),
        ]


def _tables(batch: ForwardBatch) -> Array:
    """Makes the block tables of the decodes, then of the chunks, int32 ``[D + chunks, most blocks]``."""
    # Numba compiles a kernel again for every new memory order, which must not happen during a request.
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
    """Makes the runs of all rows of the step, decodes first; see `RUN_FIELDS`."""
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


def _address(array: Array) -> int:
    """Returns the address of an array; `ndarray.ctypes` would create five objects for it."""
    address: int = array.__array_interface__["data"][0]
    return address
