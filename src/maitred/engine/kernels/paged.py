"""Numba kernels over the paged KV cache: attention of decodes and of prefill chunks, and rotate-and-store.

Attention is two small products per block with a softmax between them (see `simd`). The scores of a whole sequence fit
into the first-level cache, so they are kept and normalised in one go; an online softmax (Milakov and Gimelshein, 2018)
would save no memory traffic here and cost a rescaling per block. The rows of a step are independent, so callers may
split them over threads: the kernels do not hold the interpreter's lock.

A row is added up in the same order whether it is a decode or one of a chunk, and whatever is computed beside it. Its
result is the same to the last bit, so that an answer that was preempted, or lost its engine, goes on exactly as it
would have: what is computed again is what was there.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np

from maitred.engine.compiled import FAST, compiled_fast
from maitred.engine.kernels.simd import EDITION, add_weighted_rows, float_of_bits, narrowed, scale_strip

_LEAST = np.float32(1e-30)
"""What is smaller is rounded to zero, not divided by."""

Array = np.ndarray[Any, Any]
Kernel = Callable[..., None]

_LOG2_E = np.float32(1.4426950408889634)
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)


@numba.njit(fastmath=set(FAST), inline="always")  # type: ignore[untyped-decorator]
def exponential(x: np.float32) -> np.float32:
    """e**x for x <= 0 in fp32, in operations that vectorise.

    x = n ln 2 + r; a polynomial gives e**r, and n goes into the exponent's bits (Cephes' expf, Moshier, 1992).
    """
    x = max(x, np.float32(-87.0))
    n = np.float32(math.floor(x * _LOG2_E + np.float32(0.5)))
    r = x - n * _LN_2_HIGH - n * _LN_2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    power: np.float32 = float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return p * power


@numba.njit(fastmath=set(FAST), inline="always")  # type: ignore[untyped-decorator]
def _softmax(scores: Array, count: int, scale: np.float32) -> None:
    """Turns `count` scores into probabilities in place and zeroes the rest.

    Inlined, because a function that is called exists twice, compiled by itself and with its caller, and adds up in
    another order there: the process that compiles would call the one, and those that load from disk the other.
    """
    highest = np.float32(-np.inf)
    for t in range(count):
        highest = max(highest, scores[t])
    total = np.float32(0.0)
    for t in range(count):
        weight = exponential((scores[t] - highest) * scale)
        scores[t] = weight
        total += weight
    share = np.float32(1.0) / total
    for t in range(count):
        scores[t] *= share
    for t in range(count, len(scores)):
        scores[t] = np.float32(0.0)


RUN_FIELDS = 4
"""Of a run, int64: its block table, its first row in the step, its rows, tokens that its first row attends to."""


def rows_together(group: int) -> int:
    """Rows of a chunk that share every cached element that is loaded: as many as have their sums in registers."""
    if group <= 4:
        return 3
    return 2 if group <= 8 else 1


@cache
def attention_kernel(head_dim: int, block_tokens: int, group: int, *, scaled: bool = False) -> Kernel:
    """Attention of runs of rows, compiled for one model's shape. A decode is a run of one row.

    Args:
        head_dim: Of the model.
        block_tokens: Of the cache.
        group: Query heads that share a cached one.
        scaled: Keys and values are int8 and have scales: a score is multiplied with its key's, a weight with its
            value's.

    Returns:
        ``kernel(queries, keys, values, key_scales, value_scales, tables, runs, attended, packed, scores, sums,
        kv_heads, first_block, first, last)``, which computes the runs ``first … last - 1`` of the step. ``queries`` and
        ``attended`` are flat fp32 ``[T, heads, head_dim]``; ``keys`` and ``values`` are the whole cache, flat, of which
        the layer starts at ``first_block``, and so are the scales, fp32 ``[blocks, kv_heads, block_tokens]``; ``runs``
        is ``[N, RUN_FIELDS]``. The rest is scratch of one thread, fp32, for as many rows as `rows_together` says:
        ``packed`` and ``sums`` ``[rows * heads * head_dim]``, ``scores`` ``[rows * heads, max_blocks * block_tokens]``.
    """
    key_lanes, value_lanes = math.gcd(16, block_tokens), math.gcd(16, head_dim)
    # How many sums a result has decides how it is rounded, so it must not depend on how many rows go together.
    unroll = math.gcd(8 // min(group, 8), math.gcd(head_dim, block_tokens))
    unroll = 1 << (unroll.bit_length() - 1)
    tile = rows_together(group)
    both = tile * group
    edition = EDITION
    block_size = head_dim * block_tokens
    scale = np.float32(head_dim**-0.5)

    @compiled_fast
    def kernel(
        queries: Array,
        keys: Array,
        values: Array,
        key_scales: Array,
        value_scales: Array,
        tables: Array,
        runs: Array,
        attended: Array,
        packed: Array,
        scores: Array,
        sums: Array,
        kv_heads: int,
        first_block: int,
        first: int,
        last: int,
    ) -> None:
        flat_scores = scores.reshape(scores.size)
        width = scores.shape[1]
        heads = kv_heads * group
        if edition < 0:  # never; but what a kernel names is part of its key on disk
            return
        for run in range(first, last):
            table = runs[run, 0]
            for start in range(0, runs[run, 2], tile):
                rows = min(tile, runs[run, 2] - start)
                first_row, length = runs[run, 1] + start, runs[run, 3] + start
                blocks = (length + rows - 1 + block_tokens - 1) // block_tokens
                padded = blocks * block_tokens
                # Side by side: the heads of all rows that read the same cached head.
                for r in range(rows):
                    for h in range(kv_heads):
                        source = ((first_row + r) * heads + h * group) * head_dim
                        place = (h * rows + r) * group * head_dim
                        for i in range(group * head_dim):
                            packed[place + i] = queries[source + i]
                scores[: rows * heads, :padded] = np.float32(0.0)
                for b in range(blocks):
                    block_at = (first_block + tables[table, b]) * kv_heads * block_size
                    for h in range(kv_heads):
                        for t in range(0, block_tokens, key_lanes):
                            if rows == tile:
                                add_weighted_rows(
                                    packed, h * both * head_dim, head_dim,
                                    keys, block_at + h * block_size + t, block_tokens, head_dim,
                                    flat_scores, h * both * width + b * block_tokens + t, width,
                                    both, key_lanes, unroll,
                                )  # fmt: skip
                                continue
                            for r in range(h * rows, (h + 1) * rows):
                                add_weighted_rows(
                                    packed, r * group * head_dim, head_dim,
                                    keys, block_at + h * block_size + t, block_tokens, head_dim,
                                    flat_scores, r * group * width + b * block_tokens + t, width,
                                    group, key_lanes, unroll,
                                )  # fmt: skip
                for row in range(rows * heads):
                    if scaled:
                        for b in range(blocks):
                            scales_at = (
                                (first_block + tables[table, b]) * kv_heads + row // (rows * group)
                            ) * block_tokens
                            for t in range(0, block_tokens, key_lanes):
                                place = row * width + b * block_tokens + t
                                scale_strip(flat_scores, place, key_scales, scales_at + t, key_lanes)
                    _softmax(scores[row, :padded], length + (row // group) % rows, scale)
                    if scaled:
                        for b in range(blocks):
                            scales_at = (
                                (first_block + tables[table, b]) * kv_heads + row // (rows * group)
                            ) * block_tokens
                            for t in range(0, block_tokens, key_lanes):
                                place = row * width + b * block_tokens + t
                                scale_strip(flat_scores, place, value_scales, scales_at + t, key_lanes)
                sums[: rows * heads * head_dim] = np.float32(0.0)
                for b in range(blocks):
                    block_at = (first_block + tables[table, b]) * kv_heads * block_size
                    for h in range(kv_heads):
                        for d in range(0, head_dim, value_lanes):
                            if rows == tile:
                                add_weighted_rows(
                                    flat_scores, h * both * width + b * block_tokens, width,
                                    values, block_at + h * block_size + d, head_dim, block_tokens,
                                    sums, h * both * head_dim + d, head_dim,
                                    both, value_lanes, unroll,
                                )  # fmt: skip
                                continue
                            for r in range(h * rows, (h + 1) * rows):
                                add_weighted_rows(
                                    flat_scores, r * group * width + b * block_tokens, width,
                                    values, block_at + h * block_size + d, head_dim, block_tokens,
                                    sums, r * group * head_dim + d, head_dim,
                                    group, value_lanes, unroll,
                                )  # fmt: skip
                for r in range(rows):
                    for h in range(kv_heads):
                        place = ((first_row + r) * heads + h * group) * head_dim
                        source = (h * rows + r) * group * head_dim
                        for i in range(group * head_dim):
                            attended[place + i] = sums[source + i]

    return kernel


@numba.njit(fastmath=set(FAST), inline="always")  # type: ignore[untyped-decorator]
def _rotate(heads: Array, angles: Array, half: int) -> None:
    for h in range(len(heads)):
        head = heads[h]
        for i in range(half):
            first, second = head[i], head[i + half]
            head[i] = first * angles[i] - second * angles[i + half]
            head[i + half] = second * angles[i] + first * angles[i + half]


@compiled_fast
def rotate_and_store(
    qkv: Array,
    table: Array,
    positions: Array,
    slots: Array,
    keys: Array,
    values: Array,
    layer: int,
    heads: int,
) -> None:
    """Turns queries and keys in place and stores keys and values, in one pass over the fused projection.

    Args:
        qkv: fp32 ``[T, heads + 2 * kv_heads, head_dim]``
        table: Rotary table, fp32 ``[context_tokens, head_dim]``.
        positions: int64 ``[T]``
        slots: int64 ``[T]``
        keys: ``[layers, blocks, kv_heads, head_dim, block_tokens]``, fp32, or bf16's bits as uint16.
        values: ``[layers, blocks, kv_heads, block_tokens, head_dim]``, likewise.
        layer: Which one to write.
        heads: Query heads.
    """
    kv_heads, head_dim, block_tokens = keys.shape[2], keys.shape[3], keys.shape[4]
    for row in range(qkv.shape[0]):
        block, offset = slots[row] // block_tokens, slots[row] % block_tokens
        _rotate(qkv[row, : heads + kv_heads], table[positions[row]], head_dim // 2)
        for h in range(kv_heads):
            key, value = qkv[row, heads + h], qkv[row, heads + kv_heads + h]
            for i in range(head_dim):
                keys[layer, block, h, i, offset] = narrowed(key[i], keys)
                values[layer, block, h, offset, i] = narrowed(value[i], values)


@compiled_fast
def rotate_and_round(
    qkv: Array,
    table: Array,
    positions: Array,
    slots: Array,
    keys: Array,
    values: Array,
    key_scales: Array,
    value_scales: Array,
    layer: int,
    heads: int,
) -> None:
    """The same into a cache of int8, whose scales are fp32 ``[layers, blocks, kv_heads, block_tokens]``."""
    kv_heads, head_dim, block_tokens = keys.shape[2], keys.shape[3], keys.shape[4]
    for row in range(qkv.shape[0]):
        block, offset = slots[row] // block_tokens, slots[row] % block_tokens
        _rotate(qkv[row, : heads + kv_heads], table[positions[row]], head_dim // 2)
        for h in range(kv_heads):
            key, value = qkv[row, heads + h], qkv[row, heads + kv_heads + h]
            highest_key = highest_value = np.float32(0.0)
            for i in range(head_dim):
                highest_key, highest_value = max(highest_key, abs(key[i])), max(highest_value, abs(value[i]))
            key_scales[layer, block, h, offset] = highest_key / np.float32(127.0)
            value_scales[layer, block, h, offset] = highest_value / np.float32(127.0)
            key_steps = np.float32(127.0) / max(highest_key, _LEAST)
            value_steps = np.float32(127.0) / max(highest_value, _LEAST)
            for i in range(head_dim):
                keys[layer, block, h, i, offset] = np.int8(np.rint(key[i] * key_steps))
                values[layer, block, h, offset, i] = np.int8(np.rint(value[i] * value_steps))
