"""Probabilities as integers, so that sums do not depend on the order of addition.

Floating-point sums depend on their order, and the order depends on batch size, thread count and device. So a row's
token could change because of the other rows. Here a token's *weight* is its probability relative to the most probable
token's, in units of 2^-40::

    weight(x) = floor(2^40 · 2^((x - max) · log2(e) / temperature))

and everything after that is integer arithmetic. Sums are exact, so the total of a row, the mass of a nucleus and the
inverse of the cumulative distribution are the same whether computed in blocks, sorted, in parallel or on a GPU. The
power of two is a polynomial of single-precision multiplications and additions, because IEEE 754 defines these to the
last bit. A library's `exp` has no such guarantee. So the same logits give the same token on every device, and an answer
can continue on another replica.

The polynomial for 2^f on [-1/2, 1/2] is 1 + f·q(f), with q the interpolant of degree 4 of (2^f - 1)/f at Chebyshev
nodes; rounding included, its relative error is below 3e-7, about two units of single precision. A token 2^40 times less
probable than the best one has weight 0 and is never drawn; in a vocabulary of 2^18 tokens all such together have a
probability below 2^-22. Totals stay below 2^62 for vocabularies up to 2^21 tokens.
"""

import numpy as np

from maitred.engine.compiled import compiled

FRACTION_BITS = 40
ONE = 1 << FRACTION_BITS
"""Weight of the most probable token."""
MANTISSA_BITS = 24
"""Number of mantissa bits: single precision has no more, so 2^f converts exactly to 32 bits."""
SHARE_BITS = 32
SHARE_ONE = 1 << SHARE_BITS
"""Shares (random draws, top_p) are integers in [0, 2^32]."""
INDEX_BITS = 21
INDEX_MASK = (1 << INDEX_BITS) - 1
"""A rank packs (weight, token) in one integer: heavier first, then the lower token id."""
LOG2_E = 1.4426950408889634
LOWEST = -62.0
"""Lowest exponent used: its shift is legal and leaves no bit of the weight, as for lower exponents."""
POLYNOMIAL = (
    1.0,
    0.6931471805599482,
    0.2402234903802036,
    0.055503810137915874,
    0.009666368515384962,
    0.0013381302538816922,
)
"""Coefficients of 2^f, from the constant term upwards."""

_C0, _C1, _C2, _C3, _C4, _C5 = (np.float32(c) for c in POLYNOMIAL)
_LOWEST = np.float32(LOWEST)
_HALF = np.float32(0.5)
_MANTISSA = np.float32(1 << MANTISSA_BITS)
_WIDEN = np.uint64(FRACTION_BITS - MANTISSA_BITS)
_DRAW_HALF_BITS = 31
_DRAW_HALF_MASK = (1 << _DRAW_HALF_BITS) - 1


@compiled
def weight(x: np.float32, top: np.float32, scale: np.float32) -> np.int64:
    """Weight of logit `x` where `top` is the row's largest one and `scale` is log2(e) / temperature."""
    exponent = (x - top) * scale
    exponent = exponent if exponent > _LOWEST else _LOWEST
    shift = np.int32(_HALF - exponent)
    f = exponent + np.float32(shift)
    power = _C0 + f * (_C1 + f * (_C2 + f * (_C3 + f * (_C4 + f * _C5))))
    return np.int64((np.uint64(np.uint32(power * _MANTISSA)) << _WIDEN) >> np.uint64(shift))


@compiled
def share_of(total: np.int64, share: np.int64) -> np.int64:
    """floor(total · share / 2^32), exactly, for total < 2^62 and share ≤ 2^32."""
    high = (total >> _DRAW_HALF_BITS) * share
    low = (total & _DRAW_HALF_MASK) * share
    return (high + (low >> _DRAW_HALF_BITS)) >> 1
