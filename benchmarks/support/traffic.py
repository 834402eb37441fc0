"""Callers of several tenants who come when they come, whatever the server does, or one after the other.

`maitred load run` plays users; here the requests of each tenant have headers of their own, and what the server's
headers say is held against what happened, so the callers stand on the load tester's connections directly.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.concurrent_callers import PLAIN_TOKENS
from benchmarks.support.installation import MODEL
from benchmarks.support.single_request import Call, Client, Reply
from maitred.load.play.clock import calm_collector

Length = tuple[int, int]
"""From the shortest to the longest, all alike."""

_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Sort:
    """What the requests of one sort of caller are like.

    Attributes:
        name: Whose figures they are.
        key: That they send.
        prompt: Tokens.
        output: Tokens; answers are never shorter.
        headers: That they send.
        body: Further fields.
    """

    name: str
    key: str
    prompt: Length
    output: Length
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Visit:
    """One request and what came of it. Times are seconds since its traffic began; NaN: it did not come to that."""

    sort: str
    due_s: float
    prompt_tokens: int
    asked_tokens: int
    call: Call
    reply: Reply
    zero_s: float = 0.0
    """When its traffic began, by the client's clock."""

    @property
    def whole(self) -> bool:
        """Whether all of the answer came."""
        return self.reply.whole

    @property
    def first_s(self) -> float:
        """When the first of the answer came."""
        return self.reply.arrivals_s[0] - self.zero_s if self.reply.arrivals_s else float("nan")

    @property
    def ttft_s(self) -> float:
        """From when it was due to the first of the answer."""
        return self.first_s - self.due_s

    @property
    def ended_s(self) -> float:
        """When its caller had the end, or left."""
        return self.reply.ended_s - self.zero_s

    @property
    def gaps_s(self) -> list[float]:
        """Between two pieces of the answer."""
        times = self.reply.arrivals_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def tokens(self) -> float:
        """Of the answer, that came: as the server counted, or one for each piece where it did not come to say."""
        return self.reply.output_tokens or len(self.reply.arrivals_s)

    def tokens_within(self, from_s: float, until_s: float) -> float:
        """Tokens of the answer that came in a part of the traffic."""
        pieces = self.reply.arrivals_s
        if not pieces:
            return 0.0
        inside = sum(from_s <= at_s - self.zero_s < until_s for at_s in pieces)
        return self.tokens * inside / len(pieces)


def visit(sort: Sort, rng: random.Random, due_s: float, words: random.Random | None = None) -> Visit:
    """One request of this sort, drawn; its words from a sequence of their own, if there is one."""
    prompt_tokens, output_tokens = rng.randint(*sort.prompt), rng.randint(*sort.output)
    body: dict[str, object] = {
        "model": MODEL,
        "prompt": (words or rng).choices(PLAIN_TOKENS, k=prompt_tokens),
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "seed": rng.getrandbits(32),
        "stream": True,
        "stream_options": {"include_usage": True},
        **sort.body,
    }
    id_ = f"{sort.name}-{next(_numbers)}"
    call = Call(id_, sort.key, body, headers=sort.headers)
    return Visit(sort.name, due_s, prompt_tokens, output_tokens, call, Reply(id_))


def poisson(sort: Sort, rate_per_s: float, seconds: float, seed: str, words: str | None = None) -> list[Visit]:
    """Requests at random moments; the same ones for the same seed.

    Args:
        sort: Of caller.
        rate_per_s: Of them all.
        seconds: For so long.
        seed: Of moments and lengths, and of words unless
        words: is another, for what must not be in the prefix cache already.
    """
    rng, visits, at_s = random.Random(seed), [], 0.0
    wording = None if words is None else random.Random(words)
    while (at_s := at_s + rng.expovariate(rate_per_s)) < seconds:
        visits.append(visit(sort, rng, at_s, wording))
    return visits


async def play(client: Client, visits: Iterable[Visit], *, until_s: float) -> None:
    """Sends each request when it is due; who has no answer by the end hangs up then."""
    with calm_collector():
        zero_s = client.clock.now_s()
        tasks: set[asyncio.Task[None]] = set()
        try:
            for one in sorted(visits, key=lambda visit: visit.due_s):
                one.zero_s = zero_s
                await _until(client, zero_s + one.due_s)
                task = asyncio.create_task(client.ask_into(one.call, one.reply))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            waited_s = max(0.0, zero_s + until_s - client.clock.now_s())
            if tasks:
                await asyncio.wait(tasks, timeout=waited_s)
        finally:
            await _hang_up(tasks)


async def play_closed(client: Client, users: Mapping[Sort, int], *, seconds: float, seed: str) -> list[Visit]:
    """So many users of each sort, each of whom asks again as soon as there is an answer; at the end they hang up."""
    zero_s = client.clock.now_s()
    visits: list[Visit] = []

    async def stay(sort: Sort, number: int) -> None:
        rng = random.Random(f"{seed}:{sort.name}:{number}")
        while True:
            one = visit(sort, rng, client.clock.now_s() - zero_s)
            one.zero_s = zero_s
            visits.append(one)
            await client.ask_into(one.call, one.reply)
            if not one.whole:
                await asyncio.sleep(REFUSED_S)

    most = max(users.values())
    all_users = [(sort, number) for number in range(most) for sort, count in users.items() if number < count]
    tasks = {asyncio.create_task(stay(sort, number)) for sort, number in all_users}
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await _hang_up(tasks)
    return visits


REFUSED_S = 0.2
"""Until a user who was refused asks again."""


async def _until(client: Client, at_s: float) -> None:
    """Comes back at this time of the client's clock, and lets others have their turn in any case."""
    await asyncio.sleep(max(0.0, at_s - client.clock.now_s()))


async def _hang_up(tasks: Iterable[asyncio.Task[None]]) -> None:
    left = list(tasks)
    for task in left:
        task.cancel()
    for result in await asyncio.gather(*left, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def of(visits: Iterable[Visit], *sorts: str, due: tuple[float, float] = (0.0, float("inf"))) -> list[Visit]:
    """Those of these sorts that were due in a part of the traffic."""
    return [visit for visit in visits if visit.sort in sorts and due[0] <= visit.due_s < due[1]]


def tokens_per_s(visits: Iterable[Visit], from_s: float, until_s: float) -> float:
    """Output tokens that came in a part of the traffic, per second."""
    return sum(visit.tokens_within(from_s, until_s) for visit in visits) / (until_s - from_s)


def ttfts_s(visits: Iterable[Visit], *, open_until_s: float) -> list[float]:
    """Times to first token; of those that had none by the end, how long they had waited by then, which is less."""
    return [visit.ttft_s if visit.reply.arrivals_s else max(0.0, open_until_s - visit.due_s) for visit in visits]


async def capacity(
    client: Client, sorts: Sequence[Sort], *, users: int, warmup_s: float, seconds: float, seed: str
) -> "Capacity":
    """What the server does for users who keep it as busy as it can be."""
    each = max(1, users // len(sorts))
    until_s = warmup_s + seconds
    visits = await play_closed(client, dict.fromkeys(sorts, each), seconds=until_s, seed=seed)
    tokens = tokens_per_s(visits, warmup_s, until_s)
    # Requests by their tokens: whole answers in so short a time come in waves.
    mean_tokens = sum(visit.asked_tokens for visit in visits) / len(visits)
    return Capacity(round(tokens / mean_tokens, 3), round(tokens, 1))


@dataclass(frozen=True)
class Capacity:
    """Of a server, for requests of some sorts."""

    requests_per_s: float
    tokens_per_s: float


def endings(visits: Iterable[Visit]) -> dict[str, int]:
    """How many ended in each way."""
    return dict(sorted(Counter(map(ending_of, visits)).items()))


def ending_of(visit: Visit) -> str:
    """One word for how a request ended."""
    if visit.whole:
        return "whole"
    return visit.reply.code or (
        f"HTTP {visit.reply.status}" if visit.reply.status not in (0, 200) else "open at the end"
    )
