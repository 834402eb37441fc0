"""WebSockets of the Responses API: thousands at once, budgets and bills, the time to the first token, and what is left.

- *Many*: 2,000 sockets of two tenants take turns at once, on an engine whose answer is a digest of the conversation
  (`benchmarks.support.digest_engine`), so no turn can lack its context unnoticed. The budget of one tenant runs out in
  the middle of its sockets and may not be overspent. One in twenty sockets of the other is cut in the middle of an
  answer. Each turn that the engine has begun has to be in the ledger once, with the engine's tokens.
- *First token*: on the real engine, the time to the first token of the second turn over a socket and over HTTP, in
  turns, with prompts of the same length.
- *Soak*: sockets come and go on the real engine, one in twenty by an abrupt end. Then blocks, leases, places, credits
  and file descriptors of gateway and engine are what they were.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvloop

from benchmarks.support.digest_engine import DigestEngine, digest_engine, digest_of, question
from benchmarks.support.installation import MODEL, Gateway, Installation, Key, Organisation, Plan, installed
from benchmarks.support.ledger_audit import BILLED, ledger_of, require_spent_within, settled
from benchmarks.support.report import Report
from benchmarks.support.response_sockets import TurnResult, response_socket, take_turn
from benchmarks.support.tenant_gateway import unbounded
from maitred.core.context import Outcome
from maitred.core.replica import LoadReport
from maitred.core.usage import UsageEvent, to_usd
from maitred.wire.address import UnixAddress

SEED = 20261128
SOCKETS, QUICK_SOCKETS = 2000, 40
TURNS = 4
OUTPUT_TOKENS = 64
KEYS = 8
"""Keys of a tenant, which share its sockets."""
CUT = 20
"""One in so many sockets is cut."""
USD_PER_SOCKET = 2e-4
"""Part of the budget: about half of what the turns of a socket cost."""
PRICE = {"prompt": 2.0, "cached": 0.5, "output": 6.0}
LEASE_S = 3.0
STORE_DEADLINE_S = 60.0
"""Time for one access to the store while the turns of all sockets begin at once."""
SETTLED_WITHIN_S = LEASE_S + 10.0
LEAST_USED = 0.95
SPENT, LATER = "insufficient_quota", "rate_limit_exceeded"
"""Codes of a budget that is used up, and of one whose rest is reserved for requests that run."""
MOST_IN_FLIGHT = 8
"""Most tokens that the engine computes for a turn from the last one that the gateway has seen to the cancellation."""
ROUNDS, QUICK_ROUNDS = 100, 4
PROMPT_WORDS = 60
MOST_RATIO = 1.1
SOAK_SOCKETS, QUICK_SOAK_SOCKETS = 2000, 40
SOAK_AT_ONCE = 32
SOAK_TOKENS = 16
WORDS = ("river", "stone", "seven", "lamp", "under", "morning", "table", "quiet")
HELD = ("maitred_in_flight", "maitred_leases", "maitred_dispatch_running", "maitred_dispatch_waiting")
FDS = ("maitred_process_open_fds", "maitred_engine_process_open_fds")
LEVEL_WITHIN_S = 15.0
MOST_FDS = 4
"""Number of descriptors of two connections to the database, which its pool opens when it first needs them."""


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SOCKETS} sockets")
    arguments = parser.parse_args()
    report = Report("websockets", seed=SEED, quick=arguments.quick)
    uvloop.run(run(report, quick=arguments.quick))
    return report.finish()


async def run(report: Report, *, quick: bool) -> None:
    """Runs all parts."""
    spender = Tenant("spender", limits={"usd_total": USD_PER_SOCKET * (QUICK_SOCKETS if quick else SOCKETS) / 2})
    leaver, admin = Tenant("leaver"), Key(scopes=["admin"])
    with TemporaryDirectory(prefix="maitred-digest-", dir="/tmp") as folder:
        async with (
            digest_engine(UnixAddress(f"{folder}/engine.sock")) as engine,
            system([spender, leaver], admin, engine) as installation,
        ):
            await _many(report, installation, engine, [spender, leaver], admin, QUICK_SOCKETS if quick else SOCKETS)
    tenant = Tenant("acme")
    async with system([tenant], admin) as installation:
        await _first_token(report, installation.gateways[0], tenant, QUICK_ROUNDS if quick else ROUNDS)
        await _soak(report, installation, tenant, QUICK_SOAK_SOCKETS if quick else SOAK_SOCKETS)


class Tenant:
    """Tenant with several keys.

    Args:
        id_: Id of the tenant.
        limits: Its limits.

    Attributes:
        id: Its id.
        organisation: For the configuration.
        secrets: Of its keys.
    """

    def __init__(self, id_: str, *, limits: Mapping[str, Any] | None = None) -> None:
        keys = {f"key{number}": Key() for number in range(KEYS)}
        self.id = id_
        self.organisation = Organisation(keys, limits=limits or {})
        self.secrets = [key.secret for key in keys.values()]


@asynccontextmanager
async def system(
    tenants: Sequence[Tenant], admin: Key, engine: DigestEngine | None = None
) -> AsyncIterator[Installation]:
    """Starts a gateway; the engine is the real one, unless another is given."""
    no_queue_limits = unbounded()
    server = {**no_queue_limits["server"], "websocket": {"max_per_key": 100_000}}
    plan = Plan(
        {tenant.id: tenant.organisation for tenant in tenants} | {"operators": Organisation({"admin": admin})},
        settings={
            **no_queue_limits,
            "server": server,
            "admission": {"lease_s": LEASE_S, "prices": {"*": PRICE}},
            "store": {"deadline_s": STORE_DEADLINE_S},
        },
        engine_address=None if engine is None else engine.address,
    )
    async with installed(plan) as installation:
        yield installation


async def _many(
    report: Report,
    installation: Installation,
    engine: DigestEngine,
    tenants: Sequence[Tenant],
    admin: Key,
    sockets: int,
) -> None:
    (gateway,) = installation.gateways
    await _hold(gateway, tenants[1], 0, Counter(), asyncio.Barrier(1), cuts=False)  # opens what is opened once
    before = await _level(gateway)
    endings: Counter[str] = Counter()
    began_s = time.monotonic()
    all_open = asyncio.Barrier(sockets)
    async with asyncio.TaskGroup() as group:
        for number in range(sockets):
            tenant = tenants[number % 2]
            cuts = tenant is tenants[1] and number // 2 % CUT == 0
            group.create_task(_hold(gateway, tenant, number + 1, endings, all_open, cuts=cuts))
    seconds = time.monotonic() - began_s
    budget, leases = await settled(installation, tenants[0].id, admin.secret, within_s=SETTLED_WITHIN_S)
    after = await _level(gateway, before)
    lines = await ledger_of(installation)
    spent = [line for line in lines if line.organisation == tenants[0].id]
    report.figures["many"] = {
        "sockets": sockets,
        "seconds": round(seconds, 1),
        "turns": dict(endings),
        "ledger_lines": dict(Counter(line.outcome.value for line in lines)),
        "budget_usd": to_usd(budget.limit),
        "spent_usd": to_usd(sum(line.cost_nusd for line in spent)),
        "before": before,
        "after": after,
    }
    print(report.figures["many"], flush=True)
    require_spent_within(report, "many", spent, budget, leases)
    report.require("part of the budget used", budget.charged / budget.limit, at_least=LEAST_USED)
    report.require("turns without their context", endings["without context"], at_most=0)
    ends = {"whole", "shortened", "cut", "told to come later", "without context", SPENT}
    others = sum(count for ending, count in endings.items() if ending not in ends)
    report.require("turns that ended otherwise", others, at_most=0)
    report.require("turns refused because the budget is used up", endings[SPENT], at_least=1)
    report.require("turns cut", endings["cut"], at_least=sockets / 2 / CUT)
    _require_all_billed(report, lines, engine)
    _require_level(report, "many", before, after)
    report.require("many: sequences left in the engine", engine.load().running, at_most=0)


async def _hold(
    gateway: Gateway, tenant: Tenant, number: int, endings: Counter[str], all_open: asyncio.Barrier, *, cuts: bool
) -> None:
    """Opens a socket, waits until all are open, and takes its turns."""
    key = tenant.secrets[number // 2 % len(tenant.secrets)]
    said: list[str] = []
    async with response_socket(gateway.url, key) as socket:
        await all_open.wait()
        previous = None
        for turn in range(TURNS):
            asked = question(number, turn)
            link: dict[str, Any] = {} if previous is None else {"previous_response_id": previous}
            body = {"input": asked, "max_output_tokens": OUTPUT_TOKENS, "store": False, **link}
            while True:
                result = await take_turn(socket, body, cuts=cuts and turn == TURNS - 1)
                if result.code != LATER:
                    break
                endings["told to come later"] += 1
                await asyncio.sleep(result.retry_after_s)
            if not result.is_whole:
                endings["cut"] += 1
                return
            if result.code:
                endings[result.code] += 1
                continue
            answer = text_of(result)
            expected = digest_of([*said, asked])
            if result.response["status"] == "incomplete":  # shortened to what is left of the budget
                endings["shortened"] += 1
                endings["without context"] += not expected.startswith(answer)
            else:
                endings["whole"] += 1
                endings["without context"] += answer != expected
            said += asked, answer
            previous = result.response["id"]


def _require_all_billed(report: Report, lines: Sequence[UsageEvent], engine: DigestEngine) -> None:
    of_ids = Counter(line.id for line in lines if line.outcome in BILLED)
    unbilled = sum(event_id not in of_ids for event_id in engine.counts)
    report.require("turns of the engine that are not billed", unbilled, at_most=0)
    report.require("turns billed twice", sum(count - 1 for count in of_ids.values()), at_most=0)
    differing = 0
    for line in lines:
        if line.outcome is Outcome.FINISHED:
            count = engine.counts[line.id]
            differing += (line.prompt_tokens, line.output_tokens) != (count.prompt_tokens, count.output_tokens)
    report.require("finished turns with other tokens than the engine's", differing, at_most=0)
    load, billed = engine.load(), [line for line in lines if line.outcome in BILLED]
    for name, counted in (("prompt", load.prompt_tokens), ("output", load.output_tokens)):
        recorded = sum(getattr(line, f"{name}_tokens") for line in billed)
        report.figures["many"][f"{name}_tokens"] = {"engine": counted, "ledger": recorded}
        report.require(f"{name} tokens in the ledger that the engine has not counted", recorded - counted, at_most=0)
        cancelled = sum(line.outcome is Outcome.CANCELLED for line in lines)
        most = MOST_IN_FLIGHT * cancelled if name == "output" else 0
        report.require(f"{name} tokens of the engine that are not billed", counted - recorded, at_most=most)


async def _first_token(report: Report, gateway: Gateway, tenant: Tenant, rounds: int) -> None:
    """Compares second turns over a socket with those over HTTP, in turns."""
    rng, key = random.Random(SEED), tenant.secrets[0]
    times_s: dict[str, list[float]] = {"websocket": [], "http": []}
    async with (
        response_socket(gateway.url, key) as socket,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
    ):

        async def over_http(body: Mapping[str, Any]) -> TurnResult:
            return await _turn_over_http(session, gateway.url, body)

        async def over_socket(body: Mapping[str, Any]) -> TurnResult:
            return await take_turn(socket, body)

        transports = [("websocket", over_socket), ("http", over_http)]
        for _ in range(rounds):
            rng.shuffle(transports)
            for name, turn in transports:
                texts = [" ".join(rng.choices(WORDS, k=PROMPT_WORDS)) for _ in range(2)]
                first = await turn({"input": texts[0], "max_output_tokens": SOAK_TOKENS})
                second = await turn(
                    {
                        "input": texts[1],
                        "max_output_tokens": SOAK_TOKENS,
                        "previous_response_id": first.response["id"],
                    }
                )
                times_s[name].append(second.ttft_s)
    medians_s = {name: statistics.median(times) for name, times in times_s.items()}
    ratio = medians_s["websocket"] / medians_s["http"]
    report.figures["first_token"] = {
        "rounds": rounds,
        "ttft_ms": {name: round(1e3 * median_s, 2) for name, median_s in medians_s.items()},
        "ratio": round(ratio, 3),
    }
    print(report.figures["first_token"], flush=True)
    report.require("first token of a second turn, socket over HTTP", ratio, at_most=MOST_RATIO)


async def _turn_over_http(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> TurnResult:
    turn = TurnResult()
    sent_s = time.perf_counter()
    async with session.post(f"{url}/v1/responses", json={"model": MODEL, "stream": True, **body}) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if event["type"] == "response.output_text.delta" and turn.ttft_s != turn.ttft_s:
                    turn.ttft_s = time.perf_counter() - sent_s
                turn.response = event.get("response", turn.response)
    return turn


async def _soak(report: Report, installation: Installation, tenant: Tenant, sockets: int) -> None:
    (gateway,) = installation.gateways
    rng, endings = random.Random(SEED), Counter[str]()

    async def hold(number: int) -> None:
        async with response_socket(gateway.url, tenant.secrets[number % KEYS]) as socket:
            previous = None
            for turn in range(2):
                link: dict[str, Any] = {} if previous is None else {"previous_response_id": previous}
                body = {"input": rng.choice(WORDS), "max_output_tokens": SOAK_TOKENS, "store": False, **link}
                result = await take_turn(socket, body, cuts=number % CUT == 0 and turn == 1)
                endings[("whole" if not result.code else result.code) if result.is_whole else "cut"] += 1
                if not result.is_whole:
                    return
                previous = result.response["id"]

    async def hold_some(numbers: Any) -> None:  # noqa: ANN401 - an iterator that tasks share
        for number in numbers:
            await hold(number)

    await asyncio.gather(*[hold(number) for number in range(1, SOAK_AT_ONCE)])
    before, load_before = await _level(gateway), await installation.engine_load()
    numbers = iter(range(sockets))
    await asyncio.gather(*[hold_some(numbers) for _ in range(SOAK_AT_ONCE)])
    after, load = await _level(gateway, before), await installation.engine_load()
    report.figures["soak"] = {"sockets": sockets, "turns": dict(endings), "before": before, "after": after}
    print(report.figures["soak"], flush=True)
    report.require("soak: turns that failed", endings.total() - endings["whole"] - endings["cut"], at_most=0)
    report.require("soak: turns cut", endings["cut"], at_least=sockets // CUT)
    _require_level(report, "soak", before, after)
    blocks = _blocks_held(load) - _blocks_held(load_before)
    report.require("soak: more blocks held", blocks, at_most=0)
    report.require("soak: sequences left in the engine", load.running + load.waiting, at_most=0)


async def _level(gateway: Gateway, before: Mapping[str, float] | None = None) -> dict[str, float]:
    """Returns what is held and open, once nothing is held and no more is open than before, or the time is over."""
    deadline_s = time.monotonic() + LEVEL_WITHIN_S
    while True:
        samples = await asyncio.to_thread(gateway.metrics)
        level = {
            name: sum(value for sample, value in samples.items() if sample.partition("{")[0] == name)
            for name in (*HELD, *FDS)
        }
        is_quiet = not any(level[name] for name in HELD)
        is_low = before is None or all(level[name] <= before[name] for name in FDS)
        if (is_quiet and is_low) or time.monotonic() > deadline_s:
            return level
        await asyncio.sleep(0.2)


def _require_level(report: Report, name: str, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    report.require(f"{name}: held afterwards", sum(after[held] for held in HELD), at_most=0)
    for metric in FDS:
        more = after[metric] - before[metric]
        report.require(f"{name}: more {metric.removeprefix('maitred_')}", more, at_most=MOST_FDS)


def _blocks_held(load: LoadReport) -> int:
    return load.total_blocks - load.free_blocks


def text_of(turn: TurnResult) -> str:
    """Returns the text of a turn's response."""
    messages = [item for item in turn.response.get("output", ()) if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


if __name__ == "__main__":
    sys.exit(main())
