"""When a connection is cut because its client does not read, on a transport of the test's own."""

import asyncio
import inspect
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from maitred.api.http.protocol import HttpProtocol


class Transport:
    """Says that so much is unsent, and notes its end."""

    def __init__(self, unsent):
        self.unsent = unsent
        self.closing = False
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self):
        return self.unsent

    def set_write_buffer_limits(self, high, low):
        assert 0 < low < high

    def get_extra_info(self, name, default=None):
        return default

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True

    def abort(self):
        self.closing = True
        self.aborted.set()


async def connected(unsent, stall_grace_s=0.01):
    transport = Transport(unsent)
    protocol = HttpProtocol(Config(lambda: None), ServerState(), {}, stall_grace_s=stall_grace_s)
    protocol.connection_made(transport)
    return protocol, transport


def test_the_private_parts_of_uvicorn_that_this_server_uses_are_there():
    """Its classes of protocols are no public interface; `pyproject.toml` bounds its version."""
    for name in ("on_header", "on_body", "on_headers_complete", "on_message_complete", "_start_asgi_task"):
        assert callable(getattr(HttpToolsProtocol, name))
    for name in ("run_asgi", "send", "receive"):
        assert callable(getattr(RequestResponseCycle, name))
    fields = inspect.signature(RequestResponseCycle.__init__).parameters
    assert {"scope", "transport", "flow", "message_event", "keep_alive", "on_response"} <= fields.keys()
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bound,) = [need for need in project["dependencies"] if need.startswith("uvicorn")]
    assert "<" in bound


async def test_what_does_not_go_out_in_time_is_dropped():
    protocol, transport = await connected(100_000)
    assert (protocol.writable, protocol.stalled) == (True, False)
    protocol.pause_writing()
    assert (protocol.writable, protocol.stalled) == (False, False)
    async with asyncio.timeout(300):
        await transport.aborted.wait()
    assert protocol.stalled
    protocol.connection_lost(None)


async def test_a_client_that_reads_on_is_left_alone():
    protocol, transport = await connected(100_000, stall_grace_s=1000)
    protocol.pause_writing()
    assert protocol._patience is not None
    transport.unsent = 10_000
    protocol.resume_writing()
    assert (protocol.writable, protocol._patience) == (True, None)
    protocol.connection_lost(None)


@pytest.mark.parametrize("unsent", [0, 10_000])
async def test_an_idle_connection_is_closed_and_what_it_did_not_read_is_dropped(unsent):
    protocol, transport = await connected(unsent)
    protocol.timeout_keep_alive_handler()
    assert transport.closing
    assert transport.aborted.is_set() == bool(unsent)
    protocol.connection_lost(None)


@pytest.mark.parametrize("drains", [False, True])
async def test_a_connection_that_shall_close_does_not_wait_for_ever(drains):
    """Also when its client reads on, and stops again with little left."""
    protocol, transport = await connected(100_000)
    protocol.pause_writing()
    protocol.linger()
    transport.close()
    if drains:
        transport.unsent = 10_000
        protocol.resume_writing()
    async with asyncio.timeout(300):
        await transport.aborted.wait()
    protocol.connection_lost(None)


async def test_a_connection_that_has_sent_everything_needs_no_patience():
    protocol, _ = await connected(0)
    protocol.linger()
    assert protocol._patience is None
    protocol.connection_lost(None)


async def test_nothing_waits_once_the_connection_is_gone():
    protocol, transport = await connected(100_000)
    protocol.pause_writing()
    protocol.connection_lost(None)
    assert protocol._patience is None
    assert not transport.aborted.is_set()


async def test_one_timer_watches_an_idle_connection_through_all_its_requests():
    class Loop:
        now_s, timers = 0.0, []

        def time(self):
            return self.now_s

        def call_later(self, delay_s, callback):
            self.timers.append(delay_s)
            return SimpleNamespace(cancel=lambda: None)

    protocol, transport = await connected(0)
    loop, patience_s = Loop(), protocol.timeout_keep_alive
    protocol._in_head, protocol.loop = False, loop
    protocol.cycle = SimpleNamespace(response_complete=True)
    for loop.now_s in (10.0, 12.0):
        protocol.on_response_complete()
    assert loop.timers == [patience_s]
    loop.now_s = 10.0 + patience_s
    protocol.timeout_keep_alive_handler()
    assert loop.timers == [patience_s, 2.0]
    protocol.cycle.response_complete = False
    protocol.timeout_keep_alive_handler()  # a request is being answered, and its end sets the next
    protocol.cycle.response_complete = True
    protocol.on_response_complete()
    assert not transport.closing
    loop.now_s += patience_s
    protocol.timeout_keep_alive_handler()
    assert transport.closing
    assert loop.timers == [patience_s, 2.0, patience_s]
    protocol.cycle = None
    protocol.connection_lost(None)
