"""How a request for embeddings is cut, and how a vector is."""

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.app.request.embeddings import MAX_CHUNK_TEXTS, shorten, split_inputs

NUMBERS = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=32)


def packed(numbers):
    return struct.pack(f"<{len(numbers)}f", *numbers)


def unpacked(vector):
    return struct.unpack(f"<{len(vector) // 4}f", vector)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=200), st.integers(1, 512))
def test_slices_are_all_of_it_in_order_and_small(lengths, tokens):
    slices = list(split_inputs(lengths, tokens))
    assert [index for part in slices for index in part] == list(range(len(lengths)))
    for part in slices:
        assert 1 <= len(part) <= MAX_CHUNK_TEXTS
        assert len(part) == 1 or sum(lengths[index] for index in part) <= tokens


def test_short_texts_go_together():
    assert list(split_inputs([10] * 40, 1000)) == [range(32), range(32, 40)]
    assert list(split_inputs([10, 10, 10], 20)) == [range(2), range(2, 3)]


@given(NUMBERS, st.data())
def test_a_shortened_vector_keeps_its_direction_and_has_length_one(numbers, data):
    dimensions = data.draw(st.integers(1, len(numbers)))
    kept = unpacked(shorten(packed(numbers), dimensions))
    assert len(kept) == dimensions
    length = math.hypot(*numbers[:dimensions])
    if length > 1e-20:
        assert math.hypot(*kept) == pytest.approx(1.0, abs=1e-4)
        assert kept == pytest.approx([number / length for number in numbers[:dimensions]], abs=1e-5)
    else:
        assert all(math.isfinite(number) for number in kept)
