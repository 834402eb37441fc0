"""Products with rounded weights: against plain torch, and to the last bit against themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.engine.compiled import processor_features
from maitred.engine.kernels.linear import KINDS, GroupedWeight, QuantisedLinear, job, make_linear
from maitred.engine.kernels.linear.dots import PAIRS, PLAIN, VNNI, best_dot
from maitred.engine.kernels.linear.job import product
from maitred.engine.kernels.linear.panels import GROUP_INPUTS
from maitred.engine.kernels.linear.tiles import BF16, BYTES, FP16, FP16_ALONE, FP32, ROW, SIGNED_BYTES

SCHEMES = [(8, False), (8, True), (4, False), (4, True)]
KINDS_OF_BITS = {8: ROW, 4: BF16}
needs_avx2 = pytest.mark.skipif("avx2" not in processor_features(), reason="has no AVX2")
outputs_and_inputs = st.tuples(st.integers(1, 200), st.integers(1, 150))


def rounded_weight(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """What a weight is after rounding, in plain torch."""
    if bits == 8:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return (weight / scale.clamp(min=1e-38)).round() * scale
    parts = []
    for part in torch.nn.functional.pad(weight, (0, -weight.shape[1] % GROUP_INPUTS)).split(GROUP_INPUTS, dim=1):
        low, high = part.amin(dim=1, keepdim=True), part.amax(dim=1, keepdim=True)
        scale, offset = ((high - low) / 15).bfloat16().float(), (-low).bfloat16().float()
        parts.append(((part + offset) / scale.clamp(min=1e-38)).round().clamp(0, 15) * scale - offset)
    return torch.cat(parts, dim=1)[:, : weight.shape[1]]


def rounded_rows(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().amax(dim=1, keepdim=True) / 127
    return (rows / scale.clamp(min=1e-38)).round() * scale


@pytest.mark.parametrize(("bits", "real"), SCHEMES)
@settings(max_examples=40, deadline=None)
@given(shape=outputs_and_inputs, count=st.integers(0, 20), bias=st.booleans(), seed=st.integers(0, 1 << 30))
def test_equals_torch_over_rounded_numbers(bits, real, shape, count, bias, seed):
    torch.manual_seed(seed)
    weight, rows = torch.randn(shape), torch.randn(count, shape[1])
    offset = torch.randn(shape[0]) if bias else None
    given_rows = rows if real else rounded_rows(rows)
    expected = torch.nn.functional.linear(given_rows.double(), rounded_weight(weight, bits).double())
    expected = expected if offset is None else expected + offset
    product_ = QuantisedLinear(weight, offset, bits=bits, real=real)(rows)
    # A number halfway between two may be rounded either way: one unit of one input.
    most = 0 if real else float(rows.abs().max() / 127 * weight.abs().max()) if count else 0
    torch.testing.assert_close(product_, expected.float(), atol=most + 2e-4, rtol=1e-4)


@pytest.mark.parametrize(("bits", "real"), SCHEMES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_its_neighbours(bits, real, threads):
    """Bit for bit, at every height of a tile, and whoever computes a panel."""
    torch.manual_seed(0)
    linear, rows = QuantisedLinear(torch.randn(200, 150), bits=bits, real=real), torch.randn(70, 150)
    rows[1::2] *= 1000
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([linear(rows[i : i + 1]) for i in range(len(rows))])
        for count in (*range(2, 14), 31, 70):
            assert torch.equal(linear(rows[:count]), alone[:count])
            assert torch.equal(linear(rows[-count:]), alone[-count:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("bits", "real"), SCHEMES)
def test_is_the_same_after_it_was_taken_apart(bits, real):
    linear = QuantisedLinear(torch.randn(130, 70), torch.randn(130), bits=bits, real=real)
    rows, parts = torch.randn(9, 70), linear.tensors()
    elsewhere = {}
    for name, part in parts.items():
        buffer = torch.empty(part.nbytes + 8, dtype=torch.uint8)[8:]
        elsewhere[name] = buffer.view(part.dtype).view(part.shape).copy_(part)
    assert torch.equal(KINDS[linear.kind].of(parts)(rows), linear(rows))
    assert torch.equal(KINDS[linear.kind].of(elsewhere)(rows), linear(rows))
    assert KINDS[linear.kind].of(parts).tensors()["panels"].data_ptr() == parts["panels"].data_ptr()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dot", [PLAIN, pytest.param(PAIRS, marks=needs_avx2)])
def test_a_lesser_processor_computes_the_same(bits, dot, monkeypatch):
    """The widest numbers included: no way may saturate where another does not."""
    linear, rows = QuantisedLinear(torch.randn(150, 90), bits=bits, real=False), torch.randn(13, 90)
    extremes = QuantisedLinear(torch.where(torch.randn(150, 90) > 0, 1.0, -1.0), bits=bits, real=False)
    ones = torch.where(torch.randn(13, 90) > 0, 1.0, -1.0)
    expected = [linear(rows), extremes(ones)]
    for layer in (linear, extremes):
        monkeypatch.setattr(layer, "_product", product(bits, KINDS_OF_BITS[bits], real=False, dot=dot))
    assert torch.equal(linear(rows), expected[0])
    assert torch.equal(extremes(ones), expected[1])


def grouped(bits: int, kind: int, group: int, outputs: int = 150, inputs: int = 256) -> GroupedWeight:
    """A random weight of a checkpoint, with its widest numbers and with scales that are not normal in fp16."""
    groups = inputs // group
    numbers = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    numbers[0], numbers[1] = 0, (1 << bits) - 1
    if kind in (FP16, FP16_ALONE, FP32):
        scales = (torch.rand(outputs, groups) * 0.1).half()
        scales[:9] = 6e-8
        offsets = None if kind == FP16_ALONE else (torch.randn(outputs, groups) * 0.5).half()
        if kind == FP32:  # products of a number in fp16 and one of 6 bits
            numbers = numbers % 64 + 96
            return GroupedWeight(bits, numbers, scales.float() * 61, offsets.float() * 61)
        return GroupedWeight(bits, numbers, scales, offsets)
    factors = (torch.rand(outputs, 1, 2 if kind == BYTES else 1) * 0.01).half()
    if kind == SIGNED_BYTES:
        scales = torch.randint(-128, 128, (outputs, groups)).to(torch.int8)
        return GroupedWeight(bits, numbers, scales, None, factors)
    scales, offsets = torch.randint(0, 64, (2, outputs, groups), dtype=torch.uint8)
    numbers = numbers if bits == 4 else numbers % 32 + 128
    return GroupedWeight(bits, numbers, scales, offsets, factors)


GROUPED = [
    (4, FP16, 32),
    (8, FP16, 32),
    (8, FP16_ALONE, 32),
    (4, BYTES, 32),
    (8, BYTES, 32),
    (8, SIGNED_BYTES, 16),
    (8, FP32, 16),
]


@pytest.mark.parametrize(("bits", "kind", "group"), GROUPED)
@pytest.mark.parametrize("widens", [True, False])
def test_a_weight_of_a_checkpoint_stays_as_it_is(bits, kind, group, widens, monkeypatch):
    """Bit for bit, also where the processor does not widen fp16 by itself: one input alone shows each weight."""
    if not widens:
        monkeypatch.setattr(job, "processor_features", lambda: frozenset({"avx2"}))
    product.cache_clear()
    torch.manual_seed(0)
    weight = grouped(bits, kind, group)
    assert (weight.kind, weight.group_inputs) == (kind, group)
    linear = QuantisedLinear(weight, bits=bits, real=True)
    assert torch.equal(linear(torch.eye(256)), weight.plain().T)
    rows, bias = torch.randn(13, 256), torch.arange(150.0)
    with_bias = QuantisedLinear(weight, bias, bits=bits, real=True)
    expected = torch.nn.functional.linear(rows.double(), weight.plain().double(), bias.double()).float()
    torch.testing.assert_close(with_bias(rows), expected, atol=1e-3, rtol=1e-5)
    assert torch.equal(QuantisedLinear.of(with_bias.tensors())(rows), with_bias(rows))
    product.cache_clear()


@pytest.mark.parametrize(("bits", "kind", "group"), GROUPED)
def test_rows_are_rounded_group_by_group(bits, kind, group):
    torch.manual_seed(0)
    weight, rows = grouped(bits, kind, group), torch.randn(13, 256)
    rows[:, :group] *= 1000
    rows[1::2] *= 100
    parts = rows.view(13, -1, group)
    scale = parts.abs().amax(dim=2, keepdim=True) / 127
    rounded = ((parts * (1 / scale)).round() * scale).view(13, 256)
    linear = QuantisedLinear(weight, bits=bits, real=False)
    expected = torch.nn.functional.linear(rounded.double(), weight.plain().double())
    # A number halfway between two may be rounded either way: one unit of one input.
    within = float((scale.amax(dim=1) * weight.plain().abs().max()).max())
    torch.testing.assert_close(linear(rows).double(), expected, atol=within, rtol=1e-5)
    assert (linear(rows).double() - expected).abs().mean() < within / 1000
    alone = torch.cat([linear(rows[i : i + 1]) for i in range(13)])
    assert torch.equal(linear(rows), alone)
    assert torch.equal(QuantisedLinear.of(linear.tensors())(rows), alone)


@pytest.mark.parametrize(("bits", "kind", "group"), GROUPED)
@pytest.mark.parametrize("dot", [PLAIN, pytest.param(PAIRS, marks=needs_avx2)])
def test_a_lesser_processor_computes_the_same_with_groups(bits, kind, group, dot, monkeypatch):
    torch.manual_seed(0)
    linear, rows = QuantisedLinear(grouped(bits, kind, group), bits=bits, real=False), torch.randn(13, 256)
    rows[0] = 1.0
    expected = linear(rows)
    monkeypatch.setattr(linear, "_product", product(bits, kind, real=False, dot=dot))
    assert torch.equal(linear(rows), expected)


def test_weights_of_different_forms_are_stacked_unchanged():
    torch.manual_seed(0)
    weights = [grouped(*form) for form in GROUPED]
    together = GroupedWeight.stack(weights)
    assert (together.bits, together.kind, together.group_inputs) == (8, FP32, 16)
    assert torch.equal(together.plain(), torch.cat([weight.plain() for weight in weights]))
    same = GroupedWeight.stack([grouped(4, BYTES, 32), grouped(4, BYTES, 32)])
    assert (same.bits, same.kind, same.shape) == (4, BYTES, (300, 256))


@pytest.mark.parametrize(
    ("bits", "scheme", "kept", "real"),
    [
        (4, "none", True, True),
        (4, "int8", True, False),
        (4, "int4_weight_only", True, True),
        (8, "int8_weight_only", True, True),
        (8, "int8", True, False),
        (8, "int4", False, False),
    ],
)
def test_a_scheme_says_whether_rows_are_rounded(bits, scheme, kept, real):
    """A checkpoint's weight is rounded again only where fewer bits are asked for."""
    weight = grouped(bits, FP16, 32)
    linear = make_linear(weight, scheme=scheme)
    expected = QuantisedLinear(weight if kept else weight.plain(), bits=bits if kept else 4, real=real)
    rows = torch.randn(5, 256)
    assert torch.equal(linear(rows), expected(rows))


@pytest.mark.skipif("avx512bf16" not in processor_features(), reason="has no AVX-512 BF16")
@settings(max_examples=40, deadline=None)
@given(shape=outputs_and_inputs, count=st.integers(0, 20), bias=st.booleans(), seed=st.integers(0, 1 << 30))
def test_bf16_products_are_those_of_rounded_rows(shape, count, bias, seed):
    torch.manual_seed(seed)
    weight, rows = torch.randn(shape), torch.randn(count, shape[1])
    offset = torch.randn(shape[0]) if bias else None
    linear = make_linear(weight, offset, "bf16")
    expected = torch.nn.functional.linear(rows.bfloat16().double(), weight.bfloat16().double())
    expected = expected if offset is None else expected + offset
    torch.testing.assert_close(linear(rows), expected.float(), atol=1e-4, rtol=1e-5)
    assert torch.equal(QuantisedLinear.of(linear.tensors())(rows), linear(rows))
    if count:
        assert torch.equal(torch.cat([linear(row[None]) for row in rows]), linear(rows))


def test_a_processor_gets_the_best_that_it_has():
    assert best_dot(frozenset({"avx2", "avx512f", "avx512vnni"})) == VNNI
    assert best_dot(frozenset({"avx2", "avx512f"})) == PAIRS
    assert best_dot(frozenset({"neon"})) == PLAIN


def test_features_are_those_that_machine_code_may_use(monkeypatch):
    monkeypatch.setattr("numba.core.config.CPU_FEATURES", None)
    assert processor_features()
    monkeypatch.setattr("numba.core.config.CPU_FEATURES", "+avx2,-avx512f,+fma")
    assert processor_features() == {"avx2", "fma"}


def test_zeros_stay_zeros_and_what_is_no_number_stays_none():
    linear = QuantisedLinear(torch.zeros(3, 8), torch.arange(3.0), bits=8, real=False)
    assert linear(torch.zeros(1, 8)).tolist() == [[0.0, 1.0, 2.0]]
    broken = torch.ones(2, 8)
    broken[0, 3] = torch.nan
    product_ = QuantisedLinear(torch.ones(3, 8), bits=8, real=False)(broken)
    assert product_[0].isnan().all()
    assert product_[1].tolist() == pytest.approx([8.0] * 3)


def test_rows_that_are_not_contiguous():
    linear, rows = QuantisedLinear(torch.randn(5, 8), bits=8, real=False), torch.randn(4, 16)[:, ::2]
    assert torch.equal(linear(rows), linear(rows.contiguous()))


def test_more_inputs_than_a_sum_can_hold_are_refused():
    with pytest.raises(ValueError, match="70000 inputs cannot be rounded; 66311 are the most"):
        QuantisedLinear(torch.zeros(1, 70_000), bits=8, real=False)


@pytest.mark.parametrize(("scheme", "bytes_"), [("int8", 1), ("int8_weight_only", 1), ("int4", 0.5)])
def test_a_scheme_says_how_weights_are_kept(scheme, bytes_):
    linear = make_linear(torch.randn(640, 640), scheme=scheme)
    assert linear.tensors()["panels"].nbytes == 640 * 640 * bytes_
