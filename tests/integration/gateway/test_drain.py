"""Replicas taken out of service under load, as an operator would: a real gateway, real engines, the real command."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
from typer.testing import CliRunner

from maitred.cli.app import app
from maitred.testing.server_process import serving
from tests.integration.gateway.test_replicas import all_kinds, settled

MODEL = "maitred-tiny"
ADMIN_KEY = "sk-mtd-admin00000000000-" + "a" * 43
DECLARED = {
    "tenants.operators.keys.admin.secret.env": "ADMIN",
    "tenants.operators.keys.admin.scopes": "[admin, inference, metrics]",
}


def maitred(server, *arguments):
    """A command of an administrator's; what it has printed, decoded."""
    result = CliRunner().invoke(app, ["replicas", *arguments, "--json", "--url", server.url, "--key", ADMIN_KEY])
    assert result.exit_code == 0, result.output
    return {replica["replica"]: replica for replica in json.loads(result.stdout)}


@asynccontextmanager
async def gateway(*arguments):
    server = serving(
        *arguments,
        settings={"engine.kv_memory_bytes": "32MiB", **DECLARED, "dispatch.max_wait_s.standard": "1s"},
        environment={"ADMIN": ADMIN_KEY},
    )
    started = await asyncio.to_thread(server.__enter__)
    try:
        async with httpx.AsyncClient(
            base_url=started.url, timeout=300, headers={"authorization": f"Bearer {ADMIN_KEY}"}
        ) as client:
            yield started, client
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


async def test_a_drain_under_running_streams_loses_nothing_and_tells_when_it_is_over():
    async with asyncio.timeout(300), gateway("--replicas", "2") as (server, client):
        await settled(server)
        undisturbed = await all_kinds(client)
        running = asyncio.create_task(all_kinds(client))
        busy = None
        while busy is None:
            assert not running.done()
            replicas = {item["replica"]: item for item in (await client.get("/admin/v1/replicas")).json()["data"]}
            busy = next((name for name, one in replicas.items() if one["requests"] > 1), None)
        drained = (await client.post("/admin/v1/replicas/drain", json={"replica": busy})).json()
        assert (drained["state"], drained["ready"]) == ("draining", False)
        later = asyncio.create_task(all_kinds(client))
        over = (await asyncio.to_thread(maitred, server, "drain", busy, "--wait"))[busy]
        assert (over["state"], over["requests"]) == ("maintenance", 0)
        for answers in (await running, await later):
            for kind, answer in answers.items():
                assert answer.same_as(undisturbed[kind]), kind
        metrics = await settled(server)
        assert metrics.get("maitred_recoveries_total", 0) == 0, "what ran was left to end where it was"
        resting = (await asyncio.to_thread(maitred, server, "list"))[busy]
        assert resting["sequences"] == 0

        (other,) = set(replicas) - {busy}
        await asyncio.to_thread(maitred, server, "drain", other, "--at-once")
        assert (await client.get("/health/ready")).status_code == 503
        refused = await client.post("/v1/completions", json={"model": MODEL, "prompt": "The fox", "max_tokens": 2})
        assert refused.status_code == 503, refused.text
        assert "out of service for maintenance" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        await asyncio.to_thread(maitred, server, "resume", busy)
        served = await client.post("/v1/completions", json={"model": MODEL, "prompt": "The fox", "max_tokens": 2})
        assert served.status_code == 200
        assert (await client.get("/health/ready")).status_code == 200
        scrape = (await client.get("/metrics")).text
        assert f'maitred_replica_duty{{model="{MODEL}",replica="{other}",state="maintenance"}} 1.0' in scrape
        assert f'maitred_replica_duty{{model="{MODEL}",replica="{busy}",state="serving"}} 1.0' in scrape
