"""A head that comes again is read as the parser would have read it, and nothing that only looks like one is."""

import asyncio
import itertools
import re

from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState

from maitred.api.http.fast_path import CachedHead
from maitred.api.http.protocol import HttpProtocol
from tests.unit.api.http.test_fast_path import Transport


class Parsed(HttpProtocol):
    """Has the parser read everything."""

    def _repeatable(self, data):
        return None


async def seen(kind, reads):
    """The calls that an application gets of these reads, what is written, and whether the connection is closed then."""
    received = []

    async def serve(scope, receive, send):
        message = await receive()
        whole = not message.get("more_body")
        while whole is False and (message := await receive())["type"] == "http.request":
            whole = not message["more_body"]
        scope = {name: value for name, value in scope.items() if name != "extensions"}
        received.append((scope, message.get("body"), whole))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    state = ServerState()
    protocol = kind(Config(serve, http=kind, log_config=None), state, {}, asyncio.get_running_loop())
    transport = Transport()
    protocol.connection_made(transport)
    for read in reads:
        if transport.closed:
            break
        protocol.data_received(read)
        for _ in range(4):  # who is answered by then, has been between requests
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    while state.tasks:
        await asyncio.wait(state.tasks)
    return received, re.sub(rb"req-[0-9a-f]+", b"req-x", transport.written), transport.closed


HEADERS = st.lists(
    st.sampled_from(
        [
            *(b"Host: here", b"accept: */*", b"x-a: 1", b"x-a:2", b"X-A:  3 ", b"Connection: keep-alive"),
            *(
                b"connection: close",
                b"expect: 100-continue",
                b"upgrade: h2c",
                b"Content-Length: 3",
                b"transfer-encoding: chunked",
            ),
        ]
    ),
    max_size=3,
)
LENGTHS = st.sampled_from(
    [b"Content-Length: %d", b"content-length:%d", b"content-length: 0%d", b"content-length: %d ", b"x: %d"]
)


@st.composite
def requests(draw):
    """Some with one of two heads, which differ in the length of their bodies."""
    heads = []
    for _ in range(2):
        path = draw(st.sampled_from([b"/v1/chat", b"/v1/chat?a=%2e", b"/b%20b", b"nowhere"]))
        version = draw(st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
        before, after = draw(HEADERS), draw(HEADERS)
        length = draw(LENGTHS)
        heads.append((b"POST %b HTTP/%b" % (path, version), before, length, after))
    parts = []
    for _ in range(draw(st.integers(2, 6))):
        line, before, length, after = draw(st.sampled_from(heads))
        body = draw(st.sampled_from([b"", b"{}", b"x" * 12, b"POST / HTTP/1.1\r\n\r\n", b"\r\n\r\n"]))
        body_bytes = len(body) + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
        parts.append(b"\r\n".join([line, *before, length % max(0, body_bytes), *after, b"", body]))
    stream = b"".join(parts)
    ends = [sum(map(len, parts[: place + 1])) for place in range(len(parts))]
    kept = draw(st.lists(st.sampled_from(ends), max_size=6)) if draw(st.booleans()) else ends
    cuts = draw(st.lists(st.integers(0, len(stream)), max_size=2)) if draw(st.booleans()) else []
    places = sorted({0, len(stream), *kept, *cuts})
    return [stream[a:b] for a, b in itertools.pairwise(places)]


NOUGHTS = [
    b"POST /v1/chat HTTP/1.1\r\nContent-Length: %b\r\n\r\n" % length for length in (b"0", b"00", b"02", b"0", b"2")
]


@given(reads=requests())
@example(reads=[head + b"{}" * (b"2" in head) for head in NOUGHTS])
@settings(max_examples=150, deadline=None)
def test_both_paths_give_the_same_request(reads):
    assert asyncio.run(seen(HttpProtocol, reads)) == asyncio.run(seen(Parsed, reads))


REQUEST = b"POST /v1/chat HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\nx-a: 1\r\n\r\n%b"


async def test_the_third_request_of_a_connection_needs_no_parser(monkeypatch):
    taken = []
    monkeypatch.setattr(HttpProtocol, "_take", lambda protocol, head, body: taken.append(body))
    await seen(HttpProtocol, [REQUEST % (len(body), body) for body in (b"{}", b"{}", b"[1, 2]")])
    assert taken == [b"[1, 2]"]


def test_a_body_has_the_length_that_its_head_declares():
    scope = {"headers": [(b"host", b"here"), (b"content-length", b"2"), (b"x-a", b"1")], "state": {}, "path": "/"}
    head = CachedHead.of(REQUEST % (2, b"{}"), scope)
    assert head is not None
    assert head.body_in(REQUEST % (12, b"x" * 12)) == b"x" * 12
    assert head.scope_for(b"x" * 12)["headers"][1] == (b"content-length", b"12")
    assert scope["headers"][1] == (b"content-length", b"2")
    for other in (REQUEST % (3, b"{}"), REQUEST % (1, b"{}"), REQUEST.replace(b"%d", b"+2") % b"{}", REQUEST[:30]):
        assert head.body_in(other) is None
