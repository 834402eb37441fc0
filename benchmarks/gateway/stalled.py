"""Readers that stop reading: 200 of them, and neither the server's memory nor the other readers may suffer.

Each of the 200 opens a stream with log-probabilities of twenty tokens a step, some two kilobytes a token, reads its
beginning, and then nothing more. Its connection is like one over a network: small segments and a small receive window,
so that the kernel takes in 160 KB of what it is sent and no more. The whole answer would be several times that.

Patient readers are measured in turns without and with the 200. With them, the measurement begins when the 200 have what
fits into their connections: from then on their sequences are to stand still. Memory is the growth of resident memory
since before the 200 came; the server may keep a bounded buffer for each. Then the server's grace period for stalled
readers passes, and what they held must be free, although they are still connected.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field

import psutil
import uvloop

from benchmarks.support.installation import Key, Organisation
from benchmarks.support.report import Report, percentiles
from benchmarks.support.single_request import Client
from benchmarks.support.stalled_readers import StalledReaders
from benchmarks.support.tenant_gateway import merged, ordered_by, served, settled, unbounded
from benchmarks.support.traffic import Sort, Visit, play_closed
from maitred.testing.server_process import ServerProcess

SEED = 20261127
STALLED = 200
PATIENT_USERS = 8
PROMPT, OUTPUT = (20, 60), (80, 120)
CALM_S = 1.0
"""Without a new token for anybody, the 200 stand still."""
STANDSTILL_S = 60.0
UNREAD_TOKENS = 64
"""Of a stream, in the gateway, before the engine stops computing it: few, since each has twenty alternatives."""
BUFFER_MIB = 0.5
"""Per stalled reader: the server's buffer, the tokens on their way to it, and what a request is anyway."""
WORK_MIB = 32
"""That either process may grow by in any case."""
FREE_S = 5.0
"""Beside the grace period."""
KV_BYTES = 1 << 30


@dataclass(frozen=True)
class Size:
    """How much is done: rounds of without and with, seconds of each, and of these the warm-up."""

    rounds: int
    seconds: float
    warmup_s: float
    stalled: int
    grace_s: float
    """The server's for a stalled reader: longer than a measurement."""


FULL = Size(rounds=2, seconds=15, warmup_s=2, stalled=STALLED, grace_s=45)
QUICK = Size(rounds=1, seconds=4, warmup_s=1, stalled=40, grace_s=12)


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="40 of them, once; times have no bars")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    report = Report("stalled", seed=SEED, quick=arguments.quick)
    organisations = {name: Organisation({"key": Key()}) for name in ("patient", "stalled")}
    keys = {name: organisation.keys["key"].secret for name, organisation in organisations.items()}
    settings = merged(
        unbounded(),
        ordered_by("fair"),
        {
            "engine": {"max_sequences": STALLED + 2 * PATIENT_USERS, "kv_memory_bytes": KV_BYTES},
            "server": {"stall_grace_s": size.grace_s, "unread_tokens": UNREAD_TOKENS},
        },
    )
    with served(organisations, settings) as server:
        uvloop.run(run(report, server, keys, size))
        report.require("exit code", server.stop(), at_most=0)
    if not arguments.quick:
        report.require("ITL p99 of the others over without", report.figures["itl_p99_ratio"], at_most=1.1)
    return report.finish()


async def run(report: Report, server: ServerProcess, keys: dict[str, str], size: Size) -> None:
    """Without and with the stalled readers, in turns."""
    client = Client(server.url, patience_s=600)
    patient = Sort("patient", keys["patient"], PROMPT, OUTPUT)
    gaps: dict[str, list[float]] = {"without": [], "with": []}
    growth = {"gateway": 0.0, "engine": 0.0}
    ends_s: list[float] = []
    await play_closed(client, {patient: PATIENT_USERS}, seconds=size.warmup_s, seed="warm-up")
    for number in range(size.rounds):
        gaps["without"] += await _read(client, patient, size, f"{number}:without")
        before = await settled(server)
        memory = Memory(server.process.pid)
        readers = StalledReaders(server.url, keys["stalled"])
        try:
            await readers.arrive(size.stalled)
            stands = await standstill(server, readers)
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(memory.watch())
                gaps["with"] += await _read(client, patient, size, f"{number}:without")
                watching.cancel()
            for name, value in memory.growth_mib.items():
                growth[name] = max(growth[name], value)
            samples = await asyncio.to_thread(server.metrics)
            report.figures[f"round {number}"] = {
                "tokens_at_standstill": stands - before[GENERATED],
                "still_held": samples["maitred_in_flight"],
                **memory.growth_mib,
            }
            print(report.figures[f"round {number}"], flush=True)
            still = samples["maitred_in_flight"] / size.stalled
            report.require(f"round {number}: part of the stalled that stood still to the end", still, at_least=1)
            if number == size.rounds - 1:
                ends_s.append(await seconds_until_free(server, 2 * size.grace_s))
        finally:
            readers.leave()
        left = await settled(server)
        held = left["maitred_engine_kv_blocks_total"] - left["maitred_engine_kv_blocks_free"]
        report.require(f"round {number}: KV blocks left", held, at_most=0)
        report.require(f"round {number}: requests left", left["maitred_in_flight"], at_most=0)
    client.close()
    itl = {name: percentiles(values) for name, values in gaps.items()}
    ratio = round(itl["with"]["p99"] / itl["without"]["p99"], 4)
    report.figures |= {
        "stalled": size.stalled,
        "patient": PATIENT_USERS,
        "itl_s": itl,
        "itl_p99_ratio": ratio,
        "memory_growth_mib": growth,
        "freed_after_s": round(ends_s[0], 1),
    }
    print(report.figures, flush=True)
    bound_mib = WORK_MIB + size.stalled * BUFFER_MIB
    report.require("growth of the gateway, MiB", growth["gateway"], at_most=bound_mib)
    report.require("growth of the engine, MiB", growth["engine"], at_most=bound_mib + KV_BYTES / 2**20)
    report.require("stalled readers freed after, s", ends_s[0], at_most=size.grace_s + FREE_S)


GENERATED = "maitred_engine_output_tokens_total"


async def _read(client: Client, patient: Sort, size: Size, seed: str) -> list[float]:
    """The times between tokens that patient readers see, after the warm-up."""
    visits = await play_closed(client, {patient: PATIENT_USERS}, seconds=size.seconds, seed=seed)
    later: list[Visit] = [visit for visit in visits if visit.due_s >= size.warmup_s]
    return [gap_s for record in later for gap_s in record.gaps_s]


async def standstill(server: ServerProcess, readers: StalledReaders) -> float:
    """Waits until the engine generates nothing more for those who do not read; what it has generated in all."""
    generated, since_s = -1.0, time.monotonic()
    async with asyncio.timeout(STANDSTILL_S):
        while time.monotonic() - since_s < CALM_S or not readers.all_stalled:
            samples = await asyncio.to_thread(server.metrics)
            if samples[GENERATED] != generated:
                generated, since_s = samples[GENERATED], time.monotonic()
            await asyncio.sleep(0.1)
    return generated


async def seconds_until_free(server: ServerProcess, within_s: float) -> float:
    """How long the server goes on holding anything for readers who are still connected."""
    started_s = time.monotonic()
    await settled(server, within_s=within_s)
    return time.monotonic() - started_s


@dataclass
class Memory:
    """How much more resident memory the gateway and its engine hold than when this was made.

    Attributes:
        growth_mib: The most so far.
    """

    gateway_pid: int
    growth_mib: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        gateway = psutil.Process(self.gateway_pid)
        self._processes = {"gateway": gateway, "engine": gateway.children()[0]}
        self._before = {name: process.memory_info().rss for name, process in self._processes.items()}

    async def watch(self) -> None:
        """Samples until cancelled."""
        while True:
            for name, process in self._processes.items():
                grown_mib = round((process.memory_info().rss - self._before[name]) / 2**20, 1)
                self.growth_mib[name] = max(self.growth_mib.get(name, 0.0), grown_mib)
            await asyncio.sleep(0.25)


if __name__ == "__main__":
    sys.exit(main())
