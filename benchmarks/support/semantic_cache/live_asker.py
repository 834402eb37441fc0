"""Clients of a gateway with a semantic cache, and what they see of it."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class SeenAnswer:
    """Answer of the gateway, as its client sees it.

    Attributes:
        asked: The last message of the conversation.
        text: The answer; empty if the request failed.
        cache: ``x-maitred-cache``.
        state: ``x-maitred-cache-state``: that of the scope; empty: no similar question was looked for.
        similarity: ``x-maitred-cache-similarity``; None: no cached question came near.
        bound: ``x-maitred-cache-false-hit-bound``; None: nothing is certified.
        tokens: Tokens of its prompt and itself.
        took_s: Time from the request to the end of the answer.
    """

    asked: str
    text: str
    cache: str
    state: str
    similarity: float | None
    bound: float | None
    tokens: int
    took_s: float


class LiveAsker:
    """Clients of one tenant.

    Args:
        client: Its connections.
        url: The gateway.
        key: Key of the tenant.
        user: Name of the caller in each request, which the server repeats in its answers.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str, key: str, user: str) -> None:
        self._client = client
        self._url = f"{url}/v1/chat/completions"
        self._headers = {"authorization": f"Bearer {key}"}
        self._user = user

    async def ask(self, model: str, messages: Sequence[dict[str, Any]], **fields: object) -> SeenAnswer:
        """Sends one conversation, with further fields, and reads the answer."""
        body = {"model": model, "messages": list(messages), "temperature": 0, "user": self._user, **fields}
        start_s = time.perf_counter()
        async with self._client.post(self._url, json=body, headers=self._headers) as response:
            answer = await response.json()
            took_s = time.perf_counter() - start_s
            head = response.headers
        if response.status != 200:
            print(f"status {response.status}: {answer}", flush=True)
            return SeenAnswer(str(messages[-1]["content"]), "", "", "", None, None, 0, took_s)
        similarity, bound = head.get("x-maitred-cache-similarity"), head.get("x-maitred-cache-false-hit-bound")
        return SeenAnswer(
            asked=str(messages[-1]["content"]),
            text=answer["choices"][0]["message"]["content"],
            cache=head.get("x-maitred-cache", ""),
            state=head.get("x-maitred-cache-state", ""),
            similarity=None if similarity is None else float(similarity),
            bound=None if bound is None else float(bound),
            tokens=answer["usage"]["total_tokens"],
            took_s=took_s,
        )

    async def ask_all(
        self, model: str, conversations: Iterable[Sequence[dict[str, Any]]], *, lanes: int
    ) -> list[SeenAnswer]:
        """Sends conversations, so many at a time, and returns the answers in the order in which they came."""
        left, answers = iter(conversations), list[SeenAnswer]()

        async def work() -> None:
            for messages in left:
                answers.append(await self.ask(model, messages))

        async with asyncio.TaskGroup() as group:
            for _ in range(lanes):
                group.create_task(work())
        return answers
