"""What differs for a client between two gateways is found, and nothing else is said."""

import json
from pathlib import Path

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.migration.shadow_comparison import ShadowAnswer, find_differences
from maitred.migration.shadow_requests import SampleRequest, read_requests, sample_requests

GREEDY = SampleRequest({"model": "a", "messages": [], "temperature": 0})
JSON = {"content-type": "application/json"}


def answered(text="Paris", *, status=200, headers=JSON, finish="stop", tokens=3, model="a", calls=()):
    message = {"role": "assistant", "content": text, "tool_calls": list(calls) or None}
    body = {
        "id": "x",
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens},
    }
    return ShadowAnswer(status, headers, json.dumps(body).encode())


def streamed(*chunks, done=True):
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + (["data: [DONE]\n\n"] if done else [])
    return ShadowAnswer(200, {"content-type": "text/event-stream; charset=utf-8"}, "".join(lines).encode())


def delta(**message):
    return {"model": "a", "choices": [{"index": 0, "delta": message}]}


def call(arguments):
    return {"index": 0, "function": {"name": "f", "arguments": arguments}}


def test_equal_answers_have_no_differences():
    assert find_differences(GREEDY, answered(), answered()) == []
    assert (
        find_differences(GREEDY, streamed(delta(content="Par"), delta(content="is")), streamed(delta(content="Paris")))
        == []
    )
    split = streamed(
        delta(tool_calls=[call('{"a"')]), delta(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}])
    )
    assert find_differences(GREEDY, split, streamed(delta(tool_calls=[call('{"a":1}')]))) == []


@pytest.mark.parametrize(
    ("ours", "names"),
    [
        (answered("Rome"), ["text"]),
        (answered(status=201), ["status"]),
        (ShadowAnswer(404, JSON, b'{"error": {"message": "no such model"}}'), ["status", "ours says 'no such model'"]),
        (answered(finish="length"), ["finish reasons"]),
        (answered(tokens=4), ["completion_tokens", "total_tokens"]),
        (answered(model="b"), ["model"]),
        (answered(calls=[call("{}")]), ["tool calls"]),
        (ShadowAnswer(200, JSON, b"oops"), ["body"]),
    ],
)
def test_each_difference_is_named(ours, names):
    found = [each.partition(":")[0] for each in find_differences(GREEDY, answered(), ours)]
    assert set(names) <= set(found)
    assert len(found) == len(names) or names == ["body"]


def test_drawn_texts_may_differ():
    drawn = SampleRequest({"model": "a", "messages": []})
    assert find_differences(drawn, answered("Paris"), answered("Rome")) == []


def test_errors_differ_by_type_and_fields_and_a_stream_by_its_end():
    def failed(**error):
        return ShadowAnswer(400, JSON, json.dumps({"error": error}).encode())

    found = find_differences(GREEDY, failed(type="a", message="x"), failed(type="b", message="y", code=1))
    assert [each.partition(":")[0] for each in found] == ["fields of the error", "type of the error"]
    (end,) = find_differences(GREEDY, streamed(delta(content="x")), streamed(delta(content="x"), done=False))
    assert end.startswith("end of the stream")


def test_headers_that_clients_read_are_missed():
    theirs = {**JSON, "x-litellm-model-id": "1", "x-litellm-call-id": "2", "server": "uvicorn"}
    (lacking,) = find_differences(
        GREEDY, answered(headers=theirs), answered(headers={**JSON, "x-litellm-call-id": "3"})
    )
    assert lacking == "headers that only theirs has: x-litellm-model-id"


def test_requests_are_read_from_a_file(tmp_path: Path):
    file = tmp_path / "requests.jsonl"
    file.write_text(
        '{"model": "a", "messages": []}\n\n{"path": "/v1/embeddings", "body": {"model": "e"}, "name": "n"}\n'
    )
    first, second = read_requests(file)
    assert (first.path, first.name) == ("/v1/chat/completions", "line 1 (a)")
    assert (second.path, second.body, second.name) == ("/v1/embeddings", {"model": "e"}, "n (e)")
    for text in ("", "[1]", '{"body": 3}'):
        file.write_text(text)
        with pytest.raises(ConfigInvalid, match="one JSON object a line"):
            read_requests(file)


def test_each_model_gets_some_requests():
    names = [request.name for request in sample_requests(["a", "b"])]
    assert len(names) == len(set(names)) == 7
