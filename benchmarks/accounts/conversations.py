"""No turn of a stored conversation lacks its context and none is billed twice, whenever a gateway is killed.

1,000 conversations of 20 turns, over two gateways on one PostgreSQL and one Redis: each turn at another gateway than
the one before, without a pause, three of four by `previous_response_id` and the others by `conversation`. Meanwhile
gateways are killed (``kill -9``) 20 times and started again. A client whose connection broke looks at what is stored,
and asks again if its answer is not there (`benchmarks.support.careful_client`).

The engine answers with a digest of all questions and answers in its prompt (`benchmarks.support.digest_engine`), so
each answer shows whether the model has read the whole conversation. What the engine has counted for a request has to
be in the ledger, once for each turn. A smaller part runs on the real engine: each answer has to be that to the same
conversation sent as a whole, with a prompt of the same length. At the end nothing may be held, and the store has to
have one row for each turn, whose size does not grow with the conversation.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvloop
from sqlalchemy import func, select

from benchmarks.support.careful_client import CarefulClient
from benchmarks.support.digest_engine import DigestEngine, digest_engine, digest_of, question
from benchmarks.support.installation import MODEL, Installation, Key, Organisation, Plan, installed
from benchmarks.support.ledger_audit import BILLED, ledger_of, require_spent_within, settled
from benchmarks.support.report import Report
from maitred.core.usage import UsageEvent, to_usd
from maitred.store.database import open_database
from maitred.store.schema import conversation_items, responses
from maitred.wire.address import UnixAddress

SEED = 20261128
CONVERSATIONS, QUICK_CONVERSATIONS = 1000, 40
TURNS, QUICK_TURNS = 20, 10
KILLS, QUICK_KILLS = 20, 2
REAL_CONVERSATIONS, QUICK_REAL_CONVERSATIONS = 24, 2
REAL_TURNS = 6
REAL_TOKENS = 12
AT_ONCE = 32
BY_CONVERSATION = 4
"""One in so many goes on by `conversation`, the others by `previous_response_id`."""
FOREIGN = 25
"""One conversation in so many is asked for by a key of another tenant."""
PRICE = {"prompt": 2.0, "cached": 0.5, "output": 6.0}
BUDGET_USD = 1000.0
LEASE_S = 3.0
MOMENTS = ("response.created", "response.output_text.delta", "response.output_text.done")
"""Events of an answer: a gateway is killed when a client has just read one."""
MOST_AFTER_S = 0.01
"""Longest time from such an event to the kill."""
SETTLED_WITHIN_S = LEASE_S + 10.0
MOST_GROWTH = 1.1
HELD = ("maitred_in_flight", "maitred_leases", "maitred_dispatch_running", "maitred_dispatch_waiting")
WORDS = ("river", "stone", "seven", "lamp", "under", "morning", "table", "quiet")


def main() -> int:
    """Runs the benchmark; the exit code says whether every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CONVERSATIONS} conversations of {QUICK_TURNS}")
    arguments = parser.parse_args()
    report = Report("conversations", seed=SEED, quick=arguments.quick)
    uvloop.run(run(report, quick=arguments.quick))
    return report.finish()


async def run(report: Report, *, quick: bool) -> None:
    """Runs both parts."""
    conversations = QUICK_CONVERSATIONS if quick else CONVERSATIONS
    turns = QUICK_TURNS if quick else TURNS
    kills = QUICK_KILLS if quick else KILLS
    with TemporaryDirectory(prefix="maitred-digest-", dir="/tmp") as folder:
        async with digest_engine(UnixAddress(f"{folder}/engine.sock")) as engine, system(engine) as tenants:
            await _play(report, Conversations(tenants, conversations, turns), engine, kills)
    async with system() as tenants:
        await _play_real(report, tenants, QUICK_REAL_CONVERSATIONS if quick else REAL_CONVERSATIONS)


class Tenants:
    """Two gateways with what they share, and clients of two tenants.

    Attributes:
        installation: The gateways.
        client: Of the tenant whose conversations these are.
        stranger: Of another tenant.
        admin: Secret of an admin key.
    """

    def __init__(self, installation: Installation, session: aiohttp.ClientSession, keys: Sequence[Key]) -> None:
        self.installation = installation
        own, foreign, admin = keys
        urls = [gateway.url for gateway in installation.gateways]
        self.client = CarefulClient(session, urls, own.secret)
        self.stranger = CarefulClient(session, urls, foreign.secret)
        self.admin = admin.secret


@asynccontextmanager
async def system(engine: DigestEngine | None = None) -> AsyncIterator[Tenants]:
    """Starts two gateways; the engine is the real one, unless another is given."""
    keys = Key(), Key(), Key(scopes=["admin"])
    plan = Plan(
        {
            "acme": Organisation({"key": keys[0]}, limits={"usd_total": BUDGET_USD}),
            "other": Organisation({"key": keys[1]}),
            "operators": Organisation({"admin": keys[2]}),
        },
        settings={"admission": {"lease_s": LEASE_S, "prices": {"*": PRICE}}},
        engine_address=None if engine is None else engine.address,
        gateways=2,
        shared=True,
    )
    timeout = aiohttp.ClientTimeout(total=120)
    async with installed(plan) as installation, aiohttp.ClientSession(timeout=timeout) as session:
        yield Tenants(installation, session, keys)


class Conversations:
    """Conversations that are held, and what was wrong with their answers.

    Args:
        tenants: Whom they belong to.
        count: How many.
        turns: Of each.

    Attributes:
        wrong: What was wrong, by name.
        taken: Turns taken so far.
    """

    def __init__(self, tenants: Tenants, count: int, turns: int) -> None:
        self.tenants = tenants
        self.count = count
        self.turns = turns
        self.wrong: Counter[str] = Counter()
        self.taken = 0
        self._left = iter(range(count))

    async def hold_all(self) -> None:
        """Holds all, `AT_ONCE` beside each other."""
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._hold_some())

    async def _hold_some(self) -> None:
        for number in self._left:
            await self._hold(number)

    async def _hold(self, number: int) -> None:
        client, said = self.tenants.client, []
        name = await self._begin(number) if number % BY_CONVERSATION == 0 else None
        previous: str | None = None
        for turn in range(self.turns):
            asked = question(number, turn)
            link = {"previous_response_id": previous} if name is None else {"conversation": name}
            body = {"model": MODEL, "input": asked, "max_output_tokens": 64, **link}
            response = await client.ask(f"c{number}-{turn}", number + turn, body)
            said.append(asked)
            expected = digest_of(said)
            if (answer := text_of(response)) != expected:
                self.wrong["answers without their context"] += 1
                print("WRONG", number, turn, repr(answer), expected, flush=True)
            said.append(answer)
            previous = response["id"]
            self.taken += 1
        if name is not None:
            await self._check_items(number, name, said)
        if number % FOREIGN in (0, 1):
            await self._ask_as_stranger(number, str(previous), name)

    async def _begin(self, number: int) -> str:
        while True:
            try:
                status, body = await self.tenants.client.send(number, "/v1/conversations", {})
            except aiohttp.ClientConnectionError:
                number += 1
                continue
            if status == 200:
                return str(body["id"])

    async def _check_items(self, number: int, name: str, said: Sequence[str]) -> None:
        _, listed = await self.tenants.client.get(number, f"/v1/conversations/{name}/items?order=asc&limit=100")
        kept = ["".join(part["text"] for part in item["content"]) for item in listed["data"]]
        self.wrong["conversations with other items"] += kept != list(said)

    async def _ask_as_stranger(self, number: int, response: str, name: str | None) -> None:
        stranger = self.tenants.stranger
        paths = [f"/v1/responses/{response}", *([] if name is None else [f"/v1/conversations/{name}"])]
        for path in paths:
            status, _ = await stranger.get(number, path)
            self.wrong["ids shown to another tenant"] += status != 404
        link = {"previous_response_id": response} if name is None else {"conversation": name}
        while True:
            try:
                status, _ = await stranger.send(number, "/v1/responses", {"model": MODEL, "input": "Hi", **link})
            except aiohttp.ClientConnectionError:
                number += 1
                continue
            self.wrong["conversations continued by another tenant"] += status not in (400, 404)
            return


async def _play(report: Report, conversations: Conversations, engine: DigestEngine, kills: int) -> None:
    installation = conversations.tenants.installation
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        holding = group.create_task(conversations.hold_all())
        killed = await _kill(installation, conversations, kills, holding)
    seconds = time.monotonic() - began_s
    budget, leases = await settled(installation, "acme", conversations.tenants.admin, within_s=SETTLED_WITHIN_S)
    lines = [line for line in await ledger_of(installation) if line.organisation == "acme"]
    stored = await _stored(installation)
    turns = conversations.count * conversations.turns
    report.figures["digest"] = {
        "conversations": conversations.count,
        "turns": turns,
        "kills": killed,
        "seconds": round(seconds, 1),
        "turns_per_s": round(turns / seconds, 1),
        "attempts": dict(conversations.tenants.client.endings),
        "refusals": conversations.tenants.client.refusals,
        "ledger_lines": dict(Counter(line.outcome.value for line in lines)),
        "spent_usd": to_usd(sum(line.cost_nusd for line in lines)),
        "wrong": dict(+conversations.wrong),
        "store": stored,
    }
    print(report.figures["digest"], flush=True)
    for name in (
        *("answers without their context", "conversations with other items"),
        *("ids shown to another tenant", "conversations continued by another tenant"),
    ):
        report.require(name, conversations.wrong[name], at_most=0)
    report.require("kills", killed, at_least=kills)
    _require_billed_once(report, lines, engine, turns)
    require_spent_within(report, "digest", lines, budget, leases)
    report.require("responses stored beside one for each turn", abs(stored["responses"] - turns), at_most=0)
    of_conversations = len(range(0, conversations.count, BY_CONVERSATION)) * conversations.turns
    report.require("items stored beside two for each turn", abs(stored["items"] - 2 * of_conversations), at_most=0)
    report.require("responses that a gateway still claims", stored["claimed"], at_most=0)
    report.require("largest row over the mean", stored["largest_bytes"] / stored["mean_bytes"], at_most=MOST_GROWTH)
    samples = [await asyncio.to_thread(gateway.metrics) for gateway in installation.gateways]
    held = sum(value for each in samples for name, value in each.items() if name.partition("{")[0] in HELD)
    report.require("held afterwards", held + engine.load().running, at_most=0)


async def _kill(
    installation: Installation, conversations: Conversations, kills: int, holding: "asyncio.Task[None]"
) -> int:
    """Kills gateways in turns, spread over the run, and starts them again; returns how many."""
    turns, rng = conversations.count * conversations.turns, random.Random(SEED)
    for kill in range(kills):
        while conversations.taken < (kill + 0.5) * turns / kills:
            if holding.done():
                return kill
            await asyncio.sleep(0.01)
        gateway = installation.gateways[kill % 2]
        reading = asyncio.create_task(
            conversations.tenants.client.reads(gateway.url, MOMENTS[kill // 2 % len(MOMENTS)])
        )
        await asyncio.wait({reading, holding}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            return kill
        await asyncio.sleep(rng.uniform(0, MOST_AFTER_S))
        gateway.kill()
        await gateway.start()
    return kills


def _require_billed_once(report: Report, lines: Sequence[UsageEvent], engine: DigestEngine, turns: int) -> None:
    billed = [line for line in lines if line.outcome in BILLED]
    times = Counter(line.request_id.rpartition(".")[0] for line in billed)
    twice = [line for line in billed if times[line.request_id.rpartition(".")[0]] > 1]
    for line in twice[:5]:
        print("TWICE", line, flush=True)
    report.require("turns billed twice", sum(count - 1 for count in times.values()), at_most=0)
    report.require("turns that are not billed", turns - len(times), at_most=0)
    differing = 0
    for line in billed:
        count = engine.counts[line.id]
        differing += (line.prompt_tokens, line.output_tokens) != (count.prompt_tokens, count.output_tokens)
    report.require("lines with other tokens than the engine has counted", differing, at_most=0)
    free = sum(line.cost_nusd for line in lines if line.outcome not in BILLED)
    report.require("cost of what was interrupted, nano-USD", free, at_most=0)


async def _stored(installation: Installation) -> dict[str, float]:
    size = func.length(responses.c.input) + func.length(responses.c.output)
    async with open_database(installation.store) as database, database.begin_read() as connection:
        query = select(func.count(), func.coalesce(func.max(size), 0), func.coalesce(func.avg(size), 1))
        count, largest, mean = (await connection.execute(query.select_from(responses))).one()
        items = await connection.scalar(select(func.count()).select_from(conversation_items))
        claimed = await connection.scalar(select(func.count(responses.c.claimed_until_s)))
    return {
        "responses": count,
        "items": items or 0,
        "claimed": claimed or 0,
        "largest_bytes": int(largest),
        "mean_bytes": round(float(mean), 1),
    }


async def _play_real(report: Report, tenants: Tenants, count: int) -> None:
    """Compares each answer with that to the same conversation sent as a whole."""
    rng, client = random.Random(SEED), tenants.client
    greedy = {"model": MODEL, "max_output_tokens": REAL_TOKENS, "temperature": 0}
    wrong: Counter[str] = Counter()

    async def hold(number: int, questions: Sequence[str]) -> None:
        previous, items = None, []
        for turn, asked in enumerate(questions):
            items.append({"role": "user", "content": asked})
            body = {**greedy, "input": asked, "previous_response_id": previous}
            response = await client.ask(f"r{number}-{turn}", number + turn, body)
            whole = await client.ask(f"w{number}-{turn}", number, {**greedy, "input": items, "store": False})
            wrong["answers"] += text_of(response) != text_of(whole)
            wrong["prompts"] += response["usage"]["input_tokens"] != whole["usage"]["input_tokens"]
            previous = response["id"]
            items.append({"role": "assistant", "content": text_of(response)})

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(hold(number, [" ".join(rng.choices(WORDS, k=6)) for _ in range(REAL_TURNS)]))
    load = await tenants.installation.engine_load()
    lines = await ledger_of(tenants.installation)
    differing = [
        abs(counted - sum(getattr(line, name) for line in lines))
        for name, counted in (("prompt_tokens", load.prompt_tokens), ("output_tokens", load.output_tokens))
    ]
    report.figures["real"] = {"conversations": count, "turns": count * REAL_TURNS, "ledger_lines": len(lines)}
    print(report.figures["real"], flush=True)
    report.require("real engine: answers that differ from those to the whole", wrong["answers"], at_most=0)
    report.require("real engine: prompts that differ in length from the whole", wrong["prompts"], at_most=0)
    report.require("real engine: tokens by which ledger and engine differ", sum(differing), at_most=0)
    report.require("real engine: blocks held", load.total_blocks - load.free_blocks, at_most=0)


def text_of(response: Any) -> str:  # noqa: ANN401 - JSON
    """Returns the text of a response."""
    messages = [item for item in response.get("output", ()) if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


if __name__ == "__main__":
    sys.exit(main())
