"""Both forms of the draw against the plain reference, token for token; then against the distribution it should have."""

import math
import random

import numpy as np
import pytest
import torch

from maitred.core.request import SamplingParams
from maitred.engine.sampling.device_rows import DeviceRows
from maitred.engine.sampling.draw import DrawParameters
from maitred.engine.sampling.philox import random_bits
from maitred.engine.sampling.row_kernels import NOT_A_NUMBER, draw_rows
from tests.support import sampling_reference as reference


def on_host(logits, params, bits):
    p = DrawParameters.of(params, [0] * len(params))
    tokens = np.empty(len(params), np.int64)
    draw_rows(logits, p.scales, p.top_ks, p.top_ps, p.min_weights, bits, tokens)
    return tokens.tolist()


def on_device(logits, params, bits):
    rows = DeviceRows(DrawParameters.of(params, [0] * len(params)), torch.device("cpu"))
    return rows.draw(torch.from_numpy(logits.copy()), bits)


FORMS = pytest.mark.parametrize("form", [on_host, on_device])


def settings(**fields):
    return SamplingParams(max_tokens=1, seed=0, **fields)


EACH_PARAMETER = [
    settings(temperature=0),
    settings(),
    settings(temperature=0.3),
    settings(temperature=2.0),
    settings(top_k=1),
    settings(top_k=7),
    settings(top_k=10**6),
    settings(top_p=0.9),
    settings(top_p=0.3),
    settings(top_p=0.9999),
    settings(top_p=1e-9),
    settings(min_p=0.05),
    settings(min_p=1.0),
    settings(top_k=20, top_p=0.8, min_p=0.02, temperature=1.3),
    settings(top_p=0.95, min_p=0.3),
]


@FORMS
@pytest.mark.parametrize("params", EACH_PARAMETER, ids=str)
@pytest.mark.parametrize("shape", ["peaked", "flat", "tied", "constant"])
def test_equals_the_reference(form, params, shape):
    numbers = np.random.default_rng(3)
    logits = numbers.standard_normal((6, 1500)).astype(np.float32)
    logits = {"peaked": logits * 6, "flat": logits / 10, "tied": np.round(logits), "constant": logits * 0}[shape]
    bits = numbers.integers(0, 1 << 32, 6)
    bits[:2] = 0, (1 << 32) - 1
    expected = [reference.draw(row, params, int(own)) for row, own in zip(logits, bits, strict=True)]
    assert form(logits, [params] * 6, bits) == expected


@FORMS
@pytest.mark.parametrize("vocabulary", [1, 2, 63, 64, 65, 129])
def test_any_vocabulary_size(form, vocabulary):
    logits = np.random.default_rng(4).standard_normal((40, vocabulary)).astype(np.float32)
    bits = np.random.default_rng(5).integers(0, 1 << 32, 40)
    for params in (settings(), settings(temperature=0), settings(top_k=2, top_p=0.7)):
        expected = [reference.draw(row, params, int(own)) for row, own in zip(logits, bits, strict=True)]
        assert form(logits, [params] * 40, bits) == expected


def test_both_forms_agree_on_large_vocabularies_where_the_nucleus_outgrows_every_prefix():
    numbers = np.random.default_rng(6)
    choose = random.Random(7)
    params = [
        settings(
            temperature=choose.choice([0, 0.2, 1.0, 1.7]),
            top_k=choose.choice([0, 0, 40, 5000]),
            top_p=choose.choice([1.0, 0.5, 0.99]),
            min_p=choose.choice([0.0, 0.01]),
        )
        for _ in range(64)
    ]
    logits = (numbers.standard_normal((64, 40_000)) * numbers.choice([0.2, 2, 6], (64, 1))).astype(np.float32)
    bits = numbers.integers(0, 1 << 32, 64)
    assert on_host(logits, params, bits) == on_device(logits, params, bits)


@FORMS
def test_greedy_takes_the_lowest_id_among_equals(form):
    logits = np.zeros((3, 200), np.float32)
    logits[0, [150, 70, 199]] = 2
    logits[1] = -1
    logits[2, 5] = -0.0  # equal to +0.0 at the lower ids
    assert form(logits, [settings(temperature=0)] * 3, np.zeros(3, np.int64)) == [70, 0, 0]


@FORMS
@pytest.mark.parametrize("params", [settings(temperature=0), settings(), settings(top_p=0.5, top_k=3)], ids=str)
def test_a_row_without_any_possible_token_yields_the_first(form, params):
    assert form(np.full((1, 100), -np.inf, np.float32), [params], np.array([123])) == [0]


@FORMS
@pytest.mark.parametrize("params", [settings(temperature=0), settings(), settings(top_p=0.5, top_k=3)], ids=str)
@pytest.mark.parametrize("pattern", [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000], ids=hex)
def test_a_row_with_nan_or_infinity_is_reported_and_the_others_are_not(form, params, pattern):
    logits = np.random.default_rng(8).standard_normal((3, 100)).astype(np.float32)
    clean = form(logits, [params] * 3, np.array([1, 2, 3]))
    logits[1, 77] = np.array(pattern, np.uint32).view(np.float32)
    assert form(logits, [params] * 3, np.array([1, 2, 3])) == [clean[0], NOT_A_NUMBER, clean[2]]


@FORMS
@pytest.mark.parametrize(
    "params",
    [settings(), settings(temperature=0.5), settings(temperature=1.8), settings(top_k=6), settings(top_p=0.75),
     settings(min_p=0.1), settings(top_k=12, top_p=0.9, min_p=0.03, temperature=1.4)],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_distribution(form, params):
    """Chi-square against float64 softmax and filters that are written for probabilities, not for weights."""
    row = (np.random.default_rng(9).standard_normal(24) * 1.5).astype(np.float32)
    draws = 20_000
    bits = random_bits(np.full(draws, 10, np.uint64), np.zeros(draws, np.int64), np.arange(draws))
    tokens = form(np.tile(row, (draws, 1)), [params] * draws, bits)
    expected = probabilities(row.astype(np.float64), params) * draws
    counts = np.bincount(tokens, minlength=row.size)
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = likely.sum() - 1
    # Wilson and Hilferty's approximation of the chi-square quantile at p = 1e-4.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def probabilities(row, params):
    p = np.exp((row - row.max()) / params.temperature)
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()
