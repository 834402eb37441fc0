"""Engines die under load, and no client notices: every stream has exactly the tokens of an undisturbed run.

200 callers (greedy and seeded, some with two choices, with penalties, with log-probabilities, with stop strings, held
to a schema or to a regular expression) read streams from one gateway with three engines on this machine. First nothing
disturbs them, and their answers are kept. Then the same requests are sent again, round after round, and in the middle
of each round one of the engines is killed (``kill -9``). Every stream must end with ``[DONE]``, its finish reasons, the
text and the token counts of the undisturbed one; the ledger must have one line for each, with the tokens that the
client received; and nothing may be left behind.

With ``--workers 2`` the gateway has two API workers, a controller and a process that keeps the engines; with ``--victim
controller`` it is the controller that is killed, and the streams go on where they run.

The added gap is what a stream had to wait that went from one engine to another (the ledger names both): its longest
time between two events, less the longest that the same request had undisturbed.
"""

import argparse
import asyncio
import json
import random
import sqlite3
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import psutil
import uvloop

from benchmarks.support.report import Report, percentiles
from maitred.fleet.local import ENGINE_MODULE
from maitred.testing.server_process import ServerProcess, serving

SEED = 20261121
MODEL = "maitred-tiny"
ENGINES = 3
STREAMS, QUICK_STREAMS = 200, 36
KILLS, QUICK_KILLS = 20, 2
TOKENS = 48
ENDS_WITHIN_S = 120.0
READY_WITHIN_S = 60.0
MOST_ADDED_GAP_S = 5.0
SCHEMA = {
    "type": "object",
    "properties": {
        "animals": {"type": "array", "minItems": 5, "items": {"enum": ["hare", "heron", "hedgehog", "badger", "owl"]}},
        "the_oldest_of_them": {"type": "string", "minLength": 12},
        "years_of_its_life": {"type": "integer", "minimum": 20},
    },
    "required": ["animals", "the_oldest_of_them", "years_of_its_life"],
    "additionalProperties": False,
}
"""Text that is forced, and text that is not; long enough to be cut by a kill anywhere."""
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.3, "min_tokens": 20},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.9, "stop": [" very", "?"]},
    {"temperature": 1.0, "n": 2, "structured_outputs": {"json": SCHEMA}},
    {"temperature": 0.8, "structured_outputs": {"regex": "([A-Z][a-z]{2,9}, ){12,40}and so on"}, "logprobs": 1},
]
VICTIMS = ("engine", "controller")
IDLE = ("maitred_in_flight", "maitred_leases", "maitred_dispatch_running", "maitred_engine_running")


@dataclass
class Stream:
    """What one client has received."""

    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    """Where log-probabilities were asked for."""
    finishes: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    done: bool = False
    longest_gap_s: float = 0.0

    @property
    def answer(self) -> tuple[object, ...]:
        """All of it that must be the same whatever happens."""
        return self.texts, self.tokens, self.finishes, self.prompt_tokens, self.output_tokens, self.done


class Callers:
    """The callers: the same requests in every round.

    Args:
        url: Of the gateway.
        streams: How many.
    """

    def __init__(self, url: str, streams: int) -> None:
        self._url = url
        self._bodies = [
            {
                **{"model": MODEL, "stream": True, "stream_options": {"include_usage": True}},
                **{"prompt": f"{number} animals met in the deep wood, and the oldest of them said:"},
                **{"max_tokens": TOKENS, "ignore_eos": True, "seed": number},
                **KINDS[number % len(KINDS)],
            }
            for number in range(streams)
        ]
        self.events = 0
        """In this round."""

    async def round(self, client: aiohttp.ClientSession, name: str) -> list[Stream]:
        """All of them at once; their request ids begin with the name."""
        self.events = 0
        return await asyncio.gather(
            *(self._read(client, f"{name}-{number}", body) for number, body in enumerate(self._bodies))
        )

    async def _read(self, client: aiohttp.ClientSession, request_id: str, body: dict[str, Any]) -> Stream:
        stream = Stream()
        before_s = None
        headers = {"x-request-id": request_id}
        try:
            async with client.post(f"{self._url}/v1/completions", json=body, headers=headers) as response:
                async for line in response.content:
                    if not line.startswith(b"data: "):
                        continue
                    now_s = time.monotonic()
                    if before_s is not None:
                        stream.longest_gap_s = max(stream.longest_gap_s, now_s - before_s)
                    before_s = now_s
                    self.events += 1
                    _take(stream, line.removeprefix(b"data: ").strip())
        except (aiohttp.ClientError, TimeoutError):
            stream.done = False
        return stream


def _take(stream: Stream, event: bytes) -> None:
    if event == b"[DONE]":
        stream.done = True
        return
    chunk = json.loads(event)
    for choice in chunk.get("choices", ()):
        index = choice["index"]
        stream.texts[index] = stream.texts.get(index, "") + choice["text"]
        if choice.get("logprobs"):
            stream.tokens.setdefault(index, []).extend(choice["logprobs"]["tokens"])
        if choice["finish_reason"] is not None:
            stream.finishes[index] = choice["finish_reason"]
    if chunk.get("usage"):
        stream.prompt_tokens = chunk["usage"]["prompt_tokens"]
        stream.output_tokens = chunk["usage"]["completion_tokens"]


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STREAMS} streams, {QUICK_KILLS} kills")
    parser.add_argument("--kills", type=int, help=f"in place of {KILLS}")
    parser.add_argument("--streams", type=int, help=f"in place of {STREAMS}")
    parser.add_argument("--workers", type=int, default=1, help="API workers")
    parser.add_argument("--victim", choices=VICTIMS, default="engine", help="who is killed; the second needs workers")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    if arguments.victim == "controller" and arguments.workers < 2:
        parser.error("A gateway of one process has no controller that could die alone: say --workers 2.")
    name = "failover" if arguments.workers == 1 else f"failover_workers_{arguments.victim}"
    report = Report(name, seed=arguments.seed, quick=arguments.quick)
    kills = arguments.kills or (QUICK_KILLS if arguments.quick else KILLS)
    streams = arguments.streams or (QUICK_STREAMS if arguments.quick else STREAMS)
    rng = random.Random(arguments.seed)
    uvloop.run(run(report, rng, kills, streams, workers=arguments.workers, victim=arguments.victim))
    return report.finish()


async def run(report: Report, rng: random.Random, kills: int, streams: int, *, workers: int, victim: str) -> None:
    """All of it."""
    with TemporaryDirectory(prefix="maitred-") as folder:
        settings = {"engine.kv_memory_bytes": "96MiB", "store.folder": folder, "log.level": "error"}
        with serving("--replicas", str(ENGINES), "--workers", str(workers), settings=settings) as server:
            callers = Callers(server.url, streams)
            timeout = aiohttp.ClientTimeout(total=ENDS_WITHIN_S)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
                await _ready(server)
                await callers.round(client, "warm")
                calm = await callers.round(client, "calm")
                rounds = []
                for number in range(kills):
                    rounds.append(await _killed(server, callers, client, rng, number, victim))
                    await _ready(server)
            metrics = await asyncio.to_thread(server.metrics)
        lines = _ledger(Path(folder))
    _judge(report, calm, rounds, lines, metrics, moving=victim == "engine")


async def _killed(
    server: ServerProcess, callers: Callers, client: aiohttp.ClientSession, rng: random.Random, number: int, victim: str
) -> list[Stream]:
    """One round, with one of the processes killed when so many of its events have come."""
    reading = asyncio.create_task(callers.round(client, f"kill{number}"))
    wanted = rng.uniform(0.02, 0.8) * len(callers._bodies) * TOKENS
    await asyncio.sleep(0)
    while callers.events < wanted and not reading.done():  # noqa: ASYNC110 - an event per token would cost more
        await asyncio.sleep(0.005)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    rng.choice([process for process in processes if _is(victim, process)]).kill()
    return await reading


def _is(victim: str, process: psutil.Process) -> bool:
    """Grammars are tried in processes of their own, too."""
    if process.status() == psutil.STATUS_ZOMBIE:
        return False
    return ENGINE_MODULE in process.cmdline() if victim == "engine" else process.name() == "mtd-controller"


async def _ready(server: ServerProcess) -> None:
    """Waits until all engines are there and nothing is left of any request."""
    async with asyncio.timeout(READY_WITHIN_S):
        while True:
            try:
                metrics = await asyncio.to_thread(server.metrics)
            except OSError:
                await asyncio.sleep(0.1)  # the controller, which tells them, is being started again
                continue
            held = metrics["maitred_engine_kv_blocks_total"] - metrics["maitred_engine_kv_blocks_free"]
            if metrics["maitred_engine_up"] == ENGINES and not held and not any(metrics[name] for name in IDLE):
                return
            await asyncio.sleep(0.1)


def _ledger(folder: Path) -> list[tuple[str, str, str, int, int]]:
    """Request, replicas, outcome and tokens of every line."""
    database = folder / "maitred.db"
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return connection.execute(
            "SELECT request_id, replica, outcome, prompt_tokens, output_tokens FROM usage"
        ).fetchall()


def _judge(
    report: Report,
    calm: list[Stream],
    rounds: list[list[Stream]],
    lines: list[tuple[str, str, str, int, int]],
    metrics: dict[str, float],
    *,
    moving: bool,
) -> None:
    replicas = {request_id: replica for request_id, replica, *_ in lines}
    billed = {line[0]: line[3:] for line in lines}
    counted = Counter(request_id for request_id, *_ in lines)
    received = {f"calm-{number}": stream for number, stream in enumerate(calm)}
    received |= {f"kill{kill}-{n}": stream for kill, streams in enumerate(rounds) for n, stream in enumerate(streams)}
    differing: list[dict[str, object]] = []
    gaps = []
    moved = 0
    for kill, streams in enumerate(rounds):
        for number, (stream, undisturbed) in enumerate(zip(streams, calm, strict=True)):
            if stream.answer != undisturbed.answer:
                differing.append(_difference(kill, number, stream, undisturbed))
            if "," in replicas.get(f"kill{kill}-{number}", ""):
                moved += 1
                gaps.append(max(0.0, stream.longest_gap_s - undisturbed.longest_gap_s))
    wrong = sum(
        (stream.prompt_tokens, stream.output_tokens) != billed.get(request_id)
        for request_id, stream in received.items()
    )
    report.figures = {
        "engines": ENGINES,
        "streams": len(calm),
        "kills": len(rounds),
        "recoveries": metrics.get("maitred_recoveries_total", 0.0),
        "streams_that_moved": moved,
        "added_gap_s": percentiles(gaps),
        "undisturbed_longest_gap_s": percentiles([stream.longest_gap_s for stream in calm]),
        "output_tokens": sum(stream.output_tokens for stream in received.values()),
        "differing": differing[:10],
        "recomputed_tokens_of_the_last_lives": metrics["maitred_engine_recomputed_tokens_total"],
    }
    print(report.figures, flush=True)
    report.require("undisturbed streams that are not whole", sum(not s.done for s in calm), at_most=0)
    report.require("streams that differ from the undisturbed run", len(differing), at_most=0)
    report.require("streams with other tokens in the ledger than the client was told", wrong, at_most=0)
    report.require("streams with other than one line", sum(counted[id_] != 1 for id_ in received), at_most=0)
    if moving:
        report.require("streams that moved, per kill", moved / max(1, len(rounds)), at_least=1)
    report.require("added gap p99, s", report.figures["added_gap_s"].get("p99", 0.0), at_most=MOST_ADDED_GAP_S)


def _same(one: str, other: str) -> int:
    """Characters that two texts have in common from their beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _difference(kill: int, number: int, stream: Stream, undisturbed: Stream) -> dict[str, object]:
    """Where a stream begins to differ."""
    return {
        "round": kill,
        "request": number,
        "kind": KINDS[number % len(KINDS)],
        "whole": stream.done,
        "characters": {index: len(text) for index, text in undisturbed.texts.items()},
        "from_character": {
            index: _same(text, stream.texts.get(index, "")) for index, text in undisturbed.texts.items()
        },
        "tokens": [undisturbed.output_tokens, stream.output_tokens],
    }


if __name__ == "__main__":
    sys.exit(main())
