"""The draw on a CPU: one compiled pass over each row in place of a dozen tensor operations over the batch.

A row is read in blocks of 256 logits. The first pass finds each block's largest logit; a block whose largest weighs
nothing is never looked at again. What follows depends on the row's own parameters only:

* greedy: the first block that holds the maximum is searched for it;
* no filter: block totals lead to the block that holds the drawn share, and only that block is added up token by token;
* filters: tokens are gathered from the heaviest down, in bands, until top_k and top_p are covered. For a peaked row
  this gathers a handful of tokens out of 150,000; for a flat row it ends with all of them, so the result is exact
  either way. Only what was gathered is sorted.

The weights are integers (see `fixed_point`), hence the result equals that of `device_rows` bit for bit.
"""

import numba
import numpy as np
from numpy.typing import NDArray

from maitred.engine.sampling.fixed_point import FRACTION_BITS, INDEX_BITS, INDEX_MASK, ONE, SHARE_ONE, share_of, weight

NOT_A_NUMBER = -1
"""In place of a token: the row holds a NaN or +inf."""
_BLOCK = 256
_BANDS = (8, 16, 24, FRACTION_BITS)
"""Weights down to 2^-band of the largest are gathered, one band after the other."""
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_PLUS_INFINITY = np.int32(0x7F800000)
_MINUS_INFINITY = np.int32(-0x7F800001)


@numba.njit(cache=True, nogil=True)
def draw_rows(
    logits: NDArray[np.float32],
    scales: NDArray[np.float32],
    top_ks: NDArray[np.int64],
    top_ps: NDArray[np.int64],
    min_weights: NDArray[np.int64],
    bits: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> None:
    """Chooses a token for each row.

    Args:
        logits: [rows, vocabulary], contiguous.
        scales: log2(e) / temperature; 0 means greedy.
        top_ks: Tokens to keep; 0 keeps all.
        top_ps: Share of the mass to keep, in units of 2^-32.
        min_weights: Least weight to keep.
        bits: 32 random bits per row.
        tokens: Receives the choices; `NOT_A_NUMBER` where a row has none.
    """
    vocabulary = logits.shape[1]
    blocks = (vocabulary + _BLOCK - 1) // _BLOCK
    block_keys = np.empty(blocks, np.int32)
    block_masses = np.empty(blocks, np.int64)
    ranks = np.empty(vocabulary, np.int64)
    for r in range(logits.shape[0]):
        row = logits[r]
        if not _find_block_tops(row.view(np.int32), block_keys):
            tokens[r] = NOT_A_NUMBER
            continue
        tops = block_keys.view(np.float32)
        top = tops[0]
        for value in tops:
            top = max(top, value)
        scale = scales[r]
        if scale == 0 or top == -np.inf:
            tokens[r] = _first_of(row, tops, top)
            continue
        top_k = top_ks[r] if 0 < top_ks[r] < vocabulary else 0
        if top_k == 0 and top_ps[r] >= SHARE_ONE and min_weights[r] <= 1:
            total = _weigh_blocks(row, tops, top, scale, block_masses)
            tokens[r] = _pick_in_blocks(row, top, scale, block_masses, share_of(total, bits[r]))
        else:
            total = _weigh_blocks(row, tops, top, scale, block_masses) if top_ps[r] < SHARE_ONE and top_k == 0 else 0
            tokens[r] = _pick_filtered(
                row, tops, top, scale, total, top_k, top_ps[r], max(min_weights[r], 1), bits[r], ranks
            )


@numba.njit(inline="always")
def _ordered(pattern: np.int32) -> np.int32:
    """The bits of a float as an integer that compares as the float does, and back."""
    return np.int32(pattern ^ np.int32(np.int32(pattern >> _SIGN) & _MAGNITUDE))


@numba.njit(cache=True, nogil=True)
def _find_block_tops(patterns: NDArray[np.int32], tops: NDArray[np.int32]) -> bool:
    """Writes the bit pattern of each block's largest logit; False if there is a NaN or +inf.

    Works on integers that are ordered as the floats are: a maximum of integers is compiled to vector instructions,
    while one of floats is not, because of NaN. A NaN is beyond one of the infinities in that order.
    """
    least = _MAGNITUDE
    most = _MINUS_INFINITY
    for block in range(tops.size):
        start = block * _BLOCK
        largest = np.int32(-0x80000000)
        smallest = _MAGNITUDE
        part = patterns[start : start + _BLOCK]
        for i in range(part.size):
            key = _ordered(part[i])
            largest = key if key > largest else largest
            smallest = key if key < smallest else smallest
        most = max(most, largest)
        least = min(least, smallest)
        tops[block] = _ordered(largest)
    return most < _PLUS_INFINITY and least >= _MINUS_INFINITY


@numba.njit(cache=True, nogil=True)
def _first_of(row: NDArray[np.float32], tops: NDArray[np.float32], top: np.float32) -> int:
    """The lowest token id whose logit is `top`."""
    for block in range(tops.size):
        if tops[block] == top:
            start = block * _BLOCK
            for token in range(start, min(start + _BLOCK, row.size)):
                if row[token] == top:
                    return token
    return 0


@numba.njit(cache=True, nogil=True)
def _weigh_blocks(
    row: NDArray[np.float32], tops: NDArray[np.float32], top: np.float32, scale: np.float32, masses: NDArray[np.int64]
) -> int:
    """Writes the weight of each block; returns that of the row."""
    total = np.int64(0)
    for block in range(tops.size):
        mass = np.int64(0)
        if weight(tops[block], top, scale) > 0:
            start = block * _BLOCK
            part = row[start : start + _BLOCK]
            for i in range(part.size):  # an iterator over the part would not be compiled to vector instructions
                mass += weight(part[i], top, scale)
        masses[block] = mass
        total += mass
    return total


@numba.njit(cache=True, nogil=True)
def _pick_in_blocks(
    row: NDArray[np.float32], top: np.float32, scale: np.float32, masses: NDArray[np.int64], target: int
) -> int:
    """The first token at which the running total, in order of token id, exceeds the target."""
    running = np.int64(0)
    block = 0
    while running + masses[block] <= target:
        running += masses[block]
        block += 1
    token = block * _BLOCK
    running += weight(row[token], top, scale)
    while running <= target:
        token += 1
        running += weight(row[token], top, scale)
    return token


@numba.njit(cache=True, nogil=True)
def _pick_filtered(
    row: NDArray[np.float32],
    tops: NDArray[np.float32],
    top: np.float32,
    scale: np.float32,
    total: int,
    top_k: int,
    top_p: int,
    min_weight: int,
    bits: int,
    ranks: NDArray[np.int64],
) -> int:
    """The same among the tokens that top_k, then top_p, then min_p keep; `total` is needed for top_p without top_k."""
    nucleus = top_p < SHARE_ONE
    count = 0
    for band in _BANDS:
        floor = np.int64(ONE >> band)
        if top_k == 0 and (not nucleus or floor < min_weight):
            floor = np.int64(min_weight)
        count, mass = _gather(row, tops, top, scale, floor, ranks)
        if floor == min_weight and top_k == 0:
            break
        if count >= top_k and (top_k > 0 or mass >= share_of(total, top_p)):
            break
    cutoff = np.int64(0)
    if top_k > 0 or nucleus:
        ascending = np.sort(ranks[:count])
        keep = count
        if top_k > 0:
            keep = min(top_k, count)
            total = np.int64(0)
            for i in range(count - keep, count):
                total += ascending[i] >> INDEX_BITS
        if nucleus:
            keep = _nucleus_size(ascending, keep, share_of(total, top_p))
        cutoff = ascending[count - keep]
    cutoff = max(cutoff, np.int64(min_weight) << INDEX_BITS)
    kept = np.int64(0)
    for rank in ranks[:count]:
        if rank >= cutoff:
            kept += rank >> INDEX_BITS
    target = share_of(kept, bits)
    running = np.int64(0)
    for rank in ranks[:count]:
        if rank >= cutoff:
            running += rank >> INDEX_BITS
            if running > target:
                return INDEX_MASK - (rank & INDEX_MASK)
    return NOT_A_NUMBER


@numba.njit(cache=True, nogil=True)
def _gather(
    row: NDArray[np.float32],
    tops: NDArray[np.float32],
    top: np.float32,
    scale: np.float32,
    floor: int,
    ranks: NDArray[np.int64],
) -> tuple[int, int]:
    """Writes the ranks of the tokens that weigh at least `floor`, by token id; returns how many and their mass."""
    count = 0
    mass = np.int64(0)
    # A comparison spares most tokens the power. One binary digit of slack covers its rounding.
    least = np.float32(top - (FRACTION_BITS + 1 - np.log2(floor)) / scale)
    for block in range(tops.size):
        if tops[block] >= least:
            start = block * _BLOCK
            for token in range(start, min(start + _BLOCK, row.size)):
                if row[token] < least:
                    continue
                own = weight(row[token], top, scale)
                if own >= floor:
                    ranks[count] = (own << INDEX_BITS) | (INDEX_MASK - token)
                    count += 1
                    mass += own
    return count, mass


@numba.njit(cache=True, nogil=True)
def _nucleus_size(ascending: NDArray[np.int64], most: int, target: int) -> int:
    """How many ranks, from the heaviest on, it takes to reach the target; at least 1, at most `most`."""
    running = np.int64(0)
    size = 0
    while size < most:
        size += 1
        running += ascending[ascending.size - size] >> INDEX_BITS
        if running >= target:
            break
    return size
