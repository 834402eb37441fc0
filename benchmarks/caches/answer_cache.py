"""The cache of answers: whether each answer is the right one, and what a hit costs.

Right answers: 20 tenants ask the same questions, drawn by Zipf's law, through four APIs, streamed or whole, of a real
engine. Every answer is held against the one that was computed first for its tenant and its question, and the ledger
against the counters of the engine, to the token. Then a hundred ask the same at once: the engine computes one answer.

Cost: gateways with everything on, before a replica that answers at once, take turns (see
`benchmarks.support.caches.hit_cost`). Rivals: the caches of LiteLLM and Portkey, if they are installed by
``python -m benchmarks gateways install`` (see `benchmarks.support.caches.cache_rivals`).

    python -m benchmarks answer_cache
    python -m benchmarks answer_cache --only cost --before ../maitred-of-before    another checkout takes turns, too
    python -m benchmarks answer_cache --only answers --workers 4

Figures of some parts only, or of several workers, go to a result file of their own, because costs need a quiet machine
and right answers do not.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory

import uvloop

from benchmarks.support.caches.answer_audit import (
    SHARED,
    books_of,
    require_books,
    require_engine,
    require_equal,
    require_no_leak,
)
from benchmarks.support.caches.askers import Asker, Came
from benchmarks.support.caches.cache_rivals import compare
from benchmarks.support.caches.hit_cost import CostScale, measure
from benchmarks.support.caches.questions import Asked, asked_at_random
from benchmarks.support.gateways.gateway_field import Scale
from benchmarks.support.installation import Key, Organisation
from benchmarks.support.report import Report
from benchmarks.support.tenant_gateway import served
from maitred.testing.server_process import ServerProcess

SEED = 20261128
PARTS = ("answers", "in flight", "cost", "rivals")
TENANTS, LANES = 20, 32
REQUESTS, QUESTIONS = 100_000, 3_000
QUICK_REQUESTS, QUICK_QUESTIONS = 2_000, 100
QUICK_COST = CostScale(starts=1, rounds=10, requests=100, latencies=300, idle_s=1.0)
RIVAL_ROUNDS, RIVAL_REQUESTS = 15, 200
QUICK_RIVAL_ROUNDS, QUICK_RIVAL_REQUESTS = 2, 40
TOLD_EVERY = 5_000
_WARM_UP = 2_000_000
"""Number of the first question that is asked before the others."""
STREAMS, WITHIN_S, STREAM_TOKENS = 100, 2.0, 400
SETTINGS = {"cache": {"ttl_s": 86_400, "max_bytes": 1 << 30}}


def main() -> int:
    """Runs the benchmark; the exit code says whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--requests", type=int, help="for right answers")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    parser.add_argument("--workers", type=int, default=1, help="of the gateway that is asked for right answers")
    parser.add_argument("--before", type=Path, help="a checkout of a version to compare the cost with")
    arguments = parser.parse_args()
    requests = arguments.requests or (QUICK_REQUESTS if arguments.quick else REQUESTS)
    questions = QUICK_QUESTIONS if arguments.quick else QUESTIONS
    report = Report(result_name(arguments.only, arguments.workers), seed=SEED, quick=arguments.quick)
    report.figures["parts"], report.figures["workers"] = [*arguments.only], arguments.workers
    keys = [Key() for _ in range(TENANTS)]
    if {"answers", "in flight"}.intersection(arguments.only):
        organisations = {f"tenant-{number}": Organisation({"one": key}) for number, key in enumerate(keys)}
        with served(organisations, {**SETTINGS, "server": {"workers": arguments.workers}}) as server:
            asker = Asker(server.url, [key.secret for key in keys])
            if "answers" in arguments.only:
                uvloop.run(answers(server, asker, requests, questions, report))
            if "in flight" in arguments.only:
                uvloop.run(in_flight(server, asker, report))
    if "cost" in arguments.only:
        uvloop.run(measure(QUICK_COST if arguments.quick else CostScale(), arguments.before, report))
    if "rivals" in arguments.only:
        rounds = QUICK_RIVAL_ROUNDS if arguments.quick else RIVAL_ROUNDS
        turn = QUICK_RIVAL_REQUESTS if arguments.quick else RIVAL_REQUESTS
        with TemporaryDirectory(prefix="maitred-") as folder:
            uvloop.run(compare(Path(folder), Scale(rounds=rounds), turn, report))
    return report.finish()


def result_name(parts: Sequence[str], workers: int) -> str:
    """Returns the name of the result file for these parts."""
    some = [part for part in PARTS if part in parts and len(parts) < len(PARTS)]
    return "_".join(["answer_cache", *" ".join(some).split(), *(["workers"] if workers > 1 else [])])


async def answers(server: ServerProcess, asker: Asker, requests: int, questions: int, report: Report) -> None:
    """Asks many questions, and holds all answers against each other and against what was written down."""
    before = await books_of(server, await _warmed_up(asker))
    start_s = time.monotonic()
    asked = asked_at_random(SEED, requests, questions, TENANTS)
    replies = await asker.ask_all(_told(asked, start_s), lanes=LANES)
    took_s = time.monotonic() - start_s
    after = await books_of(server, len(before.lines) + requests)
    require_equal(report, "answers", replies)
    require_no_leak(report, "answers", replies)
    require_books(report, "answers", replies, before, after)
    shared = sum(came.cache in SHARED for came in replies)
    report.figures["answers"] |= {
        "hit_share": round(shared / requests, 4),
        "engine": "real, bundled model",
        "seconds_of_asking": round(took_s, 1),
        "most_memory_of_the_asker_mib": getrusage(RUSAGE_SELF).ru_maxrss >> 10,
    }
    print(report.figures["answers"], flush=True)
    asker.close()


async def _warmed_up(asker: Asker) -> int:
    """Waits until every worker that has a connection knows its engine; returns how many requests were answered."""
    answered = 0
    while True:
        came = await asyncio.gather(*(asker.ask(Asked(0, _WARM_UP + n, "chat", streamed=False)) for n in range(LANES)))
        right = sum(each.answer is not None for each in came)
        answered += right
        if right == LANES:
            return answered


def _told(requests: Iterator[Asked], start_s: float) -> Iterator[Asked]:
    """Yields the requests, and says now and then how many there were."""
    for number, asked in enumerate(requests):
        if number and not number % TOLD_EVERY:
            print(f"{number} requests in {time.monotonic() - start_s:.0f} s", flush=True)
        yield asked


async def in_flight(server: ServerProcess, asker: Asker, report: Report) -> None:
    """Sends identical streams while the first one is answered: all stay, the first one leaves, and all leave."""
    name = "in flight"
    before = await books_of(server, 0)
    replies = await asyncio.gather(*_streams(asker, question=1_000_000))
    after = await books_of(server, len(before.lines) + STREAMS)
    require_equal(report, name, replies)
    require_books(report, name, replies, before, after)
    print(report.figures[name], flush=True)

    for name, question, leave in (
        ("in flight, the first leaves", 1_000_001, 1),
        ("in flight, all leave", 1_000_002, STREAMS),
    ):
        before, begun = after, asyncio.Event()
        streams = _streams(asker, question=question, begun=begun.set)
        await begun.wait()
        await asyncio.sleep(WITHIN_S / 2)
        for stream in streams[:leave]:
            stream.cancel()
        ended = await asyncio.gather(*streams, return_exceptions=True)
        stayed = [came for came in ended if isinstance(came, Came)]
        after = await books_of(server, len(before.lines) + max(len(stayed), STREAMS - leave + 1))
        report.figures[name] = {
            "found_by": dict(Counter(came.cache for came in stayed)),
            "lines": dict(Counter(f"{line.cache or 'computed'}, {line.outcome}" for line in after.lines_since(before))),
            "saved_tokens": sum(line.saved_tokens for line in after.lines_since(before)),
        }
        print(name, report.figures[name], flush=True)
        whole = {came.answer for came in stayed if came.answer is not None}
        report.require(f"{name}: streams that failed", sum(came.answer is None for came in stayed), at_most=0)
        report.require(f"{name}: answers", len(whole), at_most=1)
        require_engine(report, name, before, after, sequences=1, cut=not stayed)
    asker.close()


def _streams(asker: Asker, *, question: int, begun: Callable[[], None] | None = None) -> "list[asyncio.Task[Came]]":
    """Starts identical streams, the first one at once and the others spread over a time."""

    async def ask(number: int) -> Came:
        await asyncio.sleep(WITHIN_S * number / STREAMS)
        asked = Asked(0, question, "chat", streamed=True)
        return await asker.ask(asked, tokens=STREAM_TOKENS, begun=None if number else begun)

    return [asyncio.create_task(ask(number)) for number in range(STREAMS)]


if __name__ == "__main__":
    sys.exit(main())
