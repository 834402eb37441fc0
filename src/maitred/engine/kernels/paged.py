"""Compiled kernels over the paged KV cache: attention of decodes and prefill chunks, and rotate-and-store.

Attention is two small products per block with a softmax between them (see `simd`). The scores of a whole sequence fit
into the first-level cache, so they are kept and normalised in one go; an online softmax (Milakov and Gimelshein, 2018)
would save no memory traffic here and cost a rescaling per block. The rows of a step are independent, so threads take
runs of them as they come.

A row is summed up in the same order whether it is a decode or belongs to a chunk, and whatever rows are computed beside
it. Its result is the same to the last bit. So an answer that was preempted, or lost its engine, continues exactly as it
would have: recomputed values equal the lost ones.
"""

import math
from functools import cache
from typing import Any

import numpy as np
from numba import carray
from numba.extending import register_jitable

from maitred.engine.compiled import REGISTERS, VECTOR_LANES
from maitred.engine.kernels.job import (
    COUNT,
    INT8,
    NEXT,
    ROWS_AT_A_TIME,
    SLOT,
    CompiledEntry,
    floats,
    ints,
    longs,
    numbers,
    take,
)  # fmt: skip
from maitred.engine.kernels.simd import (
    EDITION,
    add_weighted_rows,
    cap_strips,
    copy_numbers,
    narrow,
    scale_strip,
    softmax_strips,
)

_STRIP = 16
"""Maximum tokens, or numbers of a head, side by side: one register of AVX-512, two of AVX2."""
_LEAST = np.float32(1e-30)
"""Smaller magnitudes are rounded to zero instead of being divided by."""

Array = np.ndarray[Any, Any]

RUN_FIELDS = 4
"""Number of int64 fields of a run: block table, first row in the step, rows, tokens that the first row attends to."""
STEP_FIELDS = (
    "rows", "runs", "attended", "positions", "slots", "tables", "table_blocks", "runs_at", "scratch", "scratch_bytes"
)  # fmt: skip
"""Names of the int64 fields that change from step to step.

They are the numbers of rows, of runs, and of tokens that rows attend to; the addresses of int64 ``positions`` and
``slots`` ``[rows]``, of the block tables, int32 ``[tables, table_blocks]``, and of the runs ``[runs, RUN_FIELDS]``; and
the address of the scratch memory, of `scratch_bytes` for each thread.
"""
_ROWS, _RUNS, _ATTENDED, _POSITIONS, _SLOTS, _TABLES, _TABLE_BLOCKS, _RUNS_AT, _SCRATCH, _SCRATCH_BYTES = range(
    len(STEP_FIELDS)
)
_STEP_FIELDS = len(STEP_FIELDS)
LAYER_FIELDS = ("step", "heads", "stride", "attended", "keys", "values", "key_scales", "value_scales", "kv_heads")
"""Names of the own fields of both attention jobs of a layer.

They are the address of the step's fields; of the queries (for the job that rotates: of all heads), fp32
``[rows, stride]``; of the result, ``[rows, heads * head_dim]``; of the layer's part of the cache; and its number of KV
heads.
"""
(
    _STEP, _HEADS, _STRIDE, _RESULT, _KEYS, _VALUES, _KEY_SCALES, _VALUE_SCALES, _KV_HEADS
) = range(COUNT + 1, COUNT + 1 + len(LAYER_FIELDS))  # fmt: skip
_ROTARY, _QUERY_HEADS, _LAST = _KV_HEADS + 1, _KV_HEADS + 2, _KV_HEADS + 3
_LAYER_FIELDS = _KV_HEADS + 1


def rows_together(group: int) -> int:
    """Returns how many rows of a chunk share each load from the cache: as many as keep their sums in registers.

    This holds with AVX-512; with fewer registers the rows are split into parts.
    """
    if group <= 4:
        return 3
    return 2 if group <= 8 else 1


def scratch_bytes(head_dim: int, group: int, block_tokens: int, blocks: int) -> int:
    """Returns the scratch memory of a thread that attends to so many blocks at most: a multiple of a cache line."""
    width: int = _score_width(blocks, block_tokens)
    return -(-rows_together(group) * group * (2 * head_dim + width) * 4 // 64) * 64


def tile_size(lines: int, unroll: int, lanes: int, registers: int, vector_lanes: int) -> tuple[int, int]:
    """Returns how many lines and how many strips are summed up together, so that all sums stay in registers.

    Registers also hold the strips themselves and one weight, broadcast to all lanes.

    Args:
        lines: Number of heads of all rows that are computed together.
        unroll: Independent sums that a line has for each strip.
        lanes: Numbers of a strip.
        registers: Vector registers of the processor.
        vector_lanes: Fp32 numbers of a register.
    """
    strip = -(-lanes // vector_lanes)
    strips = 2 if 2 * strip * (lines * unroll + 1) < registers else 1
    return max(1, ((registers - 1) // (strip * strips) - 1) // unroll), strips


@register_jitable  # type: ignore[untyped-decorator]
def _score_width(blocks: int, block_tokens: int) -> int:
    """Returns the number of scores of a row, with space for a strip beyond the last block.

    Rows are an odd number of cache lines apart: with a power of two, all rows would map to the same cache set.
    """
    return (blocks + 1) // 2 * 2 * block_tokens + 16


@cache
def attention(
    head_dim: int,
    block_tokens: int,
    group: int,
    kind: int,
    registers: int = REGISTERS,
    vector_lanes: int = VECTOR_LANES,
    *,
    scale: float = 0.0,
    window: int = 0,
    cap: float = 0.0,
) -> CompiledEntry:
    """Compiles the attention of runs of rows for one model's shape. A decode is a run of one row.

    Windows and caps are compiled in, so layers without them do not pay for them.

    The job has `LAYER_FIELDS`. Its parts are counted in attended tokens, but threads take runs of the step.

    Args:
        head_dim: Head size of the model.
        block_tokens: Block size of the cache.
        group: Query heads that share a KV head.
        kind: Kind of the cache's numbers. In int8, keys and values have scales: a score is multiplied with the scale of
            its key, a weight with the scale of its value.
        registers: Vector registers of the processor.
        vector_lanes: Fp32 numbers of a register.
        scale: Factor of the scores; 0: one over the root of the head size.
        window: Maximum tokens that a row attends to, itself the last one; 0: all. Blocks before it are not read.
        cap: Soft cap of the scores; 0: none.
    """
    key_lanes, value_lanes = math.gcd(_STRIP, block_tokens), math.gcd(_STRIP, head_dim)
    # The number of partial sums decides the rounding, so it must not depend on how many rows are computed together. It
    # keeps the arithmetic units busy with one row, and keeps the sums of all rows in registers.
    enough = registers * vector_lanes // 64
    unroll = math.gcd(enough // min(group, enough), math.gcd(head_dim, block_tokens))
    unroll = 1 << (unroll.bit_length() - 1)
    tile = rows_together(group)
    both = tile * group
    keys_at_once, abreast = tile_size(both, unroll, key_lanes, registers, vector_lanes)
    keys_at_once_alone, abreast_alone = tile_size(group, unroll, key_lanes, registers, vector_lanes)
    values_at_once, value_strips = tile_size(both, unroll, value_lanes, registers, vector_lanes)
    values_at_once_alone, value_strips_alone = tile_size(group, unroll, value_lanes, registers, vector_lanes)
    value_strips = math.gcd(head_dim // value_lanes, value_strips)
    value_strips_alone = math.gcd(head_dim // value_lanes, value_strips_alone)
    edition, scaled = EDITION, kind == INT8
    block_size = head_dim * block_tokens
    factor = np.float32(scale or head_dim**-0.5)
    capped, cap_at, softmax_scale = cap != 0.0, np.float32(cap), np.float32(1.0) if cap else factor

    def attend(address: Any) -> None:  # noqa: ANN401 - a C pointer
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        job = carray(address, _LAYER_FIELDS)
        step = carray(longs(job[_STEP]), _STEP_FIELDS)
        kv_heads, stride, table_blocks = job[_KV_HEADS], job[_STRIDE], step[_TABLE_BLOCKS]
        width = _score_width(table_blocks, block_tokens)
        everything = 1 << 40  # how many elements the cache has does not matter here
        queries, attended = carray(floats(job[_HEADS]), everything), carray(floats(job[_RESULT]), everything)
        keys, values = carray(numbers(job[_KEYS], kind), everything), carray(numbers(job[_VALUES], kind), everything)
        key_scales = carray(floats(job[_KEY_SCALES]), everything)
        value_scales = carray(floats(job[_VALUE_SCALES]), everything)
        tables = carray(ints(step[_TABLES]), everything)
        runs = carray(longs(step[_RUNS_AT]), (step[_RUNS], RUN_FIELDS))
        own = step[_SCRATCH] + take(job, SLOT, 1) * step[_SCRATCH_BYTES]
        packed = carray(floats(own), both * head_dim)
        sums = carray(floats(own + both * head_dim * 4), both * head_dim)
        scores = carray(floats(own + 2 * both * head_dim * 4), both * width)
        run = take(job, NEXT, 1)
        while run < step[_RUNS]:
            table, end = runs[run, 0] * table_blocks, runs[run, 1] + runs[run, 2]
            row, length = runs[run, 1], runs[run, 3]
            while row < end:
                rows = tile if row + tile <= end else 1
                blocks = (length + rows - 1 + block_tokens - 1) // block_tokens
                first = max(0, length - window) // block_tokens if window else 0
                start = first * block_tokens
                for h in range(kv_heads):
                    # Side by side: the heads of all rows that read the same cached head.
                    for r in range(rows):
                        source = (row + r) * stride + h * group * head_dim
                        copy_numbers(packed, r * group * head_dim, queries, source, group * head_dim)
                    for line in range(rows * group):
                        scores[line * width + start : line * width + blocks * block_tokens] = np.float32(0.0)
                    for b in range(first, blocks, abreast if rows == tile else abreast_alone):
                        block = tables[table + b] * kv_heads + h
                        other = tables[table + min(b + 1, blocks - 1)] * kv_heads + h
                        for t in range(0, block_tokens, key_lanes):
                            if rows == tile:
                                add_weighted_rows(
                                    packed, 0, head_dim,
                                    keys, block * block_size + t, block_tokens, head_dim,
                                    scores, b * block_tokens + t, width,
                                    both, keys_at_once, key_lanes, unroll, abreast,
                                    (other - block) * block_size, block_tokens,
                                )  # fmt: skip
                            else:
                                add_weighted_rows(
                                    packed, 0, head_dim,
                                    keys, block * block_size + t, block_tokens, head_dim,
                                    scores, b * block_tokens + t, width,
                                    group, keys_at_once_alone, key_lanes, unroll, abreast_alone,
                                    (other - block) * block_size, block_tokens,
                                )  # fmt: skip
                    if scaled:
                        for b in range(first, blocks):
                            scales_at = (tables[table + b] * kv_heads + h) * block_tokens
                            for t in range(0, block_tokens, key_lanes):
                                for line in range(rows * group):
                                    place = line * width + b * block_tokens + t
                                    scale_strip(scores, place, key_scales, scales_at + t, key_lanes)
                    for line in range(rows * group):
                        place, padded = line * width + start, blocks * block_tokens - start
                        seen = length + line // group
                        if capped:
                            cap_strips(scores, place, padded, factor, cap_at, key_lanes)
                        if window:
                            hidden = max(0, seen - window) - start
                            softmax_strips(scores, place, padded, hidden, seen - start, softmax_scale, key_lanes)
                        else:
                            softmax_strips(scores, place, padded, 0, seen, softmax_scale, key_lanes)
                    sums[: rows * group * head_dim] = np.float32(0.0)
                    for b in range(first, blocks):
                        block = tables[table + b] * kv_heads + h
                        if scaled:
                            for t in range(0, block_tokens, key_lanes):
                                for line in range(rows * group):
                                    place = line * width + b * block_tokens + t
                                    scale_strip(scores, place, value_scales, block * block_tokens + t, key_lanes)
                        if rows == tile:
                            for d in range(0, head_dim, value_lanes * value_strips):
                                add_weighted_rows(
                                    scores, b * block_tokens, width,
                                    values, block * block_size + d, head_dim, block_tokens,
                                    sums, d, head_dim,
                                    both, values_at_once, value_lanes, unroll, value_strips,
                                    value_lanes, value_lanes,
                                )  # fmt: skip
                        else:
                            for d in range(0, head_dim, value_lanes * value_strips_alone):
                                add_weighted_rows(
                                    scores, b * block_tokens, width,
                                    values, block * block_size + d, head_dim, block_tokens,
                                    sums, d, head_dim,
                                    group, values_at_once_alone, value_lanes, unroll, value_strips_alone,
                                    value_lanes, value_lanes,
                                )  # fmt: skip
                    for r in range(rows):
                        place = ((row + r) * kv_heads + h) * group * head_dim
                        copy_numbers(attended, place, sums, r * group * head_dim, group * head_dim)
                row, length = row + rows, length + rows
            run = take(job, NEXT, 1)

    return CompiledEntry(attend, fast=True)


@cache
def rotation(kind: int) -> CompiledEntry:
    """Compiles a pass over the fused projection that rotates queries and keys and stores keys and values.

    The job has `LAYER_FIELDS`, of which ``heads`` is the address of the projection, fp32 ``[rows, heads + 2 * kv_heads,
    head_dim]``. Further fields are the address of the rotary table, fp32 ``[context_tokens, head_dim]``, the number of
    query heads, the size of a head, and the size of a block.

    Args:
        kind: Kind of the cache's numbers.
    """
    scaled, rows_at_a_time = kind == INT8, ROWS_AT_A_TIME

    def rotate(address: Any) -> None:  # noqa: ANN401 - a C pointer
        job = carray(address, _LAST + 2)
        step = carray(longs(job[_STEP]), _STEP_FIELDS)
        query_heads, kv_heads, head_dim, block_tokens = job[_QUERY_HEADS], job[_KV_HEADS], job[_LAST], job[_LAST + 1]
        positions, slots = carray(longs(step[_POSITIONS]), step[_ROWS]), carray(longs(step[_SLOTS]), step[_ROWS])
        half = head_dim // 2
        keys, values = numbers(job[_KEYS], kind), numbers(job[_VALUES], kind)
        first = take(job, NEXT, rows_at_a_time)
        while first < job[COUNT]:
            for row in range(first, min(first + rows_at_a_time, job[COUNT])):
                block, offset = slots[row] // block_tokens, slots[row] % block_tokens
                angles = carray(floats(job[_ROTARY] + positions[row] * head_dim * 4), head_dim)
                at = job[_HEADS] + row * job[_STRIDE] * 4
                for h in range(query_heads + kv_heads):
                    head = carray(floats(at + h * head_dim * 4), head_dim)
                    for i in range(half):
                        one, other = head[i], head[i + half]
                        head[i] = one * angles[i] - other * angles[i + half]
                        head[i + half] = other * angles[i] + one * angles[i + half]
                for h in range(kv_heads):
                    key = carray(floats(at + (query_heads + h) * head_dim * 4), head_dim)
                    value = carray(floats(at + (query_heads + kv_heads + h) * head_dim * 4), head_dim)
                    start = (block * kv_heads + h) * head_dim * block_tokens
                    stored_keys = carray(keys, start + head_dim * block_tokens)[start:]
                    stored_values = carray(values, start + head_dim * block_tokens)[start + offset * head_dim :]
                    if scaled:
                        highest_key = highest_value = np.float32(0.0)
                        for i in range(head_dim):
                            highest_key, highest_value = (
                                max(highest_key, abs(key[i])),
                                max(highest_value, abs(value[i])),
                            )
                        scale_at = ((block * kv_heads + h) * block_tokens + offset) * 4
                        carray(floats(job[_KEY_SCALES] + scale_at), 1)[0] = highest_key / np.float32(127.0)
                        carray(floats(job[_VALUE_SCALES] + scale_at), 1)[0] = highest_value / np.float32(127.0)
                        key_steps = np.float32(127.0) / max(highest_key, _LEAST)
                        value_steps = np.float32(127.0) / max(highest_value, _LEAST)
                        for i in range(head_dim):
                            stored_keys[i * block_tokens + offset] = np.int8(np.rint(key[i] * key_steps))
                            stored_values[i] = np.int8(np.rint(value[i] * value_steps))
                    else:
                        for i in range(head_dim):
                            stored_keys[i * block_tokens + offset] = narrow(key[i], stored_keys)
                            stored_values[i] = narrow(value[i], stored_values)
            first = take(job, NEXT, rows_at_a_time)

    return CompiledEntry(rotate, fast=True)
