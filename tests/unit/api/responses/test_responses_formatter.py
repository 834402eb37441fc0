"""A response of the Responses API: its items and its events, checked by the types of the official client."""

import json
from collections import Counter

import openai.types.responses as types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from maitred.api.responses.formatter import ResponsesFormatter
from maitred.api.responses.replay import ResumeFilter, replay
from maitred.api.streaming import CollectedChoice
from maitred.core.context import RequestContext
from maitred.core.errors import ReplicaLost
from maitred.core.inference import ChunkMetadata, TextDelta, TokenLogprob, TokenScore
from maitred.core.request import FinishReason, Usage
from maitred.core.stored_response import StoredResponse
from maitred.wire.responses.requests import decode_thoughts
from maitred.wire.responses.resource import ResponseResource
from maitred.wire.sse import SSEDecoder, encode_event

EVENT = TypeAdapter(types.ResponseStreamEvent)
USAGE = Usage(7, 5, 3, reasoning_tokens=2)
END = TextDelta(0, "", finish=FinishReason.STOP)


def formatter(**options):
    context = RequestContext("req-1", 0.0)
    context.model = "m"
    resource = ResponseResource(
        id="resp_0123456789abcdef01234567",
        created_at=1,
        status="in_progress",
        model="asked",
        text={"format": {"type": "text"}},
    )
    return ResponsesFormatter(resource, context, **options)


def events_of(written):
    decoder = SSEDecoder()
    events = []
    for event in decoder.feed(written):
        fields = json.loads(event.data)
        assert event.type == fields["type"]
        EVENT.validate_python(fields)
        events.append(fields)
    return events


def streamed(parts, usage=USAGE, **options):
    """The events of an answer, and the response in the last one."""
    writer = formatter(**options)
    written = writer.start() + b"".join(writer.events([part]) for part in parts) + writer.end(usage)
    events = events_of(written)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    check_order(events)
    check_replay(events)
    return events, events[-1]["response"]


def collected(parts):
    choice = CollectedChoice()
    for part in parts:
        choice.add(part)
    return choice


def whole(parts, usage=USAGE, **options):
    response = json.loads(formatter(**options).whole([collected(parts)], usage))
    types.Response.model_validate(response)
    return response


def check_order(events):
    """Each item is added once and done once, its parts lie within, and what its deltas say is what is done."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{events[-1]['response']['status']}"
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert added == list(range(len(added)))
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert [done[index] for index in added] == events[-1]["response"]["output"]
    texts: dict[tuple, str] = {}
    for event in events:
        kind, _, stage = event["type"].removeprefix("response.").rpartition(".")
        place = kind, event.get("item_id"), event.get("content_index")
        if stage == "delta":
            texts[place] = texts.get(place, "") + event["delta"]
        elif stage == "done" and kind not in ("output_item", "content_part"):
            said = next(event[name] for name in ("text", "refusal", "arguments", "input") if name in event)
            assert texts.pop(place, "") == said
    assert texts == {}
    ids = Counter(event["item"]["id"] for event in events if event["type"] == "response.output_item.added")
    assert set(ids.values()) <= {1}
    for event in events:
        if "item_id" in event:
            assert events[-1]["response"]["output"][event["output_index"]]["id"] == event["item_id"]


def check_replay(events):
    """What is stored gives the same items and parts in the same order, and the same end."""
    stored = StoredResponse(
        id="resp_1",
        tenant="t",
        organisation="t",
        previous=None,
        created_s=0.0,
        expires_s=1.0,
        input=b"[]",
        output=b"[]",
        resource=json.dumps(events[-1]["response"]).encode(),
        last_event=events[-1]["sequence_number"],
    )
    again = events_of(replay(stored, None))
    check_order(again)
    assert again[-1] == events[-1]
    numbers = [event["sequence_number"] for event in again]
    assert numbers == sorted({*numbers})
    assert steps_by_item(again) == steps_by_item(events)
    assert events_of(replay(stored, 0)) == events[-1:]


def steps_by_item(events):
    """Index of an item -> what happens to it, with deltas that follow each other as one."""
    steps = {}
    for event in events[2:-1]:
        kind = event["type"]
        if kind != "response.output_text.annotation.added":
            of_item = steps.setdefault(event["output_index"], [])
            said = {} if kind.endswith((".delta", "_item.added")) else event | {"sequence_number": 0}
            if not of_item or of_item[-1] != (kind, event.get("content_index"), said):
                of_item.append((kind, event.get("content_index"), said))
    return steps


@given(st.lists(st.text(max_size=5), max_size=6), st.integers(-1, 8), st.data())
@settings(max_examples=25)
def test_a_stream_begins_after_an_event_wherever_it_is_cut(texts, after, data):
    events = [encode_event(json.dumps(text).encode(), b"kind") for text in texts]
    written = b"".join(events)
    resume_filter, position, left = ResumeFilter(after), 0, b""
    while position < len(written):
        size = data.draw(st.integers(1, 8))
        left += resume_filter.feed(written[position : position + size])
        position += size
    assert left == b"".join(events[after + 1 :])


def piece(number, *, name=None, arguments="", call_id=None, field="function"):
    body = {"arguments" if field == "function" else "input": arguments} | ({} if name is None else {"name": name})
    call = {"index": number, field: body} | ({} if call_id is None else {"id": call_id, "type": field})
    return TextDelta(0, "", extra={"tool_calls": [call]})


def test_a_text():
    events, response = streamed([TextDelta(0, "Hello"), TextDelta(0, " there"), TextDelta(0, "!"), END])
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.delta", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    assert all(event["logprobs"] == [] for event in events if "output_text" in event["type"])
    (message,) = response["output"]
    assert message["content"] == [{"type": "output_text", "text": "Hello there!", "annotations": [], "logprobs": []}]
    assert (message["role"], message["status"], response["status"]) == ("assistant", "completed", "completed")
    assert response["completed_at"] is not None
    assert response["model"] == "m"
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }
    assert response == whole([TextDelta(0, "Hello there!"), END]) | {"completed_at": response["completed_at"]}


def test_an_empty_answer_is_a_message_without_text():
    for response in (streamed([END])[1], whole([END])):
        (message,) = response["output"]
        assert message["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("finish", "details"),
    [
        (FinishReason.LENGTH, {"reason": "max_output_tokens"}),
        (FinishReason.DEADLINE, {"reason": "max_output_tokens", "stop_reason": "deadline"}),
        (FinishReason.CONTENT_FILTER, {"reason": "content_filter"}),
    ],
)
def test_an_answer_that_was_cut_is_incomplete(finish, details):
    parts = [TextDelta(0, "Hel"), TextDelta(0, "", finish=finish)]
    for response in (streamed(parts)[1], whole(parts)):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", details)
        assert response["output"][0]["status"] == "incomplete"
        assert response["completed_at"] is None


def test_a_call_that_was_cut_is_incomplete_and_one_before_it_is_not():
    parts = [
        piece(0, name="f", call_id="call_1", arguments='{"a": 1}'),
        piece(1, name="g", call_id="call_2", arguments='{"b": '),
        TextDelta(0, "", finish=FinishReason.LENGTH),
    ]
    for response in (streamed(parts)[1], whole(parts)):
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
        assert [item["arguments"] for item in response["output"]] == ['{"a": 1}', '{"b": ']


def test_thoughts_come_before_the_text_as_an_item_of_their_own():
    parts = [
        TextDelta(0, "", extra={"reasoning_content": "Let me", "reasoning": "Let me"}),
        TextDelta(0, "", extra={"reasoning_content": " see.", "reasoning": " see."}),
        TextDelta(0, "Yes."),
        END,
    ]
    events, response = streamed(parts)
    assert "response.reasoning_text.delta" in {event["type"] for event in events}
    reasoning, message = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert (reasoning["summary"], "encrypted_content" in reasoning) == ([], False)
    assert message["content"][0]["text"] == "Yes."
    assert response["output"] == whole(parts)["output"]


def test_thoughts_are_given_back_as_one_text_to_a_client_that_keeps_them():
    signed = [
        TextDelta(
            0, "", extra={"reasoning_content": "Hm", "thinking_blocks": [{"type": "thinking", "thinking": "Hm"}]}
        ),
        TextDelta(
            0, "", extra={"thinking_blocks": [{"index": 0, "type": "thinking", "thinking": "", "signature": "sig"}]}
        ),
        TextDelta(0, "", extra={"thinking_blocks": [{"type": "redacted_thinking", "data": "xyz"}]}),
    ]
    for response in (
        streamed([*signed, TextDelta(0, "Yes."), END], with_encrypted_reasoning=True)[1],
        whole([*signed, TextDelta(0, "Yes."), END], with_encrypted_reasoning=True),
    ):
        assert decode_thoughts(response["output"][0]["encrypted_content"]) == [
            {"type": "thinking", "thinking": "Hm", "signature": "sig"},
            {"type": "redacted_thinking", "data": "xyz"},
        ]
    unsigned = [TextDelta(0, "", extra={"reasoning": "Hm"}), TextDelta(0, "Yes."), END]
    response = streamed(unsigned, with_encrypted_reasoning=True)[1]
    assert decode_thoughts(response["output"][0]["encrypted_content"]) == [{"type": "thinking", "thinking": "Hm"}]


def test_what_is_kept_has_the_signatures_also_for_a_client_that_did_not_ask():
    writer = formatter()
    block = {"type": "thinking", "thinking": "Hm", "signature": "sig"}
    writer.events([TextDelta(0, "", extra={"thinking_blocks": [block]}), TextDelta(0, "Yes."), END])
    writer.complete(USAGE)
    reasoning, _ = writer.items_to_keep()
    assert decode_thoughts(reasoning["encrypted_content"]) == [block]
    assert "encrypted_content" not in writer.resource.output[0]


def test_calls_in_turns_are_items_side_by_side():
    parts = [
        TextDelta(0, "I look."),
        piece(0, name="f", call_id="call_1"),
        piece(0, arguments='{"a"'),
        piece(1, name="g", call_id="call_2", arguments="{"),
        piece(0, arguments=": 1}"),
        piece(1, arguments="}"),
        TextDelta(0, "", finish=FinishReason.TOOL_CALLS),
    ]
    events, response = streamed(parts)
    message, first, second = response["output"]
    assert (first["type"], first["name"], first["call_id"], first["arguments"]) == (
        *("function_call", "f", "call_1"),
        '{"a": 1}',
    )
    assert (second["name"], second["call_id"], second["arguments"]) == ("g", "call_2", "{}")
    assert response["status"] == "completed"
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(event["name"], event["arguments"]) for event in done] == [("f", '{"a": 1}'), ("g", "{}")]
    assert message["status"] == "completed"
    assert response["output"] == whole(parts)["output"]


def test_a_call_without_an_id_or_arguments_gets_what_clients_need():
    parts = [piece(0, name="f"), TextDelta(0, "", finish=FinishReason.TOOL_CALLS)]
    (call,) = streamed(parts)[1]["output"]
    assert call["call_id"].startswith("call")
    assert call["arguments"] == ""


@pytest.mark.parametrize("pieces", [["abc"], ["a", "bc"]])
def test_a_custom_call_has_a_text_as_its_input(pieces):
    native = [
        piece(0, name="patch", call_id="call_1", field="custom"),
        *(piece(0, arguments=text, field="custom") for text in pieces),
        TextDelta(0, "", finish=FinishReason.TOOL_CALLS),
    ]
    written = json.dumps({"input": "".join(pieces)})
    as_function = [
        piece(0, name="patch", call_id="call_1"),
        *(piece(0, arguments=half) for half in (written[:5], written[5:])),
        TextDelta(0, "", finish=FinishReason.TOOL_CALLS),
    ]
    for parts in (native, as_function):
        for response in (
            streamed(parts, custom_tools=frozenset({"patch"}))[1],
            whole(parts, custom_tools=frozenset({"patch"})),
        ):
            (call,) = response["output"]
            assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", "abc")


def test_a_custom_call_whose_arguments_are_not_as_they_should_is_told_as_it_came():
    parts = [piece(0, name="patch", arguments='{"text": 1}'), TextDelta(0, "", finish=FinishReason.TOOL_CALLS)]
    (call,) = streamed(parts, custom_tools=frozenset({"patch"}))[1]["output"]
    assert (call["type"], call["input"]) == ("custom_tool_call", '{"text": 1}')


def test_a_refusal_is_a_part_of_the_message():
    parts = [
        TextDelta(0, "Well. "),
        TextDelta(0, "", extra={"refusal": "No"}),
        TextDelta(0, "", extra={"refusal": "."}),
        END,
    ]
    for response in (streamed(parts)[1], whole(parts)):
        (message,) = response["output"]
        assert [part["type"] for part in message["content"]] == ["output_text", "refusal"]
        assert message["content"][1]["refusal"] == "No."


def test_citations_are_annotations_of_the_text():
    cited = {
        "type": "url_citation",
        "url_citation": {"url": "http://a", "title": "A", "start_index": 0, "end_index": 2},
    }
    parts = [TextDelta(0, "So."), TextDelta(0, "", extra={"annotations": [cited]}), END]
    events, response = streamed(parts)
    flat = {"type": "url_citation", "url": "http://a", "title": "A", "start_index": 0, "end_index": 2}
    assert [event["annotation"] for event in events if "annotation" in event] == [flat]
    for answer in (response, whole(parts)):
        assert answer["output"][0]["content"][0]["annotations"] == [flat]


def test_log_probabilities_stand_beside_their_text_if_they_were_asked_for():
    score = TokenScore(TokenLogprob("Hi", b"Hi", -0.5), [TokenLogprob("Hi", b"Hi", -0.5)], 0)
    parts = [TextDelta(0, "Hi", scores=[score]), END]
    entry = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}
    for response in (streamed(parts, with_logprobs=True)[1], whole(parts, with_logprobs=True)):
        assert response["output"][0]["content"][0]["logprobs"] == [{**entry, "top_logprobs": [entry]}]
    assert whole(parts)["output"][0]["content"][0]["logprobs"] == []


def test_what_a_server_says_beyond_the_answer_reaches_the_client():
    metadata = ChunkMetadata({"system_fingerprint": "fp", "id": "theirs"})
    parts = [TextDelta(0, "Hi", metadata=metadata, extra={"audio": {"id": "a"}}), TextDelta(0, "!"), END]
    for response in (streamed(parts)[1], whole(parts)):
        assert response["system_fingerprint"] == "fp"
        assert response["id"].startswith("resp_")
        assert response["output"][0]["audio"] == {"id": "a"}
        assert response["output"][0]["content"][0]["text"] == "Hi!"


def test_where_another_server_goes_on_is_marked():
    events, _ = streamed([TextDelta(0, "Hel"), TextDelta(0, "lo", continued=True), END])
    assert [event["delta"] for event in events if "maitred" in event] == ["lo"]


def test_an_error_ends_the_stream_with_what_there_is():
    writer = formatter()
    written = writer.start() + writer.events([TextDelta(0, "Hel"), TextDelta(0, "lo")])
    events = events_of(written + writer.error_events(ReplicaLost("It died.")))
    *_, error, failed = events
    assert (error["type"], error["code"], error["message"]) == ("error", ReplicaLost.code, "It died.")
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "It died."}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hello"
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


TEXTS = st.text(min_size=1, max_size=4)
PIECES = st.one_of(
    st.builds(lambda text: ("thought", text), TEXTS),
    st.builds(lambda text: ("text", text), TEXTS),
    st.builds(lambda text: ("refusal", text), TEXTS),
    st.builds(lambda number, text: ("call", (number, text)), st.integers(0, 2), TEXTS),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, max_size=12), st.sampled_from(list(FinishReason)))
def test_any_answer_says_the_same_as_a_stream_and_as_a_whole(pieces, finish):
    parts, named = [], set()
    for kind, value in pieces:
        match kind:
            case "thought":
                parts.append(TextDelta(0, "", extra={"reasoning_content": value, "reasoning": value}))
            case "text":
                parts.append(TextDelta(0, value))
            case "refusal":
                parts.append(TextDelta(0, "", extra={"refusal": value}))
            case "call":
                number, text = value
                named_now = {} if number in named else {"name": f"f{number}", "call_id": f"call_{number}"}
                named.add(number)
                parts.append(piece(number, arguments=text, **named_now))
    parts.append(TextDelta(0, "", finish=finish))

    def said(response):
        words = Counter()
        for item in response["output"]:
            if item["type"] == "function_call":
                words["call", item["call_id"], item["name"], item["arguments"]] += 1
            else:
                for part in item["content"]:
                    words.update((part["type"], letter) for letter in part.get("text", part.get("refusal")))
        return words, response["status"], response["incomplete_details"]

    assert said(streamed(parts)[1]) == said(whole(parts))
