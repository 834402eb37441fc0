"""Answers that have to look like something, from the official client to the bundled model and back."""

import asyncio
import json
import re
from typing import Literal

import httpx
import openai
import pytest
from jsonschema import validate
from pydantic import BaseModel, Field

from maitred.testing.server_process import serving

MODEL = "maitred-tiny"
USER = [{"role": "user", "content": "Tell me of a town."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "middling", "large"]},
        "people": {"type": "integer", "minimum": 10, "maximum": 5000},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "size", "people", "rivers"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "town", "strict": True, "schema": SCHEMA}}


class Town(BaseModel):
    model_config = {"extra": "forbid"}
    size: Literal["small", "large"]
    people: int = Field(ge=1, le=999)


@pytest.fixture(scope="module")
def server():
    with serving(settings={"engine.threads": 1, "engine.max_sequences": 16}) as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def chat(client, **fields):
    fields = {"max_tokens": 300, "temperature": 1.5, "seed": 7} | fields
    return client.chat.completions.create(model=MODEL, messages=USER, **fields)


def test_a_strict_schema_is_followed_by_every_choice(client):
    completion = chat(client, response_format=STRICT, n=4)
    for choice in completion.choices:
        assert choice.finish_reason == "stop"
        validate(json.loads(choice.message.content), SCHEMA)
    assert len({choice.message.content for choice in completion.choices}) > 1


def test_a_stream_brings_the_same_as_a_whole_answer(client):
    whole = chat(client, response_format=STRICT)
    stream = chat(client, response_format=STRICT, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == whole.choices[0].message.content


def test_the_clients_own_parsing_gets_what_it_declares(client):
    completion = client.chat.completions.parse(
        model=MODEL, messages=USER, response_format=Town, max_tokens=300, temperature=0.7, seed=3
    )
    assert isinstance(completion.choices[0].message.parsed, Town)


def test_a_json_object_is_one(client):
    completion = chat(client, response_format={"type": "json_object"}, max_tokens=200, temperature=0, seed=1)
    text = completion.choices[0].message.content
    assert text.startswith("{")
    if completion.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_an_answer_that_is_cut_says_so(client):
    completion = chat(client, response_format=STRICT, max_tokens=5)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[A-Z][a-z]{2,5}-[0-9]{3}"}}, "[A-Z][a-z]{2,5}-[0-9]{3}"),
        ({"guided_regex": "^(cat|dog)s?$"}, "(cat|dog)s?"),
        ({"structured_outputs": {"choice": ["north", "south"]}}, "north|south"),
        ({"guided_choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"guided_choice": ["a <|end|> b", "<|begin|>"]}, r"a <\|end\|> b|<\|begin\|>"),
        ({"guided_regex": "<[|]system[|]>e\u0301"}, "<[|]system[|]>e\u0301"),
        ({"guided_grammar": 'root ::= "a" root | "b"'}, "a*b"),
        ({"structured_outputs": {"grammar": 'start: ("x" | "y")~3 "z"'}}, "[xy]{3}z"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 7}}, "[3-7]"),
        ({"structured_outputs": {"json": {"type": "array", "maxItems": 0}, "whitespace_pattern": " ?"}}, r"\[ ?\]"),
    ],
)
def test_other_forms_are_followed_by_texts_and_by_chats(client, fields, pattern):
    text = client.completions.create(
        model=MODEL, prompt="The answer is", max_tokens=60, seed=5, logit_bias={"95": 1}, extra_body=fields
    )
    assert re.fullmatch(pattern, text.choices[0].text) or text.choices[0].finish_reason == "length"
    answer = chat(client, extra_body=fields, max_tokens=60, presence_penalty=0.5, top_p=0.9)
    assert re.fullmatch(pattern, answer.choices[0].message.content)


def test_the_end_of_the_grammar_overrides_min_tokens_and_ignore_eos(client):
    fields = {"guided_regex": "ab?", "min_tokens": 30, "ignore_eos": True}
    answer = chat(client, extra_body=fields, max_tokens=50)
    assert answer.choices[0].message.content == "ab"
    assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities_come_for_every_token(client):
    answer = chat(client, response_format=STRICT, logprobs=True, top_logprobs=2)
    scores = answer.choices[0].logprobs.content
    text = answer.choices[0].message.content
    validate(json.loads(text), SCHEMA)
    assert "".join(score.token for score in scores) == text
    assert len(scores) == answer.usage.completion_tokens - 1  # the end of the turn is not shown


async def test_unconstrained_answers_beside_constrained_ones_are_as_ever(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def text(seed, **fields):
            answer = await client.chat.completions.create(
                model=MODEL, messages=USER, max_tokens=40, seed=seed, temperature=0.9, **fields
            )
            return answer.choices[0].message.content

        alone = [await text(seed) for seed in range(3)]
        together = await asyncio.gather(
            *(text(seed) for seed in range(3)), *(text(seed, response_format=STRICT) for seed in range(5))
        )
    assert together[:3] == alone


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object"),
        ({"guided_json": {"not": {"pattern": "a"}}}, "guided_json", "`not` at #"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_regex": "[a"}, "guided_regex", "unclosed character class"),
        ({"guided_choice": []}, "guided_choice", "1 to 4096 strings"),
        ({"guided_grammar": 'root ::= "a" x'}, "guided_grammar", "'x' not found"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "exclude each other"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "65,536 are allowed"),
        ({"guided_grammar": "start: <[4000-4096]>"}, None, "ids run from 0 to 4095."),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_to_do(server, fields, param, says):
    body = {"model": MODEL, "messages": USER, "max_tokens": 5, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert says in error["message"]


def test_a_schema_that_is_not_strict_is_followed_as_far_as_can_be(client):
    loose = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "not": {"const": 1}}}}
    answer = chat(client, response_format=loose, max_tokens=20)
    assert re.match("-?[0-9]+", answer.choices[0].message.content)


def test_messages_follow_a_schema_too(server):
    body = {
        **{"model": MODEL, "messages": USER, "max_tokens": 300},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }
    headers = {"anthropic-version": "2023-06-01"}
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers, timeout=300).json()
    validate(json.loads(answer["content"][0]["text"]), SCHEMA)
    body["output_config"]["format"]["schema"] = {"not": {}}
    error = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("output_config.format.schema cannot be used. The keyword `not` at #")
