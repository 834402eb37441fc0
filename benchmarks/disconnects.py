"""Clients that leave: 500 of them hang up at random moments under load, and nothing may be left behind.

While patient users keep the server busy, impatient ones open a stream (or a request without streaming) and drop the
connection after a random time: before the first token, in the middle, near the end. Afterwards no sequence runs or
waits, every KV block is free, no request is in flight in the gateway; and the patient users have lost nothing.
"""

import argparse
import asyncio
import random
import sys
import time
from contextlib import suppress

import aiohttp
import uvloop

from benchmarks.report import Report
from benchmarks.stream_client import Answer, stream_chat
from benchmarks.users import words
from maitred.testing.server_process import ServerProcess, serving

SEED = 20260104
AT_ONCE = 64
PATIENT_USERS = 16
LONGEST_STAY_S = 2.0
SETTLE_S = 2.0
"""For the last cancellations to travel; the engine needs one step."""


def main() -> int:
    """Runs the benchmark; the exit code says whether anything was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 disconnects")
    parser.add_argument("--disconnects", type=int, default=500)
    arguments = parser.parse_args()
    report = Report("disconnects", seed=SEED, quick=arguments.quick)
    with serving() as server:
        uvloop.run(run(server, 60 if arguments.quick else arguments.disconnects, report))
        report.require("exit code", server.stop(), at_most=0)
    return report.finish()


async def run(server: ServerProcess, disconnects: int, report: Report) -> None:
    """Lets patient and impatient users loose, and counts what is left."""
    draw = random.Random(SEED)
    stays_s = [draw.uniform(0.0, LONGEST_STAY_S) for _ in range(disconnects)]
    gate = asyncio.Semaphore(AT_ONCE)
    stop = asyncio.Event()
    answers: list[Answer] = []
    started_s = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as group:
        for _ in range(PATIENT_USERS):
            group.create_task(patient(session, server.url, stop, answers))
        leaving = [
            group.create_task(impatient(session, server.url, stay_s, number % 4 != 0, gate))
            for number, stay_s in enumerate(stays_s)
        ]
        await asyncio.gather(*leaving)
        stop.set()
    left = sum(task.result() for task in leaving)
    await asyncio.sleep(SETTLE_S)
    samples = await asyncio.to_thread(server.metrics)
    report.figures = {
        "disconnects": disconnects,
        "left_before_the_end": left,
        "patient_answers": len(answers),
        "seconds": round(time.perf_counter() - started_s, 1),
        "cancelled_sequences": samples["maitred_engine_cancelled_total"],
        "finished_sequences": samples["maitred_engine_finished_total"],
    }
    held = samples["maitred_engine_kv_blocks_total"] - samples["maitred_engine_kv_blocks_free"]
    report.require("KV blocks left", held, at_most=0)
    report.require("sequences left", samples["maitred_engine_running"] + samples["maitred_engine_waiting"], at_most=0)
    report.require("requests in flight", samples["maitred_in_flight"], at_most=0)
    incomplete = [answer for answer in answers if not answer.complete(PATIENT_TOKENS)]
    report.require("patient answers lost or cut", len(incomplete), at_most=0)
    report.require("left before the end", left, at_least=disconnects * 0.5)
    print(report.figures)


PATIENT_TOKENS = 60


def request_body(max_tokens: int, *, stream: bool) -> dict[str, object]:
    """A chat request of a random length."""
    body: dict[str, object] = {
        "model": "maitred-tiny",
        "messages": [{"role": "user", "content": words(random.randrange(5, 300))}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


async def patient(session: aiohttp.ClientSession, url: str, stop: asyncio.Event, answers: list[Answer]) -> None:
    """Reads every answer to its end."""
    while not stop.is_set():
        answers.append(await stream_chat(session, url, request_body(PATIENT_TOKENS, stream=True)))


async def impatient(
    session: aiohttp.ClientSession, url: str, stay_s: float, stream: bool, gate: asyncio.Semaphore
) -> bool:
    """Hangs up after `stay_s`; whether that was before the end."""
    async with gate:
        with suppress(TimeoutError):
            async with asyncio.timeout(stay_s):
                async with session.post(
                    f"{url}/v1/chat/completions", json=request_body(400, stream=stream)
                ) as response:
                    await response.read()
                return False
        return True


if __name__ == "__main__":
    sys.exit(main())
