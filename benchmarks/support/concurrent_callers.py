"""Callers that ask all at once, through gateways that come and go."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.support.installation import MODEL
from benchmarks.support.single_request import CHAT, COMPLETIONS, Call, Client, Reply

PLAIN_TOKENS = range(300, 340)
"""Of the bundled model: short pieces of words."""
WORDS = ("river", "stone", "seven", "lamp", "under", "morning", "table", "quiet")
AWAY_S = 0.05
"""Between two attempts at gateways of which none listens."""


class ConcurrentCallers:
    """Callers that work off one list of calls together.

    Args:
        clients: One per gateway; a caller whose gateway does not listen takes another.
        callers: How many ask at one time.

    Attributes:
        asked: Requests sent so far, over all lists.
        replies: To all of them.
    """

    def __init__(self, clients: Sequence[Client], callers: int) -> None:
        self.asked = 0
        self.replies: list[Reply] = []
        self._clients = clients
        self._callers = callers
        self._waiting: list[tuple[int, asyncio.Event]] = []

    async def ask_all(self, calls: Iterable[Call], until: Callable[[Reply], bool] = lambda _: False) -> list[Reply]:
        """Asks until the calls are used up, or a reply is the last one that is wanted."""
        shared, replies, over = iter(calls), [], asyncio.Event()

        async def ask_some(number: int) -> None:
            for call in shared:
                reply = await self._ask(call, number)
                replies.append(reply)
                if until(reply):
                    over.set()
                if over.is_set():
                    return

        async with asyncio.TaskGroup() as group:
            for number in range(self._callers):
                group.create_task(ask_some(number))
        self.replies += replies
        return replies

    async def has_asked(self, requests: int) -> None:
        """Waits until so many requests were sent."""
        if self.asked < requests:
            event = asyncio.Event()
            self._waiting.append((requests, event))
            await event.wait()

    async def _ask(self, call: Call, number: int) -> Reply:
        for client in itertools.islice(itertools.cycle(self._clients), number % len(self._clients), None):
            reply = await client.ask(call)
            if not reply.refused_connection:
                break
            await asyncio.sleep(AWAY_S)
        self.asked += 1
        for requests, event in self._waiting:
            if self.asked >= requests:
                event.set()
        return reply


def calls(
    name: str,
    keys: Sequence[str],
    rng: random.Random,
    *,
    streamed: float = 0.6,
    leaving: float = 0.0,
    patience_s: float | None = None,
) -> Iterator[Call]:
    """Requests of all sizes without end: streams and whole answers, prompts as text and as tokens.

    Args:
        name: Begins their ids.
        keys: Drawn from.
        rng: Draws.
        streamed: Part of the answers that are streams.
        leaving: Part of the callers that leave before they have everything.
        patience_s: After this the others leave too.
    """
    for number in itertools.count():
        body: dict[str, object] = {"model": MODEL, "max_tokens": rng.randint(1, 128)}
        size = min(200, 5 + int(rng.expovariate(1 / 40)))
        chat = rng.random() < 0.3
        if chat:
            body["messages"] = [{"role": "user", "content": " ".join(rng.choices(WORDS, k=size))}]
        else:
            body["prompt"] = rng.choices(PLAIN_TOKENS, k=size)
        if rng.random() < streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        leaves_after_s = rng.uniform(0, 0.15) if rng.random() < leaving else patience_s
        yield Call(f"{name}-{number}", rng.choice(keys), body, CHAT if chat else COMPLETIONS, leaves_after_s)


def counted(replies: Iterable[Reply]) -> dict[str, int]:
    """How many ended in each way."""
    return dict(Counter(map(ending_of, replies)).most_common())


def ending_of(reply: Reply) -> str:
    """One word for how a request ended."""
    if reply.whole:
        return "whole"
    if reply.left:
        return "left"
    return reply.code or f"HTTP {reply.status}"
