import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.request import SamplingParams
from maitred.engine.sampling.edits import RowEdits
from tests.support import sampling_reference as reference

VOCABULARY = 300
EOS = [0, 9]

EDITS = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"logit_bias": {5: 100.0, 6: -100.0, 299: 0.5}},
    {"min_tokens": 4},
    {"min_tokens": 4, "ignore_eos": True, "stop_token_ids": (17,)},
    {"min_tokens": 4, "stop_token_ids": (17,), "logit_bias": {17: 100.0}, "repetition_penalty": 1.2},
    {"allowed_token_ids": (0, 9, 7, 42, 299, 10**6), "min_tokens": 4},
    {"bad_words_token_ids": ((5,), (42,), (10**6,), (8, 10**6))},
    {"bad_words_token_ids": ((42, 7), (42, 8, 9), (8, 42, 6), (3,)), "presence_penalty": 0.5},
    {"allowed_token_ids": tuple(range(50)), "bad_words_token_ids": ((42, 5), (42,)), "logit_bias": {5: 100.0}},
]


def make(fields, prompt, output):
    params = SamplingParams(max_tokens=500, seed=0, **fields)
    ending = frozenset(params.stop_token_ids).union(() if params.ignore_eos else EOS)
    return params, RowEdits(params, prompt, output, ending, VOCABULARY)


def on_host(edits, row, position):
    row = row.copy()
    edits.apply(torch.from_numpy(row), position)
    return row


def on_device(edits, row, position):
    row = torch.from_numpy(row.copy())
    edits._apply_on_device(row, position)
    edits._restrict(row, ())
    return row.numpy()


@pytest.mark.parametrize("apply", [on_host, on_device])
@pytest.mark.parametrize("fields", EDITS, ids=str)
def test_each_edit_equals_the_reference_at_every_length(apply, fields):
    choose = random.Random(1)
    prompt = [choose.randrange(VOCABULARY) for _ in range(90)]
    output: list[int] = []
    params, edits = make(fields, prompt, output)
    for position in range(120):
        row = np.random.default_rng(position).standard_normal(VOCABULARY).astype(np.float32) * 4
        if position < 8 or position % 20 == 0:
            expected = reference.edited(row, params, prompt, output, EOS)
            np.testing.assert_array_equal(apply(edits, row, position), expected)
        output.append(choose.randrange(VOCABULARY) if position % 3 else 42)
        edits.record(output[-1])


@pytest.mark.parametrize("fields", EDITS, ids=str)
def test_recomputed_after_a_preemption_is_the_same_as_kept(fields):
    choose = random.Random(2)
    prompt = [choose.randrange(VOCABULARY) for _ in range(10)]
    output = [choose.randrange(20) for _ in range(100)]
    _, kept = make(fields, prompt, [])
    for token in output:
        kept.record(token)
    _, recomputed = make(fields, prompt, output)
    row = np.random.default_rng(3).standard_normal(VOCABULARY).astype(np.float32)
    np.testing.assert_array_equal(on_host(kept, row, 100), on_host(recomputed, row, 100))


TINY = 6
tokens = st.integers(0, TINY - 1)


@given(
    allowed=st.lists(tokens, max_size=4),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=8),
    output=st.lists(tokens, max_size=8),
    drafts=st.lists(tokens, max_size=5),
    recorded=st.integers(0, 8),
)
def test_a_token_is_banned_exactly_if_it_is_not_allowed_or_completes_a_bad_word(
    allowed, bad_words, output, drafts, recorded
):
    words = tuple(map(tuple, bad_words))
    params = SamplingParams(99, 0, allowed_token_ids=tuple(allowed), bad_words_token_ids=words)
    edits = RowEdits(params, [], output[:recorded], frozenset(), TINY)
    for token in output[recorded:]:
        edits.record(token)
    text = [*output, *drafts]
    for apply in (edits.apply, lambda row, *rest: (edits._restrict(row, rest[1]), bool(row.max() > -np.inf))[1]):
        row = torch.zeros(TINY)
        left = apply(row, len(text), drafts)
        for token in range(TINY):
            banned = bool(allowed) and token not in allowed
            banned = banned or any([*text, token][-len(word) :] == word for word in bad_words)
            assert (row[token].item() == -np.inf) is banned, token
        assert left is bool((row == 0).any())


def test_bias_of_a_hundred_decides():
    row = np.random.default_rng(4).standard_normal(VOCABULARY).astype(np.float32) * 10
    _, edits = make({"logit_bias": {77: 100.0, int(row.argmax()): -100.0}}, [1], [])
    assert on_host(edits, row, 0).argmax() == 77


def test_tokens_outside_of_the_vocabulary_are_left_out():
    fields = {"logit_bias": {VOCABULARY: 1.0}, "repetition_penalty": 2.0, "stop_token_ids": (10**6,), "min_tokens": 9}
    _, edits = make(fields, [VOCABULARY + 5, 3], [VOCABULARY])
    row = np.ones(VOCABULARY, np.float32)
    after = on_host(edits, row, 0)
    assert np.flatnonzero(after != 1).tolist() == [0, 3, 9]


def test_rows_without_edits_have_no_table():
    assert not RowEdits.is_needed(SamplingParams(max_tokens=1, seed=0, temperature=0.5, top_p=0.5, stop_token_ids=(1,)))
    for fields in EDITS:
        assert RowEdits.is_needed(SamplingParams(max_tokens=1, seed=0, **fields))
