"""What a server's stream is read as: every broken ending is distinguished from the one complete ending."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import ContextLengthExceeded, InvalidRequest, ReplicaLost
from maitred.core.request import FinishReason, Usage
from maitred.replica.upstream.dialects import DIALECTS
from maitred.replica.upstream.errors import failure_details
from maitred.replica.upstream.openai_stream import OpenAIStreamParser
from maitred.wire.openai.written import merge_deltas

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


def read(data, size=None, *, is_framed=True, **how):
    """All parts, the last usage, and the reader at the end of the body."""
    answer, parts, usage = reader(**how), [], None
    for at in range(0, len(data), size or max(1, len(data))):
        batch = answer.feed(data[at : at + (size or len(data))])
        if batch is not None:
            parts += batch.parts
            usage = batch.usage or usage
    if (batch := answer.on_end(is_framed=is_framed)) is not None:
        parts += batch.parts
        usage = batch.usage or usage
    assert answer.is_complete
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


@given(st.integers(0, len(WHOLE) - len(COUNTED + DONE) - 3))
def test_no_beginning_of_an_answer_is_whole(cut):
    assert fails(WHOLE[:cut])


@given(st.integers(len(WHOLE) - len(COUNTED + DONE), len(WHOLE) - len(DONE) - 3))
def test_an_end_within_an_event_is_whole_only_where_nothing_was_cut(cut):
    """The connection may end between events where it says nothing of the length, but not before the usage."""
    assert fails(WHOLE[:cut], is_framed=False)
    rest = WHOLE[:cut].rpartition(b"\n\n")[2]
    if b":" in rest.removeprefix(b"data:"):
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
        (ROLE + chunk("He") + DONE, "1 of 1 choices unfinished"),
        (chunk("He") + event(b"{oops"), "an event that is no JSON"),
        (chunk("He") + event(b"<html>"), "the body ended before [DONE]"),
        (chunk("He") + chunk(finish="stop") + b'data: {"choices', "an event that is no JSON"),
        (chunk("He") + event({"choices": "none"}), "no chunk of an answer"),
        (chunk("He") + event({"choices": ["none"]}), "no chunk of an answer"),
        (chunk("He") + event({"choices": [{"delta": "none"}]}), "a delta that is no object"),
        (chunk("He") + event({"choices": [], "error": {"message": "out of tokens"}}), "out of tokens"),
        (chunk("He") + event([{"error": {"message": "in a list"}}]), "in a list"),
        (chunk("He") + event({"error": {"message": "out of memory", "code": 500}}), "out of memory"),
        (chunk("He") + event({"error": "overloaded", "error_type": "overloaded"}), "overloaded"),
        (chunk("He") + event({"object": "error", "message": "gone", "code": 500}), "gone"),
        (chunk("He") + chunk(finish="abort"), "which is no end"),
        (chunk("He") + chunk(finish="stop") + chunk("llo"), "went on after its end"),
        (chunk("He") + chunk(finish="stop") + chunk(reasoning_content="So"), "went on after its end"),
        (chunk("He") + chunk(finish="stop") + chunk(tool_calls=[{"index": 0, "id": "a"}]), "went on after its end"),
        (chunk("He") + chunk("llo", index=1), "a choice 1 of 1"),
        (chunk("He") + chunk("llo", index=-1), "a choice -1 of 1"),
        (chunk(tool_calls="no list"), "other types"),
        (chunk(tool_calls=["no call"]), "other types"),
        (chunk(tool_calls=[{"index": 0, "function": "f"}]), "other types"),
        (chunk(3), "neither text nor a list of parts"),
        (chunk([{"type": "text", "text": "He"}, 3]), "neither text nor a list of parts"),
        (chunk(reasoning_content=True), "neither text nor a list of parts"),
        (b"<html>No.</html>", "sent something else"),
        (b'{"choices": [{"message": {"content": "He"}}]}', "the body ended before [DONE]"),
        (b'{"choices": [{"message": {"content": "He"}', "an event that is no JSON"),
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


@pytest.mark.parametrize("place", ["x_groq", "usageMetadata", "usage_metadata"])
def test_usage_may_stand_elsewhere(place):
    google = {"promptTokenCount": 7, "candidatesTokenCount": 3}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    last[place] = {"id": "r", "usage": USAGE} if place == "x_groq" else google
    _, usage = read(chunk("Hi") + event(last) + DONE, dialect="generic")
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)


def test_zeros_behind_the_usage_are_no_usage():
    zeros = event({"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}})
    _, usage = read(chunk("Hi") + chunk(finish="stop", usage=USAGE) + zeros + DONE)
    assert (usage.prompt_tokens, usage.completion_tokens) == (7, 3)


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "", "delta": {"content": "Hello"}},
        {"text": None, "delta": {"content": "Hello"}},
        {"text": "Hello", "delta": {}},
        {"delta": {}, "message": {"role": "assistant", "content": "Hello"}},
        {"delta": None, "message": {"role": "assistant", "content": "Hello"}},
        {"text": "", "message": {"content": "Hello"}},
    ],
)
def test_the_text_of_a_choice_may_stand_at_any_of_its_places(choice):
    for data in (
        event({"choices": [{"index": 0, **choice, "finish_reason": "stop"}]}),
        event({"choices": [{"index": 0, **choice}]}) + chunk(finish="stop"),
    ):
        parts, _ = read(data + DONE, dialect="generic")
        assert "".join(part.text for part in parts) == "Hello"


def test_the_number_of_a_choice_may_be_written_as_text():
    data = chunk("a", index="1") + chunk("b", index=0.0) + chunk("c", index=None)
    parts, _ = read(data + chunk(finish="stop", index="1") + chunk(finish="stop") + DONE, choices=2)
    assert [(part.index, part.text) for part in parts[:3]] == [(1, "a"), (0, "b"), (0, "c")]
    for index in ("two", "2", 2, 0.5, -1, [0]):
        assert "of 2" in fails(chunk("a", index=index), choices=2)


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


def test_log_probabilities_that_only_the_client_may_read_go_on():
    choice = {"index": 0, "delta": {"content": "a"}, "logprobs": BEYOND_BYTES}
    parts, _ = read(event({"choices": [choice]}) + chunk(finish="stop") + DONE)
    assert (parts[0].scores, parts[0].metadata.choice) == (None, {"logprobs": BEYOND_BYTES})


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


@pytest.mark.parametrize(
    "logprobs",
    [
        {"tokens": ["a", "b"], "token_logprobs": [None, -2], "top_logprobs": [None, {"b": -2}], "text_offset": [0, 1]},
        {"content": [{"token": "a", "logprob": None}, {"token": "b", "logprob": -2}]},
    ],
)
def test_a_token_without_log_probability_is_not_certain(logprobs):
    choice = {"index": 0, "text": "ab", "logprobs": logprobs, "finish_reason": "length"}
    ((part,), _) = read(event({"choices": [choice]}) + DONE)
    assert [score.chosen.logprob for score in part.scores] == [None, -2]


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
    for nothing in (
        b"null",
        b"true",
        b"",
        b" ",
        b"ping",
        b"keep-alive",
        b": OPENROUTER PROCESSING",
        b"[]",
        b'{"ping": 1}',
    ):
        for data in (event(nothing) + WHOLE, WHOLE.replace(COUNTED, event(nothing) + COUNTED)):
            parts, usage = read(data)
            assert ("".join(part.text for part in parts), usage) == ("Hello", Usage(7, 3, 2))


def test_without_done_an_answer_is_whole_with_its_usage_and_the_end_of_the_body():
    """As `transformers serve` does it."""
    data = ROLE + chunk("He") + chunk(finish="length", usage=USAGE)
    parts, usage = read(data, dialect="transformers")
    assert [(part.text, part.finish) for part in parts] == [("He", None), ("", FinishReason.LENGTH)]
    assert usage == Usage(7, 3, 2)
    for dialect in ("transformers", "generic"):
        assert read(data, dialect=dialect, is_framed=False) == (parts, usage)
        uncounted = ROLE + chunk("He") + chunk(finish="length")
        assert read(uncounted, dialect=dialect)[0] == parts
        assert fails(uncounted, dialect=dialect, is_framed=False)
        assert fails(ROLE + chunk("He", usage=USAGE), dialect=dialect)
        assert fails(b"", dialect=dialect)


def text_of(parts):
    return "".join(part.text for part in parts)


def finishes_of(parts):
    return [part.finish for part in parts if part.finish]


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data:[DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n", b" "])
@pytest.mark.parametrize("size", [None, 1, 7])
def test_done_needs_no_blank_line(end, size):
    parts, usage = read(WHOLE.removesuffix(DONE) + end, size)
    assert (text_of(parts), finishes_of(parts), usage) == ("Hello", [FinishReason.STOP], Usage(7, 3, 2))


def test_done_is_an_end_before_the_connection_ends():
    answer = reader()
    answer.feed(WHOLE.removesuffix(DONE))
    assert not answer.is_complete
    answer.feed(b"data: [DONE]\n")
    assert answer.is_complete


def test_the_last_event_needs_no_blank_line_if_it_can_be_read():
    for end in (b"", b"\n", b"\r\n"):
        parts, usage = read(WHOLE.removesuffix(DONE).rstrip(b"\n") + end)
        assert (text_of(parts), usage) == ("Hello", Usage(7, 3, 2))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("stop", "end", "eos", "STOP", "completed", "finished", "stop_token", "<|im_end|>"), FinishReason.STOP),
        (("length", "MAX_TOKENS", "max_output_tokens", "model_context_window_exceeded"), FinishReason.LENGTH),
        (("content_filter", "SAFETY", "RECITATION", "content_filtered", "sensitive"), FinishReason.CONTENT_FILTER),
    ],
)
def test_an_end_is_known_in_other_words(words, reason):
    for word in words:
        assert finishes_of(read(chunk("He") + chunk(finish=word) + DONE)[0]) == [reason]


@pytest.mark.parametrize("word", ["abort", "error", "cancelled", "timeout", "network_error", "MALFORMED_FUNCTION_CALL"])
def test_a_word_of_failure_is_no_end(word):
    assert "which is no end" in fails(chunk("He") + chunk(finish=word) + DONE)


@pytest.mark.parametrize("word", [None, "", "null", 0, False])
def test_a_choice_that_has_not_ended_goes_on(word):
    assert text_of(read(chunk("He", finish=word) + chunk("llo") + chunk(finish="stop") + DONE)[0]) == "Hello"


@pytest.mark.parametrize(
    ("word", "reason"), [({"type": "stop"}, "stop"), ({"reason": "max_tokens"}, "length"), (1, "stop"), (True, "stop")]
)
def test_an_end_may_be_no_word(word, reason):
    assert finishes_of(read(chunk("He") + chunk(finish=word) + DONE)[0]) == [reason]


def test_the_only_choice_may_stand_in_no_list():
    parts, _ = read(event({"choices": {"delta": {"content": "Hi"}}}) + chunk(finish="stop") + DONE)
    assert text_of(parts) == "Hi"


def test_a_refusal_in_parts_is_a_refusal():
    parts, _ = read(chunk([{"type": "refusal", "refusal": "No."}]) + chunk(finish="stop") + DONE)
    assert text_of(parts) == ""
    assert parts[0].extra == {"refusal": "No."}


def test_an_end_may_be_said_again():
    again = chunk("", finish="stop", role="assistant", usage={"prompt_tokens": 7, "completion_tokens": 3})
    parts, usage = read(chunk("He") + chunk(finish="stop") + again + chunk() + DONE)
    assert (text_of(parts), finishes_of(parts), usage) == ("He", [FinishReason.STOP], Usage(7, 3))
    # What is said later and means more counts.
    parts, _ = read(chunk("He") + chunk(finish="stop") + chunk(finish="length") + chunk(finish="stop") + DONE)
    assert finishes_of(parts) == [FinishReason.STOP, FinishReason.LENGTH]
    assert fails(chunk("He") + chunk(finish="stop") + chunk(finish="abort") + DONE)


def test_what_is_no_answer_may_follow_the_end():
    filtered = event({"choices": [{"index": 0, "delta": {}, "content_filter_results": {"hate": {"filtered": False}}}]})
    cited = chunk(annotations=[{"type": "url_citation"}])
    parts, _ = read(chunk("He") + chunk(finish="stop") + filtered + cited + DONE)
    assert parts[2].metadata.choice == {"content_filter_results": {"hate": {"filtered": False}}}
    assert parts[3].extra == {"annotations": [{"type": "url_citation"}]}


def test_the_only_choice_may_have_any_number():
    parts, _ = read(chunk("He", index=1) + chunk("llo", index=1) + chunk(finish="stop", index=1) + DONE)
    assert [(part.index, part.text) for part in parts] == [(0, "Hello"), (0, "")]
    for first, others in ((None, 0), (None, 1), (0, None), (1, None)):
        parts, _ = read(
            chunk("He", index=first) + chunk("llo", index=others) + chunk(finish="stop", index=others) + DONE
        )
        assert text_of(parts) == "Hello"


HALVES = [
    b'"a\\ud83d"',
    b'"\\ude00b"',
    b'"c\\uD83D"',
    b'"\\uDE00"',
    b'"d"',
    b'"e\\ud83d"',
    b'"f"',
    b'"\\ude00g"',
    b'"h\\ud83d"',
]


@pytest.mark.parametrize("name", ["content", "reasoning_content", "arguments"])
@pytest.mark.parametrize("together", [True, False])
def test_halves_of_a_character_come_in_two_events(name, together):
    def delta(text):
        if name != "arguments":
            return b'{"%b": %b}' % (name.encode(), text)
        return b'{"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": %b}}]}' % text

    data = b"".join(event(b'{"choices": [{"index": 0, "delta": %b}]}' % delta(text)) for text in HALVES)
    parts, _ = read(data + chunk(finish="stop") + DONE, None if together else 50)
    if name == "content":
        texts = [part.text for part in parts]
    elif name == "arguments":
        texts = [part.extra["tool_calls"][0]["function"]["arguments"] for part in parts if part.extra]
    else:
        texts = [part.extra[name] for part in parts if part.extra]
    cut = "\ufffd" if name == "content" else ""
    assert "".join(texts) == "a\U0001f600bc\U0001f600de\ufffdf\ufffdgh" + cut


@pytest.mark.parametrize("dialect", ["generic", "vllm", "llamacpp"])
def test_so_is_one_with_several_choices(dialect):
    """Its usage is that of all of them, and no choice takes the place of another."""
    messages = [{"content": "Hello", "reasoning_content": "why"}, {"content": None, "refusal": "no"}]
    choices = [
        {"index": index, "delta": {}, "message": message, "finish_reason": "stop"}
        for index, message in enumerate(messages)
    ]
    for data in (
        json.dumps({"choices": choices, "usage": USAGE}).encode(),
        event({"choices": choices, "usage": USAGE}),
    ):
        parts, usage = read(data, choices=2, dialect=dialect)
        assert [(part.index, part.text, part.extra) for part in parts] == [
            (0, "Hello", {"reasoning_content": "why"}),
            (1, "", {"refusal": "no"}),
        ]
        assert usage == Usage(7, 3, 2)


@pytest.mark.parametrize("delta", [None, {}])
def test_a_message_behind_a_streamed_thought_adds_its_text(delta):
    message = {"content": "Hello", "reasoning_content": "why"}
    end = event({"choices": [{"index": 0, "delta": delta, "message": message, "finish_reason": "stop"}]})
    (thought, text), _ = read(chunk(reasoning_content="why") + end + DONE)
    assert (thought.extra, text.text, text.extra) == ({"reasoning_content": "why"}, "Hello", None)


def test_what_is_no_text_in_a_thought_is_kept_beside_it():
    reference, odd = {"type": "reference", "reference_ids": [1]}, {"content": "why"}
    for sent in (
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "so"}, reference]}]},
        {"reasoning_content": [{"type": "text", "text": "so"}, reference]},
    ):
        (part, _), _ = read(event({"choices": [{"index": 0, "delta": sent}]}) + chunk(finish="stop") + DONE)
        assert part.extra == {"reasoning_content": "so", "content_parts": [reference]}
    (part, _), _ = read(chunk(reasoning=odd) + chunk(finish="stop") + DONE)
    assert part.extra == {"content_parts": [odd]}


def test_a_whole_answer_in_place_of_a_stream_is_read():
    message = {"role": "assistant", "content": "Hello", "annotations": [{"type": "url_citation"}]}
    answer = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    body = json.dumps({**answer, "usage": USAGE, "system_fingerprint": "fp"}, indent=1).encode()
    for data, framed in (
        (body, True),
        (body, False),
        (b"\n" + body, True),
        (event(json.dumps(answer).encode()) + DONE, True),
    ):
        for size in (None, 1, 10):
            (part,), usage = read(data, size, is_framed=framed)
            assert (part.text, part.finish, part.extra) == (
                "Hello",
                FinishReason.STOP,
                {"annotations": [{"type": "url_citation"}]},
            )
            assert usage in (None, Usage(7, 3, 2))
    with pytest.raises(ReplicaLost):
        read(b'{"error": {"message": "boom"}}')
    with pytest.raises(InvalidRequest):
        read(b'{"error": {"message": "top_p", "code": 400}}')


def test_content_in_parts_is_text_and_thought():
    thought = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}], "closed": True}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    reference = {"type": "reference", "reference_ids": [1]}
    parts, _ = read(
        chunk("A")
        + chunk(thought)
        + chunk([{"type": "text", "text": "B"}, reference, image, {"type": "output_text", "text": "C"}, "D"])
        + chunk({"type": "text", "text": "E"})
        + chunk("F")
        + chunk(reasoning_content=[{"type": "text", "text": "so"}])
        + chunk(finish="stop")
        + DONE
    )
    assert text_of(parts) == "ABCDEF"
    extras = [part.extra for part in parts if part.extra]
    assert extras == [
        {"reasoning_content": "hm", "content_parts": [{"type": "thinking", "closed": True}]},
        {"images": [image], "content_parts": [reference]},
        {"reasoning_content": "so"},
    ]


@pytest.mark.parametrize("images", [0, "x", {}, [{"type": "image_url", "n": 1}]])
@pytest.mark.parametrize("is_first", [True, False])
def test_images_of_a_refusal_stand_beside_whatever_else_is_called_so(images, is_first):
    image = {"type": "image_url"}
    sent = [("images", images), ("refusal", [image])]
    (part, _), _ = read(chunk(**dict(sent if is_first else sent[::-1])) + chunk(finish="stop") + DONE)
    others = images if isinstance(images, list) else []
    assert part.extra == {"images": [*others, image] if is_first else [image, *others]}


def test_members_that_are_not_decided_here_go_on():
    head = {
        "id": "x",
        "model": "m",
        "created": 1,
        "system_fingerprint": "fp",
        "service_tier": "flex",
        "obfuscation": "xy",
    }

    def cited(delta, finish=None, **more):
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "seed": 7}], **more})

    data = (
        event({**head, "choices": [], "prompt_filter_results": [{"prompt_index": 0}]})
        + cited({"role": "assistant", "content": "", "refusal": None})
        + cited({"content": "a"})
        + cited({"content": "b"})
        + cited({"content": "c", "annotations": [{"url": "u"}], "name": "n"}, citations=["u"])
        + cited({}, "stop", citations=["u"])
        + event({**head, "choices": [], "citations": ["u"], "search_results": [1], "usage": USAGE})
        + DONE
    )
    for size in (None, 5):
        parts, _ = read(data, size)
        named = [part for part in parts if part.metadata is not None]
        always = {"system_fingerprint": "fp", "service_tier": "flex"}
        assert [part.metadata.chunk for part in named] == [
            {**always, "prompt_filter_results": [{"prompt_index": 0}]},
            always,
            {**always, "citations": ["u"]},
            {**always, "citations": ["u"], "search_results": [1]},
        ]
        assert {tuple(part.metadata.choice.items()) for part in named} == {(("seed", 7),)}
        assert text_of(parts) == "abc"
        assert [part.extra for part in parts if part.extra] == [{"annotations": [{"url": "u"}], "name": "n"}]


def test_what_changes_in_a_chunk_is_never_taken_for_text():
    """Chunks that differ in their text alone are compared byte for byte."""

    def with_tokens(text, *tokens):
        return event({"choices": [{"index": 0, "delta": {"content": text}, "token_ids": [*tokens]}]})

    data = with_tokens("a", 1) + with_tokens("b", 1) + with_tokens('"c\\', 2, 3) + with_tokens('"content":', 4)
    for size in (None, 3):
        parts, _ = read(data + chunk(finish="stop") + DONE, size)
        assert text_of(parts) == 'ab"c\\"content":'
        assert [part.metadata.choice for part in parts if part.metadata] == [
            {"token_ids": [1]},
            {"token_ids": [1]},
            {"token_ids": [2, 3]},
            {"token_ids": [4]},
            {},
        ]


def test_log_probabilities_of_a_refusal_go_on():
    scores = {"content": None, "refusal": [{"token": "No", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
    choice = {"index": 0, "delta": {"refusal": "No"}, "logprobs": scores, "finish_reason": "stop"}
    ((part,), _) = read(event({"choices": [choice]}) + DONE)
    assert (part.extra, part.metadata.choice) == ({"refusal": "No"}, {"logprobs": {"refusal": scores["refusal"]}})


def test_each_count_of_a_usage_is_read_for_itself():
    for usage, expected in (
        ({"prompt_tokens": 1000, "total_tokens": 1000}, Usage(1000, 0)),
        ({"prompt_tokens": 1000, "completion_tokens": None, "total_tokens": 1003}, Usage(1000, 3)),
        ({"prompt_tokens": "7", "completion_tokens": 3.0}, Usage(7, 3)),
        ({"input_tokens": 5, "output_tokens": 3, "cache_read_input_tokens": 2}, Usage(7, 3, 2)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_cache_hit_tokens": 2}, Usage(7, 3, 2)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2}, Usage(7, 3, 2)),
    ):
        read_usage = read(chunk("He") + chunk(finish="stop") + event({"choices": [], "usage": usage}) + DONE)[1]
        assert msgspec.structs.replace(read_usage, details=None) == expected
    moonshot = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": USAGE}]})
    assert read(chunk("He") + moonshot + DONE)[1] == Usage(7, 3, 2)


def test_what_a_server_counts_beside_goes_on():
    details = {"completion_tokens_details": {"reasoning_tokens": 2, "accepted_prediction_tokens": 1}, "cost": 0.5}
    usage = read(chunk("He") + chunk(finish="stop") + event({"choices": [], "usage": {**USAGE, **details}}) + DONE)[1]
    assert usage == Usage(7, 3, 2, reasoning_tokens=2, details=details)


# --- tool calls ---


def calls_of(*pieces, finish="tool_calls"):
    """The calls as a client puts them together by their index, and the finish reason."""
    data = b"".join(chunk(tool_calls=piece if isinstance(piece, list) else [piece]) for piece in pieces)
    parts, _ = read(data + chunk(finish=finish) + DONE, dialect="generic")
    sent = [piece for part in parts if part.extra for piece in part.extra["tool_calls"]]
    assert all(isinstance(piece["index"], int) for piece in sent)
    merged = merge_deltas([part.extra for part in parts if part.extra])["tool_calls"]
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in merged], parts[-1].finish


def piece(arguments=None, *, name=None, **more):
    function = {**({} if name is None else {"name": name}), **({} if arguments is None else {"arguments": arguments})}
    return {**more, "function": function}


TWO = [("a", "f", '{"x":1}'), ("b", "g", '{"y":2}')]


@pytest.mark.parametrize(
    "pieces",
    [
        # as OpenAI does it
        [
            piece("", index=0, id="a", name="f"),
            piece('{"x":1}', index=0),
            piece("", index=1, id="b", name="g"),
            piece('{"y":2}', index=1),
        ],
        # in turns
        [
            piece("", index=0, id="a", name="f"),
            piece("", index=1, id="b", name="g"),
            piece('{"x":', index=0),
            piece('{"y":', index=1),
            piece("1}", index=0),
            piece("2}", index=1),
        ],
        # no index
        [piece('{"x":1}', id="a", name="f"), piece('{"y":2}', id="b", name="g")],
        [piece("", id="a", name="f"), piece('{"x":'), piece("1}"), piece("", id="b", name="g"), piece('{"y":2}')],
        [[piece('{"x":1}', id="a", name="f"), piece('{"y":2}', id="b", name="g")]],
        # no index, by id and in turns
        [piece('{"x":', id="a", name="f"), piece('{"y":', id="b", name="g"), piece("1}", id="a"), piece("2}", id="b")],
        # one index for all
        [piece('{"x":1}', index=0, id="a", name="f"), piece('{"y":2}', index=0, id="b", name="g")],
        [
            piece("", index=0, id="a", name="f"),
            piece('{"x":1}', index=0),
            piece("", index=0, id="b", name="g"),
            piece('{"y":2}', index=0),
        ],
        # from another number, as text
        [piece('{"x":1}', index="1", id="a", name="f"), piece('{"y":2}', index="2", id="b", name="g")],
        [piece('{"x":1}', index=3, id="a", name="f"), piece('{"y":2}', index=1, id="b", name="g")],
        # the id later than the name
        [
            piece("", index=0, name="f"),
            {"index": 0, "id": "a"},
            piece('{"x":1}', index=0),
            piece('{"y":2}', index=1, name="g"),
            {"index": 1, "id": "b"},
        ],
        [piece("", name="f"), piece('{"x":1}', id="a"), piece('{"y":2}', id="b", name="g")],
        # the name in pieces would be one name; id and name are repeated
        [
            piece("", index=0, id="a", name="f"),
            piece('{"x":', index=0, id="a", name="f"),
            piece("1}", index=0, id="a", name="f"),
            piece('{"y":2}', index=1, id="b", name="g"),
        ],
        # the arguments are repeated when they are whole
        [
            piece('{"x":', index=0, id="a", name="f"),
            piece("1}", index=0),
            piece('{"x":1}', index=0, id="a", name="f"),
            piece('{"y":2}', index=1, id="b", name="g"),
        ],
        # an empty object before the arguments
        [
            piece("{}", index=0, id="a", name="f"),
            piece('{"x":', index=0),
            piece("1}", index=0),
            piece({}, index=1, id="b", name="g"),
            piece('{"y":2}', index=1, id="b", name="g"),
        ],
        [
            piece("", index=0, id="a", name="f"),
            piece("{}", index=0),
            piece('{"x":1}', index=0),
            piece("{}", id="b", name="g"),
            piece('{"y":2}'),
        ],
        # the name and the arguments beside the id
        [
            {"index": 0, "id": "a", "type": "function", "name": "f", "arguments": ""},
            {"index": 0, "arguments": '{"x":'},
            {"index": 0, "arguments": "1}"},
            {"index": 1, "id": "b", "type": "tool_use", "name": "g", "input": '{"y":2}'},
        ],
        # an index only later
        [piece("", id="a", name="f"), piece('{"x":1}', index=0), piece('{"y":2}', index=1, id="b", name="g")],
        # nulls and nothing
        [
            {"index": 0, "id": "a", "type": None, "function": {"name": "f", "arguments": None}},
            {"index": 0},
            piece('{"x":1}', index=0, id="", name=""),
            piece('{"y":2}', index=1, id="b", name="g"),
        ],
    ],
)
def test_pieces_of_calls_find_their_call(pieces):
    assert calls_of(*pieces) == (TWO, FinishReason.TOOL_CALLS)


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(arguments):
    for pieces in (
        [piece(arguments, index=0, id="a", name="f"), piece(arguments, index=1, id="b", name="g")],
        [piece(arguments, id="a", name="f"), piece(arguments, id="b", name="g"), piece(arguments, id="b", name="g")],
        [[piece(arguments, id="a", name="f"), piece(arguments, id="b", name="g")]],
    ):
        assert calls_of(*pieces)[0] == [("a", "f", "{}"), ("b", "g", "{}")]


@pytest.mark.parametrize("pieces", [["{}", "\n"], ["{}", " ", "{}"], ["{}", '{"x"', ":1}"], ["{}", "\n", '{"x":1}']])
def test_an_empty_object_is_kept_unless_arguments_follow_it(pieces):
    ((_, _, arguments),), _ = calls_of(piece("", index=0, id="a", name="f"), *(piece(text, index=0) for text in pieces))
    assert json.loads(arguments) == ({"x": 1} if "x" in "".join(pieces) else {})


def test_a_call_that_was_cut_before_its_arguments_has_none():
    assert calls_of(piece("", index=0, id="a", name="f"), finish="length") == ([("a", "f", "")], FinishReason.LENGTH)


def test_a_name_that_is_said_again_begins_no_call():
    pieces = [piece('{"x":1}', name="f", id="a"), piece("", name="f")]
    assert calls_of(*pieces)[0] == [("a", "f", '{"x":1}')]


def test_calls_of_one_tool_without_ids_are_two_calls_with_ids():
    for pieces in (
        [[piece('{"x":1}', name="f"), piece('{"x":1}', name="f")]],
        [piece('{"x":1}', name="f"), piece('{"x":1}', name="f")],
        [piece('{"x":1}', name="f", index=0), piece('{"x":1}', name="f", index=0)],
        [
            piece("", name="f", index=0),
            piece("", name="f", index=1),
            piece('{"x":1}', index=0),
            piece('{"x":1}', index=1),
        ],
        [piece("", name="f"), piece('{"x":'), piece("1}"), piece("", name="f"), piece('{"x":'), piece("1}")],
        [
            piece('{"x":1}', name="f", index=0),
            piece("", name="f", index=0),
            piece('{"x"', index=0),
            piece(":1}", index=0),
        ],
    ):
        calls, _ = calls_of(*pieces)
        assert [call[1:] for call in calls] == [("f", '{"x":1}')] * 2
        assert all(call[0].startswith("call") for call in calls)
        assert calls[0][0] != calls[1][0]


def test_a_name_that_grows_is_one_name():
    pieces = [piece("", index=0, id="a", name="get_"), piece("[]", index=0, name="get_weather")]
    assert calls_of(*pieces)[0] == [("a", "get_weather", "[]")]


def test_a_name_in_pieces_is_one_name():
    assert calls_of(piece("", index=0, id="a", name="get_"), piece("{}", index=0, name="weather"))[0] == [
        ("a", "get_weather", "{}")
    ]


def test_arguments_may_be_an_object_and_a_call_no_list():
    data = (
        chunk(tool_calls={"id": "a", "function": {"name": "f", "arguments": {"x": "é"}}}) + chunk(finish="stop") + DONE
    )
    (part, end), _ = read(data)
    (call,) = part.extra["tool_calls"]
    assert (call["index"], call["function"]) == (0, {"name": "f", "arguments": '{"x": "é"}'})
    assert end.finish is FinishReason.TOOL_CALLS


def test_calls_are_the_reason_for_the_end_unless_they_were_cut():
    whole = piece("{}", index=0, id="a", name="f")
    for word in ("stop", "tool_calls", "function_call", "end", "tool_use"):
        assert calls_of(whole, finish=word)[1] is FinishReason.TOOL_CALLS
        # Without a call there is nothing for the caller to run.
        assert finishes_of(read(chunk("He") + chunk(finish=word) + DONE)[0]) == [FinishReason.STOP]
    cut = piece('{"x":', index=0, id="a", name="f")
    assert calls_of(cut, finish="length") == ([("a", "f", '{"x":')], FinishReason.LENGTH)


def test_members_of_calls_stay_beside_what_is_read_of_them():
    signed = {"google": {"thought_signature": "SIG"}}
    (part, _), _ = read(
        chunk(
            tool_calls=[{"id": "a", "function": {"name": "f", "arguments": "[]", "parsed": 1}, "extra_content": signed}]
        )
        + chunk(finish="tool_calls")
        + DONE
    )
    function = {"name": "f", "arguments": "[]", "parsed": 1}
    call = {"id": "a", "type": "function", "function": function, "extra_content": signed}
    assert part.extra == {"tool_calls": [{"index": 0, **call}]}
    assert merge_deltas([part.extra])["tool_calls"] == [call]


@pytest.mark.parametrize("written", [["ls", " -l"], ["{}", " + x"], ["{}", "\n"], ["{}"], ['{"a":1}', '{"a":1}']])
def test_custom_calls_have_a_name_and_an_input(written):
    """The input is a text, so an object in it has no meaning of its own."""
    parts, _ = read(
        chunk(tool_calls=[{"index": 0, "id": "t", "type": "custom", "custom": {"name": "shell", "input": ""}}])
        + b"".join(chunk(tool_calls=[{"index": 0, "custom": {"input": piece}}]) for piece in written)
        + chunk(finish="tool_calls")
        + DONE
    )
    assert merge_deltas([part.extra for part in parts if part.extra])["tool_calls"] == [
        {"id": "t", "type": "custom", "custom": {"name": "shell", "input": "".join(written)}}
    ]


def test_the_only_call_of_the_old_api_is_a_tool_call():
    parts, _ = read(
        chunk(function_call={"name": "f", "arguments": ""})
        + chunk(function_call={"arguments": "{}"})
        + chunk(finish="function_call")
        + DONE
    )
    (call,) = merge_deltas([part.extra for part in parts if part.extra])["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}
    assert parts[-1].finish is FinishReason.TOOL_CALLS
