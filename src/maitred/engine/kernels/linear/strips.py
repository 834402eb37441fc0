"""Products in fp32 with a weight laid out in strips, in MKL's layout or in our own.

MKL's product is made for many rows. With the few rows of a decode step, it waits for weights from memory, computes, and
waits again: the 32 rows of 32 answers take the sum of both times. Here the weights of the next piece are fetched while
this one is multiplied, so the rows take the longer of both times.

Outputs are in *parts*, one for each thread that MKL foresees; a part is in *strips* of some outputs, of which the last
may have fewer; inputs are in *blocks*. A strip's weights of one block are side by side, input after input::

    packed[start + padded * first_input + inputs_of_block * first_output + strip_width * input + output]

A row is summed up in one order whatever rows are beside it: the inputs of a block one after the other, then the blocks.

MKL's packed weights are read for few rows, with the same result bits as MKL, since a second layout would double a
model's memory. MKL's layout is undocumented. So it is searched for in the packed memory when a weight is packed, and
used only if every weight is where it should be; otherwise MKL computes all rows. A trial checks that the results are
equal bit for bit (`maitred.engine.kernels.linear.packed.has_independent_rows`). Weights in our own layout
(`maitred.engine.kernels.linear.tiled`) are read for any number of rows.
"""

# ruff: noqa: ANN401 - values of the code generator have no types of their own

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from maitred.engine.kernels.job import COUNT, NEXT, CompiledEntry, int8s, take
from maitred.engine.kernels.linear.dots import LANES
from maitred.engine.kernels.linear.tiles import MaskedLanes, Tile, element, prefetch, splat

MOST_ROWS = 48
"""Maximum rows for this code. With more, MKL is as fast: arithmetic takes longer than reading the weights."""
_MOST_INPUTS = 384
"""Maximum inputs of a block."""
_MANY_TILES = 24
"""With more tiles, a weight is used so often that the rows, not the weights, are fetched ahead."""
_TILES_TOGETHER = 64
"""Tiles that go through all blocks of inputs together: their sums stay in the second-level cache meanwhile."""
_MOST_STRIPS_AT_A_TIME = 8
_TURNS = 4
"""Minimum number of shares of strips per thread."""
WEIGHTS_WORTH_A_THREAD = 1 << 16
_LOOKED_THROUGH = 1 << 20
"""Numbers at the beginning of the packed memory, among which the first weight is searched."""
EDITION = 9
"""Version of the emitted code; raise it with every change. See `maitred.engine.kernels.linear.tiles.EDITION`."""

_LONG, _FLOAT = ir.IntType(64), ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, LANES)


class TileShape(NamedTuple):
    """Shape of a tile: the rows that are multiplied with a strip together.

    Attributes:
        vectors: Vectors of a strip, 16 outputs each.
        height: Maximum number of rows.
    """

    vectors: int
    height: int

    @property
    def outputs(self) -> int:
        """Number of outputs in a strip."""
        return self.vectors * LANES


OF_MKL = TileShape(vectors=3, height=8)
"""Tile for AVX-512, and MKL's strip: the sums take 24 of 32 registers."""
NARROW = TileShape(vectors=1, height=6)
"""Tile for 16 registers of half the size: the sums take 12 of them."""
STRIP = OF_MKL.outputs


class Layout(NamedTuple):
    """Layout of a weight that MKL has packed.

    Attributes:
        start: Index of the first weight in the packed memory.
        block: Number of inputs in a block.
        part: Number of outputs in a part.
    """

    start: int
    block: int
    part: int


def find_layout(packed: Tensor, weight: Tensor, threads: int) -> Layout | None:
    """Finds the layout in which every weight is where it should be; None: there is none.

    Args:
        packed: Packed memory, fp32.
        weight: fp32 ``[out, in]``
        threads: Number of threads that MKL had when it packed.
    """
    outputs, inputs = weight.shape
    if outputs % LANES or outputs < LANES:
        return None
    block = block_inputs(inputs)
    places = packed[:_LOOKED_THROUGH].unfold(0, LANES, LANES)
    starts = [LANES * int(place) for place in (places == weight[:LANES, 0]).all(dim=1).nonzero()[:1]]
    for start in starts:
        for parts in {threads, 1}:
            layout = Layout(start, block, _rounded_up(-(-outputs // parts), LANES))
            if _fits(layout, packed, weight):
                return layout
    return None


def block_inputs(inputs: int) -> int:
    """Returns the number of inputs in a block: blocks are as equal as possible."""
    return _rounded_up(-(-inputs // -(-inputs // _MOST_INPUTS)), 4)


def _fits(layout: Layout, packed: Tensor, weight: Tensor) -> bool:
    outputs, inputs = weight.shape
    for first_input in range(0, inputs, layout.block):
        count = min(layout.block, inputs - first_input)
        at = layout.start + _rounded_up(outputs, STRIP) * first_input
        for first in range(0, outputs, layout.part):
            last = min(first + layout.part, outputs)
            whole = (last - first) // STRIP
            for strips, width in ((whole, STRIP), (1, (last - first) % STRIP)):
                size = strips * width * count
                if size == 0:
                    continue
                if at + first * count + size > len(packed):
                    return False
                read = packed[at + first * count :][:size].view(strips, count, width)
                part = weight[first : first + strips * width, first_input : first_input + count]
                if not torch.equal(read.transpose(1, 2), part.reshape(strips, width, count)):
                    return False
                first += strips * width
    return True


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


FIELDS = (
    "compute", "inputs", "outputs", "rows", "packed", "bias", "out", "first", "block", "part", "entry", "together",
    "threads", "share", "abreast", "marks",
)  # fmt: skip
"""Names of a job's own fields; see `maitred.engine.kernels.linear.packed.packed_product`.

Here they are sizes, as in `Layout`; addresses of rows, of the bias or 0, of the result, and of the ``first`` weight;
how
many strips a thread takes at a time, and how many of them a tile of rows goes through before the next tile does; and
the address of bytes ``[strips, rows]`` that mark what is computed, or 0 to compute all.
"""
(
    COMPUTE, INPUTS, OUTPUTS, ROWS, PACKED, BIAS, OUT, FIRST, BLOCK, PART, ENTRY, TOGETHER, THREADS, SHARE, ABREAST,
    MARKS,
) = range(COUNT + 1, COUNT + 1 + len(FIELDS))  # fmt: skip
ALL = COUNT + 1 + len(FIELDS)


def strips_at_a_time(strips: int, threads: int) -> int:
    """Returns how many strips a thread takes at a time: few enough to balance a late thread."""
    return max(1, min(_MOST_STRIPS_AT_A_TIME, strips // (_TURNS * threads)))


@cache
def strips_product(shape: TileShape = OF_MKL) -> CompiledEntry:
    """Compiles the product for any number of threads; threads take strips."""
    edition, height, vectors, lanes, many_tiles = EDITION, shape.height, shape.vectors, LANES, _MANY_TILES
    tiles_together = _TILES_TOGETHER
    strip_outputs = shape.outputs

    def compute(address: Any) -> None:  # a C pointer
        job = carray(address, ALL)
        if edition < 0:  # never; but what a function names is part of its key on disk
            return
        count, inputs, outputs, share, abreast = job[COUNT], job[INPUTS], job[OUTPUTS], job[SHARE], job[ABREAST]
        block, part, bias = job[BLOCK], job[PART], job[BIAS]
        padded = (outputs + strip_outputs - 1) // strip_outputs * strip_outputs
        of_part = (part + strip_outputs - 1) // strip_outputs
        last = (outputs + part - 1) // part * of_part
        marks = carray(int8s(job[MARKS]), (last, count))
        tiles = count if job[MARKS] else (count + height - 1) // height
        if tiles <= many_tiles:
            # With few rows, a strip takes little time: smaller shares balance the threads better.
            share, abreast = (share + 1) // 2, (abreast + 1) // 2
        # Each tile fetches a part of the next strip, at most a line with every input. With marks, each tile fetches
        # all of it, since it is unknown which rows of a strip are computed.
        fetching = 1 if job[MARKS] else tiles
        weights_step = min(64, (64 * vectors + fetching - 1) // fetching)
        taken = take(job, NEXT, share)
        while taken < last:
            end_of_share = min(taken + share, last)
            for few in range(taken, end_of_share, abreast):
                end_of_few = min(few + abreast, end_of_share)
                if job[MARKS] and not marks[few:end_of_few].any():
                    continue
                # Next strips: a thread's next share is probably one share per thread away.
                next_few = end_of_few if end_of_few < end_of_share else taken + job[THREADS] * share
                for some in range(0, tiles, tiles_together):
                    for k in range(0, inputs, block):
                        length = min(block, inputs - k)
                        for t in range(some, min(some + tiles_together, tiles)):
                            row, below = t * count // tiles, (t + 1) * count // tiles
                            rows = job[ROWS] + (row * inputs + k) * 4
                            for strip in range(few, end_of_few):
                                if job[MARKS] and not marks[strip, row]:
                                    continue
                                first = strip // of_part * part + strip % of_part * strip_outputs
                                end = min(min(first + strip_outputs, (strip // of_part + 1) * part), outputs)
                                width = min((end - first + lanes - 1) // lanes * lanes, strip_outputs)
                                weights = job[FIRST] + (padded * k + first * length) * 4
                                # Fetched ahead: this strip's next block, or the first block of the next strip.
                                upcoming = min(next_few + strip - few, last - 1)
                                next_first = upcoming // of_part * part + upcoming % of_part * strip_outputs
                                ahead = job[FIRST] + next_first * min(block, inputs) * 4
                                if k + block < inputs:
                                    ahead = (
                                        job[FIRST] + (padded * (k + block) + first * min(block, inputs - k - block)) * 4
                                    )
                                step = weights_step
                                ahead += min(t, fetching - 1) * length * step
                                if fetching > many_tiles and t > 0:
                                    # A row of the next tile: four bytes with every input.
                                    ahead = job[ROWS] + (min(below + strip - few, count - 1) * inputs + k) * 4
                                    step = 4
                                out = job[OUT] + (row * outputs + first) * 4
                                before, before_bytes = out, outputs * 4
                                if k == 0:
                                    before, before_bytes = bias + first * 4 if bias else 0, 0
                                if end - first == strip_outputs:
                                    strip_tile(
                                        below - row, rows, inputs * 4, weights, width * 4, before, before_bytes, out,
                                        outputs * 4, length, ahead, step, strip_outputs, vectors, height, 1,
                                    )  # fmt: skip
                                else:
                                    for lane in range(0, width, lanes):
                                        strip_tile(
                                            below - row, rows, inputs * 4, weights + lane * 4, width * 4,
                                            before + lane * 4 if before else 0, before_bytes, out + lane * 4,
                                            outputs * 4, length, ahead, step, end - first - lane, 1, height, 0,
                                        )  # fmt: skip
            taken = take(job, NEXT, share)

    return CompiledEntry(compute)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def strip_tile(
    typing_context: Any,
    height: Any,
    rows_at: Any,
    row_bytes: Any,
    weights_at: Any,
    weight_bytes: Any,
    before_at: Any,
    before_bytes: Any,
    out_at: Any,
    out_bytes: Any,
    inputs: Any,
    ahead_at: Any,
    ahead_bytes: Any,
    outputs: Any,
    vectors: Any,
    most: Any,
    full: Any,
) -> Any:
    """Computes ``out[r, o] = before[r, o] + Σ_k row[r, k] * weight[k, o]`` for `height` rows.

    Each vector has 16 outputs. All arguments but the constants are addresses, distances and counts; `before_at` may be
    0. For each input, the cache line of
    `ahead_at` is fetched into the second-level cache, and `ahead_at` moves on by `ahead_bytes`. The constants are the
    number of vectors, the most that `height` can be, and whether there are outputs for all lanes; otherwise only so
    many as there are `outputs` are read from `before_at` and written.
    """
    count, highest, whole = vectors.literal_value, most.literal_value, bool(full.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for rows in range(1, highest + 1):
            with builder.if_then(builder.icmp_signed("==", arguments[0], _LONG(rows))):
                lanes = None if whole else MaskedLanes(builder, arguments[12])
                _tile(builder, Tile(builder, rows, count), lanes, *arguments[1:12])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13, vectors, most, full), generate


def _tile(
    builder: Any, tile: Tile, lanes: MaskedLanes | None, rows: Any, row_bytes: Any, weights: Any, weight_bytes: Any,
    before: Any, before_bytes: Any, out: Any, out_bytes: Any, inputs: Any, ahead: Any, ahead_bytes: Any,
) -> None:  # fmt: skip
    sums, fetch = tile.zeros(_FLOATS), prefetch(builder)

    def at(address: Any, step: Any, index: Any) -> Any:
        return builder.add(address, builder.mul(step, index))

    with cgutils.for_range(builder, inputs) as loop:
        strip = at(weights, weight_bytes, loop.index)
        side = [builder.load(element(builder, strip, _FLOATS, v), align=64) for v in range(tile.vectors)]
        fetch(at(ahead, ahead_bytes, loop.index))
        for r in range(tile.height):
            number = builder.load(element(builder, at(rows, row_bytes, _LONG(r)), _FLOAT, loop.index), align=4)
            factor = splat(builder, number, _FLOATS)
            for v in range(tile.vectors):
                builder.store(tile.fma(factor, side[v], builder.load(sums[r, v])), sums[r, v])

    def store(result: Callable[[int, int], Any]) -> None:
        for r, v in sums:
            row = at(out, out_bytes, _LONG(r))
            if lanes is None:
                builder.store(result(r, v), element(builder, row, _FLOATS, v), align=4)
            else:
                lanes.store(result(r, v), row, v)

    def accumulate(r: int, v: int) -> Any:
        row = at(before, before_bytes, _LONG(r))
        addend = builder.load(element(builder, row, _FLOATS, v), align=4) if lanes is None else lanes.load(row, v)
        return builder.fadd(builder.load(sums[r, v]), addend)

    with builder.if_else(builder.icmp_signed("==", before, _LONG(0))) as (nothing, something):
        with nothing:
            store(lambda r, v: builder.load(sums[r, v]))
        with something:
            store(accumulate)
