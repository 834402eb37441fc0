import pytest
import torch

from maitred.engine.kernels.linear import PackedLinear, make_linear, packed
from maitred.engine.kernels.linear.strips import MOST_ROWS, find_layout
from tests.support.processors import MKL_WITH_AVX_512

pytestmark = pytest.mark.skipif(not MKL_WITH_AVX_512, reason="the layout is known of MKL with AVX-512 alone")

SHAPES = [(96, 200), (256, 704), (896, 896), (512, 512), (1152, 896), (512, 1536), (896, 4864), (4096, 256), (16, 8)]
"""Outputs and inputs: strips of 48 alone, and with one of 32 or 16 at the end of a part; one block and several."""


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_computes_what_mkl_computes_to_the_last_bit(outputs, inputs, bias, threads):
    linear = PackedLinear(torch.randn(outputs, inputs), torch.randn(outputs) if bias else None)
    assert linear.reads_strips
    rows = torch.randn(MOST_ROWS + 1, inputs)
    expected = linear.without_strips()(rows)
    for count in (*range(1, 18), 31, 32, 33, MOST_ROWS, MOST_ROWS + 1):
        assert torch.equal(linear(rows[:count]), expected[:count]), count


def test_leaves_what_is_beside_the_result_alone():
    linear, rows = PackedLinear(torch.randn(80, 40)), torch.randn(5, 40)
    out = torch.full((7, 80), 7.0)
    packed.packed_product().run(5, linear._fields(rows.data_ptr(), out[1:].data_ptr(), 1))
    assert torch.equal(out[1:6], linear(rows))
    assert (out[[0, 6]] == 7.0).all()


@pytest.mark.parametrize("place", [0, 511 * 896 + 895])
def test_a_layout_with_one_weight_elsewhere_is_none(place):
    weight = torch.randn(512, 896)
    parts = PackedLinear(weight).tensors()
    assert find_layout(parts["packed"], weight, torch.get_num_threads()) is not None
    weight.view(-1)[place] += 1
    assert find_layout(parts["packed"], weight, torch.get_num_threads()) is None


def test_weights_that_are_equal_by_chance_do_not_deceive():
    weight = torch.zeros(512, 512)
    weight[300, 300] = 1
    rows = torch.randn(8, 512)
    linear = PackedLinear(weight)
    assert torch.equal(linear(rows), linear.without_strips()(rows))


def test_outputs_that_fill_no_vector_are_left_to_mkl():
    linear, rows = PackedLinear(torch.eye(100)), torch.randn(8, 100)
    assert not linear.reads_strips
    assert torch.equal(linear(rows), rows)


def test_the_layout_is_kept_with_the_weight():
    linear, rows = PackedLinear(torch.randn(512, 200)), torch.randn(8, 200)
    again = PackedLinear.of(linear.tensors())
    assert again.reads_strips
    assert torch.equal(again(rows), linear(rows))


def test_strips_that_give_other_bits_are_not_read(monkeypatch):
    monkeypatch.setattr(packed, "_APART", {})
    product = PackedLinear.__call__
    monkeypatch.setattr(
        PackedLinear,
        "__call__",
        lambda self, rows: product(self, rows) * (1 + 1e-6 * (self.reads_strips and len(rows) <= MOST_ROWS)),
    )
    linear = make_linear(torch.randn(512, 200))
    assert isinstance(linear, PackedLinear)
    assert not linear.reads_strips
