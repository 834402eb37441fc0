# mypy: disable-error-code="untyped-decorator"
"""Paged attention kernels in Triton, for any GPU that Triton supports, any block size and any number of heads.

A program computes one tile (see `tiles`) and one KV head: all rows and all query heads that share the KV head. So each
key and value is read once for the whole group. Softmax is taken on the fly (Milakov and Gimelshein, 2018; Dao et al.,
2022). A decode's context is cut into splits of a fixed number of tokens, which programs compute side by side and
`combine` adds up ("flash decoding", Dao et al., 2023). The size of a split does not depend on the batch, so the sums of
a row do not depend on it either.
"""

from typing import Any

import triton
import triton.language as tl

# Triton's compiler evaluates the annotations of arguments and knows no names but its own, so these stand in quotes.
Pointer = Any
"""Pointer to the first element of a tensor, as a kernel receives it."""
Scalar = Any
"""Number whose type Triton chooses: for one annotated as int, Triton would not check whether 16 divides it."""
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def rotate_and_store(
    qkv: "Pointer",
    angles: "Pointer",
    positions: "Pointer",
    slots: "Pointer",
    keys: "Pointer",
    values: "Pointer",
    qkv_stride: "Scalar",
    HEADS: tl.constexpr,  # noqa: N803 - what Triton compiles for is in capitals, as is its custom
    KV_HEADS: tl.constexpr,  # noqa: N803
    PADDED_HEADS: tl.constexpr,  # noqa: N803
    PADDED_KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_HALF: tl.constexpr,  # noqa: N803
) -> None:
    """Rotates the queries and keys of one row in place, and writes its keys and values to its slot."""
    HALF: tl.constexpr = HEAD_DIM // 2  # noqa: N806
    TURNED: tl.constexpr = HEADS + KV_HEADS  # noqa: N806
    row = tl.program_id(0).to(tl.int64)
    own = qkv + row * qkv_stride
    slot = tl.load(slots + row).to(tl.int64) * KV_HEADS * HEAD_DIM
    pair = tl.arange(0, PADDED_HALF)
    angle = angles + tl.load(positions + row).to(tl.int64) * HEAD_DIM + pair
    cosine = tl.load(angle, mask=pair < HALF, other=0.0)[None, :]
    sine = tl.load(angle + HALF, mask=pair < HALF, other=0.0)[None, :]
    head = tl.arange(0, PADDED_HEADS)[:, None]
    there = (head < TURNED) & (pair < HALF)[None, :]
    place = own + head * HEAD_DIM + pair[None, :]
    first = tl.load(place, mask=there, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=there, other=0.0).to(tl.float32)
    turned = first * cosine - second * sine
    turned_second = second * cosine + first * sine
    tl.store(place, turned.to(qkv.dtype.element_ty), mask=there)
    tl.store(place + HALF, turned_second.to(qkv.dtype.element_ty), mask=there)
    # Rounded to the step's own type first, so that a cache of a wider type holds the reference's values.
    is_key = there & (head >= HEADS)
    target = keys + slot + (head - HEADS) * HEAD_DIM + pair[None, :]
    tl.store(target, turned.to(qkv.dtype.element_ty).to(keys.dtype.element_ty), mask=is_key)
    tl.store(target + HALF, turned_second.to(qkv.dtype.element_ty).to(keys.dtype.element_ty), mask=is_key)
    kv_head = tl.arange(0, PADDED_KV_HEADS)[:, None]
    kept = (kv_head < KV_HEADS) & (pair < HALF)[None, :]
    source = own + (TURNED + kv_head) * HEAD_DIM + pair[None, :]
    target = values + slot + kv_head * HEAD_DIM + pair[None, :]
    tl.store(target, tl.load(source, mask=kept, other=0.0).to(values.dtype.element_ty), mask=kept)
    tl.store(target + HALF, tl.load(source + HALF, mask=kept, other=0.0).to(values.dtype.element_ty), mask=kept)


@triton.jit
def attend_tile(
    queries: "Pointer",
    keys: "Pointer",
    values: "Pointer",
    tables: "Pointer",
    tiles: "Pointer",
    attended: "Pointer",
    sums: "Pointer",
    extremes: "Pointer",
    query_stride: "Scalar",
    table_stride: "Scalar",
    scale: "Scalar",
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_DIM: tl.constexpr,  # noqa: N803
    PADDED_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    STRIDE_TOKENS: tl.constexpr,  # noqa: N803
    SPLIT_TOKENS: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    FACTOR: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    CAP: tl.constexpr,  # noqa: N803
) -> None:
    """Computes one tile, one KV head and one split: the rows of `attended`, or the input of `combine_splits`.

    `scale` is the scale of the scores for exponents of two, and so is `CAP`, their soft cap; `FACTOR` is the type of
    the factors. A row attends to `WINDOW` tokens at most, if that is not 0. With several splits a tile has one row.
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP  # noqa: N806
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table = tl.load(tiles + tile * 4)
    first_row = tl.load(tiles + tile * 4 + 1)
    rows = tl.load(tiles + tile * 4 + 2)
    position = tl.load(tiles + tile * 4 + 3)
    start = split * SPLIT_TOKENS
    end = tl.minimum(start + SPLIT_TOKENS, position + rows)
    if WINDOW > 0:
        # What the first row does not see, no row sees. Strides begin at multiples, so that sums are in one order.
        start = tl.maximum(start, tl.maximum(position - WINDOW + 1, 0) // STRIDE_TOKENS * STRIDE_TOKENS)
    if start < end:
        place = tl.arange(0, PADDED_ROWS)
        row = place // GROUP
        head = kv_head * GROUP + place % GROUP
        live = row < rows
        reach = position + row
        dim = tl.arange(0, PADDED_DIM)
        inside = dim < HEAD_DIM
        at = (first_row + row).to(tl.int64) * query_stride + head * HEAD_DIM
        query = tl.load(
            queries + at[:, None] + dim[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        ).to(FACTOR)
        best = tl.full([PADDED_ROWS], NOTHING, tl.float32)
        norm = tl.zeros([PADDED_ROWS], tl.float32)
        total = tl.zeros([PADDED_ROWS, PADDED_DIM], tl.float32)
        for begin in range(start, end, STRIDE_TOKENS):
            token = begin + tl.arange(0, STRIDE_TOKENS)
            there = token < end
            block = tl.load(tables + table.to(tl.int64) * table_stride + token // BLOCK_TOKENS, mask=there, other=0)
            entry = ((block.to(tl.int64) * BLOCK_TOKENS + token % BLOCK_TOKENS) * KV_HEADS + kv_head) * HEAD_DIM
            key = tl.load(
                keys + entry[None, :] + dim[:, None],
                mask=there[None, :] & inside[:, None],
                other=0.0,
            ).to(FACTOR)
            scores = tl.dot(query, key, input_precision="ieee") * scale
            if CAP > 0:
                # tanh by an exponential that cannot overflow; scores are for exponents of two.
                away = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634 / CAP))
                size = (1.0 - away) / (1.0 + away) * CAP
                scores = tl.where(scores < 0, -size, size)
            seen = there[None, :] & (token[None, :] <= reach[:, None])
            if WINDOW > 0:
                seen = seen & (token[None, :] > reach[:, None] - WINDOW)
            scores = tl.where(seen, scores, NOTHING)
            newest = tl.maximum(best, tl.max(scores, 1))
            # A row that may not attend to anything yet: -inf less itself is not a number.
            shift = tl.where(newest == NOTHING, 0.0, newest)
            weights = tl.exp2(scores - shift[:, None])
            fade = tl.exp2(best - shift)
            value = tl.load(
                values + entry[:, None] + dim[None, :],
                mask=there[:, None] & inside[None, :],
                other=0.0,
            ).to(FACTOR)
            total = total * fade[:, None] + tl.dot(weights.to(FACTOR), value, input_precision="ieee")
            norm = norm * fade + tl.sum(weights, 1)
            best = newest
        if WINDOW > 0:
            norm = tl.where(norm == 0.0, 1.0, norm)  # of places behind the last row, which may see nothing
        if SPLITS == 1:
            result = (total / norm[:, None]).to(attended.dtype.element_ty)
            target = attended + ((first_row + row).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(target, result, mask=live[:, None] & inside[None, :])
        else:
            part = (tile.to(tl.int64) * HEADS + head) * SPLITS + split
            tl.store(sums + part[:, None] * HEAD_DIM + dim[None, :], total, mask=live[:, None] & inside[None, :])
            tl.store(extremes + part * 2, best, mask=live)
            tl.store(extremes + part * 2 + 1, norm, mask=live)


@triton.jit
def combine(
    sums: "Pointer",
    extremes: "Pointer",
    tiles: "Pointer",
    attended: "Pointer",
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    PADDED_DIM: tl.constexpr,  # noqa: N803
    SPLIT_TOKENS: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
) -> None:
    """Adds up the splits of one decode and one query head, in their order; those before the window were not written."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first_row = tl.load(tiles + tile * 4 + 1)
    tokens = tl.load(tiles + tile * 4 + 3) + 1
    dim = tl.arange(0, PADDED_DIM)
    part = (tile.to(tl.int64) * HEADS + head) * SPLITS
    best = NOTHING
    norm = 0.0
    total = tl.zeros([PADDED_DIM], tl.float32)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tokens - WINDOW, 0) // SPLIT_TOKENS
    for split in range(first, tl.cdiv(tokens, SPLIT_TOKENS)):
        own_best = tl.load(extremes + (part + split) * 2)
        newest = tl.maximum(best, own_best)
        fade, share = tl.exp2(best - newest), tl.exp2(own_best - newest)
        norm = norm * fade + tl.load(extremes + (part + split) * 2 + 1) * share
        total = total * fade + tl.load(sums + (part + split) * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0) * share
        best = newest
    target = attended + (first_row.to(tl.int64) * HEADS + head) * HEAD_DIM + dim
    tl.store(target, (total / norm).to(attended.dtype.element_ty), mask=dim < HEAD_DIM)
