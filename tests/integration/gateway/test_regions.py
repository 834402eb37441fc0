"""A gateway in one region with an engine there and one elsewhere: who leaves, who may not, and what goes on at home."""

import asyncio
import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from maitred.testing.server_process import serving

MODEL = "maitred-tiny"
LONG = {"model": MODEL, "temperature": 0.0, "ignore_eos": True, "max_tokens": 700, "cache": {"no-cache": True}}
SHORT = {**LONG, "max_tokens": 4}
HURRY = {"x-maitred-ttft-ms": "400"}
"""So much less than a place takes to come free that nobody in a hurry stays where none is free."""
SERVED = "x-maitred-served-region"


@contextmanager
def engine(folder, region, *, sequences):
    """A real engine that tells its region; yields its address and its process."""
    address = f"unix:{folder / region}.sock"
    command = [sys.executable, "-m", "maitred", "engine", "--listen", address, "--max-sequences", str(sequences)]
    with (folder / f"{region}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--kv-memory", "32MiB", f"--set=region={region}", "--set=engine.guests=0"],
            **{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": folder},
        )
    try:
        yield address, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=[1, 2])
def system(tmp_path, request):
    with ExitStack() as stack:
        home, _ = stack.enter_context(engine(tmp_path, "eu", sequences=2))
        away, process = stack.enter_context(engine(tmp_path, "us", sequences=4))
        settings = {"region": "eu", "server.heartbeat_s": 250, "server.workers": request.param}
        # a head that is sent early tells no region
        server = stack.enter_context(serving("--engine", home, "--engine", away, settings=settings))
        yield server, process


class Stream:
    """A stream that is read in the background."""

    def __init__(self, client, number, **headers):
        self.body = {**LONG, "stream": True, "prompt": f"{number} animals met in the deep wood. The rabbit said:"}
        self.text = ""
        self.finish = self.region = None
        self.begun = asyncio.Event()
        self._client, self._headers = client, headers
        self.task = asyncio.create_task(self._run())

    async def _run(self):
        async with self._client.stream("POST", "/v1/completions", json=self.body, headers=self._headers) as response:
            assert response.status_code == 200, await response.aread()
            self.region = response.headers[SERVED]
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    self.text += choice["text"]
                    self.finish = choice["finish_reason"] or self.finish
                    self.begun.set()


async def ask(client, **headers):
    response = await client.post("/v1/completions", json={**SHORT, "prompt": "The fox said"}, headers=headers)
    assert response.status_code == 200, response.text
    return response.headers[SERVED]


async def both_up(server):
    async with asyncio.timeout(300):
        while True:
            if (await asyncio.to_thread(server.metrics))["maitred_engine_up"] == 2:
                return
            await asyncio.sleep(0.05)


async def test_requests_leave_their_region_only_if_they_must_and_may(system):
    server, away = system
    async with asyncio.timeout(300), httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        await both_up(server)
        assert [await ask(client, **HURRY) for _ in range(4)] == ["eu"] * 4, "home is free"
        assert await ask(client, **{"x-maitred-region": "us"}) == "us"
        undisturbed = Stream(client, 3)
        await undisturbed.task
        assert undisturbed.region == "eu"

        full = [Stream(client, number) for number in (1, 2)]
        for stream in full:
            await stream.begun.wait()
        bound = Stream(client, 4, **{"x-maitred-region": "eu"})
        await asyncio.sleep(0)
        moved = Stream(client, 3, **HURRY)
        await moved.begun.wait()
        assert moved.region == "us", "home is full, and would answer too late"
        assert await ask(client, **HURRY, **{"x-maitred-region": "eu, us"}) == "us"
        assert not bound.begun.is_set(), "it waits for its region while others pass"

        away.kill()
        away.wait()
        for stream in (*full, bound, moved):
            await stream.task
        assert bound.region == "eu"
        assert (moved.text, moved.finish) == (undisturbed.text, "length"), "it went on at home, token by token"
        refused = await client.post(
            "/v1/completions", json={**SHORT, "prompt": "The fox"}, headers={"x-maitred-region": "us"}
        )
        assert refused.status_code == 503
        assert "may not leave" in refused.json()["error"]["message"]
        metrics = await asyncio.to_thread(server.metrics)
        assert metrics["maitred_dispatch_spills_total"] == 3
        assert not metrics["maitred_dispatch_running"]
