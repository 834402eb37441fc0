"""Several engines of one model, as real processes and sockets: what they say together, and what one failure costs."""

import asyncio
import sys
from contextlib import AsyncExitStack

import msgspec
import pytest

from maitred.core.clock import SystemClock
from maitred.core.errors import ReplicaUnavailable
from maitred.fleet.backend import BackendFacts
from maitred.fleet.local import LocalEngine
from maitred.fleet.local_backend import LocalBackend
from maitred.fleet.remote import RemoteEngine
from maitred.routing.catalog import ServedModel
from maitred.scaling.replica_status import ReplicaPhase
from maitred.testing.script import SCRIPTED_CARD
from maitred.testing.scripted_engine import ScriptedEngine

LIMIT_S = 300.0
SMALL = msgspec.structs.replace(SCRIPTED_CARD, context_tokens=1024, max_choices=2)


def backend_of(engines):
    """A backend of these engines, by name."""
    return LocalBackend(engines.__getitem__, BackendFacts(max_replicas=len(engines)), str, SystemClock())


def python(code):
    return lambda address: [sys.executable, "-c", code, address]


def scripted(address):
    return [sys.executable, "-m", "maitred.testing.scripted_engine", "--listen", address]


async def test_a_request_must_fit_each_engine_and_their_capacities_add_up():
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedEngine(card=card)) for card in (SCRIPTED_CARD, SMALL)]
        engines = {str(server.address): RemoteEngine(server.address) for server in servers}
        model = ServedModel("m", [engine.client for engine in engines.values()], None)  # type: ignore[arg-type]
        with pytest.raises(ReplicaUnavailable):
            model.card()
        backend = await stack.enter_async_context(backend_of(engines))
        for name in engines:
            backend.start(name)
        await asyncio.gather(*(engine.wait_started() for engine in engines.values()))
        together = model.card()
        assert (together.context_tokens, together.max_choices) == (1024, 2)
        assert together.max_sequences == 2 * SCRIPTED_CARD.max_sequences
        assert together.kv_capacity_tokens == 2 * SCRIPTED_CARD.kv_capacity_tokens
        servers[1].close()
        await engines[str(servers[1].address)].client.wait_lost()
        assert backend.is_ready
        assert model.card() == together, "the other one will come back"
        servers[0].close()
        await engines[str(servers[0].address)].client.wait_lost()
        assert not backend.is_ready


async def test_one_that_cannot_start_ends_the_first_start_but_not_those_that_serve():
    broken = python("raise SystemExit('no such model')")
    async with asyncio.timeout(LIMIT_S):
        async with backend_of({"a": LocalEngine(broken), "b": LocalEngine(broken)}) as backend:
            for name in "ab":
                backend.start(name)
            with pytest.raises(ReplicaUnavailable, match="no such model"):
                await backend.wait_started()
            assert any(replica.phase is ReplicaPhase.FAILED for replica in backend.replicas().values())
        tries = asyncio.Semaphore(0)

        async def sleep(seconds):
            tries.release()
            await asyncio.sleep(seconds)

        async with LocalEngine(scripted) as first:
            await first.wait_started()
            async with LocalEngine(broken, others_serve=lambda: first.client.is_ready, sleep=sleep) as second:
                await tries.acquire()
                await tries.acquire()
                assert second.restarts >= 1
                assert first.client.is_ready
