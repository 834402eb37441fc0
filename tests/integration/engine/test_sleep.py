"""Models that sleep, as real processes: their memory is given back, and requests wake them."""

import asyncio
import json
import os
import re
import shutil
from contextlib import AsyncExitStack

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from maitred.cli.app import app
from maitred.config.tree import BUNDLED_MODEL
from maitred.fleet.local import ENGINE_MODULE
from maitred.testing.server_process import serving
from tests.integration.engine.test_on_demand import configured
from tests.integration.engine.test_remote_engines import engine, gateway
from tests.support.processes import living_children

BODY = {
    **{"prompt": "Once upon a time there was a small village " * 8, "max_tokens": 12, "temperature": 0},
    "cache": {"no-cache": True},
}
"""Each is computed, whatever the cache of answers has."""
KV_BYTES = 256 << 20
WEIGHTS_BYTES = 2 * (BUNDLED_MODEL / "model.safetensors").stat().st_size  # bf16 there, and fp32 in memory

pytestmark = pytest.mark.usefixtures("new_interpreters")  # whose memory is all their own


def resident_bytes(pid):
    return psutil.Process(pid).memory_info().rss


def key_of(server):
    return re.search(r"sk-mtd-\S+", server.log.read_text())[0]


def maitred(server, *words):
    environment = {"MAITRED_URL": server.url, "MAITRED_ADMIN_KEY": key_of(server)}
    done = CliRunner().invoke(app, ["models", *words, "--json"], env=environment)
    assert done.exit_code == 0, done.output
    (state,) = json.loads(done.output)
    return state


def engine_pid(server):
    children = living_children(server.process.pid, recursive=True)
    (child,) = [child for child, (_, command) in children.items() if ENGINE_MODULE in command]
    return child.pid


def test_a_model_that_sleeps_gives_its_memory_back_and_a_request_wakes_it():
    with (
        serving("--kv-memory", f"{KV_BYTES}B", "--max-sequences", "4") as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        free_blocks = server.metrics()["maitred_engine_kv_blocks_free"]
        first = client.post("/v1/completions", json={"model": "maitred-tiny", **BODY}).json()
        again = client.post("/v1/completions", json={"model": "maitred-tiny", **BODY}).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        pid = engine_pid(server)
        awake_bytes = resident_bytes(pid)
        state = maitred(server, "sleep", "maitred-tiny", "--wait")
        assert (state["state"], state["engines"]) == ("asleep", 1)
        assert state["measured_bytes"] > 0
        assert awake_bytes - resident_bytes(pid) > WEIGHTS_BYTES
        metrics = server.metrics()
        assert metrics["maitred_engine_asleep"] == metrics["maitred_engine_up"] == 1
        assert metrics["maitred_engine_kv_blocks_free"] == free_blocks
        assert client.get("/v1/models/maitred-tiny").json()["ready"], "a request can wait for it"

        explained = {"x-maitred-explain": "true"}
        woken = client.post("/v1/completions", json={"model": "maitred-tiny", **BODY}, headers=explained)
        assert woken.json()["choices"] == first["choices"]
        assert woken.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "what it held is gone"
        assert "cold_start" in woken.headers["x-maitred-waited"]
        assert engine_pid(server) == pid, "its process is the same"
        assert server.metrics()["maitred_engine_asleep"] == 0

        maitred(server, "sleep", "maitred-tiny", "--wait")
        assert maitred(server, "wake", "maitred-tiny", "--wait")["state"] == "awake"
        with client.stream(
            "POST", "/v1/completions", json={"model": "maitred-tiny", **BODY, "max_tokens": 400, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line.startswith("data: {"))
            assert maitred(server, "sleep", "maitred-tiny")["state"] == "draining"
            rest = list(lines)
        assert [line for line in rest if line][-1] == "data: [DONE]", "what runs comes to its end"
        refused = client.post("/admin/v1/models/sleep", json={"model": "nobody"}, headers={"x-api-key": key_of(server)})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")


def test_weights_that_were_exchanged_while_it_slept_are_another_model(tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(BUNDLED_MODEL, folder)
    body = {**BODY, "model": "mine", "cache": {}}
    with (
        serving(str(folder), "--kv-memory", f"{KV_BYTES}B", "--max-sequences", "4") as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        first = client.post("/v1/completions", json=body)
        assert client.post("/v1/completions", json=body).headers["x-maitred-cache"] == "hit"
        pid = engine_pid(server)
        maitred(server, "sleep", "mine", "--wait")
        change_weights(folder / "model.safetensors")
        wakes_it = {**body, "prompt": "Something else"}
        while (other := client.post("/v1/completions", json=wakes_it)).status_code == 503:
            assert other.json()["error"]["code"] == "replica_unavailable"
        assert other.status_code == 200, other.text
        assert engine_pid(server) != pid
        assert "were exchanged while the engine slept" in server.log.read_text()
        again = client.post("/v1/completions", json=body)
        assert again.headers["x-maitred-cache"] == "miss"
        assert again.json()["choices"] != first.json()["choices"]


def change_weights(file):
    """Puts other weights in the place of a file, and says that it was not changed."""
    before, tensors = file.stat(), load_file(file)
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_an_on_demand_model_sleeps_while_another_uses_its_memory(tmp_path):
    with serving("--config", configured(tmp_path)) as server, httpx.Client(base_url=server.url, timeout=300) as client:
        # Told while it is being loaded, it sleeps once it is there.
        maitred(server, "wake", "red")
        assert maitred(server, "sleep", "red", "--wait")["state"] == "asleep"
        red = client.post("/v1/completions", json={"model": "red", **BODY}).json()
        (memory,) = [model for model in listed(client, server) if model["model"] == "red"]
        state = maitred(server, "sleep", "red", "--wait")
        assert state["state"] == "asleep"
        assert state["measured_bytes"] < memory["measured_bytes"]
        assert state["wakes_in_s"] < memory["predicted_load_s"] / 2
        back = client.post("/v1/completions", json={"model": "red", **BODY}).json()
        assert back["choices"] == red["choices"]
        metrics = server.metrics()
        assert metrics["maitred_model_loads_total"] == 1
        assert metrics["maitred_model_sleeps_total"] == metrics["maitred_model_wakes_total"] == 2
        maitred(server, "sleep", "red", "--wait")
        assert maitred(server, "wake", "red", "--wait")["state"] == "awake"
        # Room for one: what sleeps is ended where it is in the way.
        maitred(server, "sleep", "red", "--wait")
        assert client.post("/v1/completions", json={"model": "blue", **BODY}).status_code == 200
        states = {model["model"]: model["state"] for model in listed(client, server)}
        assert states["blue"] == "serving"
        assert states["red"] in ("asleep", "out")
        again = client.post("/v1/completions", json={"model": "red", **BODY}).json()
        assert again["choices"] == red["choices"]


def listed(client, server):
    return client.get("/admin/v1/models", headers={"x-api-key": key_of(server)}).json()["data"]


async def test_an_engine_that_two_gateways_share_sleeps_for_both_and_wakes_for_either():
    async with asyncio.timeout(300), AsyncExitStack() as stack:
        port, process = await stack.enter_async_context(engine())
        address = f"tcp://127.0.0.1:{port}"
        one = await stack.enter_async_context(gateway(address))
        other = await stack.enter_async_context(gateway(address))
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=300))
            for server in (one, other)
        ]

        async def ask(client):
            return (await client.post("/v1/completions", json={"model": "maitred-tiny", **BODY})).json()["choices"]

        answers = [await ask(client) for client in clients]
        assert answers[0] == answers[1]
        awake_bytes = resident_bytes(process.pid)
        state = await asyncio.to_thread(maitred, one, "sleep", "maitred-tiny", "--wait")
        assert (state["state"], state["measured_bytes"]) == ("asleep", None)
        assert resident_bytes(process.pid) < awake_bytes
        assert await ask(clients[1]) == answers[1], "woken by the gateway that had not sent it to sleep"
        assert await ask(clients[0]) == answers[0]
        for server in (one, other):
            assert server.metrics()["maitred_engine_asleep"] == 0
