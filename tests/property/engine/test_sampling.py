"""What a row is dealt depends on the row alone."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.request import SamplingParams
from maitred.engine.sampling.device_rows import DeviceRows
from maitred.engine.sampling.draw import DrawParameters
from maitred.engine.sampling.row_kernels import draw_rows
from maitred.engine.sampling.sampler import Sampler

CPU = torch.device("cpu")
VOCABULARY = 517

parameters = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    seed=st.integers(0, (1 << 64) - 1),
    temperature=st.sampled_from([0.0, 1e-4, 0.5, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    top_k=st.sampled_from([0, 0, 1, 20, 516, 517]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=3),
    top_logprobs=st.sampled_from([None, None, 0, 4]),
    min_tokens=st.sampled_from([0, 5]),
)
rows = st.lists(
    st.tuples(
        parameters,
        st.integers(0, 3),
        st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
        st.integers(0, 1 << 20),
        st.sampled_from([0.05, 1.0, 6.0]),
    ),
    min_size=1,
    max_size=9,
)


def logits_of(seed, width):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32) * width)


@settings(max_examples=80, deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_a_row_alone_is_dealt_what_it_is_dealt_in_any_batch(rows, shuffle):
    together = Sampler(VOCABULARY, CPU)
    for key, (params, choice, output, _, _) in enumerate(rows):
        together.add(key, params, choice, [1, 2, 3], output, (7,))
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    for step in range(2):
        logits = torch.stack([logits_of(rows[key][3] + step, rows[key][4]) for key in order])
        result = together.sample(logits.clone(), order, [len(rows[key][2]) + step for key in order])
        if step == 0:
            first = dict(zip(order, result.tokens, strict=True))
            for key, token in first.items():
                together.extend(key, [token])
            shuffle.shuffle(order)
            continue
        for i, key in enumerate(order):
            params, choice, output, _, _ = rows[key]
            alone = Sampler(VOCABULARY, CPU)
            alone.add(key, params, choice, [1, 2, 3], [*output, first[key]], (7,))
            single = alone.sample(logits[i : i + 1].clone(), [key], [len(output) + 1])
            assert single.tokens[0] == result.tokens[i]
            assert single.logprobs[0] == result.logprobs[i]


@settings(max_examples=60, deadline=None)
@given(rows)
def test_accelerator_and_cpu_deal_alike(rows):
    drawn = DrawParameters.of([row[0] for row in rows], [row[1] for row in rows])
    logits = torch.stack([logits_of(row[3], row[4]) for row in rows])
    bits = np.array([row[3] * 4099 % (1 << 32) for row in rows])
    tokens = np.empty(len(rows), np.int64)
    draw_rows(logits.numpy(), drawn.scales, drawn.top_ks, drawn.top_ps, drawn.min_weights, bits, tokens)
    assert DeviceRows(drawn, CPU).draw(logits, bits) == tokens.tolist()
