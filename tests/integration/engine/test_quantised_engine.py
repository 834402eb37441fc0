"""Engines with rounded weights and a rounded cache: one that is lost is stood in for by the next, token by token."""

import asyncio

import httpx

from maitred.testing.server_process import serving
from tests.integration.gateway.test_replicas import Midst, all_kinds, engines_of, settled

SETTINGS = {"engine.quantization": "int8", "engine.kv_dtype": "int8", "engine.kv_memory_bytes": "16MiB"}


async def test_streams_go_on_elsewhere_with_exactly_the_tokens_of_an_undisturbed_run():
    with serving("--replicas", "2", settings=SETTINGS) as server:
        async with asyncio.timeout(300), httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            undisturbed = await all_kinds(client)
            kills, recoveries = 0, 0.0
            while not recoveries:  # an engine may be far ahead of its readers, and have ended its part
                midst = Midst(10)
                round_ = asyncio.create_task(all_kinds(client, midst))
                await midst.reached.wait()
                engines_of(server)[0].kill()
                kills += 1
                answers = await round_
                assert all(answer.done and answer.same_as(undisturbed[kind]) for kind, answer in answers.items())
                recoveries = (await settled(server, restarts=kills)).get("maitred_recoveries_total", 0.0)
        assert server.stop() == 0
