"""A soak of the gateway: a million requests at half of what it can do, and nothing may creep.

One `maitred serve` with everything on (see `benchmarks.support.gateways.gateway_set`) has a core for itself, before an
upstream that costs nothing. Callers ask at fixed times: for whole answers, for streams that come at once, for some that
take a second; others for a model that always fails; and some leave in the middle of a stream. What it can do is
measured first, with callers who do not wait.

* **Answers**: every one that is not left or failed on purpose is whole, to the token.
* **Memory, files, tasks** are read between tenths, when nobody is connected. Growth is that from the end of the second
  tenth, by which caches and pools are full, to the end of the last.
* **Accounts**: nothing is in flight, no lease is held and the upstream has no stream left, after every tenth.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.engine.soak import allocated_mib
from benchmarks.support.canned_upstream import FAILING, INSTANT, PACED, CannedUpstream
from benchmarks.support.connection_rounds import Lane, Turn
from benchmarks.support.gateways.gateway_field import STREAM_TOKENS, WHOLE_TOKENS, Field, Runner, Scale, everybody
from benchmarks.support.gateways.gateway_set import CONTENDERS
from benchmarks.support.report import Report

SEED = 20261122
REQUESTS, QUICK_REQUESTS = 1_000_000, 3_000
TENTHS, WARM = 10, 2
CALLERS = 64
PACED_TOKENS, LEFT_AFTER = 20, 5
STREAMS, PACED_STREAMS, FAILURES, LEAVERS = 0.25, 0.02, 0.02, 0.02
"""Parts of all requests."""
SETTLED_S = 20.0
GROWTH = 0.02


@dataclass(frozen=True)
class Tenth:
    """One tenth of the requests: what came back, and what the gateway held when it was over."""

    answers: Turn
    failures: Turn
    left: int
    wanted_words: int
    held: dict[str, float]


class Caller(Lane):
    """Asks at fixed times, or as soon as it has its answer if that is later.

    Args:
        requests: To be sent.
        turn: Gets what came.
        first_s: When the first is due, by the loop's clock.
        every_s: Between two.
    """

    def __init__(self, requests: Iterator[bytes], turn: Turn, first_s: float, every_s: float) -> None:
        super().__init__(requests, turn)
        self._due_s = first_s
        self._every_s = every_s

    def begin(self) -> None:
        """Asks at the next of its times."""
        due_s, self._due_s = self._due_s, self._due_s + self._every_s
        asyncio.get_running_loop().call_at(due_s, super().begin)


class Leaver(Lane):
    """Hangs up in the middle of its stream."""

    def data_received(self, data: bytes) -> None:
        """See `Lane`."""
        super().data_received(data)
        if self._turn.words >= LEFT_AFTER:
            self.close()


class Soak:
    """A gateway that is asked, and looked at.

    Args:
        runner: The gateway.
        upstream: Behind it.
        rate: Requests per second.
    """

    def __init__(self, runner: Runner, upstream: CannedUpstream, rate: float) -> None:
        assert runner.gateway is not None
        self._runner = runner
        self._gateway = runner.gateway
        self._upstream = upstream
        self._rate = rate
        self._rng = random.Random(SEED)
        self._whole = runner.request()
        self._stream = runner.request(INSTANT, tokens=STREAM_TOKENS, stream=True)
        self._paced = runner.request(PACED, tokens=PACED_TOKENS, stream=True)
        self._failing = runner.request(FAILING)

    async def tenth(self, share: int) -> Tenth:
        """Sends a share of the requests, and looks at the gateway when all of them have ended."""
        wanted: Counter[int] = Counter()
        failures, leavers = max(1, int(share * FAILURES)), max(1, int(share * LEAVERS))
        answers, failed = Turn(), Turn()
        good = share - failures - leavers
        seconds = share / self._rate
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask(self._mixed(good, wanted), answers, CALLERS, good / seconds))
            group.create_task(self._ask(itertools.repeat(self._failing, failures), failed, 4, failures / seconds))
            group.create_task(self._leave(leavers, seconds))
        return Tenth(
            answers, failed, leavers, sum(tokens * count for tokens, count in wanted.items()), await self._rested()
        )

    def _mixed(self, count: int, wanted: Counter[int]) -> Iterator[bytes]:
        for _ in range(count):
            kind = self._rng.random()
            if kind < PACED_STREAMS:
                wanted[PACED_TOKENS] += 1
                yield self._paced
            elif kind < PACED_STREAMS + STREAMS:
                wanted[STREAM_TOKENS] += 1
                yield self._stream
            else:
                wanted[WHOLE_TOKENS] += 1
                yield self._whole

    async def _ask(self, requests: Iterator[bytes], turn: Turn, callers: int, rate: float) -> None:
        loop = asyncio.get_running_loop()
        first_s, every_s = loop.time(), callers / rate
        lanes = [Caller(requests, turn, first_s + number / rate, every_s) for number in range(callers)]
        for lane in lanes:
            await loop.create_connection(lambda lane=lane: lane, "127.0.0.1", self._runner.port)  # type: ignore[misc]
            lane.begin()
        await asyncio.gather(*(lane.over for lane in lanes))
        for lane in lanes:
            lane.close()
        turn.seconds = loop.time() - first_s

    async def _leave(self, count: int, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        leavers = []
        for number in range(count):
            await asyncio.sleep(max(0.0, started_s + seconds * number / count - loop.time()))
            leaver = Leaver(iter([self._paced]), Turn())
            await loop.create_connection(lambda leaver=leaver: leaver, "127.0.0.1", self._runner.port)  # type: ignore[misc]
            leaver.begin()
            leavers.append(leaver.over)
        await asyncio.gather(*leavers)

    async def _rested(self) -> dict[str, float]:
        """What it holds once nobody is there; what it holds after a while, if it never lets go of something."""
        until_s = time.monotonic() + SETTLED_S
        while True:
            held = await asyncio.to_thread(self._held)
            if not (held["in_flight"] or held["leases"] or held["upstream_streams"]) or time.monotonic() > until_s:
                return held
            await asyncio.sleep(0.5)

    def _held(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._runner.port}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        sums: defaultdict[str, float] = defaultdict(float)
        for line in lines:
            if not line.startswith("#"):
                sums[line.partition(" ")[0].partition("{")[0]] += float(line.rpartition(" ")[2])
        processes = self._gateway.processes()
        return {
            "in_flight": sums["maitred_in_flight"],
            "leases": sums["maitred_leases"],
            "upstream_streams": self._upstream.streaming,
            "tasks": sums["maitred_process_tasks"],
            # Without the connections that it keeps to the upstream for a while: as many as were needed last.
            "files": sum(process.num_fds() for process in processes) - self._upstream.connections,
            "processes": len(processes),
            "allocated_mib": round(sum(allocated_mib(process.pid) for process in processes), 2),
        }


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS:,} requests; growth has no bar")
    parser.add_argument("--requests", type=int, help=f"how many; {REQUESTS:,} unless given")
    parser.add_argument("--rate", type=float, help="per second, instead of half of what it can do")
    arguments = parser.parse_args()
    requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else REQUESTS)
    report = Report("gateway_soak", seed=SEED, quick=arguments.quick)
    with TemporaryDirectory(prefix="maitred-") as folder:
        uvloop.run(run(Path(folder), requests, arguments.rate, report))
    judge(report, quick=arguments.quick)
    return report.finish()


async def run(folder: Path, requests: int, rate: float | None, report: Report) -> None:
    """Starts the gateway and plays all tenths."""
    ours = [contender for contender in CONTENDERS if contender.name == "maitred"]
    scale = Scale(rounds=1, turn_s=1.0 if report.quick else 10.0)
    async with everybody(ours, folder, scale, {}) as field:
        runner = field.gateways[0]
        rate = rate or await capacity(field) / 2
        soak = Soak(runner, field.upstream, rate)
        report.figures |= {"requests": requests, "rate": round(rate, 1), "tenths": []}
        for number in range(TENTHS):
            share = requests * (number + 1) // TENTHS - requests * number // TENTHS
            tenth = await soak.tenth(share)
            report.figures["tenths"].append(shown(tenth))
            print(number + 1, report.figures["tenths"][-1], flush=True)
            report.write()


async def capacity(field: Field) -> float:
    """Requests of the mixture per second, of callers who do not wait."""
    mixture = itertools.cycle([True, False, False, False])

    def mixed(runner: Runner) -> Iterator[bytes]:
        for stream in mixture:
            yield runner.request(INSTANT, tokens=STREAM_TOKENS if stream else WHOLE_TOKENS, stream=stream)

    (taken,) = (await field.rounds(mixed, CALLERS, field.gateways)).values()
    return taken[0].per_s


def shown(tenth: Tenth) -> dict[str, Any]:
    """For the result file."""
    return {
        "seconds": round(tenth.answers.seconds, 1),
        "answers": tenth.answers.requests,
        "statuses": dict(sorted(tenth.answers.statuses.items())),
        "failed_on_purpose": dict(sorted(tenth.failures.statuses.items())),
        "left": tenth.left,
        "lost_tokens": tenth.wanted_words - tenth.answers.words,
        **tenth.held,
    }


def judge(report: Report, *, quick: bool) -> None:
    """Holds the figures against the bars."""
    tenths = report.figures["tenths"]
    report.require("answers that are none", sum(t["answers"] - t["statuses"].get(200, 0) for t in tenths), at_most=0)
    report.require(
        "failures that look like answers", sum(t["failed_on_purpose"].get(200, 0) for t in tenths), at_most=0
    )
    report.require("tokens lost", sum(abs(t["lost_tokens"]) for t in tenths), at_most=0)
    for name in ("in_flight", "leases", "upstream_streams"):
        report.require(f"{name.replace('_', ' ')} at rest", max(t[name] for t in tenths), at_most=0)
    for name in ("tasks", "files"):
        report.require(f"{name} gained", tenths[-1][name] - tenths[WARM - 1][name], at_most=0)
    growth = tenths[-1]["allocated_mib"] / tenths[WARM - 1]["allocated_mib"] - 1
    report.figures["memory_growth"] = round(growth, 5)
    if not quick:
        report.require("memory growth", growth, at_most=GROWTH)


if __name__ == "__main__":
    sys.exit(main())
