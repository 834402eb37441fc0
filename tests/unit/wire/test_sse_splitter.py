import pytest

from maitred.wire.sse import SSESplitter

STREAMS = {
    "plain": b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n',
    "no space": b'data:{"a":1}\n\ndata:{"b":2}\n\ndata:[DONE]\n\n',
    "crlf": b'data: {"a":1}\r\n\r\ndata: {"b":2}\r\n\r\ndata: [DONE]\r\n\r\n',
    "comments": b': ping\n\ndata: {"a":1}\n\n: ping\n\ndata: {"b":2}\n\ndata: [DONE]\n\n',
    "named": b'event: chunk\ndata: {"a":1}\n\nid: 7\ndata: {"b":2}\n\ndata: [DONE]\n\n',
    "late change": b'data: {"a":1}\n\nevent: x\ndata: {"b":2}\n\ndata: [DONE]\n\n',
    "unfinished": b'data: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\ndata: {"c"',
}
EVENTS = [b'{"a":1}', b'{"b":2}', b"[DONE]"]


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_every_form_is_cut_into_the_same_events_however_it_arrives(stream):
    for size in range(1, len(stream) + 1):
        cutter = SSESplitter()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [event for piece in pieces for event in cutter.feed(piece)] == EVENTS, size


def test_an_event_is_given_out_with_the_bytes_that_end_it():
    cutter = SSESplitter()
    assert cutter.feed(b"data: one\n") == []
    assert cutter.feed(b"\ndata: two\n\nda") == [b"one", b"two"]
    assert cutter.feed(b"ta: three\n\n") == [b"three"]
