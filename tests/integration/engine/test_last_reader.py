"""What the engine holds for an answer that many read: until the last one leaves, and not a step longer.

The engine runs in a thread here, so that its steps can be counted; before it is a gateway of one process or of several.
"""

import asyncio
import socket
import threading
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
from msgspec.structs import replace

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.clock import SystemClock
from maitred.engine.assembly import build
from maitred.engine.config import EngineConfig
from maitred.engine.models.digest import content_digest, fingerprint_of
from maitred.engine.server import EngineServer
from tests.support.console_server import consoled

LIMIT_S = 300.0
READERS = 8
BLOCK_TOKENS = 16
LONG = {"model": "maitred-tiny", "temperature": 0, "max_tokens": 1500, "ignore_eos": True, "stream": True}


class CountedEngine:
    """An engine that notes, in order, what it is told to compute and to give up, and its load behind each step."""

    def __init__(self, engine):
        self._engine = engine
        self.events = []
        self.prompt_tokens = 0  # of the first request

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def submit(self, owner, request):
        self.events.append(("submit", request.id))
        self.prompt_tokens = self.prompt_tokens or len(request.prompt)
        self._engine.submit(owner, request)

    def cancel(self, owner, request_id, index):
        self.events.append(("cancel", request_id))
        self._engine.cancel(owner, request_id, index)

    def step(self):
        outputs = self._engine.step()
        self.events.append(("step", self._engine.load()))
        return outputs

    def named(self, kind):
        return [what for name, what in [*self.events] if name == kind]

    def load_behind(self, request_id):
        """The load behind the first step after a request was given up."""
        rest = self.events[self.events.index(("cancel", request_id)) :]
        return next((what for kind, what in rest if kind == "step"), None)


@pytest.fixture(scope="module")
def model():
    engine, card = build(
        BUNDLED_MODEL, EngineConfig(threads=1, max_sequences=4, block_tokens=BLOCK_TOKENS, kv_memory_bytes=32 << 20)
    )
    return engine, replace(card, digest=replace(fingerprint_of(BUNDLED_MODEL), content=content_digest(BUNDLED_MODEL)))


@contextmanager
def serving_engine(model, path):
    engine, card = model
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    counted = CountedEngine(engine)
    server = EngineServer(counted, card, listener, SystemClock())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield counted
    finally:
        server.stop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waker:
            waker.connect(str(path))  # it may sleep
        thread.join(LIMIT_S)
    assert not thread.is_alive()


class Reader:
    """A client that reads a stream until it leaves."""

    def __init__(self, system, key, prompt):
        self.pieces = 0
        self.read = asyncio.Event()
        self._headers = {"authorization": f"Bearer {key}"}
        self._url, self._body = f"{system.url}/v1/completions", {**LONG, "prompt": prompt}
        self._task = asyncio.create_task(self._read())

    async def _read(self):
        async with (
            httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client,
            client.stream("POST", self._url, json=self._body, headers=self._headers) as response,
        ):
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    self.pieces += 1
                    self.read.set()

    async def more(self, pieces=1):
        """Waits until so many more pieces have come."""
        wanted = self.pieces + pieces
        while self.pieces < wanted:
            assert not self._task.done(), "the answer has ended"
            self.read.clear()
            await self.read.wait()

    async def leave(self):
        self._task.cancel()
        await asyncio.wait([self._task])


def most_blocks(engine, load):
    """Most blocks of the only sequence that runs: the first one, which gets one token in each step."""
    return -(-(engine.prompt_tokens + engine.named("step").index(load) + 1) // BLOCK_TOKENS)


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not (found := condition()):  # noqa: ASYNC110 - it is another thread
            await asyncio.sleep(0.001)
        return found


def booked(system, requests):
    """The sums of the ledger, once so many requests are in it."""
    data = system.admin.get("/admin/v1/usage").json()["data"]
    return data[0] if data and data[0]["requests"] == requests else None


@pytest.mark.parametrize("workers", [1, 4])
async def test_the_last_reader_who_leaves_frees_the_blocks_by_the_next_step(model, tmp_path, workers):
    path = tmp_path / "engine.sock"
    settings = {"model__engine_address": f"unix:{path}", "server__workers": workers}
    before = model[0].load()
    with serving_engine(model, path) as engine, consoled(**settings) as system:
        key = system.key("acme")
        witness = Reader(system, key, "Once upon a time")  # without it there would be no next step
        await witness.more()
        (first,) = engine.named("submit")
        readers = [Reader(system, key, "There was a king")]
        await readers[0].more()
        readers += [Reader(system, key, "There was a king") for _ in range(READERS - 1)]
        for reader in readers[1:]:
            await reader.more()
        _, shared = engine.named("submit")
        for reader in readers[:-1]:
            await reader.leave()
        await readers[-1].more(20)
        assert engine.named("cancel") == []
        shared_load = engine.named("step")[-1]
        assert shared_load.running == 2
        assert shared_load.total_blocks - shared_load.free_blocks > most_blocks(engine, shared_load)
        await readers[-1].leave()
        behind = await until(lambda: ("cancel", shared) in engine.events and engine.load_behind(shared))
        assert behind.running == 1
        assert behind.total_blocks - behind.free_blocks <= most_blocks(engine, behind)
        await witness.leave()
        nothing = await until(lambda: ("cancel", first) in engine.events and engine.load())
        assert (nothing.running, nothing.free_blocks) == (0, nothing.total_blocks)
        assert engine.named("cancel") == [shared, first]
        total = await until(partial(booked, system, READERS + 1))
        assert total["prompt_tokens"] == nothing.prompt_tokens - before.prompt_tokens
        # Tokens of steps that ran while the last one left were sampled and are never billed.
        assert 0 < total["output_tokens"] <= nothing.output_tokens - before.output_tokens
