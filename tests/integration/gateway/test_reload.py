"""The configuration is read again while a real gateway serves: at SIGHUP, by its API, and by the command."""

import asyncio
import json
import signal
from contextlib import asynccontextmanager

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from maitred.cli.app import app
from maitred.testing.scripted_openai import DelayDistribution, ServerScript, scripted_openai
from maitred.testing.server_process import serving

ADMIN_KEY = "sk-mtd-admin00000000000-" + "a" * 43
USER_KEY = "sk-mtd-user000000000000-" + "b" * 43
TOKENS = 40
SLOW = ServerScript(ttft=DelayDistribution(mean_s=0.02), itl=DelayDistribution(mean_s=0.05), default_tokens=TOKENS)
QUICK = ServerScript(ttft=DelayDistribution(mean_s=0.005), itl=DelayDistribution(mean_s=0.001), default_tokens=TOKENS)


class Reloaded:
    """A gateway whose file can be changed."""

    def __init__(self, file, server, client):
        self.file, self.server, self.client = file, server, client

    def write(self, **sections):
        self.file.write_text(yaml.safe_dump(sections))

    async def reload(self, **body):
        return await self.client.post("/admin/v1/config/reload", json=body)

    async def reloaded(self, **sections):
        self.write(**sections)
        answer = await self.reload()
        assert answer.status_code == 200, answer.text
        assert answer.json()["seconds"] > 0
        return answer.json()

    async def shown(self):
        return (await self.client.get("/admin/v1/config")).json()

    async def chat(self, model="m", key=ADMIN_KEY, **fields):
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})

    async def stream(self, model="m", begun=None):
        """Tokens; fails where the stream does not end as a whole one, or leaves one out. Some may come together."""
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        text = ""
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    text += (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
                    if begun is not None and text:
                        begun.set()
                if line == "data: [DONE]":
                    tokens = text.split()
                    assert tokens == [str(number) for number in range(len(tokens))]
                    return len(tokens)
        raise AssertionError("the stream ended early")

    async def usage(self, count):
        """So many events, once they are written."""

        async def written():
            return len((await self.client.get("/admin/v1/usage/events")).json()["data"]) >= count

        await until(written)
        return (await self.client.get("/admin/v1/usage/events")).json()["data"]


def declared(**limits):
    def key(name, *scopes, **more):
        return {"secret": {"env": name}, "scopes": list(scopes), **more}

    return {
        "operators": {
            "keys": {
                "admin": key("ADMIN", "admin", "inference", "metrics"),
                "user": key("USER", "inference", limits=limits),
            }
        }
    }


def model(*urls, **more):
    return {"upstreams": [{"url": f"{url}/v1", "dialect": "sglang", "probe_every_s": 1} for url in urls], **more}


@asynccontextmanager
async def gateway(folder, **sections):
    file = folder / "maitred.yaml"
    file.write_text(yaml.safe_dump(sections))
    server = serving("--config", str(file), environment={"ADMIN": ADMIN_KEY, "USER": USER_KEY})
    started = await asyncio.to_thread(server.__enter__)
    try:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with httpx.AsyncClient(base_url=started.url, timeout=300, headers=headers) as client:
            yield Reloaded(file, started, client)
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


@pytest.fixture(scope="module")
def quick():
    with scripted_openai(QUICK) as server:
        yield server.url


@pytest.fixture(scope="module")
def slow():
    with scripted_openai(SLOW) as server:
        yield server.url


async def until(true, seconds=300.0):
    async with asyncio.timeout(seconds):
        while True:
            if await true():
                return
            await asyncio.sleep(0.02)


async def test_a_reload_says_what_it_changes_and_what_needs_a_restart_and_a_dry_run_changes_nothing(tmp_path, quick):
    sections = {"tenants": declared(), "models": {"m": model(quick)}}
    async with gateway(tmp_path, **sections) as system:
        before = await system.shown()
        assert "max_in_flight: 8192" in before["settings"]
        assert ADMIN_KEY not in before["settings"]
        system.write(**sections, server={"max_in_flight": 7}, residency={"turn_loads": 9}, explain={"requests": 3})
        for dry_run in (True, False):
            report = (await system.reload(dry_run=dry_run)).json()
            assert report["dry_run"] is dry_run
            changed = {change["setting"]: (change["before"], change["after"]) for change in report["changed"]}
            assert changed == {"server.max_in_flight": ("8192", "7"), "explain.requests": ("1000", "3")}
            ((pending, why),) = [(change["setting"], change["restart"]) for change in report["needs_restart"]]
            assert (pending, bool(why)) == ("residency.turn_loads", True)
            shown = await system.shown()
            if dry_run:
                assert shown == before
        assert "max_in_flight: 7" in shown["settings"]
        assert f"{tmp_path}/maitred.yaml:" in next(
            line for line in shown["settings"].splitlines() if "max_in_flight" in line
        )
        assert [change["setting"] for change in shown["needs_restart"]] == ["residency.turn_loads"]
        report = await system.reloaded(**sections)
        assert {change["setting"] for change in report["changed"]} == {"server.max_in_flight", "explain.requests"}
        assert report["needs_restart"] == []


async def test_an_invalid_configuration_is_refused_with_all_its_faults_and_the_old_one_stays(tmp_path, quick):
    sections = {"tenants": declared(), "models": {"m": model(quick)}}
    async with gateway(tmp_path, **sections) as system:
        system.write(**sections, server={"max_in_flight": 0, "prot": 1}, routing={"aliases": {"a": "nowhere"}})
        refused = await system.reload()
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        for fault in ("server.max_in_flight", "server.prot", "Did you mean", "stays as it was"):
            assert fault in message
        assert (await system.chat()).status_code == 200
        metrics = (await system.client.get("/metrics")).text
        assert "maitred_config_reload_successful 0.0" in metrics
        assert 'maitred_config_reloads_total{end="refused"} 1.0' in metrics
        assert "server.prot" in (await system.shown())["fault"]
        assert "was not reloaded" in system.server.log.read_text()

        system.server.process.send_signal(signal.SIGHUP)
        await until(lambda: counted(system, "refused", 2))
        system.write(**sections, server={"max_in_flight": 9})
        system.server.process.send_signal(signal.SIGHUP)
        await until(lambda: counted(system, "applied", 1))
        assert "maitred_config_reload_successful 1.0" in (await system.client.get("/metrics")).text
        shown = await system.shown()
        assert shown["fault"] is None
        assert "max_in_flight: 9" in shown["settings"]


async def counted(system, end, count):
    return f'maitred_config_reloads_total{{end="{end}"}} {count:.1f}' in (await system.client.get("/metrics")).text


async def test_a_server_that_is_removed_ends_its_stream_and_gets_nothing_new(tmp_path, slow, quick):
    with scripted_openai(SLOW) as leaving:
        sections = {"tenants": declared(), "models": {"m": model(leaving.url)}}
        async with gateway(tmp_path, **sections) as system:
            begun = asyncio.Event()
            running = asyncio.create_task(system.stream(begun=begun))
            await begun.wait()
            await system.reloaded(tenants=declared(), models={"m": model(quick)})
            assert not running.done()
            assert (await system.chat()).status_code == 200
            names = {item["replica"] for item in (await system.client.get("/admin/v1/replicas")).json()["data"]}
            assert names == {quick.removeprefix("http://")}
            assert await running == TOKENS
            served = [row["replica"] for row in await system.usage(2)]
            assert sorted(served) == sorted([leaving.url.removeprefix("http://"), quick.removeprefix("http://")])
            # Nobody looks at it any more, and its connections are closed.
            port = int(leaving.url.rpartition(":")[2])
            await until(lambda: closed(system.server.process.pid, port))


async def closed(pid, port):
    import psutil

    connections = await asyncio.to_thread(psutil.Process(pid).net_connections, "tcp")
    return not any(connection.raddr and connection.raddr.port == port for connection in connections)


async def test_a_model_comes_and_goes_and_an_alias_moves(tmp_path, slow, quick):
    sections = {"tenants": declared(), "models": {"m": model(slow)}, "routing": {"aliases": {"best": "m"}}}
    async with gateway(tmp_path, **sections) as system:
        assert (await system.chat("n")).status_code == 404
        begun = asyncio.Event()
        running = asyncio.create_task(system.stream("best", begun))
        await begun.wait()
        await system.reloaded(tenants=declared(), models={"n": model(quick)}, routing={"aliases": {"best": "n"}})
        assert (await system.chat("n")).status_code == 200
        assert (await system.chat("best")).status_code == 200
        gone = await system.chat("m")
        assert gone.status_code == 404
        assert "Served: best, n" in gone.text
        assert not running.done()
        assert await running == TOKENS
        # Back again, while nobody remembers it.
        await system.reloaded(**sections)
        assert (await system.chat("m")).status_code == 200
        models = [row["model"] for row in await system.usage(4)]
        assert sorted(models) == ["m", "m", "n", "n"]


async def test_a_running_request_is_billed_at_the_price_that_it_began_with(tmp_path, slow):
    sections = {"tenants": declared(), "models": {"m": model(slow)}}
    async with gateway(tmp_path, **sections, admission={"prices": {"m": {"output": 100.0}}}) as system:
        begun = asyncio.Event()
        running = asyncio.create_task(system.stream(begun=begun))
        await begun.wait()
        await system.reloaded(**sections, admission={"prices": {"m": {"output": 300.0}}})
        assert await running == TOKENS
        assert (await system.chat()).status_code == 200
        events = sorted(await system.usage(2), key=lambda event: event["cost_usd"])
        assert [round(event["cost_usd"] / event["output_tokens"] * 1e6) for event in events] == [100, 300]


async def test_limits_keys_and_tenants_change(tmp_path, quick):
    sections = {"models": {"m": model(quick)}}
    async with gateway(tmp_path, tenants=declared(), **sections) as system:
        assert (await system.chat(key=USER_KEY)).status_code == 200
        await system.reloaded(tenants=declared(requests_per_minute=1), **sections)
        assert (await system.chat(key=USER_KEY)).status_code == 200
        limited = await system.chat(key=USER_KEY)
        assert limited.status_code == 429
        assert "1 request per minute" in limited.json()["error"]["message"]
        without = declared()
        del without["operators"]["keys"]["user"]
        await system.reloaded(tenants=without, **sections)
        assert (await system.chat(key=USER_KEY)).status_code == 401


async def test_who_waits_keeps_its_place_when_the_rules_of_the_line_change(tmp_path, slow):
    """One place, many requests: the settings of the line change under them, and each is answered once."""
    sections = {"tenants": declared(), "models": {"m": model(slow)}}
    async with gateway(tmp_path, **sections) as system:
        running = [asyncio.create_task(system.stream()) for _ in range(24)]
        await asyncio.sleep(0.3)
        for dispatch in (
            {"line": {"policy": "fifo"}},
            {"pools": {"mine": {"tenants": ["operators"], "share": 0.5}}},
            {"line": {"policy": "deficit"}, "reserved": {"operators": 0.2}},
            {"headroom": 0.2, "recoveries": 1, "max_waiting": {"standard": 1}},
        ):
            await system.reloaded(**sections, dispatch=dispatch)
        assert await asyncio.gather(*running) == [TOKENS] * 24


async def test_twenty_quick_reloads_under_streams_drop_none(tmp_path, slow, quick):
    sections = {"tenants": declared(), "models": {"m": model(slow)}}
    async with gateway(tmp_path, **sections) as system:
        tasks = await tasks_of(system)
        running = [asyncio.create_task(system.stream()) for _ in range(10)]
        for number in range(20):
            urls = [slow] if number % 2 else [slow, quick]
            await system.reloaded(
                tenants=declared(requests_per_minute=1000 + number),
                models={"m": model(*urls), f"extra-{number % 3}": model(quick)},
                admission={"prices": {"m": {"output": float(number)}}},
                health={"slow_start_s": 1.0 + number},
            )
            assert (await system.chat(f"extra-{number % 3}")).status_code == 200
        assert await asyncio.gather(*running) == [TOKENS] * 10
        await system.reloaded(**sections)
        await until(lambda: as_before(system, tasks))


async def as_before(system, tasks):
    return await tasks_of(system) <= tasks


async def tasks_of(system):
    """Of its event loop, this scrape among them."""
    lines = (await system.client.get("/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("maitred_process_tasks "))


async def test_the_command_reloads_and_shows_the_faults(tmp_path, quick):
    sections = {"tenants": declared(), "models": {"m": model(quick)}}
    async with gateway(tmp_path, **sections) as system:

        def command(*arguments):
            options = ["--url", system.server.url, "--key", ADMIN_KEY]
            return CliRunner().invoke(app, ["config", *arguments, *options])

        system.write(**sections, server={"max_in_flight": 7}, store={"durable_journal": True})
        dry = await asyncio.to_thread(command, "reload", "--dry-run")
        assert dry.exit_code == 0, dry.output
        assert "server.max_in_flight" in dry.output
        assert "8192" in dry.output
        done = await asyncio.to_thread(command, "reload")
        assert "needs a restart" in done.output
        assert "store.durable_journal" in done.output
        shown = await asyncio.to_thread(command, "running")
        assert "max_in_flight: 7" in shown.output
        system.write(**sections, server={"max_in_flight": 0})
        refused = await asyncio.to_thread(command, "reload")
        assert refused.exit_code == 2
