import numpy as np
import pytest
import torch

from maitred.core.errors import Bug
from maitred.core.request import SamplingParams
from maitred.engine.sampling.logprobs import LogprobRows
from maitred.engine.sampling.sampler import Sampler
from tests.support import sampling_reference as reference

CPU = torch.device("cpu")
VOCABULARY = 211
EOS = (2,)


def logits_of(rows, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, VOCABULARY)).astype(np.float32) * 3)


def settings(**fields):
    return SamplingParams(**{"max_tokens": 100, "seed": 1} | fields)


@pytest.fixture(scope="module")
def compiled():
    Sampler(VOCABULARY, CPU)


@pytest.fixture
def sampler(compiled):
    return Sampler(VOCABULARY, CPU)


def test_a_whole_answer_equals_the_reference(sampler):
    params = settings(
        seed=(1 << 64) - 3,
        top_k=50,
        top_p=0.95,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={4: 2.0},
        min_tokens=5,
    )
    prompt = [9, 8, 7]
    output: list[int] = []
    sampler.add(5, params, 3, prompt, [], EOS)
    for position in range(40):
        logits = logits_of(1, position)
        row = reference.edited(logits[0].numpy(), params, prompt, output, list(EOS))
        expected = reference.draw(row, params, reference.bits_of(params, 3, position))
        assert sampler.sample(logits, [5], [position]).tokens == [expected]
        sampler.extend(5, [expected])
        output.append(expected)


def test_a_resumed_sequence_goes_on_as_if_it_had_never_left(sampler):
    params = settings(presence_penalty=1.0, repetition_penalty=1.3)

    def answer(positions):
        for position in positions:
            tokens = sampler.sample(logits_of(1, position), [1], [position]).tokens
            sampler.extend(1, tokens)
            yield from tokens

    sampler.add(1, params, 0, [3], [], EOS)
    output = [*answer(range(10))]
    first = [*answer(range(10, 20))]
    sampler.remove(1)
    sampler.add(1, params, 0, [3], output, EOS)
    assert [*answer(range(10, 20))] == first


def test_rows_on_supposed_tokens_are_what_they_would_be_after_them(sampler):
    params = settings(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3, logit_bias={7: 1.0})
    sampler.add(1, params, 0, [3], [], EOS)
    sampler.add(2, settings(), 0, [3])
    guesses = [3, 11, 11]
    logits = torch.cat([logits_of(1, position) for position in range(4)])
    supposed = {row: guesses[:row] for row in range(4)}
    for _ in range(2):  # nothing is left of what was only supposed
        rows = sampler.sample(logits.clone(), [1, 1, 1, 1], [0, 1, 2, 3], supposed=supposed).tokens
        one_by_one = []
        sampler.add(1, params, 0, [3], [], EOS)
        for position in range(4):
            one_by_one += sampler.sample(logits_of(1, position), [1], [position]).tokens
            sampler.extend(1, guesses[position : position + 1])
        assert rows == one_by_one
        sampler.add(1, params, 0, [3], [], EOS)


def test_replacing_a_sequence_under_its_key_takes_effect(sampler):
    logits = logits_of(1)
    sampler.add(1, settings(temperature=0), 0, [1])
    assert sampler.sample(logits.clone(), [1], [0]).tokens == [int(logits.argmax())]
    sampler.add(1, settings(temperature=0, logit_bias={7: 100.0}), 0, [1])
    assert sampler.sample(logits.clone(), [1], [0]).tokens == [7]


def test_choices_of_one_request_differ(sampler):
    for index in range(8):
        sampler.add(index, settings(temperature=2.0), index, [1])
    tokens = sampler.sample(logits_of(1).expand(8, -1), list(range(8)), [0] * 8).tokens
    assert len(set(tokens)) > 3


def test_logprobs_are_of_the_models_own_distribution(sampler):
    params = settings(temperature=0.2, top_k=2, logit_bias={3: 100.0}, frequency_penalty=2.0, top_logprobs=5)
    sampler.add(1, params, 0, [1], [4, 4])
    sampler.add(2, settings(), 0, [1])
    sampler.add(3, settings(top_logprobs=0), 0, [1])
    sampler.add(4, settings(top_logprobs=2), 0, [1])
    logits = logits_of(4).double()
    result = sampler.sample(logits.float(), [1, 2, 3, 4], [2, 0, 0, 0])
    expected = torch.log_softmax(logits, -1)
    assert result.tokens[0] == 3
    assert result.logprobs[1] is None
    for row, top in ((0, 5), (2, 0), (3, 2)):
        entry = result.logprobs[row]
        assert entry is not None
        assert entry.logprob == pytest.approx(expected[row, result.tokens[row]].item(), abs=1e-5)
        assert [token for token, _ in entry.top] == expected[row].topk(top).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[row].topk(top).values.tolist(), abs=1e-5)


def test_equal_logprobs_are_listed_by_id(sampler):
    sampler.add(1, settings(temperature=0, top_logprobs=4), 0, [1])
    logits = torch.full((1, VOCABULARY), -5.0)
    logits[0, [100, 20, 60]] = 1.0
    logits[0, 150] = 2.0
    entry = sampler.sample(logits, [1], [0]).logprobs[0]
    assert entry is not None
    assert [token for token, _ in entry.top] == [150, 20, 60, 100]


@pytest.mark.parametrize("vocabulary", [5, 256, 257, 3000])
def test_logprobs_on_the_host_equal_those_of_tensors(vocabulary):
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((4, vocabulary)).astype(np.float32) * 5)
    rows = LogprobRows([0, 2, 3], [20, 0, 3], {2}, CPU)
    host = rows._observe_on_host(logits)([1, 2, 3])
    device = rows._observe_on_device(logits)([1, 2, 3])
    for mine, theirs in zip(host, device, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        assert [value for _, value in mine.top] == pytest.approx([value for _, value in theirs.top], abs=1e-5)


def test_more_logprobs_than_tokens_gives_them_all():
    sampler = Sampler(3, CPU)
    sampler.add(1, settings(top_logprobs=20), 0, [1])
    entry = sampler.sample(torch.tensor([[0.0, 2.0, 1.0]]), [1], [0]).logprobs[0]
    assert entry is not None
    assert [token for token, _ in entry.top] == [1, 2, 0]


def test_min_tokens_that_rule_everything_out_still_yield_a_token():
    sampler = Sampler(3, CPU)
    sampler.add(1, settings(min_tokens=2, stop_token_ids=(0, 1, 2)), 0, [1])
    assert sampler.sample(torch.zeros(1, 3), [1], [0]).tokens == [0]


def test_other_float_types_and_strides_are_taken(sampler):
    sampler.add(1, settings(), 0, [1])
    sampler.add(2, settings(), 0, [1])
    logits = logits_of(2).bfloat16()
    expected = sampler.sample(logits.float(), [1, 2], [0, 0])
    assert sampler.sample(logits, [1, 2], [0, 0]) == expected
    assert sampler.sample(logits.float().T.contiguous().T, [1, 2], [0, 0]) == expected
    assert sampler.sample(logits, (2, 1), (0, 0)).tokens == sampler.sample(logits, [2, 1], [0, 0]).tokens


def test_no_rows_is_no_work(sampler):
    assert sampler.sample(torch.empty(0, VOCABULARY), [], []).tokens == []


def test_nan_names_the_row_and_the_remedy(sampler):
    sampler.add(1, settings(), 0, [1])
    sampler.add(2, settings(), 0, [1])
    logits = logits_of(2)
    logits[1, 5] = torch.nan
    with pytest.raises(Bug, match=r"row 1 of 2.*Check the weights"):
        sampler.sample(logits, [1, 2], [0, 0])


def test_faults_of_the_caller_are_bugs(sampler):
    sampler.add(1, settings(), 0, [1])
    with pytest.raises(Bug, match="not added"):
        sampler.sample(logits_of(2), [1, 2], [0, 0])
    with pytest.raises(Bug, match="shape"):
        sampler.sample(logits_of(2), [1], [0])
    with pytest.raises(Bug, match="shape"):
        sampler.sample(logits_of(1)[:, :10], [1], [0])
    with pytest.raises(Bug, match="positions"):
        sampler.sample(logits_of(1), [1], [0, 1])
    sampler.remove(1)
    sampler.remove(1)
    with pytest.raises(Bug, match="not added"):
        sampler.sample(logits_of(1), [1], [0])
    with pytest.raises(Bug, match="vocabularies"):
        Sampler(1 << 22, CPU)


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0.0, "top_logprobs": 0}, False),
        ({"temperature": 0.0, "frequency_penalty": 0.5}, False),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, False),
        ({"temperature": 0.0, "min_tokens": 2}, False),
    ],
)
def test_rows_of_which_only_the_largest_logit_counts(sampler, fields, greedy):
    sampler.add(0, settings(temperature=0.0), 0, prompt=[1])
    sampler.add(1, settings(**fields), 0, prompt=[1], eos_token_ids=EOS)
    assert sampler.greedy([0])
    assert sampler.greedy([0, 1]) is greedy
