"""Property: a response means the same however its bytes are cut into reads, and nothing of what is behind it."""

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from maitred.replica.http.connection import HttpConnection


class Transport(asyncio.Transport):
    """Transport without a socket."""

    def __init__(self):
        super().__init__()
        self.is_aborted = self.is_paused = False

    def write(self, data):
        """Drops the request."""

    def abort(self):
        self.is_aborted = True

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False


parts = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
interim = st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n" * 2])
behind = st.sampled_from(
    [
        b"",
        b"junk",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nPOISON",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nPOISON\r\n0\r\n\r\n",
        b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n",
    ]
)
trailers = st.sampled_from([b"", b"X-Trailer: 1\r\nContent-Type: text/evil\r\n"])
cuts = st.lists(st.integers(0, 600), max_size=30)


def encoded(pieces, trailer, *, is_chunked):
    if not is_chunked:
        body = b"".join(pieces)
        return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    chunks = b"".join(b"%x;e=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n" + trailer + b"\r\n"


@given(parts, interim, behind, trailers, cuts, st.booleans(), st.booleans(), st.integers(0, 40))
async def test_a_response_is_its_own_bytes(pieces, before, rest, trailer, places, is_chunked, takes, drains_at):
    idle = []
    connection, transport = HttpConnection(idle.append, lambda _: None), Transport()
    connection.connection_made(transport)
    response, body = connection.send(b"GET / HTTP/1.1\r\n\r\n"), b""
    answer = before + encoded(pieces, trailer, is_chunked=is_chunked)
    data = answer + rest
    bounds = [0, *sorted(place for place in places if place < len(data)), len(data)]
    drained = False
    for number, (start, end) in enumerate(pairwise(bounds)):
        if transport.is_aborted or start == end:
            continue
        connection.data_received(data[start:end])
        if takes:
            body += response.take_body()
        if number == drains_at and not response.has_ended:
            response.drain(1000)
            drained = True
    body += response.take_body()
    assert response.status == 200
    assert response.has_ended
    assert response.failure is None
    assert response.headers[b"content-type"] == b"text/plain"
    whole = b"".join(pieces)
    assert whole.startswith(body) if drained else body == whole
    # It is used again only if nothing has come behind the response.
    assert transport.is_aborted == bool(rest)
    if rest == b"":
        assert idle == [connection]
        again = connection.send(b"GET / HTTP/1.1\r\n\r\n")
        connection.data_received(encoded([b"next"], b"", is_chunked=is_chunked))
        assert again.take_body() == b"next"
        assert again.has_ended


@given(parts.filter(len), st.integers(1, 40))
async def test_the_parts_before_broken_framing_are_kept(pieces, size):
    connection, transport = HttpConnection(lambda _: None, lambda _: None), Transport()
    connection.connection_made(transport)
    response = connection.send(b"GET / HTTP/1.1\r\n\r\n")
    good = encoded(pieces, b"", is_chunked=True).removesuffix(b"0\r\n\r\n")
    data = good + b"no chunk"
    for start in range(0, len(data), size):
        if not transport.is_aborted:
            connection.data_received(data[start : start + size])
    assert b"".join(response.chunks) == b"".join(pieces)
    assert "no HTTP" in str(response.failure)
    assert not response.has_ended
    assert transport.is_aborted


@given(st.integers(1, 50), st.integers(1, 4000))
async def test_an_unread_body_is_bounded_whatever_its_chunks(chunk_bytes, count):
    connection, transport = HttpConnection(lambda _: None, lambda _: None), Transport()
    connection.connection_made(transport)
    response = connection.send(b"GET / HTTP/1.1\r\n\r\n")
    connection.data_received(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n%b\r\n" % (chunk_bytes, b"x" * chunk_bytes)
    read = chunk * count
    reads = 0
    while not transport.is_paused:
        connection.data_received(read)
        reads += 1
    assert (reads - 1) * len(read) <= 256 * 1024 < reads * len(read)
    assert len(response.take_body()) == reads * count * chunk_bytes
    assert not transport.is_paused
