"""Replicas that come and go under load, with real engines: no client sees anything of it, and nothing stays behind."""

import asyncio
import itertools
import random
from collections import Counter
from contextlib import asynccontextmanager

import psutil
import pytest

from maitred.testing.server_process import serving
from tests.integration.gateway.test_drain import ADMIN_KEY, DECLARED
from tests.integration.gateway.test_replicas import KINDS, Midst, all_kinds, stream
from tests.support.processes import living_children
from tests.support.servers.operator_client import operator_client

MODEL = "maitred-tiny"
LIMIT_S = 500.0
READERS = 4
SETTINGS = {"engine.kv_memory_bytes": "32MiB", "engine.threads": "1", "dispatch.recoveries": "20"}


def engines_of(server):
    """The processes of the engines."""
    children = living_children(server.process.pid, recursive=True)
    return [child for child, (name, command) in children.items() if "engine.sock" in command]


class Fleet:
    """A gateway as its operator sees it."""

    def __init__(self, server, client):
        self.server = server
        self.client = client

    async def scale(self, serving, asleep=0):
        response = await self.client.post(
            "/admin/v1/replicas/scale", json={"model": MODEL, "serving": serving, "asleep": asleep}
        )
        assert response.is_success, response.text

    async def pool(self):
        (pool,) = (await self.client.get("/admin/v1/replicas/pools")).json()["data"]
        return pool

    async def phases(self):
        return Counter(replica["phase"] for replica in (await self.pool())["replicas"])

    def engines(self):
        """The processes of the engines that run."""
        return engines_of(self.server)

    async def wait_phases(self, **phases):
        """Waits until there are exactly so many replicas in each phase, and as many processes."""
        expected = Counter(phases)
        while await self.phases() != +expected or len(self.engines()) != expected.total():  # noqa: ASYNC110 - only asking tells
            await asyncio.sleep(0.05)

    async def kill(self, name):
        """Kills the process of this name, and waits until it is gone."""
        children = living_children(self.server.process.pid, recursive=True)
        (process,) = [child for child, (child_name, _) in children.items() if child_name == name]
        process.kill()
        await asyncio.to_thread(process.wait)

    async def settled(self):
        """The metrics once nothing is held for any request."""
        while True:
            metrics = await asyncio.to_thread(self.server.metrics)
            left = [
                metrics.get(name, 0.0)
                for name in (
                    *("maitred_dispatch_running", "maitred_dispatch_waiting", "maitred_dispatch_outstanding_tokens"),
                    *("maitred_engine_running", "maitred_engine_waiting", "maitred_leases", "maitred_ledger_backlog"),
                )
            ]
            held = metrics.get("maitred_engine_kv_blocks_total", 0) - metrics.get("maitred_engine_kv_blocks_free", 0)
            if not any(left) and not held:
                return metrics
            await asyncio.sleep(0.05)


class Load:
    """Readers that ask without a pause, and compare what they get with the answers of an undisturbed run."""

    def __init__(self, client, undisturbed):
        self.answers = []
        self._client = client
        self._undisturbed = undisturbed
        self._ends = False
        self._numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._read()) for _ in range(READERS)]
        self._midst = Midst(1)

    async def _read(self):
        kinds = list(KINDS)
        while not self._ends:
            number = next(self._numbers) % len(kinds)
            answer = await stream(self._client, number, kinds[number], self._midst)
            assert answer.same_as(self._undisturbed[kinds[number]]), (kinds[number], answer)
            self.answers.append(answer)

    async def flows(self, events=40):
        """Waits until so many more pieces of answers have come."""
        self._midst = Midst(events)
        reached = asyncio.create_task(self._midst.reached.wait())
        await asyncio.wait([reached, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self):
        self._ends = True
        await asyncio.gather(*self._tasks)
        return self.answers


@asynccontextmanager
async def fleet(*arguments, **settings):
    server = serving(*arguments, settings={**SETTINGS, **DECLARED, **settings}, environment={"ADMIN": ADMIN_KEY})
    async with operator_client(server, ADMIN_KEY, LIMIT_S) as (started, client):
        yield Fleet(started, client)


def kill_one(server, draw):
    if engines := engines_of(server):
        draw.choice(engines).kill()


@pytest.mark.parametrize("workers", [1, 3])
async def test_no_answer_is_lost_cut_or_doubled_while_replicas_come_go_and_die(workers):
    draw = random.Random(31)
    async with fleet(**{"server.workers": workers}) as fleet_:
        server, client = fleet_.server, fleet_.client
        await fleet_.wait_phases(serving=1)
        before = await fleet_.settled()
        undisturbed = await all_kinds(client)
        await fleet_.scale(1)
        load = Load(client, undisturbed)
        for serving_, asleep in [(1, 0), (3, 0), (1, 1), (0, 0), (1, 0)]:
            await fleet_.scale(serving_, asleep)
            if serving_:
                await load.flows()
            kill_one(server, draw)
            await fleet_.wait_phases(serving=serving_, asleep=asleep)
            if serving_:
                await load.flows()
        received = [*undisturbed.values(), *await load.end()]
        metrics = await fleet_.settled()
        for name, count in [("prompt", "prompt_tokens"), ("output", "completion_tokens")]:
            ledger = f"maitred_ledger_{name}_tokens_total"
            assert metrics[ledger] - before.get(ledger, 0.0) == sum(answer.usage[count] for answer in received)
        (engine,) = engines_of(server)
        assert server.stop() == 0
        assert not psutil.pid_exists(engine.pid)


async def test_requests_wait_for_the_first_replica_and_whoever_cannot_wait_is_told_when_it_comes():
    async with fleet() as fleet_:
        await fleet_.wait_phases(serving=1)
        await fleet_.scale(0)
        await fleet_.wait_phases()
        body = {"model": MODEL, "prompt": "The rabbit", "max_tokens": 4, "ignore_eos": True}
        expected_s = (await fleet_.pool())["ready_in_s"]
        assert expected_s > 0
        waiting = asyncio.create_task(fleet_.client.post("/v1/completions", json=body))
        hasty = await fleet_.client.post("/v1/completions", json=body, headers={"x-maitred-ttft-ms": "1"})
        assert hasty.status_code == 429
        assert float(hasty.headers["retry-after"]) >= expected_s
        assert not waiting.done()
        while not (await asyncio.to_thread(fleet_.server.metrics)).get("maitred_dispatch_waiting"):
            pass  # it must be told the time before the start is ordered
        await fleet_.scale(1)
        (replica,) = (await fleet_.pool())["replicas"]
        assert replica["phase"] == "starting"
        assert replica["start_kind"] == "weights_cached"
        assert replica["ready_in_s"] > 0
        answer = await waiting
        assert answer.status_code == 200, answer.text
        assert float(answer.headers["x-maitred-predicted-ttft-ms"]) >= 1000 * expected_s
        await fleet_.wait_phases(serving=1)
        (replica,) = (await fleet_.pool())["replicas"]
        assert list(replica["start_s"]) == ["process", "model"]
        assert all(seconds > 0 for seconds in replica["start_s"].values())


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_sleeping_replica_is_woken_and_none_is_started(workers):
    async with fleet(**{"server.workers": workers}) as fleet_:
        await fleet_.wait_phases(serving=1)
        undisturbed = await all_kinds(fleet_.client)
        await fleet_.scale(1, asleep=1)
        await fleet_.wait_phases(serving=1, asleep=1)
        before = {engine.pid for engine in engines_of(fleet_.server)}
        load = Load(fleet_.client, undisturbed)
        await load.flows()
        await fleet_.scale(2)
        await fleet_.wait_phases(serving=2)
        await load.flows()
        await fleet_.scale(0, asleep=2)
        await fleet_.wait_phases(asleep=2)
        await fleet_.scale(2)
        await fleet_.wait_phases(serving=2)
        await load.end()
        assert {engine.pid for engine in engines_of(fleet_.server)} == before
        await fleet_.settled()


async def test_a_dead_controller_leaves_the_fleet_as_it_is_and_a_dead_engine_host_gets_it_again():
    async with fleet(**{"server.workers": 2}) as fleet_:
        await fleet_.wait_phases(serving=1)
        undisturbed = await all_kinds(fleet_.client)
        await fleet_.scale(3)
        await fleet_.wait_phases(serving=3)
        engines = {engine.pid for engine in engines_of(fleet_.server)}
        load = Load(fleet_.client, undisturbed)
        await load.flows()
        await fleet_.kill("mtd-controller")
        await load.flows()
        await fleet_.wait_phases(serving=3)
        assert {engine.pid for engine in engines_of(fleet_.server)} == engines
        await load.flows()
        await fleet_.kill("mtd-keeper")
        await fleet_.wait_phases(serving=3)
        await load.flows()
        await load.end()
        await fleet_.settled()
        assert not engines & {engine.pid for engine in engines_of(fleet_.server)}
