"""Server-sent events against published vectors, whole and byte by byte."""

import json
from pathlib import Path

import pytest

from maitred.wire.sse import DONE, SSEDecoder, SSEEvent, encode_comment, encode_event
from tests.support.tokenizers import data_folder

VECTORS = Path(__file__).parents[2] / "data" / "sse" / "vectors.json"


def vectors(path):
    return json.loads(path.read_text(encoding="utf-8"))


def chunks_of(vector):
    # A byte order mark in pieces is written as one character per byte.
    pieces = vector["chunks"]
    encoding = "latin-1" if pieces[0][:1] == "\u00ef" else "utf-8"
    return [piece.encode(encoding) for piece in pieces]


def check(vector, chunks):
    decoder = SSEDecoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    assert [event.data for event in events] == [event["data"] for event in vector["events"]]
    for event, expected in zip(events, vector["events"], strict=True):
        assert event.type == expected.get("type", "message")
        assert event.id == expected.get("id", event.id if "id" not in expected else "")


@pytest.mark.parametrize("vector", vectors(VECTORS), ids=lambda vector: vector["source"])
def test_published_vectors(vector):
    whole = b"".join(chunks_of(vector))
    check(vector, [whole])
    check(vector, [bytes([byte]) for byte in whole])


def test_all_vectors_of_the_data_folder():
    for vector in vectors(data_folder() / "conformance" / "sse_parse_vectors.json"):
        check(vector, chunks_of(vector))
        check(vector, [bytes([byte]) for byte in b"".join(chunks_of(vector))])


def test_what_is_written_is_read():
    stream = encode_comment("still\nhere") + encode_event('{"a":"ü"}'.encode()) + encode_comment("") + DONE
    assert stream == b': still\n: here\n\ndata: {"a":"\xc3\xbc"}\n\n: \n\ndata: [DONE]\n\n'
    assert SSEDecoder().feed(stream) == [SSEEvent('{"a":"ü"}'), SSEEvent("[DONE]")]


def test_the_id_stays_until_replaced():
    events = SSEDecoder().feed(b"id: 7\ndata: a\n\ndata: b\n\nid\ndata: c\n\n")
    assert [event.id for event in events] == ["7", "7", ""]


def test_retry_is_remembered():
    decoder = SSEDecoder()
    decoder.feed(b"retry: soon\nretry: 1500\nretry: -1\n")
    assert decoder.retry_ms == 1500


def test_an_event_without_its_blank_line_is_dropped():
    decoder = SSEDecoder()
    assert decoder.feed(b"data: a\n") == []


def test_broken_utf8_shows_as_a_replacement():
    assert SSEDecoder().feed(b"data: \xff\n\n") == [SSEEvent("\ufffd")]
