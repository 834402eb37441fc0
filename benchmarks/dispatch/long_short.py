"""Long answers beside short ones: nine of ten requests want 50 tokens, one of ten wants 2,000.

2,000 tokens with a prompt of at most 40 are nearly all of the bundled model's window of 2,048. Short requests come from
one tenant, long ones from another, of the same weight, at random moments, together so many that they ask for 1.2 times
the tokens per second that the server makes for the short ones alone (measured first). So the long ones cannot all be
served in time, by nobody; the question is who waits. Three situations take turns, with the same short requests:

* *short alone*: without the long ones.
* *with long*: with them, queues fair.
* *with long, fifo*: with them, queues in order of arrival.

A long answer takes half a minute, so at the start as many long requests as the server has places stand for those that
would have begun before, each with a random rest of its tokens. What the long ones pay is stated: the time from one of
their tokens to the next over that of a single long answer on a quiet server, and how long they wait for the first.
A request without a first token at the end counts with what it has waited by then.
"""

import argparse
import random
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks.support.installation import Key, Organisation
from benchmarks.support.report import Report, percentiles
from benchmarks.support.single_request import Client
from benchmarks.support.tenant_gateway import SLOTS, merged, ordered_by, served, settled, unbounded
from benchmarks.support.traffic import Sort, Visit, capacity, of, play, poisson, tokens_per_s, ttfts_s, visit
from maitred.testing.server_process import ServerProcess

SEED = 20261124
SHORT_TOKENS, LONG_TOKENS = 50, 2000
LONG_PART = 0.1
LOAD = 1.2
PROMPT = (10, 40)
LEAST_PIECES = 20
"""For a pace."""
SITUATIONS = ("short alone", "with long", "with long, fifo")


@dataclass(frozen=True)
class Size:
    """How much is done: rounds of all situations, seconds of each, and of these the warm-up."""

    rounds: int
    seconds: float
    warmup_s: float
    capacity_s: float
    alone_tokens: int


FULL = Size(rounds=2, seconds=32, warmup_s=6, capacity_s=10, alone_tokens=LONG_TOKENS)
QUICK = Size(rounds=1, seconds=5, warmup_s=1, capacity_s=3, alone_tokens=200)


@dataclass(frozen=True)
class Server:
    """One server and its callers."""

    process: ServerProcess
    client: Client


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round; times have no bars")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    report = Report("long_short", seed=SEED, quick=arguments.quick)
    organisations = {name: Organisation({"key": Key()}) for name in ("short", "long")}
    keys = {name: organisation.keys["key"].secret for name, organisation in organisations.items()}
    short = Sort("short", keys["short"], PROMPT, (SHORT_TOKENS, SHORT_TOKENS))
    long = Sort("long", keys["long"], PROMPT, (LONG_TOKENS, LONG_TOKENS))
    with ExitStack() as stack:
        servers = {}
        for policy in ("fair", "fifo"):
            process = stack.enter_context(served(organisations, merged(unbounded(), ordered_by(policy))))
            servers[policy] = Server(process, Client(process.url, patience_s=3600))
        uvloop.run(run(report, servers, short, long, size))
    if not arguments.quick:
        report.require("short p99 TTFT with long ones over FIFO's", report.figures["p99_over_fifo"], at_most=1)
    return report.finish()


async def run(report: Report, servers: dict[str, Server], short: Sort, long: Sort, size: Size) -> None:
    """All situations in turns."""
    fair = servers["fair"]
    can = await capacity(
        fair.client, [short], users=3 * SLOTS, warmup_s=size.capacity_s / 3, seconds=size.capacity_s, seed="capacity"
    )
    alone_s = await _alone(fair, long, size.alone_tokens)
    tokens = (1 - LONG_PART) * SHORT_TOKENS + LONG_PART * LONG_TOKENS
    rate = LOAD * can.tokens_per_s / tokens
    report.figures |= {"tokens_per_s": can.tokens_per_s, "requests_per_s": round(rate, 2), "alone_s_per_token": alone_s}
    print(report.figures, flush=True)
    seen: dict[str, list[Visit]] = {situation: [] for situation in SITUATIONS}
    speed: dict[str, list[float]] = {situation: [] for situation in SITUATIONS}
    for number in range(size.rounds):
        for situation in (*SITUATIONS[number % 3 :], *SITUATIONS[: number % 3]):
            server = servers["fifo" if "fifo" in situation else "fair"]
            visits = poisson(short, (1 - LONG_PART) * rate, size.seconds, f"{SEED}:{number}:short")
            if situation != "short alone":
                visits += poisson(long, LONG_PART * rate, size.seconds, f"{SEED}:{number}:long")
                visits += begun_before(long, f"{SEED}:{number}:before")
            await settled(server.process)
            await play(server.client, visits, until_s=size.seconds)
            seen[situation] += visits
            speed[situation].append(tokens_per_s(visits, size.warmup_s, size.seconds))
    report.figures["situations"] = {
        situation: _figures(visits, statistics.mean(speed[situation]), alone_s, size)
        for situation, visits in seen.items()
    }
    for situation, figures in report.figures["situations"].items():
        print(situation, figures, flush=True)
    p99 = {situation: figures["short_ttft_s"]["p99"] for situation, figures in report.figures["situations"].items()}
    report.figures["p99_with_over_without"] = round(p99["with long"] / p99["short alone"], 3)
    report.figures["p99_over_fifo"] = round(p99["with long"] / p99["with long, fifo"], 3)
    print({name: value for name, value in report.figures.items() if name.startswith("p99")}, flush=True)
    for server in servers.values():
        server.client.close()


def begun_before(long: Sort, seed: str) -> list[Visit]:
    """As many long requests as there are places, due at once, each with a random rest of its tokens."""
    rng = random.Random(seed)
    rests = (rng.randint(1, LONG_TOKENS) for _ in range(SLOTS))
    return [visit(Sort("before", long.key, long.prompt, (rest, rest)), rng, 0.0) for rest in rests]


async def _alone(server: Server, long: Sort, tokens: int) -> float:
    """Seconds between two tokens of a long answer that has the server for itself."""
    await settled(server.process)
    one = visit(Sort("alone", long.key, long.prompt, (tokens, tokens)), random.Random(SEED), 0.0)
    await play(server.client, [one], until_s=120)
    return round(_pace_s(one), 6)


def _pace_s(one: Visit) -> float:
    pieces = one.reply.arrivals_s
    return (pieces[-1] - pieces[0]) / (len(pieces) - 1)


def _figures(visits: list[Visit], speed: float, alone_s: float, size: Size) -> dict[str, Any]:
    counted = (size.warmup_s, size.seconds - size.warmup_s / 2)
    short, long = of(visits, "short", due=counted), of(visits, "long")
    paces = [_pace_s(v) for v in of(visits, "long", "before") if len(v.reply.arrivals_s) >= LEAST_PIECES]
    long_tokens = sum(v.tokens_within(size.warmup_s, size.seconds) for v in of(visits, "long", "before"))
    return {
        "short_requests": len(short),
        "short_ttft_s": percentiles(ttfts_s(short, open_until_s=size.seconds)),
        "short_e2e_s": percentiles([v.ended_s - v.due_s for v in short if v.whole]),
        "long_requests": len(long),
        "long_ttft_s": percentiles(ttfts_s(long, open_until_s=size.seconds)),
        "long_pace_over_alone": round(statistics.median(paces) / alone_s, 3) if paces else None,
        "long_tokens_per_s": round(long_tokens / size.rounds / (size.seconds - size.warmup_s), 1),
        "tokens_per_s": round(speed, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
