"""Clients that ask questions over kept connections, and keep what came back as it came."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.support.caches.questions import PATHS, Answer, Asked, read_answer
from maitred.load.play.client.connection import ConnectionFailed, LoadConnection
from maitred.load.play.client.origin import Origin
from maitred.load.play.client.pool import ConnectionPool
from maitred.load.play.clock import RunClock


@dataclass(slots=True)
class Came:
    """What came back.

    Attributes:
        asked: The request.
        cache: ``x-maitred-cache``: ``hit``, ``miss``, ``coalesced``, ``bypass`` or empty.
        key: ``x-maitred-cache-key``.
        answer: What it says; None: it is none, see `error`.
        rest: Digest of all its fields but those that are its own.
        error: Why it is no answer.
    """

    asked: Asked
    cache: str = ""
    key: str = ""
    answer: Answer | None = None
    rest: bytes = b""
    error: str = ""


class Asker:
    """Asks one gateway.

    Args:
        url: Where it listens.
        keys: Key of each tenant.
    """

    def __init__(self, url: str, keys: list[str]) -> None:
        origin, clock = Origin.parse(url), RunClock()
        self._origin = origin
        self._keys = keys
        self._pool = ConnectionPool(origin, (origin.host, origin.port), connect_timeout_s=60.0, clock=clock)

    async def ask(self, asked: Asked, *, tokens: int | None = None, begun: Callable[[], None] | None = None) -> Came:
        """Sends one request and reads its answer to the end; whoever cancels this hangs up.

        Args:
            asked: The request.
            tokens: Most output tokens; None: what the question wants.
            begun: Called with the first bytes of the answer's body.
        """
        body = asked.body(tokens)
        headers = {
            "Authorization": f"Bearer {self._keys[asked.tenant]}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **({"anthropic-version": "2023-06-01"} if asked.api == "messages" else {}),
        }
        reader = _Bytes(begun)
        connection: LoadConnection | None = None
        try:
            connection = await self._pool.take()
            await connection.request(self._origin.head("POST", PATHS[asked.api], headers) + b"\r\n" + body, reader)
        except ConnectionFailed as failure:
            return Came(asked, error=str(failure))
        finally:
            if connection is not None:
                self._pool.release(connection)
        came = Came(asked, reader.headers.get(b"x-maitred-cache", b"").decode())
        came.key = reader.headers.get(b"x-maitred-cache-key", b"").decode()
        try:
            if reader.status != 200:
                raise ValueError(f"Status {reader.status}: {reader.content[:300]!r}")
            came.answer, came.rest = read_answer(asked.api, bytes(reader.content), streamed=asked.streamed)
        except (ValueError, KeyError, TypeError) as error:
            came.error = f"{type(error).__name__}: {error}"
        return came

    async def ask_all(self, requests: Iterator[Asked], *, lanes: int) -> list[Came]:
        """Sends all requests, so many at a time."""
        replies: list[Came] = []

        async def work() -> None:
            for asked in requests:
                replies.append(await self.ask(asked))  # noqa: PERF401 - others append meanwhile

        async with asyncio.TaskGroup() as group:
            for _ in range(lanes):
                group.create_task(work())
        return replies

    def close(self) -> None:
        """Closes what is idle."""
        self._pool.close()


@dataclass(slots=True)
class _Bytes:
    """See `maitred.load.play.client.connection.ResponseReader`."""

    begun: Callable[[], None] | None
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    content: bytearray = field(default_factory=bytearray)

    def head(self, status: int, headers: dict[bytes, bytes], now_s: float) -> None:
        self.status, self.headers = status, headers

    def body(self, data: bytes, now_s: float) -> None:
        if not self.content and self.begun is not None:
            self.begun()
        self.content += data
