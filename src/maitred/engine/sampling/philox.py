"""Random bits that are a function, not a state: the same request draws the same numbers wherever it runs.

A generator with a state would tie a token to everything drawn before it: to the other rows of the batch, to a
preemption, to a move to another replica. A counter-based generator instead scrambles a counter under a key, so the
bits for one token follow from (seed, choice, position) alone and need no history.

The generator is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11),
checked against the paper's known answers. The key is the seed's two halves; the counter is (position, choice, 0, 0),
and the first of the four output words is used. Ten rounds of two multiplications cost about 20 ns per token.
"""

import numpy as np
from numpy.typing import NDArray

from maitred.engine.compiled import compiled

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ROUNDS = 10


@compiled
def philox_block(counter: NDArray[np.uint64], key: NDArray[np.uint64], out: NDArray[np.uint64]) -> None:
    """Four random 32-bit words for a counter of four and a key of two, each word held in a uint64."""
    c0, c1, c2, c3 = counter[0], counter[1], counter[2], counter[3]
    k0, k1 = key[0], key[1]
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0 = (product_1 >> _WORD) ^ c1 ^ k0
        c1 = product_1 & _LOW
        c2 = (product_0 >> _WORD) ^ c3 ^ k1
        c3 = product_0 & _LOW
        k0 = (k0 + _WEYL_0) & _LOW
        k1 = (k1 + _WEYL_1) & _LOW
    out[0], out[1], out[2], out[3] = c0, c1, c2, c3


@compiled
def random_bits(
    seeds: NDArray[np.uint64], choices: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """32 uniform random bits per row, as integers in [0, 2^32).

    Args:
        seeds: Of each row's request.
        choices: Which of the request's choices the row is.
        positions: Output tokens before this one.
    """
    bits = np.empty(seeds.size, np.int64)
    counter = np.zeros(4, np.uint64)
    key = np.empty(2, np.uint64)
    block = np.empty(4, np.uint64)
    for row in range(seeds.size):
        counter[0] = np.uint64(positions[row]) & _LOW
        counter[1] = np.uint64(choices[row]) & _LOW
        key[0] = seeds[row] & _LOW
        key[1] = seeds[row] >> _WORD
        philox_block(counter, key, block)
        bits[row] = np.int64(block[0])
    return bits
