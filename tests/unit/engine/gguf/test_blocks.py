import random

import pytest
import torch

from maitred.engine.gguf.blocks import dequantise, grouped_weight
from maitred.engine.gguf.file import FORMATS
from tests.unit.engine.gguf.random_files import TYPES, StoredTensor, numbers_of, random_blocks

QUANTISED = [kind for kind in TYPES if kind not in ("F32", "F16", "BF16")]
FORMS = {form.name: form for form in FORMATS.values()}


def test_all_forms_are_tried():
    assert {name: (number, form.numbers, form.bytes) for number, form in FORMATS.items() for name in [form.name]} == (
        TYPES
    )


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_those_of_the_format(kind):
    form = FORMS[kind]
    count = 96 if form.numbers == 1 else 9
    data = random_blocks(kind, count, random.Random(kind))
    numbers = dequantise(torch.tensor(list(data), dtype=torch.uint8), form)
    assert torch.equal(numbers.float(), numbers_of(StoredTensor((count * form.numbers,), kind, data)))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q4_K", torch.float32)])
def test_stored_types_stay(kind, dtype):
    data = torch.tensor(list(random_blocks(kind, 8, random.Random(0))), dtype=torch.uint8)
    assert dequantise(data, FORMS[kind]).dtype == dtype


@pytest.mark.parametrize("kind", QUANTISED)
def test_numbers_that_are_kept_are_those_of_the_format(kind):
    form = FORMS[kind]
    data = random_blocks(kind, 40 * 512 // form.numbers, random.Random(kind))
    weight = grouped_weight(torch.tensor(list(data), dtype=torch.uint8), form, 40, 512)
    assert weight.bits == (4 if kind.startswith("Q4") else 8)
    assert torch.equal(weight.plain(), numbers_of(StoredTensor((40, 512), kind, data)))


def test_scales_that_are_too_large_are_unpacked():
    """Eight times the scale of Q4_0 may be too large for fp16; and numbers without blocks have no scales."""
    block = torch.tensor([0xFF, 0x7B, *16 * [0x80]], dtype=torch.uint8)
    assert grouped_weight(block, FORMS["Q4_0"], 1, 32) is None
    assert dequantise(block, FORMS["Q4_0"]).isfinite().all()
    assert grouped_weight(block[:16], FORMS["F16"], 1, 8) is None


@pytest.mark.parametrize("kind", QUANTISED)
def test_numbers_are_those_of_the_formats_own_library(kind):
    gguf = pytest.importorskip("gguf")
    data = torch.tensor(list(random_blocks(kind, 300, random.Random(kind))), dtype=torch.uint8)
    blocks = data.view(-1, FORMS[kind].bytes).numpy()
    own = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])).view(-1)
    assert torch.equal(dequantise(data, FORMS[kind]), own)
