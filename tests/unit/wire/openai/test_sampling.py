"""OpenAI's sampling fields, as the engine gets them."""

import json

import pytest

from maitred.core.request import SamplingParams
from maitred.wire.openai.decode import decode_chat, decode_completion
from maitred.wire.openai.sampling import to_sampling_params, unset_fields


def of_chat(**fields):
    data = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}).encode()
    return to_sampling_params(decode_chat(data, strict=True), max_tokens=9, seed=4)


def of_completion(**fields):
    data = json.dumps({"model": "m", "prompt": "a", **fields}).encode()
    return to_sampling_params(decode_completion(data, strict=True), max_tokens=9, seed=4)


def test_defaults_are_the_engines_own():
    assert of_chat() == of_completion() == SamplingParams(max_tokens=9, seed=4)


def test_null_is_the_default():
    assert of_chat(temperature=None, top_p=None, n=None, logit_bias=None) == SamplingParams(max_tokens=9, seed=4)


def test_every_field_arrives():
    fields = {
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.3,
        "min_tokens": 2,
        "ignore_eos": True,
        "n": 3,
        "prompt_logprobs": 4,
    }
    expected = SamplingParams(
        max_tokens=9, seed=4, logit_bias={5: -100.0}, stop_token_ids=(8, 9), top_logprobs=2, **fields
    )
    lists = {"logit_bias": {"5": -100}, "stop_token_ids": [8, 9], "seed": 1}
    assert of_chat(logprobs=True, top_logprobs=2, **fields, **lists) == expected
    assert of_completion(logprobs=2, **fields, **lists) == expected


@pytest.mark.parametrize("everything", [-1, 0, None])
def test_all_tokens_however_written(everything):
    assert of_chat(top_k=everything).top_k == 0


def test_log_probabilities_of_the_chosen_token_alone():
    assert of_chat(logprobs=True).top_logprobs == 0
    assert of_chat(logprobs=False).top_logprobs is None
    assert of_completion(logprobs=0).top_logprobs == 0


def test_what_a_request_does_not_name_is_left_open():
    data = {"model": "m", "prompt": "x", "temperature": 0, "top_k": None}
    request = decode_completion(json.dumps(data).encode(), strict=True)
    assert unset_fields(request, frozenset({"temperature", "top_k", "top_p"})) == {"top_k", "top_p"}
