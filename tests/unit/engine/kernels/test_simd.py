"""The vector instructions that kernels are made with, against NumPy."""

import numba
import numpy as np
import pytest

from maitred.engine.kernels.simd import exponential, softmax_strips


@numba.njit
def softmax_16(scores, at, padded, count, scale):
    softmax_strips(scores, at, padded, count, scale, 16)


@numba.njit
def softmax_4(scores, at, padded, count, scale):
    softmax_strips(scores, at, padded, count, scale, 4)


@numba.njit
def exponentials(numbers):
    return np.array([exponential(number) for number in numbers])


@pytest.mark.parametrize(("softmax", "lanes"), [(softmax_16, 16), (softmax_4, 4)])
@pytest.mark.parametrize("count", [1, 3, 4, 15, 16, 17, 100, 200])
def test_softmax(softmax, lanes, count):
    scale, at, padded = np.float32(0.25), 7, -(-count // lanes) * lanes
    scores = (np.random.default_rng(count).normal(size=400) * 30).astype(np.float32)
    exact = np.exp(0.25 * (scores[at : at + count].astype(np.float64) - scores[at : at + count].max()))
    results = []
    for further in (0, 2 * lanes):
        result = scores.copy()
        softmax(result, at, padded + further, count, scale)
        end = at + padded + further
        np.testing.assert_allclose(result[at : at + count], exact / exact.sum(), atol=3e-7)
        assert not result[at + count : end].any()
        assert np.array_equal(result[:at], scores[:at])
        assert np.array_equal(result[end:], scores[end:])
        results.append(result[at : at + count])
    assert np.array_equal(*results), "what lies behind the scores must not matter"


def test_exponential_is_right_to_the_last_digits_of_fp32():
    numbers = np.concatenate([np.linspace(-87, 0, 5000), [-1e30, -88.0]]).astype(np.float32)
    exact = np.exp(np.maximum(numbers.astype(np.float64), -87))
    np.testing.assert_allclose(exponentials(numbers), exact, rtol=3e-7)
