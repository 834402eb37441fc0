import ctypes

import pytest
import torch

from maitred.engine.kernels.linear import KINDS, PackedLinear, ScreenedLinear, TiledLinear, make_head
from maitred.engine.kernels.linear.screened import HeadSearch, searchable
from maitred.engine.kernels.linear.strips import MOST_ROWS, NARROW, OF_MKL
from maitred.engine.kernels.tape import Tape
from tests.support.processors import MKL_WITH_AVX_512

SHAPES = [(96, 200), (1152, 896), (4096, 256), (16, 8), (3312, 704)]
"""Outputs and inputs: strips of 48 alone, and with one of 32 or 16 at the end of a part; one block and several."""
LEFT_OUT = float("-inf")


@pytest.fixture(params=[None, NARROW, OF_MKL], ids=["packed", "narrow", "wide"])
def screen(request):
    """A screened product of either form, and of both sizes of tiles."""
    if request.param is None and not MKL_WITH_AVX_512:
        pytest.skip("the layout is known of MKL with AVX-512 alone")

    def product(weight):
        return PackedLinear(weight) if request.param is None else TiledLinear(weight, tile=request.param)

    return lambda weight: ScreenedLinear(product(weight), weight)


def searched(linear, rows):
    """What a search gives, and how many strips of each row were computed."""
    rows = rows.contiguous()
    out = torch.full((len(rows) + 1, linear(rows).shape[1]), 7.0)
    found = torch.zeros(len(rows), dtype=torch.int64)
    most_rows = 100  # of a step; what a search needs is as much as its own rows need
    scratch = torch.zeros(linear.scratch_bytes(most_rows) + 64, dtype=torch.uint8)
    assert linear.scratch_bytes(most_rows) == linear.scratch_bytes(MOST_ROWS)
    count, tape = ctypes.c_int64(len(rows)), Tape(torch.get_num_threads())
    places = rows.data_ptr(), out.data_ptr(), ctypes.addressof(count), scratch.data_ptr()
    linear.record_search(tape, *places, most_rows, found)
    for _ in range(2):  # what one search leaves behind is nothing to the next
        tape.play()
    assert (out[-1] == 7.0).all()
    assert not scratch[-64:].any()
    return out[:-1], found


def check(linear, rows):
    """Every output is the one of the whole product or left out, and none that is largest is."""
    expected = linear(rows)
    out, found = searched(linear, rows)
    assert torch.equal(out.argmax(dim=1), expected.argmax(dim=1))
    left = out == LEFT_OUT
    assert torch.equal(torch.where(left, expected, out), expected)
    assert not (left & (expected == expected.amax(dim=1, keepdim=True))).any()
    return found


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_largest_output_is_found_and_its_bits_are_those_of_the_product(screen, outputs, inputs, threads):
    linear = screen(torch.randn(outputs, inputs))
    for count in (1, 3, MOST_ROWS):
        check(linear, torch.randn(count, inputs))


def test_little_is_computed_of_what_is_far_behind(screen):
    weight = torch.randn(3312, 704)
    rows = weight[torch.tensor([5, 3311])] * 2
    assert check(screen(weight), rows).tolist() == [1, 1]


@pytest.mark.parametrize("seed", [9, 116, 183])
@pytest.mark.parametrize("spread", [1e-30, 1e-6, 1e-3, 1.0, 1e4])
def test_weights_and_rows_of_all_sizes(screen, spread, seed):
    """The square of a weight may be too small for fp32; of these, the bound of the rounding error was missed once."""
    torch.manual_seed(seed)
    sizes = torch.exp(torch.randn(1152, 1) * 3) * spread
    rows = torch.randn(4, 200)
    rows[1, 17] *= 1e3  # most of a row is lost in rounding
    rows[2] = 0
    check(screen(torch.randn(1152, 200) * sizes), rows)


def test_outputs_that_are_equal_are_all_kept(screen):
    linear = screen(torch.randn(1, 256).expand(960, 256).contiguous())
    strips = 960 // linear._exact.strip
    assert check(linear, torch.randn(2, 256)).tolist() == [strips, strips]


def test_an_output_that_is_larger_by_the_last_bit_is_found(screen):
    weight, rows = torch.randn(1, 256).expand(480, 256).contiguous(), torch.randn(MOST_ROWS, 256)
    weight[333] *= 1 + 2**-22
    check(screen(weight), rows)


@pytest.mark.parametrize(("where", "what"), [("row", float("nan")), ("row", float("inf")), ("weight", float("inf"))])
def test_what_is_no_number_is_there_to_be_seen(screen, where, what):
    weight, rows = torch.rand(480, 256), torch.rand(2, 256)
    (rows if where == "row" else weight)[1, 7] = what
    out, _ = searched(screen(weight), rows)
    assert not out[1].isfinite().all()
    assert (out[1].isnan() | (out[1] == float("inf"))).any()


def test_put_together_again_it_searches_as_before(screen):
    linear, rows = screen(torch.randn(480, 256)), torch.randn(3, 256)
    again = KINDS[linear.kind].of(linear.tensors())
    for one, other in zip(searched(linear, rows), searched(again, rows), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(linear(rows), again(rows))


def test_a_head_is_searched_where_it_is_large(monkeypatch):
    weight = torch.randn(512, 256)
    assert isinstance(make_head(weight), PackedLinear | TiledLinear)
    monkeypatch.setattr("maitred.engine.kernels.linear.screened.WORTH_WEIGHTS", weight.numel())
    assert isinstance(make_head(weight), ScreenedLinear)
    assert not isinstance(make_head(weight, "int8"), ScreenedLinear)
    assert searchable(PackedLinear(weight).without_strips(), weight) is None


def test_a_search_that_finds_too_much_is_given_up_for_a_while():
    search = HeadSearch(strips=100)
    assert search.begins(1)
    assert not search.begins(MOST_ROWS + 1)
    search.record(torch.tensor([12, 38]))
    assert search.begins(2)
    search.record(torch.tensor([12, 39]))
    assert sum(not search.begins(1) for _ in range(100)) == 64
