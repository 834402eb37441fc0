import json

import pytest

from maitred.load.measure.record import RequestRecord, UserOutcome
from maitred.load.play.client.answer import StreamRecorder, StreamTotals, error_message

SSE = {b"content-type": b"text/event-stream; charset=utf-8"}


def chunk(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text, finish=None, **delta):
    return chunk(choices=[{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}])


USAGE = chunk(
    choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
)
DONE = b"data: [DONE]\n\n"


def read(*parts, status=200, headers=SSE):
    record = RequestRecord(0, 0, "default", 0.0, 2)
    reader = StreamRecorder(record, StreamTotals(), keep_text=True)
    reader.head(status, headers, 1.0)
    for at_s, part in enumerate(parts, start=2):
        reader.body(part, float(at_s))
    return record, reader, *reader.outcome()


def test_a_whole_answer_has_times_text_and_the_servers_count():
    record, reader, outcome, error = read(piece("", role="assistant"), piece("a"), piece("b", "stop"), USAGE, DONE)
    assert (outcome, error) == (UserOutcome.COMPLETE, "")
    assert list(record.arrivals_s) == [3.0, 4.0]
    assert reader.text == ["a", "b"]
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (9, 4, 2)
    assert (record.finish_reason, record.headers_s, record.status) == ("stop", 1.0, 200)


@pytest.mark.parametrize("delta", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_thoughts_and_tool_calls_are_output_too(delta):
    record, *_ = read(chunk(choices=[{"delta": delta}]), piece(None, "stop", tool_calls=None), DONE)
    assert list(record.arrivals_s) == [2.0]


def test_the_completions_api_streams_text():
    record, reader, outcome, _ = read(chunk(choices=[{"text": "a", "finish_reason": "length"}], usage=None), DONE)
    assert (outcome, reader.text, len(record.arrivals_s)) == (UserOutcome.COMPLETE, ["a"], 1)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([piece("a"), piece("b", "stop")], "[DONE]"),
        ([piece("a"), DONE], "finish reason"),
        ([piece("a"), chunk(error={"message": "The engine died."}), DONE], "The engine died."),
        ([piece("a"), b"data: {nonsense\n\n", piece("b", "stop"), DONE], "{nonsense"),
        ([], "[DONE]"),
    ],
)
def test_an_answer_that_does_not_end_as_it_must_is_cut(parts, why):
    *_, outcome, error = read(*parts)
    assert outcome is UserOutcome.CUT
    assert why in error


def test_an_answer_that_was_not_streamed_has_no_times_of_its_own():
    body = json.dumps(
        {
            "choices": [{"message": {"content": "ab"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 2},
        }
    ).encode()
    record, reader, outcome, _ = read(body[:20], body[20:], headers={b"content-type": b"application/json"})
    assert (outcome, reader.text, record.output_tokens, len(record.arrivals_s)) == (UserOutcome.COMPLETE, ["ab"], 2, 0)


@pytest.mark.parametrize("body", [b"<html>hello</html>", b'{"choices": []}', b'{"choices": [{"message": {}}]}'])
def test_a_response_that_is_no_answer_is_never_complete(body):
    *_, outcome, error = read(body, headers={})
    assert outcome is UserOutcome.CUT
    assert error


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(400, UserOutcome.REFUSED), (429, UserOutcome.REFUSED), (500, UserOutcome.FAILED), (503, UserOutcome.FAILED)],
)
def test_a_refusal_is_recorded_in_the_servers_words(status, outcome):
    *_, ended, error = read(b'{"error": {"message": "Not today."}}', status=status, headers={})
    assert (ended, error) == (outcome, f"HTTP {status}: Not today.")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "a\\nb\\u001b[31m"}}', "a b [31m"),
        (b'{"object": "error", "message": "vllm"}', "vllm"),
        (b'{"error": "plain"}', "plain"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"[1]", "[1]"),
        (b"\xff\xfe", "��"),
        (b"x" * 1000, "x" * 300 + "…"),
    ],
)
def test_words_are_found_in_any_form_and_made_safe(body, words):
    assert error_message(body) == words
