"""Shared answers whose computation is lost: real workers, controllers and engines are killed under their readers."""

import asyncio
import json
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import psutil
import pytest

from maitred.testing.scripted_openai import DelayDistribution, ServerScript, scripted_openai
from maitred.testing.scripted_openai.script import FaultKind, ScriptedFault
from tests.integration.cache.test_coalescing import counters, ledger
from tests.integration.gateway.test_workers import (
    USER,
    administer,
    back,
    caller,
    gateway,
    nothing_held,
    processes,
    wait_until,
)
from tests.support.console_server import consoled
from tests.support.processes import living_children

LENGTH = 200
BODY = {"model": "m", "temperature": 0, "max_tokens": LENGTH, "stream": True}


@pytest.fixture(scope="module")
def upstream():
    with scripted_openai(ServerScript(ttft=DelayDistribution(mean_s=0.02))) as running:
        yield running


@pytest.fixture
def server(tmp_path, upstream):
    with gateway(tmp_path, upstream.url, workers=3, drain_grace_s=120) as running:
        yield running


@asynccontextmanager
async def clients(server, per_worker, key=USER):
    """Opens connections; yields as many clients of each worker, with one connection each, by the worker's process."""
    _, workers = processes(server)
    async with AsyncExitStack() as stack:
        found = {worker.pid: [] for worker in workers}
        while min(map(len, found.values())) < per_worker:
            headers = {"authorization": f"Bearer {key}"}
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=server.url, headers=headers, timeout=300, trust_env=False)
            )
            answer = await client.get("/health/live")
            port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
            for worker in workers:
                if any(
                    end.raddr and end.raddr.port == port for end in psutil.Process(worker.pid).net_connections("tcp")
                ):
                    found[worker.pid].append(client)
        yield {pid: some[:per_worker] for pid, some in found.items()}


class Reader:
    """Reads one stream in the background."""

    def __init__(self, client, prompt, headers=(), **fields):
        self.text, self.status, self.is_whole = "", "", False
        self.grown = asyncio.Event()
        messages = [{"role": "user", "content": prompt}]
        self.task = asyncio.create_task(self._read(client, {**BODY, "messages": messages, **fields}, dict(headers)))

    async def _read(self, client, body, headers):
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status_code == 200, await response.aread()
                self.status = response.headers["x-maitred-cache"]
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        self.is_whole = True
                    elif line.startswith("data: "):
                        choices = json.loads(line.removeprefix("data: ")).get("choices")
                        self.text += (choices[0]["delta"].get("content") or "") if choices else ""
                        self.grown.set()
        except httpx.TransportError:
            pass
        finally:
            self.grown.set()

    async def has(self, characters):
        while len(self.text) < characters and not self.task.done():
            self.grown.clear()
            await self.grown.wait()


async def lines(server):
    await wait_until(lambda: nothing_held(server))
    return (await administer(server, "GET", "usage/events?limit=500"))["data"]


async def test_the_readers_of_a_killed_worker_go_on_and_one_process_computes_the_rest(server, upstream):
    before = len(upstream.truth().requests)
    async with clients(server, 2) as by_worker:
        first, *others = by_worker.values()
        readers = [Reader(first[0], "killed")]
        await readers[0].has(20)
        readers += [Reader(client, "killed") for some in others for client in some]
        await asyncio.gather(*(reader.has(100) for reader in readers))
        assert not any(reader.is_whole for reader in readers), "they are in the midst of it"
        psutil.Process(next(iter(by_worker))).kill()
        await asyncio.gather(*(reader.task for reader in readers))
    assert not readers[0].is_whole
    assert {reader.status for reader in readers[1:]} == {"coalesced"}
    assert all(reader.is_whole for reader in readers[1:])
    async with caller(server) as client:
        again = Reader(client, "killed")
        await again.task
    assert {reader.text for reader in readers[1:]} == {again.text}, "no text twice, and none is missing"
    assert again.status == "hit"
    assert len(upstream.truth().requests) - before == 2, "one process has computed it for the others"
    computed = [line for line in await lines(server) if not line["cache"]]
    assert sorted((line["outcome"], line["output_tokens"] == LENGTH) for line in computed) == [
        ("failed", False),
        ("finished", True),
    ]


async def test_the_death_of_a_worker_before_its_answer_has_begun_is_not_seen(tmp_path):
    never = ScriptedFault(kind=FaultKind.SILENT, requests=[0])
    with (
        scripted_openai(ServerScript(faults=[never], early_role=False)) as upstream,
        gateway(tmp_path, upstream.url, workers=3) as server,
    ):
        async with clients(server, 1) as by_worker:
            first, *others = by_worker.values()
            readers = [Reader(first[0], "early")]
            await wait_until(lambda: len(upstream.truth().requests) == 1)
            readers += [Reader(some[0], "early") for some in others]
            await wait_until(lambda: server.metrics()["maitred_in_flight"] >= 3)
            psutil.Process(next(iter(by_worker))).kill()
            await asyncio.gather(*(reader.task for reader in readers))
        assert all(reader.is_whole for reader in readers[1:])
        assert len({reader.text for reader in readers[1:]}) == 1
        assert len(upstream.truth().requests) == 2


async def test_the_readers_of_a_killed_controller_go_on(server):
    """It computes what has an Idempotency-Key; its own callers lose their connection, as with any worker."""
    controller, _ = processes(server)
    async with clients(server, 1) as by_worker:
        some = [client for (client,) in by_worker.values()]
        own = Reader(some[0], "controller", {"idempotency-key": "one"})
        await own.has(20)
        readers = [Reader(client, "controller") for client in some]
        await asyncio.gather(*(reader.has(100) for reader in readers))
        assert {reader.status for reader in readers} == {"coalesced"}
        controller.kill()
        await asyncio.gather(*(reader.task for reader in readers))
    assert all(reader.is_whole for reader in readers)
    assert len({reader.text for reader in readers}) == 1
    await back(server)
    finished = [line for line in await lines(server) if line["outcome"] == "finished"]
    assert sum(line["output_tokens"] for line in finished) == LENGTH
    assert len(finished) == len(readers)


async def test_a_worker_that_is_replaced_waits_for_the_readers_in_others(server, upstream):
    before = len(upstream.truth().requests)
    async with clients(server, 1) as by_worker:
        pids, some = [*by_worker], [client for (client,) in by_worker.values()]
        first = Reader(some[0], "replaced")
        await first.has(20)
        second = Reader(some[1], "replaced")
        await second.has(60)
        first.task.cancel()
        await asyncio.wait([first.task])
        await some[0].aclose()
        server.process.send_signal(signal.SIGUSR2)
        await second.task
        assert second.is_whole
        assert second.status == "coalesced"
        await wait_until(lambda: pids[0] not in [worker.pid for worker in processes(server)[1]])
    assert len(upstream.truth().requests) - before == 1, "it was not computed again"


@pytest.mark.parametrize("workers", [1, 3])
async def test_the_others_go_on_when_the_key_of_the_first_caller_is_revoked(tmp_path, upstream, workers):
    with gateway(tmp_path, upstream.url, workers=workers) as server:
        made = await administer(server, "POST", "keys", json={"tenant": "acme"})
        async with caller(server, made["key"]) as first, caller(server) as others:
            readers = [Reader(first, "revoked")]
            await readers[0].has(20)
            readers += [Reader(others, "revoked") for _ in range(5)]
            await asyncio.gather(*(reader.has(60) for reader in readers))
            await administer(server, "DELETE", f"keys/{made['id']}")
            await asyncio.gather(*(reader.task for reader in readers))
        assert not readers[0].is_whole
        assert all(reader.is_whole for reader in readers[1:])
        assert len({reader.text for reader in readers[1:]}) == 1
        computed = [line for line in await lines(server) if not line["cache"]]
        assert [line["outcome"] for line in computed].count("finished") == 1
        assert [line["key"] == made["id"] for line in computed].count(True) == 1
        assert len(computed) == (1 if workers == 1 else 2)


@pytest.mark.parametrize("workers", [1, 4])
async def test_shared_streams_survive_the_death_of_their_engine(workers):
    with consoled(engine__threads=1, server__workers=workers) as system:
        server, key = system.server, system.key("acme")
        fields = {"model": "maitred-tiny", "max_tokens": 1_500, "ignore_eos": True}
        headers = {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=system.url, headers=headers, timeout=300, limits=limits, trust_env=False
        ) as client:
            readers = [Reader(client, "engine", **fields) for _ in range(20)]
            await asyncio.gather(*(reader.has(50) for reader in readers))
            assert not any(reader.is_whole for reader in readers)
            engines = [child for child in descendants(server) if "local_engine" in " ".join(child.cmdline())]
            assert engines
            for engine in engines:
                engine.kill()
            await asyncio.gather(*(reader.task for reader in readers))
            assert all(reader.is_whole for reader in readers)
            again = Reader(client, "engine", cache={"no-cache": True}, **fields)
            await again.task
        assert {reader.text for reader in readers} == {again.text}
        assert {reader.status for reader in readers} == {"miss", "coalesced"}
        await wait_until(lambda: counters(system)["maitred_ledger_backlog"] == 0)
        assert counters(system)["maitred_recoveries_total"] == 1
        assert ledger(system)["output_tokens"] == 2 * 1_500


def descendants(server):
    return living_children(server.process.pid, recursive=True)
