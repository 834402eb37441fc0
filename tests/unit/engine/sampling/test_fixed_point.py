import random

import numpy as np
import torch

from maitred.engine.sampling import device_rows
from maitred.engine.sampling.fixed_point import LOG2_E, ONE, share_of, weight
from tests.support import sampling_reference as reference


def test_weights_are_relative_probabilities():
    for difference in np.linspace(0, 20, 2001, dtype=np.float32):
        expected = np.exp(-np.float64(difference))
        assert abs(weight(-difference, np.float32(0), np.float32(LOG2_E)) / ONE - expected) < 3e-6 * expected + 2**-40


def test_the_polynomial_is_good_to_single_precision():
    for f in np.linspace(-0.5, 0, 4097, dtype=np.float32):
        assert abs(weight(f, np.float32(0), np.float32(1)) / ONE / 2 ** np.float64(f) - 1) < 3e-7
    for f in np.linspace(-1, -0.5, 4097, dtype=np.float32):
        assert abs(weight(f, np.float32(0), np.float32(1)) / ONE / 2 ** np.float64(f) - 1) < 3e-7


def test_ends_of_the_scale():
    one = np.float32(1)
    assert weight(np.float32(5), np.float32(5), one) == ONE
    assert weight(np.float32(-40), np.float32(0), one) == 1
    assert weight(np.float32(-42), np.float32(0), one) == 0
    assert weight(np.float32(-np.inf), np.float32(0), one) == 0
    assert weight(np.float32(-3e38), np.float32(3e38), np.float32(1e5)) == 0


def test_kernel_tensors_and_plain_python_agree_to_the_last_bit():
    row = (np.random.default_rng(1).standard_normal(4000) * 8).astype(np.float32)
    row[7] = -np.inf
    for temperature in (0.01, 0.3, 1.0, 2.0):
        scale = np.float32(LOG2_E / temperature)
        plain = reference.weights(row, temperature)
        assert [int(weight(x, row.max(), scale)) for x in row] == plain
        logits = torch.from_numpy(row)[None]
        tensors = device_rows.weigh(logits, logits.amax(-1, keepdim=True), torch.tensor([scale]))
        assert tensors[0].tolist() == plain


def test_shares_are_exact():
    numbers = random.Random(2)
    for _ in range(2000):
        total = numbers.getrandbits(numbers.randint(1, 61))
        share = numbers.choice([0, 1, 1 << 32, numbers.getrandbits(32)])
        assert share_of(total, share) == total * share >> 32
        assert device_rows.share_of(torch.tensor(total), torch.tensor(share)).item() == total * share >> 32
