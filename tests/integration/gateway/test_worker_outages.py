"""Common knowledge of workers about a server that refuses requests: real processes, one connection to each worker."""

import asyncio
import os
import time
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import httpx
import psutil
import pytest
import yaml

from maitred.testing.scripted_openai import DelayDistribution, FaultKind, ScriptedFault, ServerScript, scripted_openai
from maitred.testing.server_process import serving
from tests.integration.gateway.test_workers import MESSAGES, processes

TTFT = DelayDistribution(mean_s=0.01)
NEVER_S = 1_000.0
"""So long that nobody finds out within a test whether the outage is over."""
MOST_REFUSALS = 4


@contextmanager
def gateway(tmp_path, far_url, near_url, first_open_s, most_open_s):
    def model(url):
        return {"upstreams": [{"url": f"{url}/v1", "probe_every_s": 0.2}]}

    settings = {
        "server": {"workers": 3, "drain_grace_s": 1},
        "models": {"far": model(far_url), "near": model(near_url)},
        "dispatch": {"retries": 0},
        "routing": {"fallbacks": {"far": {"general": ["near"]}}},
        "health": {
            "most_refusals": MOST_REFUSALS,
            "breaker": {"first_open_s": first_open_s, "most_open_s": most_open_s},
        },
    }
    file = tmp_path / "maitred.yaml"
    file.write_text(yaml.safe_dump(settings))
    with serving("--config", str(file), environment=dict(os.environ)) as running:
        yield running


@asynccontextmanager
async def client_of_each_worker(server):
    """Opens connections until there is one to each worker; yields the clients, with one connection each."""
    _, workers = processes(server)
    async with AsyncExitStack() as stack:
        clients = {}
        while len(clients) < len(workers):
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=30))
            answer = await client.get("/health/live")
            port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
            for worker in workers:
                if any(connection.raddr and connection.raddr.port == port for connection in connections(worker)):
                    clients.setdefault(worker.pid, client)
        yield list(clients.values())


def connections(worker):
    return psutil.Process(worker.pid).net_connections("tcp")


async def chat(client):
    answer = await client.post(
        "/v1/chat/completions", json={"model": "far", "messages": MESSAGES, "max_tokens": 3}, timeout=30
    )
    assert answer.status_code == 200, answer.text
    return answer.headers.get("x-maitred-fallback")


@pytest.mark.parametrize(
    ("status", "headers", "first_open_s"), [(503, {}, NEVER_S), (429, {"retry-after": "600"}, 0.05)]
)
async def test_all_workers_begin_elsewhere_after_the_refusals_that_they_met_together(
    tmp_path, status, headers, first_open_s
):
    refused = ScriptedFault(kind=FaultKind.STATUS, status=status, headers=headers, share=1.0)
    with (
        scripted_openai(ServerScript(ttft=TTFT, faults=[refused])) as far,
        scripted_openai(ServerScript(ttft=TTFT)) as near,
        gateway(tmp_path, far.url, near.url, first_open_s, NEVER_S) as server,
    ):
        async with client_of_each_worker(server) as clients:
            for _ in range(4):
                for client in clients:
                    assert await chat(client) == "general=near"
            answers = await asyncio.gather(*(chat(client) for client in clients for _ in range(5)))
            assert set(answers) == {"general=near"}
        assert len(far.truth().requests) == MOST_REFUSALS


async def test_the_recovery_that_one_worker_finds_is_known_to_all(tmp_path):
    refused = ScriptedFault(kind=FaultKind.STATUS, status=503, requests=list(range(MOST_REFUSALS)))
    with (
        scripted_openai(ServerScript(ttft=TTFT, faults=[refused])) as far,
        scripted_openai(ServerScript(ttft=TTFT)) as near,
        gateway(tmp_path, far.url, near.url, 0.5, 0.5) as server,
    ):
        async with client_of_each_worker(server) as clients:
            for number in range(MOST_REFUSALS):
                assert await chat(clients[number % len(clients)]) == "general=near"
            deadline_s = time.monotonic() + 60
            while await chat(clients[0]) is not None:
                assert time.monotonic() < deadline_s
            assert [await chat(client) for client in clients] == [None] * len(clients)
        # Nobody but the one that found out was let through before.
        assert len(far.truth().requests) == MOST_REFUSALS + 1 + len(clients)
