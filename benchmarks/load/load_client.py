"""What an event costs a tester: our connection against aiohttp and httpx under the same reader of answers.

A scripted server on one core sends the same streams to each client in turn, which runs on the other core in a process
of its own; rounds alternate. The cost is processor time of the client per event. It decides how many streams one tester
can watch: with five thousand of them at 20 tokens a second, a core has 10 µs for an event.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine

import uvloop

from benchmarks.support.report import Report
from maitred.load.measure.record import RequestRecord
from maitred.load.play.client.answer import StreamRecorder, StreamTotals
from maitred.load.play.client.caller import LoadClient
from maitred.load.play.client.origin import Origin
from maitred.load.play.client.pool import ConnectionPool
from maitred.load.play.clock import RunClock
from maitred.load.play.target import RequestEncoder, TargetDialect
from maitred.load.spec import LoadTarget
from maitred.testing.scripted_openai import DelayDistribution, ServerScript, scripted_openai

SEED = 20260105
CLIENTS = ("maitred", "aiohttp", "httpx")
RATE_PER_S = 20
QUICK_ROUNDS = (1, 3)
"""How many, and the seconds of each."""
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
HEADERS = {b"content-type": b"text/event-stream"}

Ask = Callable[[RequestRecord], Coroutine[None, None, None]]


def main() -> int:
    """Runs the benchmark, or one client of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 3 s")
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = QUICK_ROUNDS
    tokens = arguments.seconds * RATE_PER_S
    if arguments.client:
        print(json.dumps(uvloop.run(drive(arguments.client, arguments.url, arguments.streams, tokens))))
        return 0
    report = Report("load_client", seed=SEED, quick=arguments.quick)
    cores = sorted(os.sched_getaffinity(0))
    costs: dict[str, list[float]] = {client: [] for client in CLIENTS}
    script = ServerScript(
        ttft=DelayDistribution(mean_s=0.5, cv=0.3), itl=DelayDistribution(mean_s=1 / RATE_PER_S), seed=SEED
    )
    with scripted_openai(script, core=cores[0]) as server:
        for _ in range(arguments.rounds):
            for client, rounds in costs.items():
                figures = in_process(client, server.url, arguments.streams, arguments.seconds, core=cores[-1])
                if figures["events"] != arguments.streams * tokens:
                    raise RuntimeError(f"{client} has seen {figures['events']} of {arguments.streams * tokens} events.")
                rounds.append(figures["cpu_s"] / figures["events"] * 1e6)
                print(client, f"{rounds[-1]:.1f} µs per event", flush=True)
    medians = {client: statistics.median(rounds) for client, rounds in costs.items()}
    report.figures = {
        "streams": arguments.streams,
        "us_per_event": medians,
        "rounds": costs,
        "aiohttp_over_ours": medians["aiohttp"] / medians["maitred"],
        "httpx_over_ours": medians["httpx"] / medians["maitred"],
    }
    report.require("aiohttp / ours", report.figures["aiohttp_over_ours"], at_least=2.0)
    return report.finish()


def in_process(client: str, url: str, streams: int, seconds: int, *, core: int) -> dict[str, float]:
    """The figures of one client, from its own process."""
    command = [sys.executable, "-m", "benchmarks.load.load_client", "--client", client, "--url", url]
    command += ["--streams", str(streams), "--seconds", str(seconds)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}), timeout=120
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


async def drive(client: str, url: str, streams: int, tokens: int) -> dict[str, float]:
    """Opens all streams at once and reads them to their ends."""
    origin = Origin.parse(url)
    pool = ConnectionPool(origin, (origin.host, origin.port), connect_timeout_s=10, clock=RunClock())
    requests = RequestEncoder(LoadTarget(url=url), origin, "scripted", TargetDialect(ignore_eos=True))
    head, _, body = requests.encode(MESSAGES, tokens).partition(b"\r\n\r\n")
    records = [RequestRecord(number, 0, "", 0.0, tokens) for number in range(streams)]
    began_s = time.process_time()
    async for ask in CLIENT_OF[client](pool, url, head, body):
        began_s = time.process_time()
        async with asyncio.TaskGroup() as group:
            for record in records:
                group.create_task(ask(record))
    return {"events": sum(len(r.arrivals_s) for r in records), "cpu_s": time.process_time() - began_s}


async def ours(pool: ConnectionPool, url: str, head: bytes, body: bytes) -> AsyncIterator[Ask]:
    """`maitred.load.play.client`."""
    caller = LoadClient(
        pool, now_s=time.monotonic, retries=0, timeout_s=300, rng=random.Random(0), traffic=StreamTotals()
    )
    request = head + b"\r\n\r\n" + body

    async def ask(record: RequestRecord) -> None:
        await caller.ask(record, request)

    yield ask


async def with_aiohttp(pool: ConnectionPool, url: str, head: bytes, body: bytes) -> AsyncIterator[Ask]:
    """aiohttp, with its C parser."""
    import aiohttp

    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def ask(record: RequestRecord) -> None:
            reader = StreamRecorder(record, StreamTotals(), keep_text=False)
            async with session.post(
                f"{url}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
            ) as response:
                reader.head(response.status, HEADERS, time.monotonic())
                async for data in response.content.iter_any():
                    reader.body(data, time.monotonic())

        yield ask


async def with_httpx(pool: ConnectionPool, url: str, head: bytes, body: bytes) -> AsyncIterator[Ask]:
    """httpx, on which the official SDK stands."""
    import httpx

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as session:

        async def ask(record: RequestRecord) -> None:
            reader = StreamRecorder(record, StreamTotals(), keep_text=False)
            async with session.stream(
                "POST", f"{url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
            ) as response:
                reader.head(response.status_code, HEADERS, time.monotonic())
                async for data in response.aiter_bytes():
                    reader.body(data, time.monotonic())

        yield ask


CLIENT_OF = {"maitred": ours, "aiohttp": with_aiohttp, "httpx": with_httpx}


if __name__ == "__main__":
    sys.exit(main())
