"""Sampling on a CPU: one compiled pass over each row instead of a dozen batched tensor operations.

A row is read in blocks of 256 logits. The first pass finds each block's largest logit. A block whose largest logit has
weight 0 is then skipped. What follows depends on the row's own parameters only:

* greedy: the first block that contains the maximum is searched for its token;
* no filter: the block totals identify the block with the drawn share, and only this block is summed token by token;
* filters: tokens are gathered from the heaviest down, in bands, until top_k and top_p are covered. For a peaked row
  this gathers a handful of tokens out of 150,000; for a flat row it ends with all of them, so the result is exact
  either way. The last token to keep is found by selection, without sorting.

The weights are integers (see `fixed_point`), so the result is identical to that of `device_rows`.
"""

# In compiled code an `int` is NumPy's int64, which mypy treats as a different type.
# mypy: disable-error-code="assignment, arg-type, return-value, no-any-return"

import numpy as np
from numpy.typing import NDArray

from maitred.engine.compiled import compiled
from maitred.engine.sampling.fixed_point import FRACTION_BITS, INDEX_BITS, INDEX_MASK, ONE, SHARE_ONE, share_of, weight

NOT_A_NUMBER = -1
"""Value in place of a token for a row that contains a NaN or +inf."""
BLOCK_TOKENS = 256
_BANDS = (6, 10, 14, 20, 26, 32, FRACTION_BITS)
"""Limits of the bands in bits: weights down to 2^-band of the largest are gathered band by band."""
_SIGN = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_PLUS_INFINITY = np.int32(0x7F800000)
_MINUS_INFINITY = np.int32(-0x7F800001)


@compiled
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
        min_weights: Minimum weight to keep.
        bits: 32 random bits per row.
        tokens: Receives the chosen tokens; `NOT_A_NUMBER` for rows without one.
    """
    vocabulary = logits.shape[1]
    blocks = (vocabulary + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    block_keys = np.empty(blocks, np.int32)
    block_masses = np.empty(blocks, np.int64)
    ranks = np.empty(vocabulary, np.int64)
    for r in range(logits.shape[0]):
        row = logits[r]
        if not find_block_tops(row.view(np.int32), block_keys):
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
            total = weigh_blocks(row, tops, top, scale, block_masses)
            tokens[r] = _pick_in_blocks(row, top, scale, block_masses, share_of(total, bits[r]))
        else:
            total = weigh_blocks(row, tops, top, scale, block_masses) if top_ps[r] < SHARE_ONE and top_k == 0 else 0
            tokens[r] = _pick_filtered(
                row, tops, top, scale, total, top_k, top_ps[r], max(min_weights[r], 1), bits[r], ranks
            )


@compiled
def _order_bits(pattern: np.int32) -> np.int32:
    """Converts the bits of a float to an integer with the same order, or back."""
    return np.int32(pattern ^ np.int32(np.int32(pattern >> _SIGN) & _MAGNITUDE))


@compiled
def find_block_tops(patterns: NDArray[np.int32], tops: NDArray[np.int32]) -> bool:
    """Writes the bit pattern of each block's largest logit; returns False if there is a NaN or +inf.

    The function uses integers with the order of the floats. The compiler vectorises a maximum of integers, but NaN
    prevents this for floats. In this order, a NaN is beyond one of the infinities.
    """
    least = _MAGNITUDE
    most = _MINUS_INFINITY
    for block in range(tops.size):
        start = block * BLOCK_TOKENS
        largest = np.int32(-0x80000000)
        smallest = _MAGNITUDE
        part = patterns[start : start + BLOCK_TOKENS]
        for i in range(part.size):
            key = _order_bits(part[i])
            largest = key if key > largest else largest
            smallest = key if key < smallest else smallest
        most = max(most, largest)
        least = min(least, smallest)
        tops[block] = _order_bits(largest)
    return most < _PLUS_INFINITY and least >= _MINUS_INFINITY


@compiled
def _first_of(row: NDArray[np.float32], tops: NDArray[np.float32], top: np.float32) -> int:
    """Finds the lowest token id whose logit is `top`."""
    for block in range(tops.size):
        if tops[block] == top:
            start = block * BLOCK_TOKENS
            for token in range(start, min(start + BLOCK_TOKENS, row.size)):
                if row[token] == top:
                    return token
    return 0


@compiled
def weigh_blocks(
    row: NDArray[np.float32], tops: NDArray[np.float32], top: np.float32, scale: np.float32, masses: NDArray[np.int64]
) -> int:
    """Writes the weight of each block; returns the weight of the row."""
    total = 0
    for block in range(tops.size):
        mass = 0
        if weight(tops[block], top, scale) > 0:
            start = block * BLOCK_TOKENS
            part = row[start : start + BLOCK_TOKENS]
            for i in range(part.size):  # an iterator over the part would not be compiled to vector instructions
                mass += weight(part[i], top, scale)
        masses[block] = mass
        total += mass
    return total


@compiled
def _pick_in_blocks(
    row: NDArray[np.float32], top: np.float32, scale: np.float32, masses: NDArray[np.int64], target: int
) -> int:
    """Finds the first token, by token id, at which the running total exceeds the target."""
    running = 0
    block = 0
    while running + masses[block] <= target:
        running += masses[block]
        block += 1
    token = block * BLOCK_TOKENS
    running += weight(row[token], top, scale)
    while running <= target:
        token += 1
        running += weight(row[token], top, scale)
    return token


@compiled
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
    """Draws a token among those that top_k, then top_p, then min_p keep; `total` is needed for top_p without top_k."""
    nucleus = top_p < SHARE_ONE
    count = 0
    for band in _BANDS:
        lower = ONE >> band
        if top_k == 0 and (not nucleus or lower < min_weight):
            lower = min_weight
        count, mass = _gather(row, tops, top, scale, lower, ranks)
        if lower == min_weight and top_k == 0:
            break
        if count >= top_k and (top_k > 0 or mass >= share_of(total, top_p)):
            break
    gathered = ranks[:count]
    cutoff = min_weight << INDEX_BITS
    if top_k > 0:
        least = _cutoff(gathered.copy(), top_k, False)
        cutoff = max(cutoff, least)
        total = 0  # top_p is a share of the mass that top_k leaves, before min_p
        for i in range(count):
            total += gathered[i] >> INDEX_BITS if gathered[i] >= least else 0
    if nucleus:
        cutoff = max(cutoff, _cutoff(gathered.copy(), share_of(total, top_p), True))
    kept = 0
    for i in range(count):
        kept += gathered[i] >> INDEX_BITS if gathered[i] >= cutoff else 0
    target = share_of(kept, bits)
    running = 0
    for i in range(count):
        if gathered[i] >= cutoff:
            running += gathered[i] >> INDEX_BITS
            if running > target:
                return INDEX_MASK - (gathered[i] & INDEX_MASK)
    return NOT_A_NUMBER


@compiled
def _gather(
    row: NDArray[np.float32],
    tops: NDArray[np.float32],
    top: np.float32,
    scale: np.float32,
    lower: int,
    ranks: NDArray[np.int64],
) -> tuple[int, int]:
    """Writes the ranks of tokens with weight >= `lower`, by token id; returns their number and mass."""
    count = 0
    mass = 0
    # A comparison of logits avoids computing the power of two for most tokens. A margin of one binary digit covers its
    # rounding.
    least = np.float32(top - (FRACTION_BITS + 1 - np.log2(lower)) / scale)
    for block in range(tops.size):
        if tops[block] >= least:
            start = block * BLOCK_TOKENS
            for token in range(start, min(start + BLOCK_TOKENS, row.size)):
                ranks[count] = token  # kept only if the count is incremented; a branch would often be mispredicted
                count += row[token] >= least
    candidates = count
    for i in range(candidates):
        token = ranks[i]
        ranks[i] = (weight(row[token], top, scale) << INDEX_BITS) | (INDEX_MASK - token)
    count = 0
    for i in range(candidates):
        rank = ranks[i]
        ranks[count] = rank
        if rank >> INDEX_BITS >= lower:
            count += 1
            mass += rank >> INDEX_BITS
    return count, mass


@compiled
def _cutoff(ranks: NDArray[np.int64], goal: int, by_mass: bool) -> int:
    """Finds the rank at which tokens, highest first, reach a number or a mass; else the lowest rank.

    This is quickselect (Hoare 1961) with sums of the skipped parts: it is linear on average, in contrast to sorting.
    Ranks are distinct. The function reorders its argument.
    """
    low = 0
    high = ranks.size - 1
    while low < high:
        # The median of three is the pivot; it is moved to the end, outside the partition.
        middle = (low + high) >> 1
        first, second, third = ranks[low], ranks[middle], ranks[high]
        pivot = max(min(first, second), min(max(first, second), third))
        place = low if pivot == first else (middle if pivot == second else high)
        ranks[place] = ranks[high]
        ranks[high] = pivot
        border = low
        passed = 0
        for i in range(low, high):
            rank = ranks[i]
            # The code swaps always and advances the border conditionally, because this costs less than mispredicted
            # branches.
            ranks[i] = ranks[border]
            ranks[border] = rank
            above = rank > pivot
            border += above
            passed += above * (rank >> INDEX_BITS if by_mass else 1)
        own = pivot >> INDEX_BITS if by_mass else 1
        if passed >= goal and border > low:
            high = border - 1
        elif passed + own >= goal or border == high:
            return pivot
        else:
            goal -= passed + own
            low = border
            # The pivot stays at the end and is excluded from the next partition.
            high -= 1
    return ranks[low]
