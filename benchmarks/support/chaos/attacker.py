"""Attacker: an HTTP client without manners, of which attacks are made."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from benchmarks.support.single_request import CHAT

READ_BYTES = 1 << 18
RETRY_S = 0.05
"""After a connection that was refused or reset."""
REFUSED_S = 0.1
"""After an answer that is no success: as fast as an impatient client comes back."""


class Attacker:
    """Sends requests to a server, in many ways.

    Args:
        url: Of the server.
        key: That it sends.

    Attributes:
        counts: Connections, answers by status, and whatever else an attack counts.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self.key = key
        self.counts: Counter[str] = Counter()
        parts = urlsplit(url)
        self._host = parts.netloc
        self._address = (parts.hostname or "", parts.port or 80)

    def head(
        self,
        path: str,
        *,
        length: int | None,
        key: str = "",
        headers: Mapping[str, str] | None = None,
        get: bool = False,
    ) -> bytes:
        """Returns the head of a request.

        Args:
            path: That it asks for.
            length: Of its body in bytes; None: it comes in chunks.
            key: Instead of the attacker's.
            headers: Besides.
            get: Without a body.
        """
        framing = {"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)}
        lines = {
            "Host": self._host,
            "Connection": "close",
            "Authorization": f"Bearer {key or self.key}",
            **({} if get else {"Content-Type": "application/json", **framing}),
            **(headers or {}),
        }
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{'GET' if get else 'POST'} {path} HTTP/1.1\r\n{text}\r\n".encode()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Opens a connection, and closes it without waiting for anybody."""
        reader, writer = await asyncio.open_connection(*self._address, limit=READ_BYTES)
        self.counts["connections"] += 1
        try:
            yield reader, writer
        finally:
            writer.close()

    async def exchange(self, data: bytes) -> int:
        """Sends a request, reads its answer to the end, and returns its status."""
        async with self.connection() as (reader, writer):
            writer.write(data)
            with suppress(ConnectionError):
                await writer.drain()  # a body that is too large is answered before its end
            status = (await reader.readline())[9:12].decode("latin-1") or "closed"
            while await reader.read(READ_BYTES):
                pass
        self.counts[status] += 1
        return int(status) if status.isdigit() else 0

    async def repeat(self, senders: int, send: Callable[[int], Awaitable[object]], pause_s: float = 0.0) -> None:
        """Calls `send` with numbers that go up, so many at once; each sender pauses after each call."""
        numbers = iter(range(sys.maxsize))

        async def keep_sending() -> None:
            for number in numbers:
                try:
                    await send(number)
                except OSError as error:
                    self.counts[type(error).__name__] += 1
                    await asyncio.sleep(RETRY_S)
                await asyncio.sleep(pause_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(senders):
                group.create_task(keep_sending())

    async def send_each(self, bodies: Iterable[dict[str, Any]], senders: int) -> None:
        """Posts each of these chats once, so many at once."""
        each = iter(bodies)

        async def send(_: int) -> None:
            body = json.dumps(next(each)).encode()
            if await self.exchange(self.head(CHAT, length=len(body)) + body) != 200:
                await asyncio.sleep(REFUSED_S)

        await self.repeat(senders, send)

    async def send_all(
        self,
        requests: Sequence[tuple[str, bytes]],
        senders: int,
        headers: Mapping[str, str] | None = None,
        pause_s: float = 0.0,
    ) -> None:
        """Posts these bodies to their paths again and again, so many at once."""

        async def send(number: int) -> None:
            path, body = requests[number % len(requests)]
            if await self.exchange(self.head(path, length=len(body), headers=headers) + body) != 200:
                await asyncio.sleep(REFUSED_S)

        await self.repeat(senders, send, pause_s)

    async def get_all(self, path: str, senders: int, headers: Mapping[str, str], pause_s: float = 0.0) -> None:
        """Gets a path again and again, so many at once, each as long as the answer lasts."""

        async def send(_: int) -> None:
            await self.exchange(self.head(path, length=None, headers=headers, get=True))

        await self.repeat(senders, send, pause_s)
