"""Half an hour of trouble in three minutes: no lost, no duplicated and no silently cut answer, and all comes back.

    callers -> maitred serve -> three engines: killed, stopped (SIGSTOP), slowed, flapping
                             -> two scripted servers: the same, answers with faults, stale metrics

Callers ask both models all the time, streaming and not. Each request must end as exactly one of whole and right (the
undisturbed greedy answer; the text of the script), or with an explicit error; nothing may be cut silently, differ, or
take longer than its limit. What is whole is in the ledger once, as the caller received it; what is not is not charged.
At the end nothing is held: no request, lease, slot, block or stream.
"""

import argparse
import asyncio
import json
import random
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.support.chaos.chaos_answers import UPSTREAM_MODEL, Load, own_questions, undisturbed, upstream_questions
from benchmarks.support.chaos.chaos_judge import PRICE, Line, Run, judge
from benchmarks.support.chaos.chaos_trouble import (
    ENGINE_KINDS,
    SOUND,
    UPSTREAM_KINDS,
    EngineTrouble,
    Trouble,
    Upstream,
    schedule,
)
from benchmarks.support.installation import MODEL, Key, Organisation, declared
from benchmarks.support.report import Report
from benchmarks.support.single_request import Client
from maitred.config.tree import BUNDLED_MODEL
from maitred.load.chaos.scrape import INTERVAL_S, MetricsPoller
from maitred.testing.server_process import ServerProcess, serving

SEED = 20261122
SECONDS, QUICK_SECONDS = 180, 40
ENGINES = 3
CALLERS = 10
"""Of each model."""
LIMIT_S = 60.0
SETTLED_WITHIN_S = 60.0
TIMES = {
    "connect_timeout_s": 1,
    "first_part_timeout_s": 3,
    "idle_timeout_s": 2,
    "total_timeout_s": 20,
    "probe_every_s": 1,
    "probe_timeout_s": 1,
}
HEALTH = {
    "breaker": {"window_s": 3.0, "first_open_s": 0.1, "most_open_s": 6.0},
    "outliers": {"every_s": 1.0, "base_s": 3.0, "most_s": 30.0},
    "slow_start_s": 3.0,
}
"""A tenth of all times, as the trouble comes ten times as fast."""
MOST_WAIT_S = 15.0
"""Of a request that no engine is there for."""
HARSH_PAUSE_S = 0.5, 2.0
"""Between two troubles of the engines, where the gateway is left with its own times."""
ENGINE_PAUSE_S = 2.0, 5.0
"""Between two troubles of the engines, whose starts are put off longer each time that they die young."""
MUST_BE_ZERO = (
    *("maitred_in_flight", "maitred_leases", "maitred_ledger_backlog", "maitred_dispatch_running"),
    *("maitred_dispatch_waiting", "maitred_dispatch_outstanding_tokens", "maitred_replica_requests"),
    *("maitred_engine_running", "maitred_engine_waiting", "maitred_engine_kv_blocks_promised"),
    "maitred_upstream_open_requests",
)
COUNTED = (
    *("maitred_engine_restarts_total", "maitred_recoveries_total", "maitred_engine_output_tokens_total"),
    "maitred_engine_recomputed_tokens_total",
)


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SECONDS} seconds")
    parser.add_argument("--seconds", type=float, help=f"of trouble, in place of {SECONDS}")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--harsh", action="store_true", help="twice the trouble for the engines, and every setting as it comes"
    )
    arguments = parser.parse_args()
    report = Report("chaos_harsh" if arguments.harsh else "chaos", seed=arguments.seed, quick=arguments.quick)
    seconds = arguments.seconds or (QUICK_SECONDS if arguments.quick else SECONDS)
    judge(report, uvloop.run(trouble(arguments.seed, seconds, harsh=arguments.harsh)), seconds)
    return report.finish()


async def trouble(seed: int, seconds: float, *, harsh: bool) -> Run:
    """All of it, from the start of the servers to the ledger that they leave."""
    run = Run()
    upstreams = [Upstream(), Upstream()]
    with TemporaryDirectory(prefix="maitred-chaos-") as folder:
        key, environment = Key(), dict[str, str]()
        organisations = {"callers": Organisation({"key": key}, limits={"usd_total": 1000.0})}
        config = Path(folder) / "maitred.yaml"
        config.write_text(json.dumps(_config(upstreams, declared(organisations, environment), folder, harsh)))
        try:
            for upstream in upstreams:
                await upstream.start(SOUND)
            with serving("--config", str(config), settings={"store.folder": folder}, environment=environment) as server:
                pause_s = HARSH_PAUSE_S if harsh else ENGINE_PAUSE_S
                await _troubled(run, server, upstreams, key.secret, random.Random(seed), seconds, pause_s)
                run.exit_code = await asyncio.to_thread(server.stop)
        finally:
            for upstream in upstreams:
                await upstream.stop()
        run.lines = _ledger(Path(folder))
    return run


def _config(upstreams: Sequence[Upstream], tenants: dict[str, Any], folder: str, harsh: bool) -> dict[str, Any]:
    servers = [
        {"name": f"server-{number}", "url": f"{upstream.url}/v1", "dialect": "sglang", **({} if harsh else TIMES)}
        for number, upstream in enumerate(upstreams)
    ]
    softened: dict[str, Any] = {
        "engine_link": {"silence_timeout_s": 2.0},
        "health": HEALTH,
        "dispatch": {"max_wait_s": {"standard": MOST_WAIT_S}},
    }
    return {
        "log": {"level": "error"},
        "store": {"folder": folder},
        "server": {"allow_unauthenticated": True},  # to look at the metrics
        "model": {"path": str(BUNDLED_MODEL), "replicas": ENGINES, "served_name": MODEL},
        "engine": {"kv_memory_bytes": "96MiB"},
        "models": {UPSTREAM_MODEL: {"upstreams": servers}},
        **({} if harsh else softened),
        "admission": {"prices": {"*": PRICE}},
        "tenants": tenants,
    }


async def _troubled(
    run: Run,
    server: ServerProcess,
    upstreams: Sequence[Upstream],
    key: str,
    rng: random.Random,
    seconds: float,
    pause_s: tuple[float, float],
) -> None:
    """Calm, then load with trouble, then the wait until nothing is held."""
    client = Client(server.url, patience_s=LIMIT_S)
    await _settled(run, server, upstreams)
    own, scripted = await asyncio.gather(
        undisturbed(client, key, own_questions()), undisturbed(client, key, upstream_questions())
    )
    engines = EngineTrouble(server.process.pid)
    hit_engines = schedule(rng, ENGINE_KINDS, ENGINES, seconds, pause_s)
    hit_upstreams = schedule(rng, UPSTREAM_KINDS, len(upstreams), seconds)
    load = Load(client, key, seconds)
    async with MetricsPoller(server.url) as follower:
        looking = asyncio.create_task(_count_engines(run, follower), name="count engines")
        async with asyncio.TaskGroup() as group:
            for number in range(CALLERS):
                group.create_task(load.caller(f"own-{number}", own, random.Random(rng.random())))
                group.create_task(load.caller(f"scripted-{number}", scripted, random.Random(rng.random())))
            group.create_task(_play(run, "engines", hit_engines, engines.play))
            group.create_task(
                _play(run, "upstreams", hit_upstreams, lambda trouble: upstreams[trouble.victim].play(trouble))
            )
        looking.cancel()
        await asyncio.wait({looking})
    run.asked = load.asked
    run.counted = {name: follower.counters.total(name) or 0.0 for name in COUNTED}
    run.settled_s = await _settled(run, server, upstreams)
    client.close()


async def _count_engines(run: Run, follower: MetricsPoller) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        run.engines_up[int(follower.counters.latest.get("maitred_engine_up", 0))] += 1


async def _play(run: Run, name: str, troubles: Sequence[Trouble], play: Callable[[Trouble], Awaitable[None]]) -> None:
    began_s = time.monotonic()
    played = run.played[name] = []
    for trouble in troubles:
        await asyncio.sleep(began_s + trouble.at_s - time.monotonic())
        played.append((round(time.monotonic() - began_s, 2), trouble))
        await play(trouble)


async def _settled(run: Run, server: ServerProcess, upstreams: Sequence[Upstream]) -> float:
    """Waits until everybody is there and nothing is held, or the time is over; how long that took."""
    began_s = time.monotonic()
    while True:
        metrics = await asyncio.to_thread(server.metrics)
        held = {name: metrics[name] for name in MUST_BE_ZERO}
        held["KV blocks"] = metrics["maitred_engine_kv_blocks_total"] - metrics["maitred_engine_kv_blocks_free"]
        held["engines away"] = ENGINES - metrics["maitred_engine_up"]
        held["upstreams away"] = len(upstreams) - metrics["maitred_upstream_up"]
        run.left = {name: value for name, value in held.items() if value}
        took_s = time.monotonic() - began_s
        if not run.left or took_s > SETTLED_WITHIN_S:
            break
        await asyncio.sleep(0.1)
    truths = [await asyncio.to_thread(upstream.server.truth) for upstream in upstreams if upstream.server is not None]
    if still := sum(request.ended_s is None for truth in truths for request in truth.requests):
        run.left["streams open at upstreams"] = still
    return took_s


def _ledger(folder: Path) -> dict[str, list[Line]]:
    """Every line, by request."""
    lines: dict[str, list[Line]] = {}
    with sqlite3.connect(f"file:{folder / 'maitred.db'}?mode=ro", uri=True) as connection:
        found = connection.execute("SELECT request_id, outcome, prompt_tokens, output_tokens, cost_nusd FROM usage")
        for request_id, *rest in found:
            lines.setdefault(request_id, []).append(Line(*rest))
    return lines


if __name__ == "__main__":
    sys.exit(main())
