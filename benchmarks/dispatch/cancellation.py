"""Callers that leave, on every route: nothing is left of their requests, and their places are free within a step.

An engine with few places serves chats and completions, streamed and whole, with one answer and with three. Callers send
far more of them than there are places, so that most wait in the queue, and hang up at random moments. Afterwards no KV
block, sequence, place in the queue, credit, lease or request may be left.

Then, while patient readers keep the engine computing, single callers hang up, and a connection to the engine that hears
of every step tells which of them freed the sequence. A step may be under way when the caller leaves, and that one
cannot know; the engine frees a sequence between two steps, and says so in its report of the second, which already runs
without it. So of the steps that end between the hang-up and the news two do not count, and the others are whole steps
that the sequence was held in vain. The time includes the gateway's, which has to notice that the connection is closed.
"""

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks.support.concurrent_callers import PLAIN_TOKENS, WORDS
from benchmarks.support.installation import MODEL, Gateway, Installation, Key, Organisation, Plan, installed
from benchmarks.support.report import Report, percentiles
from benchmarks.support.single_request import CHAT, COMPLETIONS, Call, Client, Reply
from benchmarks.support.tenant_gateway import unbounded

SEED = 20261126
ABORTS, QUICK_ABORTS = (1000, 80), (150, 16)
"""In a crowd, and one after the other."""
PLACES = 16
AT_ONCE = 48
STAYS_S = 1.2
TOKENS = 600
"""So many that nobody sees the end."""
READERS = 3
SETTLE_S = 20.0
FORMS = tuple(itertools.product((CHAT, COMPLETIONS), (True, False), (1, 3)))
LEFT: Mapping[str, str] = {
    "maitred_in_flight": "requests",
    "maitred_engine_running": "running sequences",
    "maitred_engine_waiting": "waiting sequences",
    "maitred_leases": "leases",
    "maitred_dispatch_waiting": "places in the queue",
    "maitred_dispatch_running": "requests at the replica",
    "maitred_dispatch_outstanding_tokens": "outstanding tokens",
}


@dataclass(frozen=True)
class Freed:
    """How long a sequence was held after its caller had left."""

    steps: int
    """That were begun after the hang-up with the sequence still there."""
    seconds: float


def main() -> int:
    """Runs the benchmark; the exit code says whether anything was left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="150 callers leave; times have no bar")
    arguments = parser.parse_args()
    report = Report("cancellation", seed=SEED, quick=arguments.quick)
    aborts, probes = QUICK_ABORTS if arguments.quick else ABORTS
    uvloop.run(run(report, aborts, probes, quick=arguments.quick))
    return report.finish()


async def run(report: Report, aborts: int, probes: int, *, quick: bool) -> None:
    """Many callers that leave at once, then one after the other."""
    key = Key()
    organisations = {"acme": Organisation({"key": key})}
    plan = Plan(organisations, settings=unbounded(), engine=("--max-sequences", str(PLACES)))
    async with installed(plan) as installation:
        gateway = installation.gateways[0]
        client = Client(gateway.url, patience_s=120)
        calls = leavers(key.secret, random.Random(SEED))
        replies = await ask_many(client, itertools.islice(calls, aborts))
        left = sum(reply.left for reply in replies)
        report.figures |= {
            "aborts": aborts,
            "left_before_the_end": left,
            "left_before_any_text": sum(reply.left and not reply.arrivals_s for reply in replies),
            "others": sorted({reply.code or str(reply.status) for reply in replies if not reply.left}),
        }
        report.require("callers who left before the end", left / aborts, at_least=0.95)
        await require_nothing_left(report, gateway, "after the crowd")
        freed = await one_by_one(installation, client, key.secret, probes)
        client.close()
        steps = [float(probe.steps) for probe in freed]
        report.figures["freed_after_steps"] = {**percentiles(steps), "most": max(steps)}
        report.figures["freed_after_s"] = percentiles([probe.seconds for probe in freed])
        print(report.figures, flush=True)
        if not quick:
            report.require("whole steps until a place is free, p95", percentiles(steps)["p95"], at_most=1)
        await require_nothing_left(report, gateway, "at the end")


def leavers(key: str, rng: random.Random) -> Iterator[Call]:
    """Requests of all forms in turn, whose callers leave at random moments."""
    for number, (path, stream, choices) in enumerate(itertools.cycle(FORMS)):
        yield call(
            f"leaver-{number}", key, rng, path, stream=stream, choices=choices, stays_s=rng.uniform(0.002, STAYS_S)
        )


def call(
    id_: str,
    key: str,
    rng: random.Random,
    path: str = COMPLETIONS,
    *,
    stream: bool = True,
    choices: int = 1,
    stays_s: float | None = None,
) -> Call:
    """One request for a long answer."""
    body: dict[str, object] = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "stream": stream, "n": choices}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(2, 30)))}]
    else:
        body["prompt"] = rng.choices(PLAIN_TOKENS, k=rng.randint(5, 60))
    return Call(id_, key, body, path, stays_s)


async def ask_many(client: Client, calls: Iterator[Call]) -> list[Reply]:
    """Many at once, until the calls are used up."""
    replies: list[Reply] = []

    async def ask_some() -> None:
        replies.extend([await client.ask(call) for call in calls])

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask_some())
    return replies


async def one_by_one(installation: Installation, client: Client, key: str, probes: int) -> list[Freed]:
    """Callers who hang up in the middle of a stream, each when the one before is gone, beside readers who stay."""
    rng = random.Random(f"{SEED}:probes")
    patience = asyncio.Event()

    async def read_on(number: int) -> None:
        for again in itertools.count():
            await client.ask(call(f"reader-{number}-{again}", key, rng))
            if patience.is_set():
                return

    freed = []
    async with installation.engine_link() as link, asyncio.TaskGroup() as group:
        news = asyncio.Event()
        link.on_change(news.set)
        readers = [group.create_task(read_on(number)) for number in range(READERS)]
        for number in range(probes):
            reply = Reply("")
            asking = asyncio.create_task(client.ask_into(call(f"probe-{number}", key, rng), reply))
            while len(reply.arrivals_s) < rng.randint(1, 20):  # noqa: ASYNC110 - the reply does not tell
                await asyncio.sleep(0.003)
            cancelled, steps = link.load().cancelled, link.load().steps
            left_s = client.clock.now_s()
            asking.cancel()
            async with asyncio.timeout(SETTLE_S):
                while link.load().cancelled == cancelled:
                    news.clear()
                    await news.wait()
            freed.append(Freed(max(0, link.load().steps - steps - 2), client.clock.now_s() - left_s))
        patience.set()
        for reader in readers:
            reader.cancel()
    return freed


async def require_nothing_left(report: Report, gateway: Gateway, when: str) -> None:
    """Holds what there is against nothing, once it is quiet."""
    left: dict[str, float] = {}
    for _ in range(int(SETTLE_S / 0.2)):
        left = left_of(await asyncio.to_thread(gateway.metrics))
        if not any(left.values()):
            break
        await asyncio.sleep(0.2)
    report.figures[when] = left
    for what, count in left.items():
        report.require(f"{what} left {when}", count, at_most=0)


def left_of(samples: Mapping[str, float]) -> dict[str, float]:
    """What is held, by name."""
    sums: dict[str, float] = {}
    credit = {"free": 0.0, "total": 0.0}
    for sample, value in samples.items():
        name = sample.partition("{")[0]
        sums[name] = sums.get(name, 0.0) + value
        if name == "maitred_dispatch_credits":
            credit["free" if 'state="free"' in sample else "total"] += value
    held: dict[str, Any] = {words: sums[name] for name, words in LEFT.items()}
    held["KV blocks"] = sums["maitred_engine_kv_blocks_total"] - sums["maitred_engine_kv_blocks_free"]
    held["credits"] = credit["total"] - credit["free"]
    return held


if __name__ == "__main__":
    sys.exit(main())
