"""How true the time is that callers are told while no replica serves, and what a warm pool saves.

A gateway with the bundled model goes to zero replicas and back, round after round: a request comes at the moment of the
order, waits in the queue, and is told when its first token is to be expected. Then the same with one replica that
sleeps in place of none.

Then one replica serves one user, who becomes ten at once, and at this moment three replicas are ordered. In turns, the
two more sleep already, or have to be started.

    python -m benchmarks replica_pool
    python -m benchmarks replica_pool --only crowd
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from typing import Any

import httpx

from benchmarks.support.report import Report
from maitred.identity.keys import make_key
from maitred.testing.server_process import serving

SEED = 20261128
MODEL = "maitred-tiny"
ROUNDS, QUICK_ROUNDS = 20, 3
PARTS = ("zero", "crowd")
CROWD_ROUNDS, QUICK_CROWD_ROUNDS = 8, 1
"""Rounds of each kind."""
USERS, CROWD, REPLICAS = 1, 10, 3
ALONE_S, CROWD_S = 2.0, 10.0
LATE, LATE_S = 1.2, 0.1
"""A promise was kept if the first token came within this ratio of the promised time, or was no later than this."""
LIMIT_S = 600.0
KEY = make_key().plaintext
SETTINGS = {
    "engine.kv_memory_bytes": "32MiB",
    "engine.threads": "1",
    "tenants.operators.keys.admin.secret.env": "ADMIN",
    "tenants.operators.keys.admin.scopes": "[admin, inference, metrics]",
}
FEW_SLOTS = {"engine.max_sequences": "2"}
"""A crowd waits for the slots of one replica, whatever the machine can do."""


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds in place of {ROUNDS}")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    arguments = parser.parse_args()
    quick = arguments.quick
    report = Report(
        "_".join(["replica_pool", *(arguments.only if len(arguments.only) == 1 else [])]), seed=SEED, quick=quick
    )
    if "zero" in arguments.only:
        _measure_zero(QUICK_ROUNDS if quick else ROUNDS, report)
    if "crowd" in arguments.only:
        asyncio.run(_measure_crowds(QUICK_CROWD_ROUNDS if quick else CROWD_ROUNDS, report))
    return report.finish()


def _measure_zero(rounds: int, report: Report) -> None:
    with (
        serving(settings=SETTINGS, environment={"ADMIN": KEY}) as server,
        httpx.Client(base_url=server.url, timeout=LIMIT_S, headers={"authorization": f"Bearer {KEY}"}) as client,
    ):
        for name, asleep in (("start", 0), ("wake", 1)):
            _reach(client, serving_=1 - asleep, asleep=asleep)
            report.figures[name] = figures = _measured([_round(client, asleep) for _ in range(rounds)])
            print(f"{name:6}", figures)
            report.require(
                f"{name}: first answers within {LATE} times the promise, or {LATE_S} s", figures["kept"], at_least=0.9
            )
    wake_s, start_s = (report.figures[name]["first_token_s"] for name in ("wake", "start"))
    report.require("a first token by waking, of one by starting", wake_s / start_s, at_most=0.25)


def _reach(client: httpx.Client, *, serving_: int, asleep: int) -> None:
    """Sets the desired numbers and waits until they are there."""
    body = {"model": MODEL, "serving": serving_, "asleep": asleep}
    client.post("/admin/v1/replicas/scale", json=body).raise_for_status()
    desired = ["asleep"] * asleep + ["serving"] * serving_
    while True:
        (pool,) = client.get("/admin/v1/replicas/pools").json()["data"]
        if sorted(replica["phase"] for replica in pool["replicas"]) == desired:
            return
        time.sleep(0.02)


def _round(client: httpx.Client, asleep: int) -> tuple[float, float]:
    """Goes to zero and back; returns the promised and the real seconds to the first token."""
    _reach(client, serving_=0, asleep=asleep)
    body = {"model": MODEL, "serving": 1, "asleep": 0}
    client.post("/admin/v1/replicas/scale", json=body).raise_for_status()
    began_s = time.perf_counter()
    question = {"model": MODEL, "prompt": "The rabbit said:", "max_tokens": 4, "stream": True}
    with client.stream("POST", "/v1/completions", json={**question, "cache": {"no-cache": True}}) as response:
        response.raise_for_status()
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        first_token_s = time.perf_counter() - began_s
        assert "data: [DONE]" in lines, "the answer was cut"
    return float(response.headers["x-maitred-predicted-ttft-ms"]) / 1000, first_token_s


def _measured(rounds: list[tuple[float, float]]) -> dict[str, Any]:
    kept = [first_token_s <= max(LATE * promised_s, promised_s + LATE_S) for promised_s, first_token_s in rounds]
    return {
        "kept": round(statistics.fmean(kept), 3),
        "promised_s": round(statistics.median(promised_s for promised_s, _ in rounds), 3),
        "first_token_s": round(statistics.median(first_token_s for _, first_token_s in rounds), 3),
        "longest_ratio": round(max(first_token_s / promised_s for promised_s, first_token_s in rounds), 2),
        "each_s": [round(first_token_s, 3) for _, first_token_s in rounds],
    }


async def _measure_crowds(rounds: int, report: Report) -> None:
    kinds = {"cold": 0, "warm": REPLICAS - 1}
    ttfts: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    all_serve_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    options: dict[str, Any] = {"timeout": LIMIT_S, "headers": {"authorization": f"Bearer {KEY}"}}
    with (
        serving(settings=SETTINGS | FEW_SLOTS, environment={"ADMIN": KEY}) as server,
        httpx.Client(base_url=server.url, **options) as operator,
    ):
        async with httpx.AsyncClient(base_url=server.url, **options) as client:
            for _, (kind, asleep) in itertools.product(range(rounds), kinds.items()):
                _reach(operator, serving_=1, asleep=asleep)
                waits_s, took_s = await _crowd(client, operator)
                ttfts[kind].append(waits_s)
                all_serve_s[kind].append(took_s)
    for kind in kinds:
        every = sorted(itertools.chain(*ttfts[kind]))
        report.figures[kind] = figures = {
            "requests": len(every),
            "ttft_p50_s": round(statistics.median(every), 3),
            "ttft_p99_s": round(every[min(len(every) - 1, int(0.99 * len(every)))], 3),
            "ttft_p50_s_by_round": [round(statistics.median(round_), 3) for round_ in ttfts[kind]],
            "longest_ttft_s_by_round": [round(max(round_), 3) for round_ in ttfts[kind]],
            "all_serve_s": [round(seconds, 2) for seconds in all_serve_s[kind]],
        }
        print(f"{kind:6}", figures)
    shares = {
        name: report.figures["warm"][name] / report.figures["cold"][name] for name in ("ttft_p50_s", "ttft_p99_s")
    }
    # Half of a crowd is served after the cold replicas have started, so the median says little about a warm pool.
    report.figures["ttft_p50_s of a crowd with replicas that sleep, of without"] = round(shares["ttft_p50_s"], 3)
    name = "ttft_p99_s of a crowd with replicas that sleep, of without"
    report.require(name, shares["ttft_p99_s"], at_most=0.9)


async def _crowd(client: httpx.AsyncClient, operator: httpx.Client) -> tuple[list[float], float]:
    """One user becomes ten; returns their times to first token, and when all replicas served, in seconds."""
    waits_s: list[float] = []
    began_s = time.perf_counter() + ALONE_S
    ends_s = began_s + CROWD_S

    async def ask_on(from_s: float) -> None:
        await asyncio.sleep(from_s - time.perf_counter())
        while (asked_s := time.perf_counter()) < ends_s:
            question = {"model": MODEL, "prompt": "The rabbit said:", "max_tokens": 48, "stream": True}
            question |= {"cache": {"no-cache": True}}
            async with client.stream("POST", "/v1/completions", json=question) as response:
                response.raise_for_status()
                lines = response.aiter_lines()
                async for line in lines:
                    if line.startswith("data: "):
                        break
                if asked_s >= began_s:
                    waits_s.append(time.perf_counter() - asked_s)
                async for _ in lines:
                    pass

    users = [asyncio.create_task(ask_on(began_s if n >= USERS else began_s - ALONE_S)) for n in range(CROWD)]
    await asyncio.sleep(began_s - time.perf_counter())
    await asyncio.to_thread(_reach, operator, serving_=REPLICAS, asleep=0)
    took_s = time.perf_counter() - began_s
    await asyncio.gather(*users)
    return waits_s, took_s


if __name__ == "__main__":
    sys.exit(main())
