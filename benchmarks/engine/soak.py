"""A soak: as many requests as a day brings, one after the other through one engine, and nothing may creep.

The engine is a process of its own, reached over its socket by the gateway's own connection, with 128 requests under
way at any time. They are short, and of every sort: sampled and greedy, several choices, prompts that share a beginning
and prompts that do not, penalties, log-probabilities, streams that are left in the middle and some that are paused.
The cache is small enough to be turned over all the time.

* **Memory** is what the engine has allocated (`Pss_Anon` and `Pss_Shmem`; pages of files count by who else maps them),
  read between tenths while it has nothing to do: growth is that from the end of the first tenth, in which caches and
  pools fill, to the end of the last.
* **Throughput** is requests per second of processor time. A machine that is shared slows down and recovers by far more
  in an hour than what is looked for here, so at the end a fresh engine, which has had as many requests as fill its
  caches, takes turns with the old one, and the ratio counts; the tenths stand beside, by processor and by clock.
* **Blocks**: after every tenth nothing runs, so every block is free, and everything that was promised is given back.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.support.report import Report
from benchmarks.support.shapes import BUNDLED
from maitred.core.replica import LoadReport
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.config import EngineConfig
from maitred.fleet.local import LocalEngine, engine_command

SEED = 20261122
REQUESTS, QUICK_REQUESTS = 1_000_000, 3_000
TENTHS = 10
CONCURRENT_REQUESTS = 128
TOKENS = 4000
"""Ids that prompts are made of."""
BEGINNINGS = 50
LEAVE, PAUSE = 0.05, 0.01
"""Parts of all requests."""
PAUSE_S = 0.05
SETTLED_S = 20.0
FRESH, LEAST_FRESH = 20_000, 200
"""Requests after which a fresh engine is warm, and how many it gets in a short run."""
TURNS, TURN, LEAST_TURN = 20, 2_000, 50
"""Of the old and the fresh engine, how many requests each turn is, and how many it is at least."""


@dataclass(frozen=True)
class Tenth:
    """One tenth of the requests: what it took, and what the engine held when it was over."""

    wall_s: float
    processor_s: float
    allocated_mib: float
    load: LoadReport


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_REQUESTS:,} requests; growth and speed have no bars"
    )
    parser.add_argument("--requests", type=int, help=f"how many; {REQUESTS:,} unless given")
    arguments = parser.parse_args()
    requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else REQUESTS)
    report = Report("soak", seed=SEED, quick=arguments.quick)
    uvloop.run(run(report, requests))
    judge(report, requests, quick=arguments.quick)
    return report.finish()


async def run(report: Report, requests: int) -> None:
    """Starts the engine and plays all tenths."""
    config = EngineConfig(device="cpu", max_sequences=64, kv_memory_bytes=24 << 20, context_tokens=256)
    endings: Counter[str] = Counter()
    async with LocalEngine(engine_command(BUNDLED, config)) as engine:
        await engine.wait_started()
        assert engine.pid is not None
        process = psutil.Process(engine.pid)
        source = sorts(requests)
        tenths = []
        for number in range(TENTHS):
            share = requests * (number + 1) // TENTHS - requests * number // TENTHS
            tenths.append(await tenth(engine, process, source, share, endings))
            print(number + 1, tenths[-1].allocated_mib, "MiB", shown(tenths[-1], share), flush=True)
        report.figures = {
            "requests": requests,
            "turns_speed_over_fresh": await beside_fresh(engine, config, requests),
            "endings": dict(sorted(endings.items())),
            "restarts": engine.restarts,
            "allocated_mib": [tenth.allocated_mib for tenth in tenths],
            "requests_per_processor_s": [round(requests / TENTHS / tenth.processor_s, 2) for tenth in tenths],
            "requests_per_s": [round(requests / TENTHS / tenth.wall_s, 2) for tenth in tenths],
            "blocks_not_free": [tenth.load.total_blocks - tenth.load.free_blocks for tenth in tenths],
            "blocks_promised": [tenth.load.promised_blocks for tenth in tenths],
            "running_or_waiting": [tenth.load.running + tenth.load.waiting + tenth.load.paused for tenth in tenths],
            "preemptions": tenths[-1].load.preemptions,
            "cached_tokens": tenths[-1].load.cached_tokens,
            "prompt_tokens": tenths[-1].load.prompt_tokens,
        }


def judge(report: Report, requests: int, *, quick: bool) -> None:
    """Holds the figures against the bars."""
    figures = report.figures
    memory, speed = figures["allocated_mib"], figures["requests_per_processor_s"]
    figures["growth"] = round(memory[-1] / memory[0] - 1.0, 5)
    figures["last_tenth_over_first"] = round(speed[-1] / speed[0], 4)
    figures["speed_over_fresh"] = statistics.median(figures["turns_speed_over_fresh"])
    report.require("requests that ended in no known way", requests - sum(figures["endings"].values()), at_most=0)
    for name in ("blocks_not_free", "blocks_promised", "running_or_waiting"):
        report.require(name.replace("_", " "), max(figures[name]), at_most=0)
    report.require("restarts", figures["restarts"], at_most=0)
    if not quick:
        report.require("memory growth", figures["growth"], at_most=0.01)
        report.require("throughput over that of a fresh engine", figures["speed_over_fresh"], at_least=0.98)


async def tenth(
    engine: LocalEngine, process: psutil.Process, source: Iterator[EngineRequest], share: int, endings: Counter[str]
) -> Tenth:
    """Sends a share of the requests, and looks at the engine when all of them have ended."""
    before, began_s = process.cpu_times(), time.monotonic()
    left = iter(range(share))

    async def user() -> None:
        for _ in left:
            endings[await ask(engine, next(source))] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENT_REQUESTS):
            group.create_task(user())
    wall_s, after = time.monotonic() - began_s, process.cpu_times()
    processor_s = after.user + after.system - before.user - before.system
    load = await rested(engine)
    return Tenth(wall_s, processor_s, allocated_mib(process.pid), load)


def allocated_mib(pid: int) -> float:
    """Memory that a process has made, without the files that it maps."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return round(kib / 2**10, 2)


async def beside_fresh(old: LocalEngine, config: EngineConfig, requests: int) -> list[float]:
    """Speed of the old engine over that of a fresh one, turn by turn, by processor time; the same requests for both."""
    scale = min(1.0, requests / REQUESTS)
    turn, endings = max(LEAST_TURN, int(TURN * scale)), Counter[str]()
    async with LocalEngine(engine_command(BUNDLED, config)) as fresh:
        await fresh.wait_started()
        engines = {engine: psutil.Process(engine.pid) for engine in (old, fresh)}
        warm_up = max(LEAST_FRESH, int(FRESH * scale))
        await tenth(fresh, engines[fresh], sorts(warm_up), warm_up, endings)
        ratios = []
        for number in range(TURNS):
            took_s = {}
            for engine in (old, fresh) if number % 2 else (fresh, old):
                source = sorts(turn, seed=SEED + 1 + number)
                took_s[engine] = (await tenth(engine, engines[engine], source, turn, endings)).processor_s
            ratios.append(round(took_s[fresh] / took_s[old], 4))
    return ratios


async def ask(engine: LocalEngine, request: EngineRequest) -> str:
    """Sends one request and reads its answer, or leaves it, or pauses; how it ended."""
    rng = random.Random(request.sampling.seed)
    leaves_after = rng.randrange(request.sampling.max_tokens) if rng.random() < LEAVE else None
    pauses = rng.random() < PAUSE
    heard = 0
    last = "nothing"
    async with engine.client.generate(request) as stream:
        async for deltas in stream:
            heard += sum(len(delta.tokens) for delta in deltas)
            last = next((delta.finish.value for delta in deltas if delta.finish is not None), last)
            if leaves_after is not None and heard > leaves_after:
                return "left"
            if pauses:
                pauses = False
                stream.pause()
                await asyncio.sleep(PAUSE_S)
                stream.resume()
    return last


async def rested(engine: LocalEngine) -> LoadReport:
    """The engine's report once it says that nothing is left; what it says after a while, if it never does."""
    for _ in range(int(SETTLED_S / 0.1)):
        load = engine.client.load()
        if not (load.running or load.waiting or load.paused or load.promised_blocks):
            break
        await asyncio.sleep(0.1)
    return engine.client.load()


def sorts(count: int, seed: int = SEED) -> Iterator[EngineRequest]:
    """So many requests, all different, the same ones for the same seed."""
    rng = random.Random(seed)
    beginnings = [rng.choices(range(TOKENS), k=rng.randint(16, 64)) for _ in range(BEGINNINGS)]
    for number in range(count):
        beginning = rng.choice(beginnings) if rng.random() < 0.5 else []
        prompt = beginning + rng.choices(range(TOKENS), k=rng.randint(2, 24))
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 6), "seed": rng.getrandbits(63), "ignore_eos": True}
        kind = rng.random()
        if kind < 0.5:
            sampling["temperature"] = 0.0
        elif kind < 0.6:
            sampling |= {"presence_penalty": 0.5, "repetition_penalty": 1.1}
        elif kind < 0.7:
            sampling |= {"n": 2, "top_p": 0.9}
        elif kind < 0.8:
            sampling |= {"top_logprobs": 2, "top_k": 40}
        yield EngineRequest(f"soak-{seed}-{number}", prompt, SamplingParams(**sampling))


def shown(tenth: Tenth, share: int) -> str:
    """For people who watch."""
    return f"{share / tenth.wall_s:.0f} requests/s, {share / tenth.processor_s:.0f} per second of processor"


if __name__ == "__main__":
    sys.exit(main())
