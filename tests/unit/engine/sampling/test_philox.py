import numpy as np
import pytest

from maitred.engine.sampling.philox import philox_block, random_bits

# Known answers published with the Random123 library (philox4x32, 10 rounds): counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return np.array([int(word, 16) for word in text.split()], np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    out = np.empty(4, np.uint64)
    philox_block(words(counter), words(key), out)
    assert out.tolist() == words(expected).tolist()


def bits(seed, choice, position):
    return int(random_bits(np.array([seed], np.uint64), np.array([choice]), np.array([position]))[0])


def test_the_layout_of_key_and_counter_is_fixed():
    # A stream that moves to another version of the engine must go on with the same numbers.
    assert bits(0, 0, 0) == 0x6627E8D5
    out = np.empty(4, np.uint64)
    philox_block(np.array([7, 3, 0, 0], np.uint64), words("89abcdef 01234567"), out)
    assert bits(0x0123456789ABCDEF, 3, 7) == int(out[0])


def test_seed_choice_and_position_all_matter():
    seen = {
        bits(seed, choice, position) for seed in (1, 1 << 32, 1 << 63) for choice in range(4) for position in range(64)
    }
    assert len(seen) == 3 * 4 * 64


def test_bits_are_uniform():
    n = 1 << 16
    drawn = random_bits(np.full(n, 42, np.uint64), np.zeros(n, np.int64), np.arange(n))
    assert drawn.min() >= 0
    assert drawn.max() < 1 << 32
    counts = np.bincount(drawn >> 24, minlength=256)
    chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert chi_square < 347  # 255 degrees of freedom, p = 1e-4
    ones = [(drawn >> bit & 1).mean() for bit in range(32)]
    assert max(abs(share - 0.5) for share in ones) < 4.5 * 0.5 / n**0.5
