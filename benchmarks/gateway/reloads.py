"""The configuration is reloaded again and again under load, and nobody notices.

One gateway serves the bundled model on an engine of its own and another one on scripted servers of somebody else's.
Users read streams and whole answers of both while the configuration is changed and reloaded: servers come and go (also
the one that streams come from), models and aliases, prices, limits, keys, rules of the line, breakers. No stream may be
dropped and no request may fail; every reload has to be over within a second, and afterwards memory, file descriptors
and tasks have to be what they were. In between, configurations with faults are refused.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import msgspec
import uvloop
import yaml

from benchmarks.gateway.users import is_whole
from benchmarks.support.report import Report, percentiles
from maitred.config.tree import BUNDLED_MODEL
from maitred.load.measure.record import RequestRecord
from maitred.load.play.driver import run
from maitred.load.spec import ArrivalsSpec, ClientsSpec, LoadSpec, LoadTarget, ShapeSpec, StopCondition
from maitred.testing.scripted_openai import DelayDistribution, ServerScript, scripted_openai
from maitred.testing.server_process import ServerProcess, serving

SEED = 20261122
RELOADS, QUICK_RELOADS = 100, 12
REFUSALS_IN = 10
"""One in so many reloads is tried with faults first."""
EVERY_S, QUICK_EVERY_S = 1.0, 0.6
WARM = 0.2
"""Part of the reloads after which memory is looked at first."""
WARM_S = 3.0
SETTLE_S = 4.0
"""Connections to servers of others stay open for 3 s."""
MOST_S = 1.0
MOST_GROWTH = 0.05
MOST_FDS = 4
"""Of two connections to the database, which its pool opens when it first needs them."""
ADMIN_KEY = "sk-mtd-admin00000000000-" + "a" * 43
USER_KEY = "sk-mtd-user000000000000-" + "b" * 43
SERVER = ServerScript(ttft=DelayDistribution(mean_s=0.05, cv=0.5), itl=DelayDistribution(mean_s=0.03, cv=0.5))
RATES_PER_S = {
    (model, stream): 3.0 if stream else 1.5 for model in ("maitred-tiny", "theirs") for stream in (True, False)
}
"""Requests of each kind. Open loop: users who send the next request at once would take whatever cores there are."""


def main() -> int:
    """Runs the benchmark; the exit code says whether all bars were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_RELOADS} reloads")
    arguments = parser.parse_args()
    report = Report("reloads", seed=SEED, quick=arguments.quick)
    with (
        TemporaryDirectory(prefix="maitred-reloads-") as folder,
        scripted_openai(SERVER) as one,
        scripted_openai(SERVER) as two,
    ):
        file = Path(folder) / "maitred.yaml"
        urls = [one.url, two.url]
        _write(file, written(0, urls))
        environment = {"ADMIN": ADMIN_KEY, "USER": USER_KEY}
        with serving("--config", str(file), environment=environment) as server:
            count, every_s = (QUICK_RELOADS, QUICK_EVERY_S) if arguments.quick else (RELOADS, EVERY_S)
            uvloop.run(play(server, file, urls, count, every_s, report))
            report.require("exit code", server.stop(), at_most=0)
    return report.finish()


def written(number: int, urls: list[str]) -> str:
    """The configuration after so many reloads: each differs from the one before in many places."""

    def servers(*chosen: str) -> dict[str, Any]:
        upstreams = [{"url": f"{url}/v1", "dialect": "sglang", "idle_timeout_s": 60 + number % 5} for url in chosen]
        return {"upstreams": upstreams}

    def key(name: str, *scopes: str) -> dict[str, Any]:
        limits = {"requests_per_minute": 100_000 + number}
        return {"secret": {"env": name}, "scopes": [*scopes], "limits": limits}

    chosen = [[urls[0]], urls, [urls[1]]][number % 3]
    keys = {"admin": key("ADMIN", "admin", "inference", "metrics"), "user": key("USER", "inference")}
    policies = ("fair", "fair", "fifo", "deficit")
    return yaml.safe_dump(
        {
            "model": {"path": str(BUNDLED_MODEL), "served_name": "maitred-tiny"},
            "engine": {"kv_memory_bytes": "64MiB"},
            "models": {"theirs": servers(*chosen), f"guest-{number % 4}": servers(urls[number % 2])},
            "routing": {"aliases": {"best": ("theirs", "maitred-tiny")[number % 2]}},
            "tenants": {"operators": {"keys": keys, "weight": 1.0 + number % 7}},
            "admission": {"prices": {"*": {"prompt": 1.0 + number, "output": 2.0 + number}}},
            "dispatch": {"line": {"policy": policies[number % 4]}, "headroom": 0.05 + number % 3 / 100},
            "health": {"slow_start_s": 1.0 + number % 9},
            "slos": {"quick": {"indicator": "ttft", "objective": 0.9, "within_s": 1.0 + number % 2}},
            "explain": {"requests": 100 + number},  # as many as there are before memory is looked at first
            "server": {"max_in_flight": 5000 + number},
        }
    )


async def play(server: ServerProcess, file: Path, urls: list[str], count: int, every_s: float, report: Report) -> None:
    """Lets the users loose, reloads, and counts what is left."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    over = asyncio.Event()
    async with aiohttp.ClientSession(headers=headers) as session:
        await found(session, server)
        await warmed(server)
        before = await settled(session, server, file, urls)
        async with asyncio.TaskGroup() as group:
            loads = {who: group.create_task(run(users(server.url, *who), stop=over)) for who in RATES_PER_S}
            await asyncio.sleep(every_s)
            times_s, own_s, refused, warm = await reload(session, server, file, urls, count, every_s)
            over.set()
        after = await settled(session, server, file, urls)
    records = {who: load.result().records for who, load in loads.items()}
    report.figures = {
        "reloads": len(times_s),
        "refused": refused,
        "reload_s": percentiles(times_s),
        "longest_reload_s": max(times_s),
        "own_reload_s": percentiles(own_s),
        "answers": {
            f"{model}, {'stream' if stream else 'whole'}": len(of_load) for (model, stream), of_load in records.items()
        },
        "before": levels(before),
        "after_a_fifth": levels(warm),
        "after": levels(after),
    }
    broken = [record for of_load in records.values() for record in of_load if not is_whole(record)]
    report.figures["broken"] = [msgspec.to_builtins(record, enc_hook=str) for record in broken[:5]]
    if broken:
        report.figures["log"] = [
            line for line in (await asyncio.to_thread(server.log.read_text)).splitlines() if " INFO " not in line
        ]
    report.require("reloads", len(times_s), at_least=count)
    report.require("configurations with faults that were refused", refused, at_least=count // REFUSALS_IN)
    report.require("streams dropped", sum(dropped(records, stream=True)), at_most=0)
    report.require("whole answers that failed", sum(dropped(records, stream=False)), at_most=0)
    report.require("answers under reloads", sum(map(len, records.values())), at_least=2 * count)
    report.require("longest reload, s", max(times_s), at_most=MOST_S)
    growth = after["maitred_process_resident_memory_bytes"] / warm["maitred_process_resident_memory_bytes"] - 1
    report.require("growth of memory", growth, at_most=MOST_GROWTH)
    for name, most in (("open_fds", MOST_FDS), ("tasks", 0)):
        more = after[f"maitred_process_{name}"] - before[f"maitred_process_{name}"]
        report.require(f"more {name.replace('_', ' ')}", more, at_most=most)
    report.require("requests in flight", after["maitred_in_flight"], at_most=0)
    print(report.figures)


async def found(session: aiohttp.ClientSession, server: ServerProcess) -> None:
    """Waits until the gateway has found the servers of all models."""
    headers = {"authorization": f"Bearer {USER_KEY}"}
    ready = False
    while not ready:
        async with session.get(f"{server.url}/v1/models", headers=headers) as response:
            ready = all(model["ready"] for model in (await response.json())["data"])
        await asyncio.sleep(0 if ready else 0.1)


async def warmed(server: ServerProcess) -> None:
    """Lets everybody in for a moment, so that everything is open that is opened once."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for who in RATES_PER_S:
            group.create_task(run(users(server.url, *who), stop=over))
        await asyncio.sleep(WARM_S)
        over.set()


async def settled(
    session: aiohttp.ClientSession, server: ServerProcess, file: Path, urls: list[str]
) -> dict[str, float]:
    """How the gateway is once it was reloaded to the first configuration and nobody is there any more."""
    for number in (1, 0):
        _write(file, written(number, urls))
        async with session.post(f"{server.url}/admin/v1/config/reload") as response:
            response.raise_for_status()
    await asyncio.sleep(SETTLE_S)
    return await metrics(session, server)


async def reload(
    session: aiohttp.ClientSession, server: ServerProcess, file: Path, urls: list[str], count: int, every_s: float
) -> tuple[list[float], list[float], int, dict[str, float]]:
    """Reloads so often: how long each took its caller and by its own word, how many were refused, how it looked."""
    times_s: list[float] = []
    own_s: list[float] = []
    refused = 0
    warm: dict[str, float] = {}
    for number in range(1, count + 1):
        if number % REFUSALS_IN == 0:
            _write(file, written(number, urls) + "serverr: {}\n")
            async with session.post(f"{server.url}/admin/v1/config/reload") as response:
                refused += response.status == 400
        _write(file, written(number, urls))
        began_s = time.perf_counter()
        async with session.post(f"{server.url}/admin/v1/config/reload") as response:
            answer = await response.json()
        times_s.append(time.perf_counter() - began_s)
        own_s.append(answer.get("seconds", 0.0))
        if response.status != 200 or len(answer["changed"]) < 5 or answer["needs_restart"]:
            raise RuntimeError(f"Reload {number}: {answer}")
        if number == max(1, round(count * WARM)):
            warm = await metrics(session, server)
        await asyncio.sleep(every_s)
    return times_s, own_s, refused, warm


def users(url: str, model: str, stream: bool) -> LoadSpec:
    """Users who read every answer to its end."""
    return LoadSpec(
        target=LoadTarget(url=url, model=model, stream=stream, exact_output="always"),
        arrivals=ArrivalsSpec(rate_per_s=RATES_PER_S[model, stream]),
        shape=ShapeSpec(prompt_tokens="uniform:5..100", output_tokens="uniform:20..60"),
        clients=ClientsSpec(retries=0),
        bounds=StopCondition(duration_s=3600.0),
        seed=SEED,
    )


def dropped(records: dict[tuple[str, bool], list[RequestRecord]], *, stream: bool) -> list[int]:
    """How many answers were not whole, of each model."""
    return [
        sum(not is_whole(record) for record in of_load)
        for (_, streamed), of_load in records.items()
        if streamed is stream
    ]


def _write(file: Path, text: str) -> None:
    file.write_text(text)


def levels(metrics: dict[str, float]) -> dict[str, float]:
    """What must not grow."""
    return {name: metrics[f"maitred_process_{name}"] for name in ("resident_memory_bytes", "open_fds", "tasks")}


async def metrics(session: aiohttp.ClientSession, server: ServerProcess) -> dict[str, float]:
    """What the gateway says, the samples of a name summed over their labels."""
    async with session.get(f"{server.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    sums: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            name = sample.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


if __name__ == "__main__":
    sys.exit(main())
