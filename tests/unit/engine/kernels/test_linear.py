import os
import subprocess
import sys

import pytest
import torch

from maitred.engine.kernels import linear as kernels
from maitred.engine.kernels.linear import KINDS, PackedLinear, PlainLinear, TiledLinear, Unchanged, make_linear, packed
from maitred.engine.kernels.linear.strips import NARROW, OF_MKL, TileShape, strips_product
from tests.support.processors import MKL_WITH_AVX_512

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(96, 200, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 513])
def test_equals_torch(weight, count, bias):
    rows, offset = torch.randn(count, 200), torch.randn(96) if bias else None
    expected = torch.nn.functional.linear(rows, weight, offset)
    torch.testing.assert_close(make_linear(weight, offset)(rows), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(PlainLinear(weight, offset)(rows), expected)


@needs_mkl
def test_takes_rows_that_are_not_contiguous(weight):
    rows = torch.randn(8, 400)[:, ::2]
    torch.testing.assert_close(PackedLinear(weight)(rows), rows @ weight.T, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not MKL_WITH_AVX_512, reason="seen to hold where MKL computes with AVX-512 only")
@pytest.mark.parametrize(("inputs", "outputs"), [(200, 96), (704, 256), (512, 512), (1536, 512), (4864, 896)])
def test_a_row_does_not_depend_on_its_neighbours(inputs, outputs):
    """Bit for bit: what makes an answer independent of the batch that it happened to be in."""
    linear, rows = PackedLinear(torch.randn(outputs, inputs)), torch.randn(130, inputs)
    alone = torch.cat([linear(rows[i : i + 1]) for i in range(len(rows))])
    for count in (2, 3, 8, 31, 64, 130):
        assert torch.equal(linear(rows[:count]), alone[:count])
        assert torch.equal(linear(rows[-count:]), alone[-count:])


@needs_mkl
def test_fp32_on_the_cpu_is_packed_and_other_types_are_not(weight, monkeypatch):
    monkeypatch.setattr(kernels, "keeps_rows_apart", lambda *_: True)
    assert isinstance(make_linear(weight), PackedLinear)
    assert isinstance(make_linear(weight.bfloat16()), PlainLinear)


@needs_mkl
def test_a_packing_that_computes_something_else_is_not_used(weight, monkeypatch):
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, rows: torch.zeros(len(rows), 96))
    assert isinstance(make_linear(weight), TiledLinear)


@needs_mkl
def test_a_packing_in_which_rows_depend_on_each_other_is_not_used(weight, monkeypatch):
    monkeypatch.setattr(packed, "_APART", {})
    product = PackedLinear.__call__
    monkeypatch.setattr(
        PackedLinear, "__call__", lambda self, rows: product(self, rows) * (1 + 1e-6 * (len(rows) > 30))
    )
    linear, rows = make_linear(weight), torch.randn(70, 200)
    assert isinstance(linear, TiledLinear)
    assert torch.equal(linear(rows)[:3], linear(rows[:3]))


@needs_mkl
@pytest.mark.parametrize("instructions", ["AVX512", "AVX2", "SSE4_2"])
def test_whatever_the_processor_has_a_row_does_not_depend_on_its_neighbours(instructions):
    """MKL's own switch; with AVX2 its product of this shape was seen to differ in steps of 2, 3 and 31 rows."""
    code = """
import torch
from maitred.engine.kernels.linear import make_linear
torch.set_num_threads(1)
linear, rows = make_linear(torch.randn(512, 1536)), torch.randn(70, 1536)
together = linear(rows)
assert all(torch.equal(linear(rows[:count]), together[:count]) for count in range(1, 70)), linear
"""
    environment = dict(os.environ, MKL_ENABLE_INSTRUCTIONS=instructions)
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", [PlainLinear, TiledLinear, pytest.param(PackedLinear, marks=needs_mkl)])
def test_is_the_same_after_it_was_taken_apart(weight, form, bias):
    linear, rows = form(weight, torch.randn(96) if bias else None), torch.randn(33, 200)
    again = KINDS[linear.kind].of(linear.tensors())
    elsewhere = KINDS[linear.kind].of({name: _moved(tensor) for name, tensor in linear.tensors().items()})
    assert torch.equal(again(rows), linear(rows))
    assert torch.equal(elsewhere(rows), linear(rows))


@needs_mkl
def test_packed_memory_at_a_fitting_address_is_not_copied(weight):
    parts = PackedLinear(weight).tensors()
    assert PackedLinear.of(parts).tensors()["packed"].data_ptr() == parts["packed"].data_ptr()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(1, 1), (16, 8), (50, 70), (130, 385), (1152, 896), (512, 1536)])
def test_tiles_of_every_size_give_the_same_bits_and_write_nothing_else(size, bias, threads):
    """Few rows and so many that rows are fetched ahead, strips that are full and strips that are not."""
    outputs, inputs = size
    weight, offset = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    rows = torch.randn(200, inputs)
    exact = torch.nn.functional.linear(rows.double(), weight.double(), None if offset is None else offset.double())
    expected = TiledLinear(weight, offset, tile=NARROW)(rows)
    torch.testing.assert_close(expected, exact.float(), atol=1e-4, rtol=1e-4)
    for tile in (NARROW, OF_MKL, TileShape(vectors=2, height=3)):
        linear = TiledLinear(weight, offset, tile=tile)
        for count in (1, 2, 5, 6, 7, 8, 9, 33, 200):
            beside = torch.full((count + 2, outputs), 7.0)
            fields = linear._fields(rows.data_ptr(), beside[1:].data_ptr(), 1)
            strips_product(tile).run(count, fields)
            assert torch.equal(beside[1:-1], expected[:count]), (tile, count)
            assert (beside[[0, -1]] == 7.0).all()
            assert torch.equal(linear(rows[:count]), expected[:count])


def test_a_missing_head_changes_nothing(weight):
    assert KINDS["unchanged"].of(Unchanged().tensors())(weight) is weight


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """The same at an address that nothing fits."""
    buffer = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return buffer[1:].view(tensor.shape).copy_(tensor)
