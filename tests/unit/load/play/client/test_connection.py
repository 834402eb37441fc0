"""What comes over a connection is the same however the network cuts it."""

import asyncio

import pytest

from maitred.load.play.client.connection import ConnectionFailed, LoadConnection
from maitred.load.play.clock import RunClock

PIECES = [b"data: one\n\n", b"x" * 300, b"\r\n", b"0\r\n\r\n", b"data: [DONE]\n\n"]
"""Some look like framing themselves."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKS = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in PIECES]
END = b"0\r\n\r\n"


class Wire:
    """A transport that takes everything."""

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        pass


class Reader:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def head(self, status, headers, now_s):
        self.status = status

    def body(self, data, now_s):
        self.pieces.append(data)


async def received(*segments):
    connection, reader = LoadConnection(RunClock()), Reader()
    connection.connection_made(Wire())
    ended = connection.request(b"", reader)
    for segment in segments:
        connection.data_received(segment)
    assert ended.done()
    ended.result()
    assert connection.reusable
    return reader


async def test_a_chunk_in_a_segment_of_its_own_is_handed_on_whole():
    reader = await received(HEAD, *CHUNKS, END)
    assert reader.pieces == PIECES


async def test_any_cut_of_the_stream_gives_the_same_bytes():
    stream = HEAD + b"".join(CHUNKS) + END
    for size in range(1, 80):
        reader = await received(*(stream[at : at + size] for at in range(0, len(stream), size)))
        assert b"".join(reader.pieces) == b"".join(PIECES), size
    for cut in range(len(HEAD), len(stream)):
        # Whole chunks in their own segments up to the cut, so that the short way has been taken before.
        before, rest = [], stream[len(HEAD) :]
        place = len(HEAD)
        for chunk in CHUNKS:
            if place + len(chunk) > cut:
                break
            before.append(chunk)
            rest, place = rest[len(chunk) :], place + len(chunk)
        reader = await received(HEAD, *before, rest[: cut - place], rest[cut - place :])
        assert b"".join(reader.pieces) == b"".join(PIECES), cut


async def test_chunk_sizes_may_have_any_form_that_http_allows():
    reader = await received(HEAD, CHUNKS[0], b"00B\r\ndata: one\n\n\r\n", b"b;note=1\r\ndata: one\n\n\r\n", END)
    assert reader.pieces == [PIECES[0]] * 3


async def test_a_second_response_on_the_same_connection_is_read_anew():
    connection, first, second = LoadConnection(RunClock()), Reader(), Reader()
    connection.connection_made(Wire())
    ended = connection.request(b"", first)
    for segment in (HEAD, *CHUNKS, END):
        connection.data_received(segment)
    assert ended.done()
    again = connection.request(b"", second)
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n3\r\nabc\r\n")
    assert not again.done()
    connection.data_received(b"!")
    assert again.done()
    assert b"".join(second.pieces) == b"3\r\nabc\r\n!"


async def test_what_is_no_chunk_ends_the_response():
    connection, reader = LoadConnection(RunClock()), Reader()
    connection.connection_made(Wire())
    ended = connection.request(b"", reader)
    for segment in (HEAD, CHUNKS[0], b"zz\r\nab\r\n"):
        connection.data_received(segment)
    with pytest.raises(ConnectionFailed, match="not HTTP"):
        await asyncio.wait_for(ended, 300)
