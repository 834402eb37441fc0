"""Client of the Responses API that asks each turn until it has the answer, through gateways that come and go.

A gateway may die after an answer was stored and before its client has read it. So whoever lost a connection looks at
what is stored before asking again: by the response's id, which the first event of its stream has.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

AWAY_S = 0.05
"""Pause before another attempt at gateways of which one has just died."""
_ENDS = ("response.completed", "response.incomplete", "response.failed")


@dataclass
class Attempt:
    """One request for a turn, as far as its answer came.

    Attributes:
        response: As its last event, or the store, shows it; empty: no event came.
        is_whole: Whether the last event came.
        is_sent: Whether a gateway listened.
        refusal: Status and body of a refusal.
    """

    response: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = False
    is_sent: bool = True
    refusal: str = ""


class CarefulClient:
    """Client with one key.

    Args:
        session: For all requests.
        urls: Of the gateways.
        key: The key.

    Attributes:
        endings: How attempts ended, by name.
        refusals: The first of the refusals, for whoever looks for their cause.
    """

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], key: str) -> None:
        self._session = session
        self._urls = urls
        self._headers = {"Authorization": f"Bearer {key}"}
        self.endings: Counter[str] = Counter()
        self.refusals: list[str] = []
        self._awaited: tuple[str, str] | None = None
        self._read = asyncio.Event()

    async def reads(self, url: str, kind: str) -> None:
        """Waits until an event of this type comes from a gateway, for whichever request."""
        self._awaited = url, kind
        self._read.clear()
        await self._read.wait()

    async def ask(self, name: str, first: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Asks until there is an answer; attempts take the gateways in turns.

        Args:
            name: Begins the ids of its requests.
            first: Gateway of the first attempt.
            body: Of the request, without `stream`.

        Returns:
            The response.
        """
        for number in itertools.count():
            url = self._urls[(first + number) % len(self._urls)]
            attempt = await self._attempt(url, f"{name}.{number}", body)
            if attempt.is_whole:
                self.endings["answered"] += 1
                return attempt.response
            if attempt.is_sent and not attempt.refusal:
                if attempt.response and (stored := await self._stored(first + number + 1, attempt.response["id"])):
                    self.endings["found in the store"] += 1
                    return stored
                self.endings["cut"] += 1
                self.endings["cut, id known"] += bool(attempt.response)
            elif not attempt.is_sent:
                self.endings["nobody listened"] += 1
            else:
                self.endings["refused"] += 1
                self.refusals = [*self.refusals, attempt.refusal][:5]
            await asyncio.sleep(AWAY_S)
        raise AssertionError("attempts have no end")

    async def get(self, gateway: int, path: str) -> tuple[int, Any]:
        """Returns status and body of an answer; another gateway answers where one is away."""
        for number in itertools.count(gateway):
            url = f"{self._urls[number % len(self._urls)]}{path}"
            try:
                async with self._session.get(url, headers=self._headers) as answer:
                    return answer.status, await answer.json()
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(AWAY_S)
        raise AssertionError("gateways have no end")

    async def send(self, gateway: int, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Posts once; returns status and body of the answer."""
        url = f"{self._urls[gateway % len(self._urls)]}{path}"
        async with self._session.post(url, json=body, headers=self._headers) as answer:
            return answer.status, await answer.json()

    async def _stored(self, gateway: int, response_id: str) -> Mapping[str, Any] | None:
        status, body = await self.get(gateway, f"/v1/responses/{response_id}")
        return body if status == 200 else None

    async def _attempt(self, url: str, request_id: str, body: Mapping[str, Any]) -> Attempt:
        attempt = Attempt()
        headers = {**self._headers, "x-request-id": request_id}
        try:
            posted = self._session.post(f"{url}/v1/responses", json={**body, "stream": True}, headers=headers)
            async with posted as answer:
                if answer.status != 200:
                    attempt.refusal = f"{answer.status} {await answer.text()}"
                    return attempt
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line.removeprefix(b"data: "))
                        attempt.response = event.get("response", attempt.response)
                        attempt.is_whole = event["type"] in _ENDS
                        if (url, event["type"]) == self._awaited:
                            self._read.set()
        except aiohttp.ClientConnectorError:
            attempt.is_sent = False
        except aiohttp.ClientError:
            pass
        return attempt
