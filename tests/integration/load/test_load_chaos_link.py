"""A link between real sockets, in each of its ways to fail."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import uvloop

from maitred.core.errors import ConfigInvalid
from maitred.load.chaos.link import HELD_BYTES, TcpLink


def on_both_loops(test):
    """The command line runs on uvloop, whoever embeds a link perhaps on asyncio's own loop."""

    @pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def run(loop_factory):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test())

    run.__name__ = test.__name__
    return run


@asynccontextmanager
async def echo_server():
    """Sends everything back; ends when the client has ended."""
    tasks = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def linked():
    async with echo_server() as address, TcpLink("127.0.0.1:0", address) as link:
        yield link


@asynccontextmanager
async def connected(link):
    host, port = link.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def echoed(reader, writer, data=b"hello"):
    writer.write(data)
    async with asyncio.timeout(300):
        return await reader.readexactly(len(data))


@on_both_loops
async def test_it_carries_everything_and_both_ends():
    data = bytes(range(256)) * 8192
    async with linked() as link, connected(link) as (reader, writer):
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(300):
            assert await reader.read(-1) == data


@on_both_loops
async def test_a_blackhole_loses_nothing():
    async with linked() as link, connected(link) as (reader, writer):
        assert await echoed(reader, writer) == b"hello"
        with link.blackhole():
            writer.write(b"are you there")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await reader.read(1)
        async with asyncio.timeout(300):
            assert await reader.readexactly(13) == b"are you there"


@on_both_loops
async def test_a_blackhole_in_one_direction():
    received = asyncio.Event()

    async def serve(reader, writer):
        await reader.readexactly(5)
        received.set()
        writer.write(b"heard")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with TcpLink("127.0.0.1:0", address) as link, connected(link) as (reader, writer):
        with link.blackhole("to_client"):
            writer.write(b"hello")
            async with asyncio.timeout(300):
                await received.wait()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await reader.read(1)
        async with asyncio.timeout(300):
            assert await reader.readexactly(5) == b"heard"
    server.close()


@on_both_loops
async def test_reset_breaks_what_is_open_and_what_comes():
    async with linked() as link, connected(link) as (reader, writer):
        await echoed(reader, writer)
        with link.resetting():
            with pytest.raises(ConnectionResetError):
                async with asyncio.timeout(300):
                    await reader.read(1)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                async with connected(link) as (later_reader, later_writer):
                    await echoed(later_reader, later_writer)
        async with connected(link) as (reader, writer):
            assert await echoed(reader, writer) == b"hello"


@on_both_loops
async def test_refuse_turns_new_ones_away_and_leaves_the_open_ones():
    async with linked() as link, connected(link) as (reader, writer):
        await echoed(reader, writer)
        await link.refuse()
        with pytest.raises(ConnectionRefusedError):
            async with connected(link):
                pass
        assert await echoed(reader, writer) == b"hello"
        await link.accept()
        async with connected(link) as (reader, writer):
            assert await echoed(reader, writer) == b"hello"


@on_both_loops
async def test_delay_is_added_to_each_direction():
    async with linked() as link, connected(link) as (reader, writer):
        await echoed(reader, writer)
        link.delay_s = 0.15
        began_s = time.monotonic()
        await echoed(reader, writer)
        assert time.monotonic() - began_s >= 0.3


@on_both_loops
async def test_throttle_lets_so_many_bytes_pass():
    async with linked() as link, connected(link) as (reader, writer):
        link.bytes_per_s = 100_000
        began_s = time.monotonic()
        await echoed(reader, writer, bytes(50_000))
        assert time.monotonic() - began_s >= 0.3


@on_both_loops
async def test_what_is_held_back_is_bounded_so_the_sender_feels_it():
    async with linked() as link, connected(link) as (_, writer):
        with link.blackhole():
            writer.write(bytes(HELD_BYTES * 32))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await writer.drain()


@on_both_loops
async def test_a_client_that_hangs_up_is_gone_for_the_server_too():
    gone = asyncio.Event()

    async def serve(reader, writer):
        while await reader.read(100):
            pass
        gone.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with TcpLink("127.0.0.1:0", f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as link:
        async with connected(link) as (_, writer):
            writer.write(b"hello")
            await writer.drain()
        async with asyncio.timeout(300):
            await gone.wait()
    server.close()


@on_both_loops
async def test_nobody_behind_it_is_a_reset():
    async with TcpLink("127.0.0.1:0", "127.0.0.1:1") as link, connected(link) as (reader, _):
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(300):
                await reader.read(1)


@on_both_loops
async def test_an_address_that_is_taken():
    async with linked() as link:
        with pytest.raises(ConfigInvalid, match="cannot listen at"):
            async with TcpLink(link.address, "127.0.0.1:1"):
                pass
