"""No answer is lost to the ledger and none is billed twice, whenever the gateway is killed.

Eight callers read streams, and the gateway is killed (``kill -9``) 50 times in the middle of them: half of the times at
a random moment, half in the very moment in which a client reads the last event of an answer, which is when a ledger
that is written too late loses it. It is started again with the same folder, and the engine lives on. At the end every
answer that a client has seen whole (finish reason and ``[DONE]``) must be in the ledger exactly once, with exactly the
tokens that the client received, and the budget must show the sum of the ledger as charged and nothing as reserved.

The engine's own counters are the third witness. Before the kills and after them nothing is cut, and there the ledger
must agree with them exactly: answers, prompt tokens, output tokens. During the kills the engine also counts what it
computed for streams that were cut, and it may finish an answer that its gateway does not live to read. So there the
ledger may have no more tokens than the engine, and the engine no more finished answers than the ledger besides those
that a kill has interrupted. Each line by itself is held against what its client has read.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterable
from itertools import islice

import uvloop

from benchmarks.support.concurrent_callers import ConcurrentCallers, calls, counted
from benchmarks.support.installation import Gateway, Installation, Key, Organisation, Plan, installed
from benchmarks.support.ledger_audit import ledger_of, require_spent_within, require_true_lines, settled
from benchmarks.support.report import Report
from benchmarks.support.single_request import Call, Client, Reply
from benchmarks.support.spending import script
from maitred.core.context import Outcome
from maitred.core.usage import Price, to_usd

SEED = 20261122
CALLERS = 8
KILLS, QUICK_KILLS = 50, 5
CALM, QUICK_CALM = 64, 16
PRICE = {"prompt": 2.0, "cached": 0.5, "output": 6.0}
BUDGET_USD = 100.0
LEASE_S = 3.0
SETTLED_WITHIN_S = LEASE_S + 5.0
LIVES_S = (0.2, 1.5)
"""How long a gateway serves before it is killed."""
ENDS_WITHIN_S = 60.0


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_KILLS} kills")
    parser.add_argument("--kills", type=int, help=f"in place of {KILLS}")
    parser.add_argument("--scripted", action="store_true", help="a scripted engine in place of the real one")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    report = Report("ledger_kills", seed=arguments.seed, quick=arguments.quick)
    kills = arguments.kills or (QUICK_KILLS if arguments.quick else KILLS)
    calm = QUICK_CALM if arguments.quick else CALM
    uvloop.run(run(report, random.Random(arguments.seed), kills, calm, scripted=arguments.scripted))
    return report.finish()


async def run(report: Report, rng: random.Random, kills: int, calm: int, *, scripted: bool) -> None:
    """All of it."""
    admin, key = Key(scopes=["admin"]), Key()
    plan = Plan(
        {
            "acme": Organisation({"key": key}, limits={"usd_total": BUDGET_USD}),
            "operators": Organisation({"admin": admin}),
        },
        settings={"admission": {"lease_s": LEASE_S, "prices": {"*": PRICE}}},
        script=script(rng, faults=()) if scripted else None,
    )
    async with installed(plan) as installation:
        (gateway,) = installation.gateways
        client = Client(gateway.url, patience_s=ENDS_WITHIN_S)
        callers = ConcurrentCallers([client], CALLERS)
        requests = calls("stream", [key.secret], rng, streamed=1.0)
        started_s = time.monotonic()
        await _calm(report, "before the kills", installation, callers, islice(requests, calm))
        during = await _killed(gateway, client, callers, requests, rng, kills)
        await _calm(report, "after the kills", installation, callers, islice(requests, calm))
        seconds = time.monotonic() - started_s
        budget, leases = await settled(installation, "acme", admin.secret, within_s=SETTLED_WITHIN_S)
        lines = await ledger_of(installation)
        load = await installation.engine_load()
        client.close()

    finished = [line for line in lines if line.outcome is Outcome.FINISHED]
    interrupted = sum(line.outcome is Outcome.FAILED for line in lines)
    whole = sum(reply.whole for reply in during)
    cut = len(during) - whole
    report.figures = {
        "engine": "scripted" if scripted else "real",
        "kills": kills,
        "seconds": round(seconds, 1),
        "endings_during_the_kills": counted(during),
        "ledger_lines": len(lines),
        "finished_lines": len(finished),
        "interrupted_lines": interrupted,
        "engine_finished": load.finished,
        "engine_output_tokens": load.output_tokens,
        "ledger_output_tokens": sum(line.output_tokens for line in lines),
        "spent_usd": to_usd(sum(line.cost_nusd for line in lines)),
    }
    print(report.figures, flush=True)
    require_true_lines(report, "all", lines, callers.replies, Price.per_million_usd(**PRICE))
    asked = {reply.request_id for reply in callers.replies}
    unasked = sum(line.request_id not in asked for line in lines)
    report.require("all: lines of requests that nobody has sent", unasked, at_most=0)
    require_spent_within(report, "all", lines, budget, leases)
    unread = load.finished - len(finished)
    report.require("all: finished lines that the engine has not finished", max(0, -unread), at_most=0)
    report.require("all: finished by the engine, neither read nor interrupted", max(0, unread - interrupted), at_most=0)
    more = sum(line.output_tokens for line in lines) - load.output_tokens
    report.require("all: output tokens that the engine has not counted", max(0, more), at_most=0)
    report.require("streams cut, per kill", cut / kills, at_least=CALLERS / 2)
    report.require("whole answers between kills, per kill", whole / kills, at_least=1)


async def _calm(
    report: Report, name: str, installation: Installation, callers: ConcurrentCallers, requests: Iterable[Call]
) -> None:
    """Answers that nobody cuts: the ledger and the engine must have counted the same."""
    load_before, lines_before = await installation.engine_load(), await ledger_of(installation)
    replies = await callers.ask_all(requests)
    load, lines = await installation.engine_load(), await ledger_of(installation)
    known = {line.id for line in lines_before}
    new = [line for line in lines if line.id not in known]
    for what, counted_, recorded in (
        ("answers", load.finished - load_before.finished, sum(line.outcome is Outcome.FINISHED for line in new)),
        ("prompt tokens", load.prompt_tokens - load_before.prompt_tokens, sum(line.prompt_tokens for line in new)),
        ("output tokens", load.output_tokens - load_before.output_tokens, sum(line.output_tokens for line in new)),
    ):
        report.require(f"{name}: {what} by which ledger and engine differ", abs(counted_ - recorded), at_most=0)
    report.require(f"{name}: answers that did not come whole", sum(not reply.whole for reply in replies), at_most=0)


async def _killed(
    gateway: Gateway,
    client: Client,
    callers: ConcurrentCallers,
    requests: Iterable[Call],
    rng: random.Random,
    kills: int,
) -> list[Reply]:
    """Streams without end, until the gateway has been killed so many times."""
    over = False
    asking = asyncio.create_task(callers.ask_all(requests, lambda _: over))
    for kill in range(kills):
        await asyncio.sleep(rng.uniform(*LIVES_S))
        if kill % 2:
            await _kill_at_the_end_of_an_answer(gateway, client)
        else:
            gateway.kill()
        await gateway.start()
    over = True
    return await asking


async def _kill_at_the_end_of_an_answer(gateway: Gateway, client: Client) -> None:
    killed = asyncio.Event()

    def kill() -> None:
        if not killed.is_set():
            gateway.kill()
            killed.set()

    client.when_done = kill
    await killed.wait()


if __name__ == "__main__":
    sys.exit(main())
