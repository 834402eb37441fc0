"""Servers behind our adapter, put to `exercise_text_replica`: our own, and those of others where they are installed.

``python -m benchmarks externals install`` installs them, and ``pytest -m external`` runs them.
"""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest

from benchmarks.rivals import externals
from benchmarks.support.figures import external_table
from benchmarks.support.report import RESULTS
from benchmarks.support.rivals.external_servers import EXTERNALS
from maitred.replica.http.pool import OpenConnections
from maitred.replica.upstream.config import UpstreamConfig
from maitred.replica.upstream.probe import HealthProbe
from maitred.replica.upstream.replica import UpstreamReplica
from maitred.testing.scripted_openai import DelayDistribution, FaultKind, ScriptedFault, ServerScript, scripted_openai
from maitred.testing.server_process import serving
from maitred.testing.text_replica_conformance import ServerCapability, TextReplicaUnderTest, exercise_text_replica

SETTINGS = {"engine.threads": 1, "engine.kv_memory_bytes": "64MiB"}


@asynccontextmanager
async def adapted(url, model, *, abilities=(), running=None, kill=None, **settings):
    """A server that is there, through our adapter."""
    async with OpenConnections() as connections:
        upstream = UpstreamReplica(UpstreamConfig(url=f"{url}/v1", model=model, **settings), "far", connections)
        await HealthProbe(upstream).probe_once()
        yield TextReplicaUnderTest(upstream, abilities, running, kill)
        assert upstream.open_streams == 0


async def test_our_own_server_through_the_adapter():
    @asynccontextmanager
    async def ours():
        context = serving(settings=SETTINGS)
        server = await asyncio.to_thread(context.__enter__)

        async def running():
            return (await asyncio.to_thread(server.metrics))["maitred_engine_running"]

        async def kill():
            server.process.kill()
            await asyncio.to_thread(server.process.wait)

        try:
            async with adapted(
                server.url, "maitred-tiny", abilities=ServerCapability, running=running, kill=kill
            ) as subject:
                yield subject
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)

    await exercise_text_replica(ours)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (FaultKind.CUT, "answers_a_conversation"),
        (FaultKind.NO_DONE, "answers_a_conversation"),
        (FaultKind.NO_USAGE, "answers_a_conversation"),
        (FaultKind.TWICE, "answers_a_conversation"),
        (FaultKind.STATUS, "answers_a_conversation"),
    ],
)
async def test_a_server_that_breaks_its_promises_is_caught(fault, check):
    script = ServerScript(
        ttft=DelayDistribution(mean_s=0.0),
        itl=DelayDistribution(mean_s=0.001),
        faults=[ScriptedFault(kind=fault, share=1.0, after=3)],
    )

    @asynccontextmanager
    async def broken():
        with scripted_openai(script) as server:
            async with adapted(server.url, "scripted", dialect="sglang") as subject:
                yield subject

    with pytest.raises(Exception) as caught:
        await exercise_text_replica(broken)
    assert f"in the replica check {check}" in caught.value.__notes__


@pytest.mark.external
@pytest.mark.timeout(900)
@pytest.mark.parametrize("external", EXTERNALS, ids=lambda external: external.name)
async def test_servers_of_others(external):
    if not external.installed:
        pytest.skip(f"not installed: python -m benchmarks externals install {external.name}")
    checks = await externals.conformance(external)
    assert set(checks.values()) <= {externals.KEPT, externals.CANNOT}, checks


def test_the_page_has_the_servers_that_were_measured():
    found = json.loads((RESULTS / "externals.json").read_text())["figures"]["servers"]
    written = external_table.PAGE.read_text().partition(external_table.BEGIN)[2].partition(external_table.END)[0]
    assert written.strip() == external_table.render(found).strip(), "run: python -m benchmarks externals"
