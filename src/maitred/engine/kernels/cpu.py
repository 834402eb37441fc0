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
from maitred.engine.models.rotary import RotaryTables, rotate

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
    tables: list[Array]
    """Block tables of the decodes, then of the chunks: those of all layers, and of layers with a window."""
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
        self._rotary = RotaryTables(config)
        self._step = _Step()
        self._window_step = _Step()
        """Fields for the layers with a window, which may have other blocks."""
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def plan(self, batch: ForwardBatch, cache: KVCache) -> CPUPlan:
        """Cuts the step into runs of rows, and stores their addresses in the step's fields."""
        config, own = self._config, batch.window
        runs = _runs(batch)
        tables = [_tables(batch.decode_tables, [chunk.block_table for chunk in batch.chunks])]
        if own is not None:
            tables.append(_tables(own.decode_tables, own.chunk_tables))
        scratch = max(
            scratch_bytes(config.head_dim, config.group_size, cache.block_tokens, table.shape[1]) for table in tables
        )
        if scratch * self.threads > len(self._scratch):
            self._scratch = torch.empty(2 * scratch * self.threads, dtype=torch.uint8)
        slots = [batch.slots, batch.slots if own is None else own.slots]
        for step, table, places, window in zip(
            (self._step, self._window_step), (tables[0], tables[-1]), slots, (0, config.window), strict=True
        ):
            step[:] = [
                *(len(batch.positions), len(runs), _count_attended(runs, window)),
                *(batch.positions.data_ptr(), places.data_ptr(), _address(table), table.shape[1]),
                *(_address(runs), self._scratch.data_ptr(), scratch),
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
            angles = self._rotary.of(layer)[plan.batch.positions]
            own = plan.batch.window if config.window_of(layer) else None
            cache.write(layer, rotate(keys, angles), values, plan.batch.slots if own is None else own.slots)
            queries = rotate(unturned, angles).float().flatten(1)
        attended = torch.empty(len(qkv), config.heads * config.head_dim)
        calls = self._calls(layer, queries.data_ptr(), queries.shape[1], attended.data_ptr(), cache)
        step = self._step_of(layer)
        for entry, fields, counter, worth in calls if queries is qkv else calls[1:]:
            count = step[_PLACES[counter]]
            entry.run(count, fields, max(1, min(self.threads, count // worth)))
        return attended.to(qkv.dtype)

    def counter(self, name: str) -> int:
        """Returns the address of one of the step's fields."""
        return _field(self._step, name)

    def _step_of(self, layer: int) -> "ctypes.Array[ctypes.c_int64]":
        """Returns the step's fields for a layer."""
        return self._window_step if self._config.window_of(layer) else self._step

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
            tape.add(entry, fields, _field(self._step_of(layer), counter), worth)

    def _calls(
        self, layer: int, heads: int, stride: int, attended: int, cache: KVCache
    ) -> list[tuple[CompiledEntry, list[int], str, int]]:
        """Returns the calls of a layer: entry, fields, name of the part counter, and minimum parts per thread."""
        config, kind = self._config, _KINDS[cache.keys.dtype]
        own, row = cache.of(layer)
        parts = (own.keys, own.values, own.key_scales, own.value_scales)
        fields = [ctypes.addressof(self._step_of(layer)), heads, stride, attended]
        fields += [part[row].data_ptr() for part in parts] + [config.kv_heads]
        shape = [self._rotary.of(layer).data_ptr(), config.heads, config.head_dim, cache.block_tokens]
        attend = attention(
            *(config.head_dim, cache.block_tokens, config.group_size, kind),
            scale=config.score_scale,
            window=config.window_of(layer),
            cap=config.score_cap,
        )
        worth = max(1, _WORTH_A_THREAD // (2 * config.heads * config.head_dim))
        return [
            (rotation(kind), fields + shape, "rows", _ROWS_WORTH_A_THREAD),
            (attend, fields, "attended", worth),
        ]


def _field(step: "ctypes.Array[ctypes.c_int64]", name: str) -> int:
    return ctypes.addressof(step) + 8 * _PLACES[name]


def _count_attended(runs: Array, window: int) -> int:
    """Returns the number of tokens that rows attend to, each at most to a window, if there is one."""
    rows, length = runs[:, 2], runs[:, 3]
    if window:
        return int(rows @ np.minimum(length + rows // 2, window))
    return int(rows @ length) + int(rows @ (rows - 1)) // 2


def _tables(decode_tables: Tensor, chunk_tables: list[list[int]]) -> Array:
    """Makes the block tables of the decodes, then of the chunks, int32 ``[D + chunks, most blocks]``."""
    # Numba compiles a kernel again for every new memory order, which must not happen during a request.
    of_decodes: Array = decode_tables.contiguous().numpy()
    if not chunk_tables:
        return of_decodes
    decodes, width = of_decodes.shape
    width = max(width, *map(len, chunk_tables))
    tables = np.zeros((decodes + len(chunk_tables), width), np.int32)
    tables[:decodes, : of_decodes.shape[1]] = of_decodes
    for row, table in enumerate(chunk_tables, decodes):
        tables[row, : len(table)] = table
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
