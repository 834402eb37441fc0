"""Workers are replaced again and again under load, and nobody notices.

One gateway with two workers serves the bundled model on an engine of its own and another one on scripted servers of
somebody else's. Users read streams and whole answers of both (as in `benchmarks.gateway.reloads`) while all workers are
replaced, one after the other, as often as it goes. No stream may be dropped and no request may fail; each answer has to
be in the ledger once, with its tokens; afterwards nothing may be held, and file descriptors and tasks of the controller
have to be what they were.
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

from benchmarks.gateway.reloads import (
    ADMIN_KEY,
    MOST_FDS,
    RATES_PER_S,
    SEED,
    SERVER,
    SETTLE_S,
    USER_KEY,
    dropped,
    metrics,
    users,
    written,
)
from benchmarks.gateway.users import is_whole
from benchmarks.support.report import Report, percentiles
from maitred.load.measure.record import RequestRecord
from maitred.load.play.driver import run
from maitred.testing.scripted_openai import scripted_openai
from maitred.testing.server_process import ServerProcess, serving

WORKERS = 2
RESTARTS, QUICK_RESTARTS = 20, 3
EVERY_S = 1.0
"""From the end of one to the beginning of the next."""
LOOK_EVERY_S = 0.1
LOOKS = 10
PROBES = 2 * len(RATES_PER_S)
"""Requests for one token, before each load sends its own."""
HELD = ("maitred_in_flight", "maitred_leases", "maitred_dispatch_running", "maitred_engine_running")


def main() -> int:
    """Runs the benchmark; the exit code says whether all bars were met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_RESTARTS} restarts")
    arguments = parser.parse_args()
    report = Report("restarts", seed=SEED, quick=arguments.quick)
    with TemporaryDirectory(prefix="maitred-restarts-") as folder, scripted_openai(SERVER) as one:
        file = Path(folder) / "maitred.yaml"
        config = yaml.safe_load(written(0, [one.url, one.url]))
        config["server"]["workers"] = WORKERS
        file.write_text(yaml.safe_dump(config))
        with serving("--config", str(file), environment={"ADMIN": ADMIN_KEY, "USER": USER_KEY}) as server:
            uvloop.run(play(server, QUICK_RESTARTS if arguments.quick else RESTARTS, report))
            report.require("exit code", server.stop(), at_most=0)
    return report.finish()


async def play(server: ServerProcess, count: int, report: Report) -> None:
    """Lets the users loose, replaces the workers, and counts what is left."""
    over = asyncio.Event()
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {ADMIN_KEY}"}) as session:
        administration = Administration(session, server.url)
        while (await metrics(session, server))["maitred_engine_up"] < 1:  # noqa: ASYNC110 - far away
            await asyncio.sleep(LOOK_EVERY_S)
        times_s = [await administration.restart()]  # so that everything is open that is opened once
        before = await levels(session, server)
        billed = await administration.billed()
        async with asyncio.TaskGroup() as group:
            loads = {who: group.create_task(run(users(server.url, *who), stop=over)) for who in RATES_PER_S}
            for _ in range(count):
                await asyncio.sleep(EVERY_S)
                times_s.append(await administration.restart())
            over.set()
        await asyncio.sleep(SETTLE_S)
        after = await levels(session, server)
        billed = {key: value - billed.get(key, 0) for key, value in (await administration.billed()).items()}
    records = {who: load.result().records for who, load in loads.items()}
    judge(report, records, billed, times_s, before, after)


async def levels(session: aiohttp.ClientSession, server: ServerProcess) -> dict[str, float]:
    """The least of several looks at the metrics: now and then a worker asks whether keys have changed."""
    looks = []
    for _ in range(LOOKS):
        await asyncio.sleep(LOOK_EVERY_S)
        looks.append(await metrics(session, server))
    return {name: min(look.get(name, 0.0) for look in looks) for name in looks[0]}


class Administration:
    """What an operator asks of the gateway.

    Args:
        session: With an admin key.
        url: Of the gateway.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url}/admin/v1"

    async def restart(self) -> float:
        """Replaces all workers; returns how long it took until the last of them had ended."""
        began_s = time.perf_counter()
        leaving = {item["pid"] for item in await self._listed("POST", "workers/restart")}
        while leaving & {item["pid"] for item in await self._listed("GET", "workers")}:  # noqa: ASYNC110 - far away
            await asyncio.sleep(LOOK_EVERY_S)
        return time.perf_counter() - began_s

    async def billed(self) -> dict[str, int]:
        """What is in the ledger: requests by their outcomes, and the tokens of all that have finished."""
        listed = await self._listed("GET", "usage?group_by=outcome")
        requests = {item["outcome"]: item["requests"] for item in listed}
        return requests | {"tokens": sum(item["output_tokens"] for item in listed if item["outcome"] == "finished")}

    async def _listed(self, method: str, path: str) -> list[dict[str, Any]]:
        async with self._session.request(method, f"{self._url}/{path}") as response:
            response.raise_for_status()
            data: list[dict[str, Any]] = (await response.json())["data"]
            return data


def judge(
    report: Report,
    records: dict[tuple[str, bool], list[RequestRecord]],
    billed: dict[str, int],
    times_s: list[float],
    before: dict[str, float],
    after: dict[str, float],
) -> None:
    """Holds everything against what was promised."""
    answers = [record for of_load in records.values() for record in of_load]
    broken = [record for record in answers if not is_whole(record)]
    report.figures = {
        "workers": WORKERS,
        "restart_s": percentiles(times_s),
        "answers": {
            f"{model}, {'stream' if stream else 'whole'}": len(of_load) for (model, stream), of_load in records.items()
        },
        "billed": billed,
        "broken": [msgspec.to_builtins(record, enc_hook=str) for record in broken[:5]],
    }
    print(report.figures, flush=True)
    report.require("streams dropped", sum(dropped(records, stream=True)), at_most=0)
    report.require("whole answers that failed", sum(dropped(records, stream=False)), at_most=0)
    report.require("answers under restarts", len(answers), at_least=10 * (len(times_s) - 1))
    finished = billed.pop("finished", 0) - PROBES
    tokens = sum(record.output_tokens for record in answers) + PROBES
    report.require("answers not in the ledger once", abs(finished - len(answers)), at_most=0)
    report.require("tokens not in the ledger once", abs(billed.pop("tokens") - tokens), at_most=0)
    report.require("lines of the ledger that nobody knows of", sum(billed.values()), at_most=0)
    report.require("held afterwards", sum(after[name] for name in HELD), at_most=0)
    for name, most in (("open_fds", MOST_FDS), ("tasks", 0)):
        more = after[f"maitred_process_{name}"] - before[f"maitred_process_{name}"]
        report.require(f"more {name.replace('_', ' ')} of the controller", more, at_most=most)


if __name__ == "__main__":
    sys.exit(main())
