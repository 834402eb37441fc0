"""The dialer of an agent: names and addresses at which no gateway is, and what is dialed again."""

import asyncio
import logging
import socket
from contextlib import ExitStack, closing

import pytest

from maitred.core.secret import Secret
from maitred.fleet.agent import dialer as dialing
from maitred.fleet.agent.dialer import GatewayDialer
from maitred.fleet.agent.server import AgentServer
from maitred.fleet.remote import RemoteEngine
from maitred.wire.address import TcpAddress
from maitred.wire.link.config import LinkConfig
from tests.support.clock import FakeClock
from tests.support.servers.paper_fleet import PaperBackend

LIMIT_S = 60.0
LINK = LinkConfig(secret=Secret("a secret that both ends know", "{env: A}"), allow_plaintext=True)
IMPOSSIBLE = TcpAddress("gateways..internal", 9300)
"""A name that cannot be encoded, which is no error of the system."""


@pytest.fixture
def dialer():
    clock = FakeClock()
    return GatewayDialer(AgentServer(PaperBackend(clock), clock), [IMPOSSIBLE], LINK)


async def test_a_name_that_cannot_be_is_told_and_dialed_on(dialer, caplog):
    caplog.set_level(logging.WARNING)
    async with asyncio.timeout(LIMIT_S), dialer:
        while "cannot be resolved" not in caplog.text:  # noqa: ASYNC110 - a thread looks it up
            await asyncio.sleep(0.001)
        assert not any(task.done() for task in dialer._tasks)


async def test_the_end_of_dialing_is_told(dialer, caplog, monkeypatch):
    async def fail(gateway):
        raise RuntimeError("a fault of this program")

    monkeypatch.setattr("maitred.fleet.agent.dialer._resolve", fail)
    async with asyncio.timeout(LIMIT_S), dialer:
        await asyncio.wait(dialer._tasks)
        await asyncio.sleep(0)
        assert "a fault of this program" in caplog.text


async def test_an_engine_whose_name_cannot_be_is_failed_with_the_reason():
    told = asyncio.Event()
    engine = RemoteEngine(IMPOSSIBLE)
    engine.on_transition = told.set
    async with asyncio.timeout(LIMIT_S), engine:
        await told.wait()
        assert engine.failure_reason
        assert engine.phase.value == "failed"


async def test_a_gateway_that_is_back_at_another_address_is_dialed_there(monkeypatch):
    addresses, lines = ["127.0.0.2"], []

    async def resolve(gateway):
        return list(addresses)

    async def take(reader, writer):
        lines.append(writer)

    monkeypatch.setattr(dialing, "_resolve", resolve)
    monkeypatch.setattr(dialing, "_CHECK_S", 0.01)
    monkeypatch.setattr(dialing, "_CHECKS", 10**9)
    clock = FakeClock()
    first = await asyncio.start_server(take, addresses[0], 0)
    port = first.sockets[0].getsockname()[1]
    second = await asyncio.start_server(take, "127.0.0.3", port)
    dialer = GatewayDialer(AgentServer(PaperBackend(clock), clock), [TcpAddress("127.0.0.1", port)], LINK)
    async with asyncio.timeout(LIMIT_S), second, dialer:
        while not dialer._connected:  # noqa: ASYNC110 - another task dials
            await asyncio.sleep(0.001)
        addresses[:] = ["127.0.0.3"]
        first.close()
        for line in lines:
            line.close()
        while not any(host == "127.0.0.3" for _, host in dialer._connected):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for line in lines:
            line.close()


async def test_an_address_where_nothing_answers_is_left_in_time(monkeypatch):
    monkeypatch.setattr(dialing, "CONNECT_S", 0.05)
    with ExitStack() as stack:
        deaf = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0), backlog=0)))
        port = deaf.getsockname()[1]
        stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))  # all that it queues
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(TimeoutError):
                await dialing._open_socket("127.0.0.1", port)
