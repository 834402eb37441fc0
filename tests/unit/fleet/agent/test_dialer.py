"""The dialer of an agent: names and addresses at which no gateway is, and what is dialed again."""

import asyncio
import logging

import pytest

from maitred.core.secret import Secret
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
