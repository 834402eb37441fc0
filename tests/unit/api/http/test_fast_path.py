"""What goes out past ASGI's messages is what would have gone out with them."""

import asyncio

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from maitred.api.exchange import HttpExchange
from maitred.api.http.protocol import HttpProtocol

REQUEST = b"%b /x HTTP/%b\r\nhost: here\r\ncontent-length: 2\r\n%b\r\n{}"


class Transport(asyncio.Transport):
    """Keeps what was written."""

    def __init__(self):
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data):
        assert not self.closed
        self.written += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_write_buffer_size(self):
        return 0

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class RoundAbout(HttpProtocol):
    """Has everything go through ASGI's messages."""

    ready = False

    def take_body(self):
        return None

    def answer(self, status, head, body):
        return False

    def begin(self, status, head, piece):
        return False


async def answered(kind, application, *requests):
    """What is written for these requests, and whether the connection is closed then."""

    async def serve(scope, receive, send):
        call = HttpExchange(scope, receive, send, 0.0)
        call.context.request_id = "one"
        if not call.has_body(1 << 20):
            await call.read_body(1 << 20, 5.0)
        assert call.body == b"{}"
        await application(call)

    state = ServerState()
    state.default_headers = [(b"date", b"today")]
    protocol = kind(Config(serve, http=kind, log_config=None), state, {}, asyncio.get_running_loop())
    transport = Transport()
    protocol.connection_made(transport)
    for request in requests:
        protocol.data_received(request)
    while state.tasks:
        await asyncio.wait(state.tasks)
    closed = transport.closed
    protocol.connection_lost(None)
    return transport.written, closed


async def whole(call):
    await call.respond(b'{"a": 1}', headers=[(b"x-more", b"yes")])


async def large(call):
    await call.respond(b"x" * 200_000)


async def refused(call):
    await call.respond(b"no", status=408, headers=[(b"connection", b"close")])


async def streamed(call):
    for events in (b"data: 1\n\n", b"data: 2\n\n"):
        await call.stream(events)
    await call.finish(b"data: 3\n\n")


async def begun_with_nothing(call):
    await call.stream(b"")
    await call.finish()


APPLICATIONS = [whole, large, refused, streamed, begun_with_nothing]


@pytest.mark.parametrize("application", APPLICATIONS)
@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("header", [b"", b"connection: close\r\n", b"expect: 100-continue\r\n"])
async def test_both_paths_write_the_same_bytes(application, method, version, header):
    request = REQUEST % (method, version, header)
    direct = await answered(HttpProtocol, application, request)
    assert direct[0]
    assert direct == await answered(RoundAbout, application, request)


@pytest.mark.parametrize("application", [whole, streamed])
async def test_pipelined_requests_are_answered_in_turn(application):
    request = REQUEST % (b"POST", b"1.1", b"")
    direct = await answered(HttpProtocol, application, request * 3, request)
    assert direct[0].count(b"HTTP/1.1 200 OK") == 4
    assert direct == await answered(RoundAbout, application, request * 3, request)


async def test_an_answer_is_one_write_without_a_message(monkeypatch):
    def no_message(cycle, message):
        raise AssertionError("the long way")

    monkeypatch.setattr("uvicorn.protocols.http.httptools_impl.RequestResponseCycle.send", no_message)
    monkeypatch.setattr("uvicorn.protocols.http.httptools_impl.RequestResponseCycle.receive", no_message)
    for application in (whole, streamed):
        written, closed = await answered(HttpProtocol, application, REQUEST % (b"POST", b"1.1", b""))
        assert written.startswith(b"HTTP/1.1 200 OK\r\ndate: today\r\n")
        assert not closed


async def test_a_header_that_would_break_out_is_not_written():
    async def injected(call):
        await call.respond(b"", headers=[(b"x-evil", b"a\r\nset-cookie: b")])

    written, _ = await answered(HttpProtocol, injected, REQUEST % (b"POST", b"1.1", b""))
    assert b"set-cookie" not in written


async def test_who_does_not_read_is_waited_for():
    """What waits to be sent is bounded: an answer that finds the connection full goes by `send`, which waits."""
    finished = []

    async def slow(call):
        call.connection.pause_writing()
        asyncio.get_running_loop().call_soon(lambda: (finished.append("room"), call.connection.resume_writing()))
        await call.respond(b"late")
        finished.append("answered")

    written, _ = await answered(HttpProtocol, slow, REQUEST % (b"POST", b"1.1", b""))
    assert finished == ["room", "answered"]
    assert written.endswith(b"\r\n\r\nlate")
