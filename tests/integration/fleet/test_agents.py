"""Real agents and gateways over TLS: replicas on two machines come, go, die and move, and no stream notices."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, asynccontextmanager

import pytest

from maitred.testing.server_process import free_port, serving
from tests.integration.fleet.test_replica_pool import LIMIT_S, MODEL, SETTINGS, Fleet, Load
from tests.integration.fleet.test_scaling import AUTOSCALING, Scaling, crowd
from tests.integration.gateway.test_drain import ADMIN_KEY, DECLARED
from tests.integration.gateway.test_replicas import all_kinds
from tests.support.certificates import Authority
from tests.support.processes import living_children
from tests.support.servers.operator_client import operator_client
from tests.support.servers.redis_server import redis_server


class Machine:
    """A machine with an agent: here a process of this one."""

    def __init__(self, process, log):
        self.process = process
        self.log = log

    def engines(self):
        """The processes of its engines."""
        children = living_children(self.process.pid, recursive=True)
        return {child.pid for child, (_, command) in children.items() if "local_engine" in command}


class Site:
    """Gateways and machines that trust each other."""

    def __init__(self, folder, stack):
        authority = Authority(folder)
        self._folder = folder
        self.stack = stack
        self._link = {
            end: {
                "engine_link.secret.env": "LINK",
                "engine_link.certificate_file": issued.certificate,
                "engine_link.key_file": issued.key,
                "engine_link.ca_file": authority.file,
            }
            for end, issued in {"gateway": authority.issue("gateway"), "agent": authority.issue("agent")}.items()
        }
        self.environment = {"ADMIN": ADMIN_KEY, "LINK": "a secret that both ends know"}

    def machine(self, name, *ports, most=3, sequences=64, **settings):
        """Starts an agent that dials gateways on these ports."""
        log = self._folder / f"{name}.log"
        command = [
            *(sys.executable, "-m", "maitred", "agent", "--name", name, "--max-replicas", str(most)),
            *("--first-port", str(free_port()), "--zone", name),
            *(argument for port in ports for argument in ("--gateway", f"127.0.0.1:{port}")),
            *(f"--set={key}={value}" for key, value in self._link["agent"].items()),
            *(f"--set=engine.{key}={value}" for key, value in settings.items()),
            *("--set=engine.kv_memory_bytes=32MiB", "--set=engine.threads=1", f"--max-sequences={sequences}"),
        ]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                cwd=self._folder,
            )
        self.stack.callback(process.wait)
        self.stack.callback(process.terminate)
        return Machine(process, log)

    @asynccontextmanager
    async def gateway(self, port, **settings):
        """A gateway at which agents connect on this port."""
        server = serving(
            settings={
                **SETTINGS,
                **DECLARED,
                **self._link["gateway"],
                "model.backend": "agents",
                "agents.listen": f"tcp:127.0.0.1:{port}",
                "agents.lost_after_s": 2,
                **settings,
            },
            environment={**self.environment, "MAITRED__STORE__FOLDER": str(self._folder / f"data-{port}")},
        )
        try:
            async with operator_client(server, ADMIN_KEY, LIMIT_S) as (started, client):
                yield Gateway(started, client)
        except BaseException:
            print(*(log.read_text() for log in self._folder.glob("*.log")))
            raise


class Gateway(Fleet):
    """A gateway as its operator sees it; its engines are elsewhere."""

    async def wait_phases(self, **phases):
        while await self.phases() != Counter(phases):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)

    async def agents(self):
        """The names of the agents that have replicas, with their number."""
        return Counter(replica["replica"].rpartition("-")[0] for replica in (await self.pool())["replicas"])


class Wire:
    """A wire between an agent and a gateway, which can be cut."""

    def __init__(self, target):
        self.port = free_port()
        self._target = target
        self._writers = set()
        self._server = None

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *error):
        await self.cut()

    async def cut(self):
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _connect(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader, writer):
        self._writers.add(writer)
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


@pytest.fixture
def site(short_folder):
    with ExitStack() as stack:
        yield Site(short_folder, stack)


async def test_two_gateways_run_the_engines_of_two_machines_and_one_of_these_dies(site, postgres_url):
    redis = site.stack.enter_context(redis_server())
    site.environment |= {"DATABASE": postgres_url, "REDIS": redis.url.reveal()}
    shared = {"store.url.env": "DATABASE", "counters.url.env": "REDIS"}
    one, other = free_port(), free_port()
    machines = [site.machine(name, one, other) for name in ("a", "b")]
    async with site.gateway(one, **shared) as first, site.gateway(other, **shared) as second:
        await first.wait_phases(serving=1)
        undisturbed = await all_kinds(first.client)
        await first.scale(0)
        await second.wait_phases()
        await second.scale(3)
        for gateway in (first, second):
            await gateway.wait_phases(serving=3)
            assert sorted((await gateway.agents()).values()) == [1, 2], "replicas are spread over the zones"
        loads = [Load(gateway.client, undisturbed) for gateway in (first, second)]
        for load in loads:
            await load.flows()
        machines[0].process.kill()
        for load in loads:
            await load.flows()
        await first.wait_phases(serving=3)
        assert await second.agents() == Counter(b=3)
        await first.scale(1)
        await second.wait_phases(serving=1)
        for load in loads:
            assert await load.end()
        metrics = await second.settled()
        assert metrics.get("maitred_lost_streams_total", 0) == 0


async def test_a_stream_through_one_gateway_goes_on_while_another_gateway_lets_its_engine_go(site, postgres_url):
    redis = site.stack.enter_context(redis_server())
    site.environment |= {"DATABASE": postgres_url, "REDIS": redis.url.reveal()}
    shared = {"store.url.env": "DATABASE", "counters.url.env": "REDIS", "dispatch.recoveries": 0}
    ports = free_port(), free_port()
    machine = site.machine("a", *ports, drain_grace_s=0)  # an engine that is told to end cuts what runs there
    async with site.gateway(ports[0], **shared) as first, site.gateway(ports[1], **shared) as second:
        await first.wait_phases(serving=1)
        undisturbed = await all_kinds(first.client)
        await first.scale(2)
        for gateway in (first, second):
            await gateway.wait_phases(serving=2)
        load = Load(second.client, undisturbed)
        await load.flows()
        await first.scale(1)
        while not (await second.phases())["draining"]:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)
        assert len(machine.engines()) == 2, "it is there until all gateways have heard of it"
        await load.flows()
        for gateway in (first, second):
            await gateway.wait_phases(serving=1)
        await load.flows()
        assert await load.end()
        while len(machine.engines()) > 1:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


async def test_streams_go_on_while_the_control_line_is_cut_or_the_gateway_is_gone(site):
    port = free_port()
    async with Wire(port) as wire:
        machine = site.machine("a", wire.port)
        async with site.gateway(port) as gateway:
            await gateway.wait_phases(serving=1)
            undisturbed = await all_kinds(gateway.client)
            load = Load(gateway.client, undisturbed)
            await load.flows()
            await wire.cut()
            await load.flows(200)
            await gateway.wait_phases(serving=1)
            async with wire:
                await gateway.scale(2)
                await gateway.wait_phases(serving=2)
                assert await load.end()
                engines = machine.engines()
                assert len(engines) == 2
                gateway.server.process.kill()
                await asyncio.to_thread(gateway.server.process.wait)
                async with site.gateway(port) as again:
                    await again.wait_phases(serving=2)
                    assert (await again.pool())["serving"] == 2
                    assert machine.engines() == engines, "they were found, and none was started"
                    answers = await all_kinds(again.client)
                    assert all(answers[kind].same_as(undisturbed[kind]) for kind in answers)


async def test_engines_of_agents_come_with_the_load_and_go_after_it(site):
    port = free_port()
    for name in ("a", "b"):
        site.machine(name, port, most=1, sequences=4)
    async with site.gateway(port, **AUTOSCALING) as gateway:
        scaling = Scaling(gateway.client)
        await gateway.wait_phases(serving=1)
        ends = asyncio.Event()
        load = asyncio.create_task(crowd(gateway.client, 12, ends))
        await scaling.until(lambda state: state["desired"] == 2)
        await gateway.wait_phases(serving=2)
        assert await gateway.agents() == Counter(a=1, b=1)
        ends.set()
        assert await load > 0
        await gateway.wait_phases(serving=1)
        assert (await scaling.changes())[-1]["reason"] == "surplus"


async def test_engines_of_agents_sleep_and_wake_and_no_other_gateway_wakes_them(site, postgres_url):
    redis = site.stack.enter_context(redis_server())
    site.environment |= {"DATABASE": postgres_url, "REDIS": redis.url.reveal()}
    shared = {"store.url.env": "DATABASE", "counters.url.env": "REDIS"}
    ports = free_port(), free_port()
    machine = site.machine("a", *ports, most=2)
    async with site.gateway(ports[0], **shared) as first, site.gateway(ports[1], **shared) as second:
        await first.wait_phases(serving=1)
        undisturbed = await all_kinds(second.client)
        (agent,) = (await first.client.get("/admin/v1/replicas/agents")).json()["data"]
        shown = {key: agent[key] for key in ("agent", "zone", "connected", "replicas", "max_replicas", "fault")}
        assert shown == {"agent": "a", "zone": "a", "connected": True, "replicas": 1, "max_replicas": 2, "fault": None}
        assert (await asyncio.to_thread(first.server.metrics))["maitred_agent_up"] == 1
        await first.scale(2)
        for gateway in (first, second):
            await gateway.wait_phases(serving=2)
        engines = machine.engines()
        load = Load(second.client, undisturbed)
        await load.flows()
        await first.scale(1, asleep=1)
        for gateway in (first, second):
            await gateway.wait_phases(serving=1, asleep=1)
        await load.flows(50)
        for gateway in (first, second):
            assert await gateway.phases() == Counter(serving=1, asleep=1), "requests wake nothing"
        await second.scale(2)
        for gateway in (first, second):
            await gateway.wait_phases(serving=2)
        await load.flows()
        assert await load.end()
        await second.scale(0, asleep=2)
        for gateway in (first, second):
            await gateway.wait_phases(asleep=2)
        sleeping = machine.engines()
        assert sleeping == engines, "their processes are those of before"
        second.server.process.kill()
        await asyncio.to_thread(second.server.process.wait)
        await first.scale(1, asleep=1)
        await first.wait_phases(serving=1, asleep=1)
        answers = await all_kinds(first.client)
        assert all(answers[kind].same_as(undisturbed[kind]) for kind in answers)
        assert machine.engines() == engines


async def test_a_sleeping_engine_of_an_agent_that_is_killed_sleeps_again(site):
    port = free_port()
    machine = site.machine("a", port, most=2)
    async with site.gateway(port) as gateway:
        await gateway.wait_phases(serving=1)
        await gateway.scale(1, asleep=1)
        await gateway.wait_phases(serving=1, asleep=1)
        engines = machine.engines()
        for engine in engines:
            os.kill(engine, signal.SIGKILL)
        while machine.engines() & engines or len(machine.engines()) < 2:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)
        await gateway.wait_phases(serving=1, asleep=1)


async def test_an_agent_that_is_stopped_gives_its_answers_first(site):
    port = free_port()
    leaving = site.machine("a", port, most=1)
    async with site.gateway(port, **{"server.workers": 2, "dispatch.recoveries": 0}) as gateway:
        await gateway.wait_phases(serving=1)
        undisturbed = await all_kinds(gateway.client)
        staying = site.machine("b", port, most=1)
        await gateway.scale(2)
        await gateway.wait_phases(serving=2)
        load = Load(gateway.client, undisturbed)
        await load.flows()
        leaving.process.terminate()
        assert await asyncio.to_thread(leaving.process.wait) == 0
        await load.flows()
        assert await load.end()
        assert await gateway.agents() == Counter(b=1)
        assert len(staying.engines()) == 1
        assert MODEL in str((await gateway.client.get("/v1/models")).json())
