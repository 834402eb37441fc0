"""The vector instructions that kernels are made with, against NumPy."""

import numba
import numpy as np
import pytest

from maitred.engine.kernels.simd import cap_strips, exponential, softmax_strips


@numba.njit
def softmax_16(scores, at, padded, count, scale):
    softmax_strips(scores, at, padded, 0, count, scale, 16)


@numba.njit
def softmax_4(scores, at, padded, count, scale):
    softmax_strips(scores, at, padded, 0, count, scale, 4)


@numba.njit
def softmax_behind(scores, at, padded, first, count, scale):
    softmax_strips(scores, at, padded, first, count, scale, 4)


@numba.njit
def capped(scores, at, padded, scale, cap):
    cap_strips(scores, at, padded, scale, cap, 8)


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


@pytest.mark.parametrize(("first", "count"), [(0, 5), (3, 4), (5, 17), (16, 20), (1, 20)])
def test_softmax_behind_the_first_scores(first, count):
    scores = np.random.default_rng(count).normal(size=40).astype(np.float32) * 5
    exact = np.exp(scores[7 + first : 7 + count].astype(np.float64))
    around = scores[:7].copy(), scores[27:].copy()
    softmax_behind(scores, 7, 20, first, count, np.float32(1.0))
    np.testing.assert_allclose(scores[7 + first : 7 + count], exact / exact.sum(), rtol=1e-5)
    assert not scores[7 : 7 + first].any()
    assert not scores[7 + count : 27].any()
    np.testing.assert_array_equal(scores[:7], around[0])
    np.testing.assert_array_equal(scores[27:], around[1])


def test_soft_cap():
    scores = np.concatenate([np.linspace(-600, 600, 61), [0.0, 1e-6, -1e30]]).astype(np.float32)
    expected = 50 * np.tanh(0.25 * scores.astype(np.float64) / 50)
    capped(scores, 0, 64, np.float32(0.25), np.float32(50.0))
    np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-5)
