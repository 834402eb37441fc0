"""Messages answers read as deltas of chat completions, and every way in which one is not whole."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.request import FinishReason, Usage
from maitred.wire.answer_event import AnswerBroken, AnswerFailed
from maitred.wire.anthropic.answer import MessagesStreamParser
from maitred.wire.openai.written import merge_deltas
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
    deltas = [delta for event in events for delta in reader.feed(SSEEvent(json.dumps(event)))]
    return reader, deltas


@pytest.mark.parametrize(("reason", "written"), [("tool_use", "{}"), ("end_turn", "{}"), ("max_tokens", "")])
def test_the_last_call_has_an_empty_object_unless_it_was_cut_before_its_arguments(reason, written):
    for events in ([*call(0), *call(1)], [*call(0), *call(1)[:-1]]):
        _, deltas = read([START, *events, ending(reason), STOP])
        calls = merge_deltas(delta.extra for delta in deltas if delta.extra)["tool_calls"]
        assert [entry["function"]["arguments"] for entry in calls] == ["{}", written]


def test_text():
    reader, deltas = read(HELLO)
    assert "".join(delta.text for delta in deltas) == "Hello"
    assert [delta.finish for delta in deltas] == [None, None, "stop"]
    assert reader.is_complete
    reader.on_end()
    details = {"cache_creation_input_tokens": 3, "service_tier": "standard"}
    assert reader.usage == Usage(18, 7, 5, cache_write_tokens=3, details=details)


def test_calls_of_tools():
    reader, deltas = read(CALLS)
    pieces = [delta.extra["tool_calls"] for delta in deltas if delta.extra]
    assert pieces[0] == [
        {"index": 0, "id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": ""}}
    ]
    arguments = {0: "", 1: ""}
    for (piece,) in pieces:
        arguments[piece["index"]] += piece["function"]["arguments"]
    assert arguments == {0: '{"at": "sea"}', 1: "{}"}
    assert deltas[-1].finish is FinishReason.TOOL_CALLS
    assert reader.is_complete


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "content_filter"),
        ("pause_turn", "pause_turn"),
        # The words of other servers that speak this API, and those that do not exist yet.
        ("stop", "stop"),
        ("length", "length"),
        ("sundown", "stop"),
        ("tool_use", "stop"),  # it calls none
    ],
)
def test_why_it_ended(reason, finish):
    reader, deltas = read([START, *text(0, "x"), ending(reason), STOP])
    assert deltas[-1].finish == finish
    assert reader.is_complete


@pytest.mark.parametrize("reason", ["end_turn", "tool_use", "stop"])
def test_an_answer_with_calls_ends_for_them(reason):
    assert read([START, *call(0, "{}"), ending(reason), STOP])[1][-1].finish is FinishReason.TOOL_CALLS


@pytest.mark.parametrize("reason", ["stop_sequence", "end_turn"])
def test_the_stop_sequence_is_named(reason):
    event = ending(reason)
    event["delta"]["stop_sequence"] = "END"
    _, deltas = read([START, *text(0, "x"), event, STOP])
    assert (deltas[-1].finish, deltas[-1].stop) == (FinishReason.STOP, "END")


@pytest.mark.parametrize("reason", ["max_tokens", "refusal", "tool_use", "stop_sequence"])
@pytest.mark.parametrize("closes", [True, False])
def test_a_call_that_is_cut_has_the_arguments_that_there_are(reason, closes):
    events = call(0, '{"city": ', '"Par')
    reader, deltas = read([START, *(events if closes else events[:-1]), ending(reason), STOP])
    pieces = [piece for delta in deltas if delta.extra for piece in delta.extra["tool_calls"]]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == '{"city": "Par'
    finishes = {
        "max_tokens": "length",
        "refusal": "content_filter",
        "tool_use": "tool_calls",
        "stop_sequence": "tool_calls",
    }
    assert deltas[-1].finish == finishes[reason]
    assert reader.is_complete


def arguments_of(deltas):
    return "".join(
        piece["function"]["arguments"] for delta in deltas if delta.extra for piece in delta.extra["tool_calls"]
    )


@pytest.mark.parametrize(
    ("events", "arguments"),
    [
        (call(0, input={"at": "sea"}), '{"at":"sea"}'),
        (call(0, input='{"at": "sea"}'), '{"at": "sea"}'),
        (call(0, input=None), "{}"),
        (call(0, "[1]"), "[1]"),  # it is the model's word, and no breakage of the answer
        (call(0, {"at": "sea"}), '{"at":"sea"}'),
    ],
)
def test_arguments_come_as_the_server_sends_them(events, arguments):
    assert arguments_of(read([START, *events, ending("tool_use"), STOP])[1]) == arguments


def test_a_call_without_an_id_gets_one_of_its_own():
    _, deltas = read([START, *call(0, id=None), *call(1, id=""), ending("tool_use"), STOP])
    ids = [piece["id"] for delta in deltas if delta.extra for piece in delta.extra["tool_calls"] if "id" in piece]
    assert len({*ids}) == 2
    assert all(ids)


def thinking(index, *pieces, signature="SIG"):
    deltas = [filled(index, type="thinking_delta", thinking=piece) for piece in pieces]
    signed = [filled(index, type="signature_delta", signature=signature)] if signature else []
    return [opened(index, type="thinking", thinking="", signature=""), *deltas, *signed, closed(index)]


def test_thoughts_come_as_they_are_written_and_their_signed_blocks_at_their_end():
    hidden = [opened(1, type="redacted_thinking", data="XX"), closed(1)]
    _, deltas = read([START, *thinking(0, "Hm", "m."), *hidden, *call(2), ending("tool_use"), STOP])
    extras = [delta.extra for delta in deltas if delta.extra]
    assert extras[:4] == [
        {"reasoning_content": "Hm", "reasoning": "Hm"},
        {"reasoning_content": "m.", "reasoning": "m."},
        {"thinking_blocks": [{"index": 0, "type": "thinking", "thinking": "Hmm.", "signature": "SIG", "position": 0}]},
        {"thinking_blocks": [{"index": 1, "type": "redacted_thinking", "data": "XX", "position": 0}]},
    ]


def test_a_thought_has_its_position_among_texts_and_calls():
    events = [*thinking(0, "a"), *text(1, "x", "y"), *text(2, "\n"), *thinking(3, "b"), *call(4), *thinking(5, "c")]
    _, deltas = read([START, *events, ending("tool_use"), STOP])
    blocks = [block for delta in deltas if delta.extra for block in delta.extra.get("thinking_blocks", ())]
    assert [(block["thinking"], block["position"]) for block in blocks] == [("a", 0), ("b", 1), ("c", 2)]


def test_a_thought_that_is_not_shown_keeps_its_signature():
    _, deltas = read([START, *thinking(0), *text(1, "Yes."), ending(), STOP])
    blocks = [{"index": 0, "type": "thinking", "thinking": "", "signature": "SIG", "position": 0}]
    assert [delta.extra for delta in deltas if delta.extra] == [{"thinking_blocks": blocks}]


def test_a_thought_without_a_signature_is_text_alone():
    _, deltas = read([START, *thinking(0, "Hm.", signature=""), ending(), STOP])
    assert [delta.extra for delta in deltas] == [{"reasoning_content": "Hm.", "reasoning": "Hm."}, None]


def test_the_last_usage_counts_and_what_it_leaves_out_stays():
    reader, _ = read([START, ending(input_tokens=20, cache_read_input_tokens=None), STOP])
    assert reader.usage == Usage(28, 7, 5, cache_write_tokens=3, details=reader.usage.details)


def test_writes_into_the_cache_are_counted_by_their_lifetime():
    written = {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 900}
    usage = {"input_tokens": 10, "cache_creation_input_tokens": 1000, "output_tokens": 1, "cache_creation": written}
    reader, _ = read([{**START, "message": {**START["message"], "usage": usage}}, ending(), STOP])
    assert reader.usage == Usage(
        1010, 7, cache_write_tokens=1000, cache_write_1h_tokens=900, details=reader.usage.details
    )


@pytest.mark.parametrize(
    ("first", "last", "usage"),
    [
        ({"input_tokens": "18", "output_tokens": 1}, {"output_tokens": 7.0}, Usage(18, 7)),
        ({"input_tokens": 0}, {"input_tokens": 18, "output_tokens": 7}, Usage(18, 7)),
        ({"input_tokens": 18}, {"input_tokens": 0, "output_tokens": 7}, Usage(18, 7)),
        ({"cache_read_input_tokens": 5}, {"output_tokens": 7}, Usage(5, 7, 5)),
        ({"input_tokens": 18}, {}, Usage(18, 0)),
        ({"input_tokens": 18, "output_tokens": 1}, None, Usage(18, 0)),
        (None, {"output_tokens": 7}, Usage(0, 7)),
        (None, None, None),
        ({"input_tokens": -1}, {"output_tokens": 7}, Usage(0, 7)),
        ({"input_tokens": 18}, {"output_tokens": 1e30}, Usage(18, 0)),
    ],
)
def test_each_count_is_read_for_itself(first, last, usage):
    start = {**START, "message": {**START["message"], "usage": first}}
    reader, _ = read([start, *text(0, "x"), {**ending(), "usage": last}, STOP])
    assert (reader.usage, reader.is_complete) == (usage, True)


def test_events_that_nobody_knows_are_passed_over():
    new = {"type": "weather", "sun": True}
    cited = [opened(1, type="text", text=""), filled(1, type="citations_delta", citation={}), closed(1)]
    searched = [
        opened(3, type="server_tool_use", id="s", name="web_search", input={}),
        filled(3, type="input_json_delta", partial_json="{}"),
        closed(3),
    ]
    reader, deltas = read([new, START, new, *cited, *searched, *text(2, "Yes."), ending(), STOP, PING, new])
    assert "".join(delta.text for delta in deltas) == "Yes."
    assert reader.is_complete


@pytest.mark.parametrize(
    "events",
    [
        HELLO[1:],  # no message_start
        [START, *HELLO],  # it came twice, before anything else
        [event for event in HELLO if event["type"] != "content_block_stop"],
        [*HELLO[:-1], HELLO[-2], STOP, STOP],
        [*HELLO, ending()],
        [START, *text(7, "Hel"), *text(7, "lo"), ending(), STOP],
        [START, *text(0)[:1], *text(1, "Hel"), filled(0, type="text_delta", text="lo"), ending(), STOP],  # interleaved
        [{name: value for name, value in event.items() if name != "index"} for event in HELLO],
        [*HELLO[:3], HELLO[2], *HELLO[3:]],  # a block that begins twice
    ],
)  # fmt: skip
def test_oddities_that_lose_nothing_break_nothing(events):
    reader, deltas = read(events)
    reader.on_end()
    assert "".join(delta.text for delta in deltas) == "Hello"
    assert deltas[-1].finish is FinishReason.STOP
    assert reader.is_complete


@pytest.mark.parametrize("data", ["", " ", "[DONE]"])
def test_an_event_without_content_says_nothing(data):
    assert MessagesStreamParser().feed(SSEEvent(data)) == []


def test_the_name_of_an_event_is_its_type():
    reader = MessagesStreamParser()
    for event in HELLO:
        reader.feed(SSEEvent(json.dumps({name: event[name] for name in event if name != "type"}), type=event["type"]))
    assert reader.is_complete


def test_a_body_that_ends_after_the_reason_is_complete():
    reader, deltas = read(HELLO[:-1])
    assert not reader.is_complete
    reader.on_end()
    assert reader.is_complete
    assert deltas[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("events", [HELLO, CALLS], ids=["text", "calls"])
def test_a_stream_that_is_cut_is_never_complete(events):
    for length in range(len(events) - 2):  # from there on the reason is known
        reader, deltas = read(events[:length])
        assert all(delta.finish is None for delta in deltas)
        with pytest.raises(AnswerBroken):
            reader.on_end()


@pytest.mark.parametrize(
    "events",
    [
        [[1]],
        [START, opened(0, type="tool_use", id="t", input={})],
        [START, opened(0, type="text", text=""), filled(0, type="input_json_delta", partial_json="{")],
        [START, *call(0)[:1], filled(0, type="text_delta", text="x")],
        [START, filled(0, type="text_delta", text="x")],
        [START, *text(0, "x"), filled(0, type="text_delta", text="x")],
        [START, {"type": "content_block_start", "index": 0}],
        [START, opened(0, type="text", text=""), {"type": "content_block_delta", "index": 0}],
        [*HELLO[:-1], *text(1, "x")],
        [*HELLO, *text(1, "x")],
        [*HELLO, *call(1)],
        [*HELLO, *thinking(1, "x")],
        [*HELLO, filled(0, type="text_delta", text="x")],
        [*HELLO[:-2], START],  # another answer begins
        [START, *text(0, "x"), STOP],
        [START, ending(None), STOP],
        [START, ending("error")],
    ],
)
def test_what_breaks_the_rules_is_broken(events):
    with pytest.raises(AnswerBroken):
        read(events)


GREETING = {"type": "text", "text": "Hello"}


@pytest.mark.parametrize(
    "events",
    [
        [{**START, "message": {**START["message"], "content": [GREETING]}}],
        [{**START, "message": {**START["message"], "content": "Hello"}}],
        [START, opened(0, text="Hel"), filled(0, type="text_delta", text="lo")],
        [START, {"no": "type"}, *text(0, "Hello")],
    ],
)
def test_text_is_read_wherever_it_comes(events):
    reader, deltas = read([*events, ending("end_turn"), STOP])
    assert reader.is_complete
    assert "".join(delta.text for delta in deltas) == "Hello"
    assert all(delta.block is None for delta in deltas)


@pytest.mark.parametrize(
    "events",
    [
        [opened(0, type="thinking", thinking=""), filled(0, type="text_delta", text="Hmm")],
        [opened(0, type="thinking", thinking=""), filled(0, type="thinking_delta", text="Hmm")],
        [opened(0, type="text", text=""), filled(0, type="thinking_delta", thinking="Hmm")],
    ],
)
def test_a_thought_is_read_wherever_it_comes(events):
    _, deltas = read([START, *events, ending("end_turn"), STOP])
    assert "".join((delta.extra or {}).get("reasoning_content", "") for delta in deltas) == "Hmm"
    assert not any(delta.text for delta in deltas)


def test_a_delta_of_an_unknown_type_is_kept_with_its_block():
    events = [opened(0, type="thinking", thinking="Hmm"), filled(0, type="source_delta", source="memory")]
    _, deltas = read([START, *events, ending("end_turn"), STOP])
    (block,) = deltas[-1].extra["content_blocks"]
    assert (block["thinking"], block["source"]) == ("Hmm", "memory")


@pytest.mark.parametrize("content", ["Hello", [GREETING], [{"text": "Hello"}]])
def test_a_whole_message_may_have_its_text_in_any_form(content):
    reader = MessagesStreamParser()
    deltas = reader.feed_whole({"type": "message", "content": content, "stop_reason": "end_turn"})
    assert reader.is_complete
    assert "".join(delta.text for delta in deltas) == "Hello"


def test_html_is_no_answer():
    with pytest.raises(AnswerBroken):
        MessagesStreamParser().feed(SSEEvent("<html>"))


@pytest.mark.parametrize("kind", ["overloaded_error", "new_error"])
@pytest.mark.parametrize("before", [[], [START], [START, *text(0, "Hel")]])
def test_an_error_in_the_stream(before, kind):
    error = {"type": "error", "error": {"type": kind, "message": "Later."}, "request_id": None}
    with pytest.raises(AnswerFailed) as caught:
        read([*before, error])
    assert (caught.value.kind, caught.value.message, caught.value.fields) == (kind, "Later.", error)


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


@pytest.mark.parametrize(
    ("word", "finish"),
    [
        ("end_turn", FinishReason.STOP),
        ("END_TURN", FinishReason.STOP),
        ("compaction", FinishReason.STOP),
        ("MAX_TOKENS", FinishReason.LENGTH),
        ("budget_exceeded", FinishReason.LENGTH),
        ("pause_turn", FinishReason.PAUSE),
        ("refusal", FinishReason.CONTENT_FILTER),
        ("safety", FinishReason.CONTENT_FILTER),
        ("tool_use", FinishReason.STOP),
    ],
)
def test_words_for_an_end_are_those_of_all_servers(word, finish):
    assert read([START, *text(0, "x"), ending(word)])[1][-1].finish is finish


@pytest.mark.parametrize("word", ["abort", "server_error", "cancelled", "timed_out"])
def test_a_word_that_speaks_of_a_failure_is_no_end(word):
    with pytest.raises(AnswerBroken):
        read([START, *text(0, "x"), ending(word)])


def test_a_word_that_keeps_the_connection_alive_is_no_event():
    reader = MessagesStreamParser()
    assert reader.feed(SSEEvent("ping", type="ping")) == reader.feed(SSEEvent("alive")) == []
    with pytest.raises(AnswerFailed, match="overloaded"):
        reader.feed(SSEEvent("overloaded", type="error"))


def test_a_block_that_nobody_reads_behind_the_end_is_passed_over():
    reader, deltas = read([START, *text(0, "x"), ending(), opened(1, type="weather"), closed(1), STOP])
    assert ("".join(delta.text for delta in deltas), reader.is_complete) == ("x", True)
