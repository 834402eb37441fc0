"""An engine that somebody else runs: found, lost, found again, and left running."""

import asyncio

import pytest

from maitred.core.errors import ReplicaLost, ReplicaUnavailable
from maitred.core.request import EngineRequest, SamplingParams
from maitred.fleet.remote import RemoteEngine
from maitred.testing.script import AnswerFault, ScriptedAnswer
from maitred.testing.scripted_engine import ScriptedEngine
from maitred.wire.address import parse_address

LIMIT_S = 300.0


def request():
    return EngineRequest(id="r", prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=3, seed=0))


async def answer_of(link):
    async with link.generate(request()) as stream:
        return [token async for deltas in stream for delta in deltas for token in delta.tokens]


async def test_it_waits_for_an_engine_that_is_not_there_yet(tmp_path):
    address = parse_address(f"unix:{tmp_path}/engine.sock")
    async with asyncio.timeout(LIMIT_S), RemoteEngine(address) as attached:
        with pytest.raises(ReplicaUnavailable):
            await answer_of(attached.client)
        async with ScriptedEngine([ScriptedAnswer(tokens=[7, 8, 9])], address=address):
            await attached.wait_started()
            assert await answer_of(attached.client) == [7, 8, 9]
            assert attached.restarts == 0


async def test_it_comes_back_to_an_engine_that_was_started_again(tmp_path):
    address = parse_address(f"unix:{tmp_path}/engine.sock")
    async with asyncio.timeout(LIMIT_S), RemoteEngine(address) as attached:
        async with ScriptedEngine([ScriptedAnswer(fault=AnswerFault.DIE, fault_after=1)], address=address):
            await attached.wait_started()
            with pytest.raises(ReplicaLost):
                await answer_of(attached.client)
        async with ScriptedEngine([ScriptedAnswer(tokens=[7])], address=address):
            while not attached.client.is_ready:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
            assert await answer_of(attached.client) == [7]
            assert attached.restarts == 1


async def test_leaving_cancels_what_runs_and_leaves_the_engine_to_others(tmp_path):
    address = parse_address(f"unix:{tmp_path}/engine.sock")
    async with asyncio.timeout(LIMIT_S), ScriptedEngine([ScriptedAnswer(tokens=[7, 8])], address=address):
        for _ in range(2):
            async with RemoteEngine(address) as attached:
                await attached.wait_started()
                assert await answer_of(attached.client) == [7, 8]
            assert attached.client.open_streams == 0
            assert not attached.client.is_ready
