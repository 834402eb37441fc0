"""Counter-based random bits: a request draws the same numbers on any replica.

With a stateful generator, a token would depend on all earlier draws: on other rows of the batch, on preemptions and on
moves to another replica. A counter-based generator mixes a counter with a key, so the bits of a token depend only on
(seed, choice, position) and need no history.

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
    """Computes four random 32-bit words from a counter of four and a key of two words, each in a uint64."""
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
    """Computes 32 uniform random bits per row, as integers in [0, 2^32).

    Args:
        seeds: Seed of each row's request.
        choices: Index of each row's choice in its request.
        positions: Number of output tokens before the token to sample.
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
