"""The connection of a WebSocket: who is alive, and what becomes of who does not read."""

import asyncio

import pytest

from maitred.api.http.websocket import MessageHandler, WebSocketProtocol

PING = b"\x89\x00"
PONG = b"\x8a\x80\0\0\0\0"


class Handler(MessageHandler):
    """Keeps what it is told."""

    def __init__(self):
        self.messages, self.lost, self.ended = [], 0, asyncio.Event()

    def on_message(self, message):
        self.messages.append(message)

    def on_shutdown(self):
        raise AssertionError("nobody stops the server")

    def on_lost(self):
        self.lost += 1
        self.ended.set()


class Transport(asyncio.Transport):
    """Keeps what is written to it."""

    def __init__(self):
        super().__init__()
        self.written, self.aborted, self.reads = b"", False, True

    def write(self, data):
        self.written += data

    def write_eof(self):
        pass

    def is_closing(self):
        return self.aborted

    def abort(self):
        self.aborted = True

    def pause_reading(self):
        self.reads = False

    def resume_reading(self):
        self.reads = True


@pytest.fixture
async def protocol():
    times = {"message_timeout_s": 0.01, "ping_s": 3600.0, "stall_grace_s": 3600.0}
    one = WebSocketProtocol(Handler(), max_message_bytes=100, **times)
    one.connections = set()
    one.connection_made(Transport())
    yield one
    one.connection_lost(None)


async def test_who_answers_pings_stays_and_who_does_not_is_cut(protocol):
    for pings in range(1, 4):
        protocol._check_alive()
        assert protocol.transport.written == PING * pings
        protocol.data_received(PONG)
        protocol._check_alive()
        assert protocol.transport.written == PING * pings, "it was heard of"
    protocol._check_alive()
    assert not protocol.transport.aborted
    protocol._check_alive()
    assert protocol.transport.aborted


async def test_the_silence_of_who_is_not_read_means_nothing(protocol):
    protocol._check_alive()
    protocol.pause_writing()
    protocol._check_alive()
    protocol._check_alive()
    assert not protocol.transport.aborted


async def test_what_was_read_before_the_client_stopped_reading_waits_for_it(protocol):
    message = b"\x81\x81\0\0\0\0a"
    protocol.pause_writing()
    assert not protocol.transport.reads
    protocol.data_received(message * 3)
    assert len(protocol._handler.messages) == 1
    protocol.resume_writing()
    assert (protocol._handler.messages, protocol.transport.reads) == ([b"a"] * 3, True)


async def test_a_message_that_does_not_end_is_given_up(protocol):
    protocol.data_received(b"\x01\x81\0\0\0\0a")
    await asyncio.wait_for(protocol._handler.ended.wait(), 300)
    assert protocol.transport.written[2:4] == (1008).to_bytes(2, "big")


async def test_a_message_in_pieces_is_whole_and_a_control_frame_may_be_between_them(protocol):
    protocol.data_received(b"\x01\x82\0\0\0\0\xc3")
    protocol.data_received(b"\xa4" + b"\x89\x80\0\0\0\0" + b"\x80\x81\0\0\0\0b")
    assert protocol._handler.messages == ["äb".encode()]
    assert protocol.transport.written == b"\x8a\x00"


async def test_the_end_is_told_once(protocol):
    protocol.data_received(b"\x82\x80\0\0\0\0")
    assert protocol._handler.lost == 1
    protocol.data_received(b"\x81\x81\0\0\0\0a")
    protocol.eof_received()
    protocol.connection_lost(None)
    assert (protocol._handler.lost, protocol._handler.messages) == (1, [])
