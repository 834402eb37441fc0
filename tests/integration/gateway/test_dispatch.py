"""Fair dispatch from outside: `maitred serve` on the bundled model, with two places in its batch, so requests wait."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from maitred.identity.keys import make_key
from maitred.testing.server_process import serving

CONFIG = """
server: {allow_unauthenticated: false}
engine: {max_sequences: 2, guests: 0, step_tokens: 64, kv_memory_bytes: 64MiB}
dispatch: {headroom: 0, max_wait_s: {standard: 600, batch: 600, background: 600}}
model:
  degradation:
    - {step: shorten, to_tokens: 4}
tenants:
  heavy:
    keys: {one: {secret: {env: HEAVY_KEY}}}
  light:
    keys: {one: {secret: {env: LIGHT_KEY}}}
  modest:
    priority_ceiling: 4
    keys: {one: {secret: {env: MODEST_KEY}}}
  operator:
    keys: {admin: {secret: {env: ADMIN_KEY}, scopes: [admin, metrics]}}
"""
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def keys():
    return {name: make_key().plaintext for name in ("HEAVY_KEY", "LIGHT_KEY", "MODEST_KEY", "ADMIN_KEY")}


@pytest.fixture(scope="module")
def server(keys, tmp_path_factory):
    path = tmp_path_factory.mktemp("dispatch") / "maitred.yaml"
    path.write_text(CONFIG)
    with serving("--config", str(path), environment=keys) as server:
        yield server
        assert server.stop() == 0


class Caller:
    """One tenant's requests, under the names that they are given as their ids."""

    def __init__(self, client):
        self.client = client
        self.ended: dict[str, float] = {}

    async def ask(self, name, *, tokens=20, headers=None, **fields):
        """A request that nobody shortens."""
        headers = {"x-request-id": name, "x-maitred-no-degradation": "true", **(headers or {})}
        try:
            return await self.client.post("/v1/completions", json=_body(name, tokens) | fields, headers=headers)
        finally:
            self.ended[name] = time.monotonic()

    @asynccontextmanager
    async def holding(self, name):
        """A stream that runs, and is abandoned in the end."""
        body = _body(name, 1_500) | {"stream": True}
        async with self.client.stream("POST", "/v1/completions", json=body) as stream:
            chunks = stream.aiter_bytes()  # kept: the stream is closed with its last reader
            await anext(chunks)
            yield

    async def place(self, name):
        return await self.client.get(f"/v1/queue/{name}")

    async def waits(self, name):
        """Returns its place once it stands in the queue."""
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await self.place(name)).status_code != 200:  # noqa: ASYNC110 - only asking tells
                await asyncio.sleep(0.02)
        return answer.json()


def _body(name, tokens):
    return {
        "model": "maitred-tiny",
        "prompt": f"Once upon a time {name}",
        "max_tokens": tokens,
        "ignore_eos": True,
    }


@pytest.fixture
async def callers(server, keys):
    """Heavy, light, modest; everything is given back after the test."""
    async with calling(server, keys) as callers:
        yield callers


@asynccontextmanager
async def calling(server, keys):
    """The same of any server."""
    async with AsyncExitStack() as clients:

        async def client(name):
            headers = {"authorization": f"Bearer {keys[name]}"}
            return await clients.enter_async_context(
                httpx.AsyncClient(base_url=server.url, headers=headers, timeout=PATIENCE_S)
            )

        yield [Caller(await client(name)) for name in ("HEAVY_KEY", "LIGHT_KEY", "MODEST_KEY")]
        admin = await client("ADMIN_KEY")
        async with asyncio.timeout(PATIENCE_S):
            while left := await _left(admin):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not left


async def _left(admin):
    """What somebody still holds."""
    values = {}
    for line in (await admin.get("/metrics")).text.splitlines():
        if line and not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            name = sample.partition("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    held = values["maitred_engine_kv_blocks_total"] - values["maitred_engine_kv_blocks_free"]
    names = (
        "maitred_engine_running",
        "maitred_engine_waiting",
        "maitred_in_flight",
        "maitred_leases",
        "maitred_dispatch_running",
        "maitred_dispatch_waiting",
    )
    return held + sum(values[name] for name in names)


@asynccontextmanager
async def full(caller):
    """Both places are taken, until the block is left."""
    async with caller.holding("running-1"), caller.holding("running-2"):
        yield


async def test_a_waiting_request_says_where_it_stands_to_its_own_organisation_only(callers):
    heavy, light, _ = callers
    async with asyncio.TaskGroup() as tasks:
        async with full(heavy):
            first = tasks.create_task(heavy.ask("place-first"))
            await heavy.waits("place-first")
            second = tasks.create_task(heavy.ask("place-second"))
            behind = await heavy.waits("place-second")
            place = await heavy.waits("place-first")
            stranger = await light.place("place-first")
        answers = [await first, await second]
    assert place["id"] == "place-first"
    assert (place["position"], behind["position"]) == (0, 1)
    assert min(place["predicted_wait_ms"], behind["predicted_wait_ms"]) > 0
    assert stranger.status_code == 404
    assert [answer.status_code for answer in answers] == [200, 200]
    assert int(answers[1].headers["x-maitred-queue-position"]) >= 1
    assert (await heavy.place("place-first")).status_code == 404


async def test_a_light_tenant_does_not_wait_behind_many_requests_of_another(callers):
    heavy, light, _ = callers
    async with asyncio.TaskGroup() as tasks, full(heavy):
        for number in range(12):
            tasks.create_task(heavy.ask(f"heavy-{number}", tokens=60))
            await heavy.waits(f"heavy-{number}")
        tasks.create_task(light.ask("light", tokens=60))
        await light.waits("light")
    later = sum(ended_s > light.ended["light"] for ended_s in heavy.ended.values())
    assert later >= 9, f"the light tenant came before {later} of 12"


async def test_a_light_tenant_gets_an_overcommit_slot_while_another_holds_all_slots(keys, tmp_path):
    path = tmp_path / "maitred.yaml"
    path.write_text(CONFIG.replace("guests: 0", "guests: 1"))
    with serving("--config", str(path), environment=keys) as server:
        async with calling(server, keys) as (heavy, light, _), asyncio.TaskGroup() as tasks, full(heavy):
            waiting = tasks.create_task(heavy.ask("heavy", tokens=20))
            await heavy.waits("heavy")
            answer = await light.ask("light", tokens=20)
            assert answer.headers["x-maitred-predicted-wait-ms"] == "0"
            assert answer.json()["usage"]["completion_tokens"] == 20
            assert not waiting.done()
            assert (await heavy.place("heavy")).status_code == 200, "it waits for the heavy tenant's own answers to end"
        assert server.stop() == 0


async def test_the_urgent_go_first_and_a_ceiling_caps_what_may_be_asked(callers):
    heavy, _, modest = callers
    async with asyncio.TaskGroup() as tasks, full(heavy):
        background = tasks.create_task(heavy.ask("background", tokens=60, headers={"x-maitred-priority": "1"}))
        await heavy.waits("background")
        capped = tasks.create_task(modest.ask("capped", tokens=60, priority=10))
        await modest.waits("capped")
        urgent = tasks.create_task(heavy.ask("urgent", tokens=60, headers={"x-maitred-priority": "interactive"}))
        assert (await heavy.waits("urgent"))["position"] == 0
    granted = [task.result().headers["x-maitred-priority"] for task in (urgent, capped, background)]
    assert granted == ["interactive", "batch", "background"]
    assert heavy.ended["urgent"] < heavy.ended["background"]


async def test_a_request_that_would_be_late_is_rejected_at_once_with_retry_after(callers):
    heavy, light, _ = callers
    async with full(heavy):
        refused = await light.ask("late", headers={"x-maitred-ttft-ms": "5"})
        assert (await light.place("late")).status_code == 404, "nothing of it waits"
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "deadline_unmeetable"
    assert int(refused.headers["retry-after-ms"]) > 0
    assert int(refused.headers["x-maitred-predicted-ttft-ms"]) > 5


async def test_an_answer_ends_at_its_deadline_with_what_there_is_if_that_is_welcome(callers):
    _, light, _ = callers
    for wish_ms in (1500, 15_000, 150_000):  # on a busy machine nothing may be there after a short time
        deadline = {"x-maitred-deadline-ms": str(wish_ms)}
        part = await light.ask("part", tokens=1_900, headers={**deadline, "x-maitred-partial": "true"})
        if part.status_code == 200:
            break
        assert part.json()["error"]["code"] in ("deadline_exceeded", "deadline_unmeetable")
    (choice,) = part.json()["choices"]
    assert (part.status_code, choice["finish_reason"], choice["stop_reason"]) == (200, "length", "deadline")
    assert 0 < part.json()["usage"]["completion_tokens"] < 1_900
    late = await light.ask("nothing", tokens=1_900, headers={"x-maitred-deadline-ms": "1500"})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_shorter_answer_is_given_where_a_whole_one_would_come_too_late(keys, tmp_path):
    config = CONFIG.replace("max_sequences: 2", "max_sequences: 8").replace("64MiB", "10MiB")
    path = tmp_path / "maitred.yaml"
    path.write_text(config)
    with serving("--config", str(path), environment=keys) as server:
        headers = {"authorization": f"Bearer {keys['HEAVY_KEY']}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=PATIENCE_S) as client:
            heavy = Caller(client)
            async with full(heavy):
                soon = {"x-maitred-ttft-ms": "200"}
                refused = await heavy.ask("declined", tokens=1_500, headers=soon)
                given = await heavy.ask("shorter", tokens=1_500, headers={**soon, "x-maitred-no-degradation": "false"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "deadline_unmeetable")
        assert given.status_code == 200, given.text
        assert given.headers["x-maitred-degraded"] == "max_tokens=4"
        assert given.json()["usage"]["completion_tokens"] == 4
        assert server.stop() == 0


async def test_who_leaves_the_queue_leaves_nothing(callers):
    heavy, light, _ = callers
    async with full(heavy):
        waiting = [asyncio.create_task(light.ask(f"leaver-{number}", n=1 + number % 2)) for number in range(9)]
        await light.waits("leaver-8")
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        async with asyncio.timeout(PATIENCE_S):
            while (await light.place("leaver-8")).status_code != 404:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_streams_tell_while_they_wait_and_account_for_it(callers):
    heavy, light, _ = callers
    async with AsyncExitStack() as stack:
        holding = await stack.enter_async_context(AsyncExitStack())
        await holding.enter_async_context(full(heavy))
        body = _body("shown", 5) | {"stream": True}
        headers = {"x-request-id": "shown", "x-maitred-explain": "true"}
        sending = asyncio.create_task(
            stack.enter_async_context(light.client.stream("POST", "/v1/completions", json=body, headers=headers))
        )
        await light.waits("shown")
        await holding.aclose()
        stream = await sending
        waited = dict(item.split("=") for item in stream.headers["x-maitred-waited"].split(", "))
        events = [line[6:] async for line in stream.aiter_lines() if line.startswith("data: ")]
    assert sum(map(float, waited.values())) > 0
    assert float(waited.get("slots", 0)) + float(waited.get("tenant_share", 0)) > 0
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
