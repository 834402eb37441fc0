"""Messages answers read as deltas of chat completions, and every way in which one is not whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.request import Usage
from maitred.wire.anthropic.answer import AnswerBroken, AnswerFailed, MessagesStreamParser, parse_answer
from maitred.wire.sse import SSEDecoder, SSEEvent

START = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 3,
            "cache_read_input_tokens": 5,
            "output_tokens": 1,
            "service_tier": "standard",
        },
    },
}
STOP = {"type": "message_stop"}
PING = {"type": "ping"}


def opened(index, **block):
    return {"type": "content_block_start", "index": index, "content_block": block}


def filled(index, **delta):
    return {"type": "content_block_delta", "index": index, "delta": delta}


def closed(index):
    return {"type": "content_block_stop", "index": index}


def ending(reason="end_turn", **usage):
    return {
        "type": "message_delta",
        "delta": {"stop_reason": reason, "stop_sequence": None},
        "usage": {"output_tokens": 7, **usage},
    }


def text(index, *pieces):
    deltas = [filled(index, type="text_delta", text=piece) for piece in pieces]
    return [opened(index, type="text", text=""), *deltas, closed(index)]


def call(index, *pieces, **fields):
    deltas = [filled(index, type="input_json_delta", partial_json=piece) for piece in pieces]
    block = {"type": "tool_use", "id": f"toolu_{index}", "name": "look", "input": {}, **fields}
    return [opened(index, **block), *deltas, closed(index)]


HELLO = [START, PING, *text(0, "Hel", "lo"), ending(), STOP]
CALLS = [START, *text(0, "See."), *call(1, "", '{"at": ', '"sea"}'), *call(2), ending("tool_use"), STOP]


def read(events):
    """The reader, and the deltas that it gave."""
    reader = MessagesStreamParser()
    deltas = [
        delta
        for event in events
        for delta in reader.feed(SSEEvent(json.dumps(event), type=event.get("type", "message")))
    ]
    return reader, deltas


def test_text():
    reader, deltas = read(HELLO)
    assert "".join(delta.text for delta in deltas) == "Hello"
    assert [delta.finish for delta in deltas] == [None, None, "stop"]
    assert reader.is_complete
    reader.on_end()
    assert reader.usage == Usage(18, 7, 5, cache_write_tokens=3)


def test_calls_of_tools():
    reader, deltas = read(CALLS)
    pieces = [delta.tool_calls for delta in deltas if delta.tool_calls]
    assert pieces[0] == [
        {"index": 0, "id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    ]
    arguments = {0: "", 1: ""}
    for (piece,) in pieces:
        arguments[piece["index"]] += piece["function"]["arguments"]
    assert arguments == {0: '{"at": "sea"}', 1: "{}"}
    assert deltas[-1].finish == "tool_calls"
    assert reader.is_complete


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "content_filter"),
    ],
)
def test_why_it_ended(reason, finish):
    _, deltas = read([START, *text(0, "x"), ending(reason), STOP])
    assert deltas[-1].finish == finish


def test_the_last_usage_counts_and_what_it_leaves_out_stays():
    reader, _ = read([START, ending(input_tokens=20, cache_read_input_tokens=None), STOP])
    assert reader.usage == Usage(28, 7, 5, cache_write_tokens=3)


@pytest.mark.parametrize(
    ("begun", "ended", "usage"),
    [
        ({"output_tokens": 1}, {"output_tokens": 7}, Usage(0, 7)),
        ({"input_tokens": 10}, None, Usage(10, 0)),
        (None, {"input_tokens": "10", "output_tokens": 7.0}, Usage(10, 7)),
        ({"input_tokens": 10, "output_tokens": 1}, {"input_tokens": -1, "output_tokens": 7}, Usage(0, 7)),
        (None, None, None),
    ],
)
def test_counts_that_are_odd_or_missing_break_nothing(begun, ended, usage):
    start = {**START, "message": {**START["message"], "usage": begun}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}
    reader, _ = read([start, *text(0, "x"), end if ended is None else {**end, "usage": ended}, STOP])
    assert (reader.usage, reader.is_complete) == (usage, True)


def test_writes_into_the_cache_are_counted_by_their_lifetime():
    written = {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 900}
    usage = {"input_tokens": 10, "cache_creation_input_tokens": 1000, "output_tokens": 1, "cache_creation": written}
    reader, _ = read([{**START, "message": {**START["message"], "usage": usage}}, ending(), STOP])
    assert reader.usage == Usage(1010, 7, cache_write_tokens=1000, cache_write_1h_tokens=900)


def test_what_nobody_knows_and_what_the_model_thinks_is_passed_over():
    new = {"type": "weather", "sun": True}
    thought = [
        opened(0, type="thinking", thinking="", signature=""),
        filled(0, type="thinking_delta", thinking="Hm."),
        filled(0, type="signature_delta", signature="x"),
        closed(0),
    ]
    cited = [opened(1, type="text", text=""), filled(1, type="citations_delta", citation={}), closed(1)]
    reader, deltas = read([new, START, *thought, new, *cited, *text(2, "Yes."), ending(), STOP, PING, new])
    assert [delta.text for delta in deltas] == ["Yes.", ""]
    assert reader.is_complete


@pytest.mark.parametrize("events", [HELLO, CALLS], ids=["text", "calls"])
def test_a_stream_that_is_cut_is_never_complete(events):
    for length in range(len(events)):
        reader, deltas = read(events[:length])
        assert all(delta.finish is None for delta in deltas)
        with pytest.raises(AnswerBroken):
            reader.on_end()


@pytest.mark.parametrize("events", [HELLO, CALLS], ids=["text", "calls"])
def test_an_event_that_is_lost_doubled_or_swapped_is_found(events):
    order = [event for event in events if event is not PING]
    for at, event in enumerate(order):
        without_harm = event["type"] == "content_block_delta"  # pieces of text have no numbers
        if not without_harm:
            broken([*order[:at], *order[at + 1 :]])
        if event["type"] not in ("content_block_delta", "message_delta"):  # the latter may come several times
            broken([*order[: at + 1], *order[at:]])
        if at + 1 < len(order) and not (without_harm and order[at + 1]["type"] == "content_block_delta"):
            broken([*order[:at], order[at + 1], event, *order[at + 2 :]])


def broken(events):
    with pytest.raises(AnswerBroken):
        read(events)[0].on_end()


@pytest.mark.parametrize(
    "events",
    [
        [{"no": "type"}],
        [{**START, "message": {"id": "x"}}],
        [START, opened(0, type="tool_use", name="look", input={})],
        [START, opened(0, type="text", text=""), filled(0, type="input_json_delta", partial_json="{")],
        [START, *call(0, "{")],
        [START, *call(0, "[1]")],
        [START, ending("pause_turn")],
        [START, ending("tool_use")],
        [START, ending(None), STOP],
    ],
)
def test_what_breaks_the_rules_is_broken(events):
    with pytest.raises(AnswerBroken):
        read(events)


def test_html_is_no_answer():
    with pytest.raises(AnswerBroken):
        MessagesStreamParser().feed(SSEEvent("<html>"))


@pytest.mark.parametrize(
    ("kind", "status"),
    [("overloaded_error", 529), ("rate_limit_error", 429), ("invalid_request_error", 400), ("new_error", 500)],
)
@pytest.mark.parametrize("before", [[], [START], [START, *text(0, "Hel")]])
def test_an_error_in_the_stream(before, kind, status):
    with pytest.raises(AnswerFailed) as caught:
        read([*before, {"type": "error", "error": {"type": kind, "message": "Later."}, "request_id": None}])
    assert (caught.value.kind, caught.value.message, caught.value.status) == (kind, "Later.", status)


@given(st.lists(st.integers(1, 40), max_size=20), st.sampled_from([HELLO, CALLS]))
def test_however_the_bytes_come(cuts, events):
    stream = b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
    decoder, reader, deltas, at = SSEDecoder(), MessagesStreamParser(), [], 0
    for size in [*cuts, len(stream)]:
        for event in decoder.feed(stream[at : at + size]):
            deltas += reader.feed(event)
        at += size
    assert reader.is_complete
    assert deltas == read(events)[1]


def whole(**fields):
    return json.dumps(
        {
            **START["message"],
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "See."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "sea"}},
            ],
            "stop_reason": "tool_use",
            **fields,
        }
    ).encode()


def test_a_whole_answer():
    answer = parse_answer(whole())
    assert answer.text == "See."
    assert answer.tool_calls == [
        {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at":"sea"}'}}
    ]
    assert answer.finish == "tool_calls"
    assert answer.usage == Usage(18, 1, 5, cache_write_tokens=3)


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", whole(stop_reason=None), whole(content=None), whole()[:-9]])
def test_what_is_no_whole_answer(body):
    with pytest.raises(AnswerBroken):
        parse_answer(body)
