"""Clients that leave: 500 of them hang up at random moments under load, and nothing may be left behind.

While patient users keep the server busy, impatient ones open a stream (or a request without streaming) and drop the
connection after a random time: before the first token, in the middle, near the end. Afterwards no sequence runs or
waits, every KV block is free, no request is in flight in the gateway; and the patient users have lost nothing. All of
them are played by `maitred.load`.
"""

import argparse
import asyncio
import sys
import time

import uvloop
from msgspec.structs import replace

from benchmarks.gateway.users import is_whole
from benchmarks.support.report import Report
from maitred.load.measure.record import RunData, UserOutcome
from maitred.load.play.driver import run
from maitred.load.spec import ArrivalsSpec, ClientsSpec, LoadSpec, LoadTarget, ShapeSpec, StopCondition
from maitred.testing.server_process import ServerProcess, serving

SEED = 20260104
QUICK_DISCONNECTS = 60
AT_ONCE = 64
STREAMED_SHARE = 0.75
PATIENT_USERS = 16
STAYS_S = "uniform:0..2"
SETTLE_S = 2.0
"""For the last cancellations to travel; the engine needs one step."""


def main() -> int:
    """Runs the benchmark; the exit code says whether anything was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_DISCONNECTS} disconnects")
    parser.add_argument("--disconnects", type=int, default=500)
    arguments = parser.parse_args()
    report = Report("disconnects", seed=SEED, quick=arguments.quick)
    with serving() as server:
        uvloop.run(play(server, QUICK_DISCONNECTS if arguments.quick else arguments.disconnects, report))
        report.require("exit code", server.stop(), at_most=0)
    return report.finish()


async def play(server: ServerProcess, disconnects: int, report: Report) -> None:
    """Lets patient and impatient users loose, and counts what is left."""
    started_s = time.perf_counter()
    all_gone = asyncio.Event()
    streamed = round(disconnects * STREAMED_SHARE)
    async with asyncio.TaskGroup() as group:
        staying = group.create_task(run(patient(server.url), stop=all_gone))
        tasks = [
            group.create_task(run(impatient(server.url, count, stream=stream)))
            for stream, count in ((True, streamed), (False, disconnects - streamed))
        ]
        leaving = [await task for task in tasks]
        all_gone.set()
    answers = staying.result().records
    left = sum(count(data, UserOutcome.CANCELLED) for data in leaving)
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
    incomplete = [record for record in answers if not is_whole(record)]
    report.require("patient answers lost or cut", len(incomplete), at_most=0)
    report.require("left before the end", left, at_least=disconnects * 0.5)
    failed = sum(
        len(data.records) - count(data, UserOutcome.CANCELLED) - count(data, UserOutcome.COMPLETE) for data in leaving
    )
    report.require("impatient users who were refused or cut", failed, at_most=0)
    print(report.figures)


def patient(url: str) -> LoadSpec:
    """Users who read every answer to its end, until they are stopped."""
    return LoadSpec(
        target=LoadTarget(url=url, exact_output="always"),
        arrivals=ArrivalsSpec(users=PATIENT_USERS, spread_s=0.0),
        shape=ShapeSpec(prompt_tokens="uniform:5..300", output_tokens="60"),
        clients=ClientsSpec(retries=0),
        bounds=StopCondition(duration_s=3600.0),
        seed=SEED,
    )


def impatient(url: str, disconnects: int, *, stream: bool) -> LoadSpec:
    """Users who all hang up; who hangs up in time did not see the end."""
    users = round(AT_ONCE * (STREAMED_SHARE if stream else 1 - STREAMED_SHARE))
    spec = patient(url)
    return replace(
        spec,
        target=replace(spec.target, stream=stream),
        arrivals=replace(spec.arrivals, users=users),
        shape=replace(spec.shape, output_tokens="400"),
        clients=ClientsSpec(retries=0, cancel_share=1.0, cancel_after_s=STAYS_S),
        bounds=StopCondition(requests=disconnects),
        seed=SEED + (1 if stream else 2),
    )


def count(data: RunData, outcome: UserOutcome) -> int:
    """How many requests ended so."""
    return sum(record.outcome is outcome for record in data.records)


if __name__ == "__main__":
    sys.exit(main())
