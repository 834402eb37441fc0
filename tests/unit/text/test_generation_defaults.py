"""What a model's makers say, and what a request says."""

import pytest

from maitred.app.request.validation import with_defaults
from maitred.core.errors import ConfigInvalid
from maitred.core.inference import InferenceRequest
from maitred.core.request import SamplingParams
from maitred.text.generation_defaults import DEFAULTED, GenerationDefaults

FILE_TEXT = '{"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [4, 5]}'


def defaults(folder, text=FILE_TEXT, source="auto"):
    (folder / "generation_config.json").write_text(text)
    return GenerationDefaults.of(folder, source)


def settled(defaults_of_model, left_open=DEFAULTED, **sampling):
    params = with_defaults(request(frozenset(left_open), **sampling), defaults_of_model).sampling
    return {field: getattr(params, field) for field in DEFAULTED}


def request(left_open=frozenset(DEFAULTED), **sampling):
    sampling = SamplingParams(max_tokens=0, seed=0, **sampling)
    return InferenceRequest(model="m", prompts=["Hi"], sampling=sampling, unset_fields=left_open)


PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
OWN = PLAIN | {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def test_what_a_request_leaves_open_is_as_the_model_has_it(tmp_path):
    assert settled(defaults(tmp_path)) == OWN


def test_what_a_request_names_stays(tmp_path):
    named = settled(defaults(tmp_path), left_open={"top_k", "min_p"}, temperature=0.0, top_p=0.5)
    assert named == PLAIN | {"temperature": 0.0, "top_p": 0.5, "top_k": 20}


def test_the_next_model_does_not_inherit_those_of_the_one_before(tmp_path):
    first = with_defaults(request(), defaults(tmp_path))
    second = with_defaults(first, GenerationDefaults(top_k=5))
    assert {field: getattr(second.sampling, field) for field in DEFAULTED} == PLAIN | {"top_k": 5}


@pytest.mark.parametrize("text", ["{}", None])
def test_without_defaults_the_values_of_the_api_hold(tmp_path, text):
    defaults_of_model = GenerationDefaults.of(tmp_path) if text is None else defaults(tmp_path, text)
    assert settled(defaults_of_model) == PLAIN


def test_the_file_need_not_count(tmp_path):
    assert settled(defaults(tmp_path, source="none")) == PLAIN
    assert settled(defaults(tmp_path, "{", source="none")) == PLAIN


@pytest.mark.parametrize("text", ["{", '{"temperature": "hot"}', '{"temperature": -1}', '{"top_p": 0}', "[]"])
def test_a_file_that_cannot_be_used_is_named(tmp_path, text):
    with pytest.raises(ConfigInvalid, match=r"generation_config.json cannot be read: .* set generation_config to none"):
        defaults(tmp_path, text)
