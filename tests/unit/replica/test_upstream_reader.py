"""What a server's stream is read as: every broken ending is distinguished from the one complete ending."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import ContextLengthExceeded, InvalidRequest, ReplicaLost
from maitred.core.request import FinishReason, Usage
from maitred.replica.upstream.dialects import DIALECTS
from maitred.replica.upstream.errors import failure_details
from maitred.replica.upstream.openai_stream import OpenAIStreamParser

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def event(data):
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def chunk(text=None, finish=None, index=0, usage=None, **delta):
    if text is not None:
        delta["content"] = text
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
    return event({"id": "x", "choices": [choice], "usage": usage})


ROLE = chunk("", role="assistant")
DONE = event(b"[DONE]")
BEYOND_BYTES = {"content": [{"token": "a", "logprob": -1.0, "bytes": [256]}]}
COUNTED = event({"choices": [], "usage": USAGE})
WHOLE = ROLE + chunk("He") + chunk("llo") + chunk(finish="stop") + COUNTED + DONE


def reader(choices=1, dialect="vllm"):
    return OpenAIStreamParser("there", choices, DIALECTS[dialect])


def read(data, size=None, **how):
    """All parts, the last usage, and the reader at the end of the body."""
    answer, parts, usage = reader(**how), [], None
    for at in range(0, len(data), size or max(1, len(data))):
        batch = answer.feed(data[at : at + (size or len(data))])
        if batch is not None:
            parts += batch.parts
            usage = batch.usage or usage
    answer.on_end()
    return parts, usage


def fails(data, **how):
    with pytest.raises(ReplicaLost) as caught:
        read(data, **how)
    return failure_details(caught.value)


@given(st.integers(1, len(WHOLE)))
def test_a_whole_answer_is_read_alike_however_it_is_cut(size):
    parts, usage = read(WHOLE, size)
    assert "".join(part.text for part in parts) == "Hello"
    assert [part.finish for part in parts if part.finish] == [FinishReason.STOP]
    assert usage == Usage(7, 3, 2)


@given(st.integers(0, len(WHOLE) - 2))
def test_no_beginning_of_an_answer_is_whole(cut):
    assert fails(WHOLE[:cut])


def test_neither_a_role_nor_a_count_is_a_part_of_an_answer():
    answer = reader()
    assert answer.feed(ROLE) is None
    assert answer.feed(chunk("", role="assistant", usage={"prompt_tokens": 7, "completion_tokens": 0})) is None
    assert not answer.has_begun
    batch = answer.feed(chunk("He"))
    assert ([part.text for part in batch.parts], batch.usage) == (["He"], Usage(7, 0))


@pytest.mark.parametrize(
    ("data", "how"),
    [
        (b"", "the body was empty"),
        (ROLE + chunk("He"), "the body ended before [DONE]"),
        (ROLE + chunk("He") + chunk(finish="stop") + COUNTED, "the body ended before [DONE]"),
        (ROLE + chunk("He") + DONE, "1 of 1 choices unfinished"),
        (chunk("He") + event(b"{oops"), "no chunk of an answer"),
        (chunk("He") + event(b"<html>"), "no chunk of an answer"),
        (chunk("He") + event({"type": "message_start"}), "no chunk of an answer"),
        (chunk("He") + event({"error": {"message": "out of memory", "code": 500}}), "out of memory"),
        (chunk("He") + event({"error": "overloaded", "error_type": "overloaded"}), "overloaded"),
        (chunk("He") + event({"object": "error", "message": "gone", "code": 500}), "gone"),
        (chunk("He") + chunk(finish="abort"), "which is no end"),
        (chunk("He") + chunk(finish="stop") + chunk("llo"), "went on after its end"),
        (chunk("He", index=1), "a choice 1 of 1"),
        (chunk("He", index=-1), "a choice -1 of 1"),
        (chunk(tool_calls={"id": "no list"}), "other types"),
        (chunk(tool_calls=["no call"]), "other types"),
        (chunk(tool_calls=[{"index": "first", "function": {}}]), "other types"),
        (chunk(tool_calls=[{"index": 0, "function": {"arguments": {}}}]), "other types"),
        (event({"choices": [{"delta": {"content": "a"}, "logprobs": BEYOND_BYTES}]}), "no chunk of an answer"),
        (chunk("a") * 4 + chunk(finish="stop") + COUNTED + DONE, "4 chunks have 3 tokens: some came twice"),
        (b"data: " + b"x" * (9 << 20), "an event without an end"),
    ],
)
def test_broken_streams_are_reported(data, how):
    assert how in fails(data)


def test_chunks_that_came_twice_show_at_once_where_every_chunk_is_counted():
    answer = reader()
    answer.feed(chunk("a", usage={"prompt_tokens": 7, "completion_tokens": 1}))
    with pytest.raises(ReplicaLost):
        answer.feed(chunk("a", usage={"prompt_tokens": 7, "completion_tokens": 1}))


def test_an_error_before_anything_may_be_the_requests_fault():
    fault = {"error": {"message": "top_p must be in (0, 1]", "type": "BadRequestError", "param": "top_p", "code": 400}}
    with pytest.raises(InvalidRequest) as caught:
        reader().feed(event(fault))
    assert (caught.value.message, caught.value.param) == ("top_p must be in (0, 1]", "top_p")
    long = {"error": {"message": "This model's maximum context length is 4096 tokens.", "code": 400}}
    with pytest.raises(ContextLengthExceeded):
        reader().feed(event(long))


def test_usage_can_be_missing_or_unsound():
    unsound = [({}, None), ([7], None), ({"prompt_tokens": -1}, None), ({"prompt_tokens": 7.0}, Usage(7, 0))]
    unsound += [({"prompt_tokens": 7, "completion_tokens": count}, Usage(7, 0)) for count in (-2, 10**30, "x", None)]
    for usage, counted in unsound:
        data = chunk("He") + chunk(finish="length") + event({"choices": [], "usage": usage}) + DONE
        assert read(data)[1] == counted
    assert read(chunk("He") + chunk(finish="length") + DONE)[1] is None


def test_usage_may_stand_in_the_choice():
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": USAGE}]}
    assert read(chunk("He") + event(last) + DONE)[1] == Usage(7, 3, 2)


def test_choices_end_one_by_one():
    data = chunk("a", index=1) + chunk("b") + chunk(finish="stop", index=1) + chunk(finish="length") + DONE
    parts, _ = read(data, choices=2)
    assert [(part.index, part.text, part.finish) for part in parts] == [
        (1, "a", None),
        (0, "b", None),
        (1, "", FinishReason.STOP),
        (0, "", FinishReason.LENGTH),
    ]
    assert "1 of 2 choices unfinished" in fails(chunk("a", index=1) + chunk(finish="stop", index=1) + DONE, choices=2)


def test_tool_calls_pass_as_they_are():
    call = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}]
    parts, _ = read(chunk(tool_calls=call) + chunk(finish="tool_calls") + DONE)
    assert (parts[0].extra, parts[0].text) == ({"tool_calls": call}, "")
    assert parts[1].finish is FinishReason.TOOL_CALLS


def test_log_probabilities_have_text_bytes_and_place():
    entry = {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [{"token": "e", "logprob": -1.5}]}
    choice = {"index": 0, "delta": {"content": "é"}, "logprobs": {"content": [entry]}}
    parts, _ = read(chunk("ab") + event({"choices": [choice]}) + chunk(finish="stop") + DONE)
    (score,) = parts[1].scores
    assert (score.chosen.text, score.chosen.raw, score.chosen.logprob, score.offset) == ("é", "é".encode(), -0.5, 2)
    assert [(top.text, top.raw) for top in score.top] == [("e", b"e")]


def test_texts_are_read_in_their_own_shape():
    logprobs = {
        "tokens": ["a", "b"],
        "token_logprobs": [-1, -2],
        "top_logprobs": [{"a": -1}, None],
        "text_offset": [0, 1],
    }
    choice = {"index": 0, "text": "ab", "logprobs": logprobs, "finish_reason": "length"}
    ((part,), _) = read(event({"choices": [choice]}) + DONE)
    assert (part.text, part.finish) == ("ab", FinishReason.LENGTH)
    assert [(score.chosen.text, score.chosen.logprob, score.offset) for score in part.scores] == [
        ("a", -1, 0),
        ("b", -2, 1),
    ]


def test_choices_that_are_counted_one_by_one_are_added_up():
    """As llama.cpp does it: each choice has a count of its own, with its prompt, which is the same."""

    def counted(completion_tokens, cached_tokens):
        details = {"cached_tokens": cached_tokens}
        usage = {"prompt_tokens": 5, "completion_tokens": completion_tokens, "prompt_tokens_details": details}
        return event({"choices": [], "usage": usage})

    first = chunk("a", index=1) + chunk(finish="stop", index=1) + counted(2, 0)
    data = first + chunk("b") + chunk(finish="stop") + counted(3, 4) + DONE
    answer = OpenAIStreamParser("there", 2, DIALECTS["llamacpp"], choices_per_prompt=2)
    assert answer.feed(first).usage is None
    assert answer.feed(data[len(first) :]).usage == Usage(5, 5, 0)
    prompts = OpenAIStreamParser("there", 2, DIALECTS["llamacpp"])
    assert prompts.feed(data).usage == Usage(10, 5, 4)


def test_an_event_that_says_nothing_is_no_fault():
    assert read(event(b"null") + WHOLE)[1] == Usage(7, 3, 2)
    assert "no chunk" in fails(event(b"true") + WHOLE)


def test_without_done_an_answer_is_whole_with_its_usage_and_the_end_of_the_body():
    """As `transformers serve` does it."""
    data = ROLE + chunk("He") + chunk(finish="length", usage=USAGE)
    parts, usage = read(data, dialect="transformers")
    assert [(part.text, part.finish) for part in parts] == [("He", None), ("", FinishReason.LENGTH)]
    assert usage == Usage(7, 3, 2)
    assert fails(ROLE + chunk("He") + chunk(finish="length"), dialect="transformers")
    assert fails(ROLE + chunk("He", usage=USAGE), dialect="transformers")
    assert fails(b"", dialect="transformers")
    assert fails(data, dialect="generic")
