"""What a request for embeddings may say."""

import json

import pytest

from maitred.core.errors import InvalidRequest
from maitred.wire.openai.decode import decode_embedding


def decode(strict=False, **fields):
    return decode_embedding(json.dumps({"model": "m", **fields}).encode(), strict=strict)


@pytest.mark.parametrize(
    ("sent", "inputs"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_inputs_come_in_four_forms(sent, inputs):
    assert decode(input=sent).inputs() == inputs


def test_numbers_are_the_default_and_base64_can_be_asked_for():
    assert not decode(input="a").as_base64
    assert not decode(input="a", encoding_format="float").as_base64
    assert decode(input="a", encoding_format="base64", dimensions=64, user="u").as_base64


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": {}}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [-1]}, "input"),
        ({"input": [[2**40]]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "model": ""}, "model"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 1.5}, "dimensions"),
        ({"input": "a", "priority": 11}, "priority"),
    ],
)
def test_a_fault_names_its_field(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        decode(**fields)
    assert caught.value.param == param


def test_unknown_fields_are_refused_where_that_is_asked_for():
    assert decode(input="a", inputs="b").inputs() == ["a"]
    with pytest.raises(InvalidRequest, match="Did you mean input"):
        decode(strict=True, input="a", inputs="b")
