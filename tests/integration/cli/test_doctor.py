"""`maitred doctor` finds what was planted: six situations with another bottleneck each, and a server at rest.

One real server: a batch of four places, a model whose KV cache holds hardly a request, one that a slow server runs, and
a tenant with a limit. Each situation is under way while the doctor looks, and gone afterwards.
"""

import asyncio
import itertools
import json
import random
import re
import socket
import sqlite3
import string
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from maitred.cli.app import app
from maitred.config.tree import BUNDLED_MODEL
from maitred.identity.keys import make_key
from maitred.observe.samples import MetricSamples, parse_metrics
from maitred.testing.scripted_openai.process import scripted_openai
from maitred.testing.scripted_openai.script import DelayDistribution, ServerScript
from maitred.testing.server_process import serving

KEY = make_key().plaintext
NUMBERS = itertools.count(10)


def settings(upstream_url):
    own = {"threads": 1, "bake_off": "off"}
    return {
        "server": {"unread_tokens": 16},
        "model": {"path": str(BUNDLED_MODEL), "served_name": "small"},
        "engine": {**own, "max_sequences": 4, "kv_memory_bytes": "64MiB"},
        "models": {
            "tight": {
                "path": str(BUNDLED_MODEL),
                "pinned": True,
                "engine": {**own, "kv_memory_bytes": "1MiB", "context_tokens": 160},
            },
            "far": {"upstreams": [{"url": f"{upstream_url}/v1", "dialect": "vllm", "model": "scripted"}]},
        },
        "tenants": {
            "acme": {"keys": {"app": {"secret": {"env": "ACME_KEY"}}}, "limits": {"requests_per_minute": 3}},
        },
    }


class Patient:
    """The server that the doctor looks at."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder

    def visit(self, *arguments: str):
        """What the doctor says."""
        result = CliRunner().invoke(app, ["doctor", "--url", self.url, "--for", "2", "--json", *arguments])
        assert result.exit_code in (0, 1), result.output
        report = json.loads(result.stdout)
        assert report["healthy"] == (result.exit_code == 0) == (not report["findings"])
        return report["findings"]


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    with ExitStack() as stack:
        far = stack.enter_context(
            scripted_openai(ServerScript(ttft=DelayDistribution(mean_s=1.4), itl=DelayDistribution(mean_s=0.01)))
        )
        file = folder / "maitred.yaml"
        file.write_text(yaml.safe_dump(settings(far.url)))
        environment = {"ACME_KEY": KEY, "MAITRED__STORE__FOLDER": str(folder / "data")}
        server = stack.enter_context(serving("--config", str(file), environment=environment))
        asyncio.run(until(server, "maitred_engine_up", 2))
        yield Patient(server.url, folder)


@asynccontextmanager
async def concurrent_callers(patient: Patient, size: int, ask: Callable[[httpx.AsyncClient], Awaitable[object]]):
    """So many clients, each asking again as soon as it has its answer."""

    async def ask_on(client):
        while True:
            await ask(client)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=patient.url, timeout=300, limits=limits) as client:
        clients = [asyncio.create_task(ask_on(client)) for _ in range(size)]
        try:
            yield client
        finally:
            for each in clients:
                each.cancel()
            await asyncio.wait(clients)


async def complete(client, model, prompt_tokens, max_tokens, **more):
    """A whole answer to a prompt that no other begins like."""
    number = next(NUMBERS)
    prompt = [number % 4000 + 5, number // 4000 + 5, *range(100, 98 + prompt_tokens)]
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return await client.post("/v1/completions", json=body, **more)


async def first_finding(patient, *arguments, visits=1, left_out=("gateway",)):
    """The first finding, without those that are true of every process of a busy machine."""
    for _ in range(visits):
        findings = await asyncio.to_thread(patient.visit, *arguments)
        if findings := [finding for finding in findings if finding["kind"] not in left_out]:
            return findings[0]
    pytest.fail("nothing was found")


async def test_a_server_at_rest_is_healthy(patient):
    """Other work may leave it too little of a core for a while, which is found."""
    for _ in range(5):
        findings = await asyncio.to_thread(patient.visit)
        assert [finding for finding in findings if finding["kind"] != "gateway"] == []
        if not findings:
            return
    pytest.fail("the gateway has too little of a core all the time")


async def test_kv_memory(patient):
    async with concurrent_callers(patient, 10, lambda client: complete(client, "tight", 60, 60)):
        finding = await first_finding(patient)
    assert (finding["kind"], finding["where"]) == ("kv_memory", "tight")
    assert "kv_memory_bytes" in finding["remedy"]


async def test_compute(patient):
    # Answers of different lengths: places become free one by one, so the engine has work while the gateway fills one.
    lengths = itertools.cycle(range(8, 200, 29))
    async with concurrent_callers(patient, 12, lambda client: complete(client, "small", 900, next(lengths))):
        # Other work may leave gateway and engine too little of a core: then places are filled late, and time is left.
        finding = await first_finding(patient, visits=20, left_out=("gateway", "queue"))
    assert (finding["kind"], finding["where"]) == ("compute", "small")
    assert "Most of the work is prompts" in finding["remedy"]


async def test_a_limit(patient):
    async def ask(client):
        await complete(client, "small", 4, 1, headers={"Authorization": f"Bearer {KEY}"})
        await asyncio.sleep(0.02)

    async with concurrent_callers(patient, 2, ask):
        finding = await first_finding(patient)
    assert (finding["kind"], finding["where"]) == ("limits", "acme")
    assert any("requests_per_minute" in line for line in finding["evidence"])


async def test_a_slow_server_behind(patient):
    async with concurrent_callers(patient, 6, lambda client: complete(client, "far", 8, 8)):
        finding = await first_finding(patient)
    assert finding["kind"] == "upstream"
    assert finding["where"].startswith("far/")


async def test_slow_readers(patient):
    body = {"model": "small", "prompt": "x", "n": 4, "logprobs": 5, "max_tokens": 1800, "ignore_eos": True}
    data = json.dumps({**body, "stream": True}).encode()
    with ExitStack() as stack:
        for _ in range(2):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
            raw.connect(address_of(patient))
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data
            )
        await until(patient, "maitred_engine_paused", 4)
        finding = await first_finding(patient)
    assert finding["kind"] == "slow_clients"


async def test_the_gateway_itself(patient):
    """Prompts to tokenise, sent many at a time so that it costs us next to nothing."""
    letters = random.Random(7).choices(string.ascii_letters + "   ", k=2000)
    body = json.dumps({"model": "small", "prompt": "".join(letters)}).encode()
    many = (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body) * 20

    async def ask_on():
        reader, writer = await asyncio.open_connection(*address_of(patient))
        with closing(writer):
            while True:
                writer.write(many)
                for _ in range(20):
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200")
                    await reader.readexactly(int(re.search(rb"content-length: (\d+)", head, re.I)[1]))

    clients = [asyncio.create_task(ask_on()) for _ in range(4)]
    # It is found by the share of a core that it uses; other work may leave it too little of one for a while.
    finding = await first_finding(patient, visits=5, left_out=())
    assert not any(client.done() for client in clients)
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)
    assert finding["kind"] == "gateway"


async def test_the_store(patient):
    (file,) = (patient.folder / "data").glob("*.db")
    with closing(sqlite3.connect(file, isolation_level=None)) as another:
        another.execute("BEGIN IMMEDIATE")
        async with concurrent_callers(patient, 1, lambda client: complete(client, "small", 4, 4)):
            await until(patient, "maitred_ledger_backlog_age_seconds", 2)
            finding = await first_finding(patient)
        another.execute("ROLLBACK")
    assert (finding["kind"], finding["where"]) == ("store", "database")


def address_of(patient):
    host, port = patient.url.removeprefix("http://").split(":")
    return host, int(port)


async def until(patient, metric, least, timeout_s=300):
    """Waits until a metric, summed over its labels, has reached something."""
    async with asyncio.timeout(timeout_s), httpx.AsyncClient(base_url=patient.url) as client:
        while True:
            if sum(MetricSamples(parse_metrics((await client.get("/metrics")).text)).sum_by(metric).values()) >= least:
                return
            await asyncio.sleep(0.05)
