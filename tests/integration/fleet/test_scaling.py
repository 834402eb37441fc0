"""Scaling of a real gateway with real engines: replicas come with the load and go after it, and nobody notices."""

import asyncio
import itertools
import random
from contextlib import suppress

import httpx
import pytest
from typer.testing import CliRunner

from maitred.cli.app import app
from tests.integration.fleet.test_replica_pool import MODEL, engines_of, fleet, kill_one
from tests.integration.gateway.test_drain import ADMIN_KEY
from tests.integration.gateway.test_replicas import all_kinds
from tests.integration.gateway.test_workers import processes

AUTOSCALING = {
    "model.autoscaling.enabled": True,
    "model.autoscaling.max_replicas": 2,
    "model.autoscaling.warm_up_s": 1,
    "model.autoscaling.ttft_s": 0.2,
    "model.autoscaling.itl_s": 0.05,
    "engine.max_sequences": 4,
}


class Scaling:
    """The scaling of the model, as its operator sees it."""

    def __init__(self, client):
        self._client = client

    async def state(self):
        (state,) = (await self._client.get("/admin/v1/scaling")).json()["data"]
        return state

    async def changes(self):
        """The decisions that changed a number, the oldest first."""
        response = await self._client.get("/admin/v1/scaling/decisions", params={"model": MODEL})
        return response.json()["data"][::-1]

    async def override(self, replicas, for_s=3600):
        body = {"model": MODEL, "replicas": replicas, "for_s": for_s}
        response = await self._client.post("/admin/v1/scaling/override", json=body)
        assert response.is_success, response.text

    async def until(self, condition):
        """Waits for a state in which the condition holds."""
        while not condition(state := await self.state()):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.1)
        return state


async def until_ready(client):
    """Waits until processes that have been killed are back."""
    is_ready = False
    while not is_ready:
        with suppress(httpx.TransportError):  # the connection was to a killed one
            is_ready = (await client.get("/health/ready")).is_success
        await asyncio.sleep(0.1)


async def command(fleet_, *arguments):
    """What a command of an operator prints."""
    options = ["--url", fleet_.server.url, "--key", ADMIN_KEY]
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    return result.stdout


async def crowd(client, users, ends):
    """Users that ask one after the other; returns how many answers they got."""
    numbers = itertools.count()

    async def user():
        answers = 0
        while not ends.is_set():
            body = {"model": MODEL, "max_tokens": 48, "prompt": f"Story number {next(numbers)}:"}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            answers += 1
        return answers

    return sum(await asyncio.gather(*(user() for _ in range(users))))


@pytest.mark.parametrize("workers", [1, 2])
async def test_replicas_come_with_the_load_and_go_after_it(workers):
    async with fleet(**AUTOSCALING, **{"server.workers": workers}) as fleet_:
        client, scaling = fleet_.client, Scaling(fleet_.client)
        await fleet_.wait_phases(serving=1)
        ends = asyncio.Event()
        load = asyncio.create_task(crowd(client, 12, ends))
        await scaling.until(lambda state: state["desired"] == 2)
        await fleet_.wait_phases(serving=2)
        busiest = (await scaling.changes())[-1]
        assert busiest["reason"] in ("backlog", "forecast", "utilisation", "limited"), busiest
        assert busiest["replica_requests_per_s"] > 0
        ends.set()
        assert await load > 0
        await scaling.until(lambda state: state["desired"] == 1)
        await fleet_.wait_phases(serving=1)
        last = (await scaling.changes())[-1]
        assert last["reason"] == "surplus", last
        state = await scaling.state()
        assert state["deciding"]
        assert {times["kind"]: times["starts"] for times in state["starts"]}["weights_cached"] >= 1
        assert fleet_.server.stop() == 0


async def test_an_operators_number_holds_for_its_time_and_within_limits_that_a_reload_changes(tmp_path):
    file = tmp_path / "maitred.yaml"
    file.write_text("model: {autoscaling: {min_replicas: 1}}\n")
    async with fleet("--config", str(file), **AUTOSCALING | {"model.autoscaling.max_replicas": 3}) as fleet_:
        client, scaling = fleet_.client, Scaling(fleet_.client)
        said = await command(fleet_, "replicas", "scale", MODEL, "2", "--for", "1h")
        assert f"2 replicas of {MODEL} should serve until" in said
        await fleet_.wait_phases(serving=2)
        state = await scaling.state()
        assert state["override"]["replicas"] == 2
        assert state["decision"]["reason"] == "override"
        refused = await client.post("/admin/v1/scaling/override", json={"model": MODEL, "replicas": 4, "for_s": 60})
        assert refused.status_code == 400
        assert "from 1 to 3" in refused.json()["error"]["message"]

        fixed = await client.post("/admin/v1/replicas/scale", json={"model": MODEL, "serving": 1})
        assert fixed.status_code == 409, "two may not decide on one number"
        told = await command(fleet_, "explain", "scaling", MODEL)
        assert "An operator has set this number" in told
        assert MODEL in await command(fleet_, "explain", "scaling")
        assert "decides" in await command(fleet_, "replicas", "scale", MODEL, "--auto")
        assert (await scaling.state())["override"] is None
        file.write_text("model: {autoscaling: {min_replicas: 3}}\n")
        reloaded = await client.post("/admin/v1/config/reload")
        assert [change["setting"] for change in reloaded.json()["changed"]] == ["model.autoscaling.min_replicas"]
        state = await scaling.until(lambda state: state["desired"] == 3)
        assert state["objectives"]["min_replicas"] == 3
        await fleet_.wait_phases(serving=3)
        assert await all_kinds(client)
        metrics = await asyncio.to_thread(fleet_.server.metrics)
        assert metrics["maitred_scaling_override_active"] == 0
        assert metrics["maitred_scaling_desired_replicas"] == 3


async def test_a_killed_replica_comes_back_and_what_was_decided_outlives_the_gateway(tmp_path):
    settings = AUTOSCALING | {"store.folder": str(tmp_path / "data")}
    async with fleet(**settings) as fleet_:
        scaling = Scaling(fleet_.client)
        await scaling.override(2)
        await fleet_.wait_phases(serving=2)
        kill_one(fleet_.server, random.Random(31))
        await fleet_.wait_phases(serving=2)
        made = await scaling.changes()
    async with fleet(**settings) as fleet_:
        scaling = Scaling(fleet_.client)
        state = await scaling.until(lambda state: state["deciding"])
        assert state["epoch"] == made[-1]["epoch"] + 1, "the same gateway decides at once, in another epoch"
        assert (await scaling.changes())[: len(made)] == made
        assert state["override"]["replicas"] == 2
        await fleet_.wait_phases(serving=2)
        (times,) = (await scaling.state())["starts"]
        assert times["starts"] >= 3, "those of the process before count, too"


async def test_a_request_waits_for_the_first_replica_of_a_model_that_has_none():
    async with fleet(**AUTOSCALING | {"model.autoscaling.min_replicas": 0}) as fleet_:
        client, scaling = fleet_.client, Scaling(fleet_.client)
        await scaling.override(0)
        await fleet_.wait_phases()
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "ok"), "a load balancer may send what wakes it"
        body = {"model": MODEL, "max_tokens": 4, "prompt": "Once"}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await scaling.until(lambda state: state["decision"]["waiting"] == 1)
        await client.delete("/admin/v1/scaling/override", params={"model": MODEL})
        response = await asked
        assert response.status_code == 200, response.text
        assert (await scaling.state())["actual"] == {"serving": 1}


async def test_a_dead_controller_leaves_the_fleet_as_it_is():
    async with fleet(**AUTOSCALING, **{"server.workers": 2}) as fleet_:
        client, scaling = fleet_.client, Scaling(fleet_.client)
        await scaling.override(2)
        await fleet_.wait_phases(serving=2)
        engines = {engine.pid for engine in engines_of(fleet_.server)}
        await client.delete("/admin/v1/scaling/override", params={"model": MODEL})
        controller, _ = processes(fleet_.server)
        controller.kill()
        controller.wait()
        assert {engine.pid for engine in engines_of(fleet_.server)} == engines
        while (await client.get("/health/ready")).status_code != 200:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.1)
        state = await scaling.until(lambda state: state["decision"] is not None)
        assert (state["desired"], state["epoch"]) == (2, 2)
        assert await all_kinds(client)
        assert {engine.pid for engine in engines_of(fleet_.server)} == engines


async def test_processes_that_have_never_seen_an_engine_let_a_request_wait_for_the_first_one():
    settings = AUTOSCALING | {"model.autoscaling.min_replicas": 0, "server.workers": 2}
    async with fleet(**settings) as fleet_:
        client, scaling = fleet_.client, Scaling(fleet_.client)
        await scaling.override(0)
        await fleet_.wait_phases()
        controller, workers = processes(fleet_.server)
        for process in (controller, *workers):
            process.kill()
            process.wait()
        await until_ready(client)
        body = {"model": MODEL, "max_tokens": 4, "prompt": "Once"}
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await scaling.until(lambda state: state["decision"]["waiting"] == 1)
        await client.delete("/admin/v1/scaling/override", params={"model": MODEL})
        response = await asked
        assert response.status_code == 200, response.text
