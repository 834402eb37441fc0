"""A whole model with rounded weights: near the exact one, and independent of how its tokens are batched."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from maitred.engine.compiled import processor_features
from maitred.engine.models import weights
from maitred.engine.models.load import load_model
from tests.support.models import make_model
from tests.unit.engine.kernels.test_quantised_linear import rounded_rows, rounded_weight
from tests.unit.engine.models.steps import Driver, random_tokens

SCHEMES = ["int8", "int8_weight_only", "int4", "int4_weight_only"]
needs_bf16 = pytest.mark.skipif("avx512bf16" not in processor_features(), reason="has no AVX-512 BF16")


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_model(folder, request.param)
    return folder


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_rounded_numbers_in_plain_torch(folder, scheme, monkeypatch):
    exact, rounded = load_model(folder, dtype=torch.float32), load_model(folder, dtype=torch.float32, scheme=scheme)
    bits, real = 4 if "int4" in scheme else 8, "weight_only" in scheme

    def plain(weight, bias=None, scheme="none", **_):
        kept = rounded_weight(weight, bits)
        return lambda rows: torch.nn.functional.linear(rows if real else rounded_rows(rows), kept, bias)

    for name in ("make_linear", "make_head"):
        monkeypatch.setattr(weights, name, plain)
    reference = load_model(folder, dtype=torch.float32)
    tokens = random_tokens(exact.config, 60)
    original, expected, logits = (Driver(model.decoder).prefill(tokens) for model in (exact, reference, rounded))
    # Numbers halfway between two bytes go either way.
    assert _distance(logits, expected) < (1e-4 if real else 1e-2)
    assert 5 * _distance(logits, expected) < _distance(logits, original)


def _distance(logits, expected):
    return float((logits - expected).norm() / expected.norm())


@needs_bf16
def test_bf16_products_are_nearer_than_all_in_bf16(folder):
    """The reference rounds everything to bf16, ours only what is multiplied."""
    exact, ours = load_model(folder, dtype=torch.float32), load_model(folder, dtype=torch.float32, scheme="bf16")
    assert set(ours.decoder.forms) == {"quantised"}
    tokens = random_tokens(exact.config, 60)
    original, logits = (Driver(model.decoder).prefill(tokens) for model in (exact, ours))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs = reference(torch.tensor([tokens])).logits[0].float()
    assert 0 < _distance(logits, original) < _distance(theirs, original)


@pytest.mark.parametrize("scheme", [*SCHEMES, pytest.param("bf16", marks=needs_bf16)])
def test_chunks_decodes_and_neighbours_change_no_bit(folder, scheme):
    model = load_model(folder, dtype=torch.float32, scheme=scheme)
    tokens = random_tokens(model.config, 40)
    whole = Driver(model.decoder).prefill(tokens)
    driver = Driver(model.decoder)
    line, neighbour = driver.open(tokens), driver.open(random_tokens(model.config, 40, 1))
    for length in (7, 1, 12, 1, 1, 18):
        chunks = [(line, length), (neighbour, 3)] if neighbour.computed < 12 else [(line, length)]
        logits = driver.step([], chunks) if length > 1 else driver.step([line], chunks[1:])
        assert torch.equal(logits[0], whole[line.computed - 1])
    assert line.computed == 40
