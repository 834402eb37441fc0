"""TCP link: leads a connection of the installation through this process so that it can fail.

Each fault has the effect that an endpoint sees of the real fault:

- ``refuse``: nothing listens; a new connection is refused, and an open one continues.
- ``reset``: open connections are reset, and new ones are reset as soon as they are made.
- ``blackhole``: nothing arrives, in both directions or in one. Nothing is lost either, for TCP sends again what was not
  acknowledged: when the hole closes, everything arrives late. (A new connection is still accepted, but carries nothing;
  a real black hole would leave it hanging too.)
- delay: every byte arrives later by the delay.
"""

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Literal

from maitred.core.errors import ConfigInvalid
from maitred.load.chaos.plan import Direction

Pump = Literal["to_server", "to_client"]

CHUNK_BYTES = 16 * 1024
HELD_BYTES = 1024 * 1024
"""Most bytes held in one direction; then the sender blocks, as with full buffers on a real path."""

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER is on with a time of 0, so that closing sends RST."""


class TcpLink:
    """Listener with its connections. Entering starts to listen; leaving closes all of them.

    Args:
        listen: ``HOST:PORT``; port 0 takes a free one.
        to: ``HOST:PORT`` that the link connects to.

    Attributes:
        address: ``HOST:PORT`` that it listens at, after it was entered.
    """

    def __init__(self, listen: str, to: str) -> None:
        self.address = listen
        self._to = to
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resets = False
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.open: dict[Pump, asyncio.Event] = {"to_server": asyncio.Event(), "to_client": asyncio.Event()}
        for event in self.open.values():
            event.set()

    async def __aenter__(self) -> "TcpLink":
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_listener()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- faults ---

    @contextmanager
    def blackhole(self, direction: Direction = "both") -> Iterator[None]:
        """Blocks all bytes while the context is open."""
        pumps: tuple[Pump, ...] = ("to_server", "to_client") if direction == "both" else (direction,)
        for pump in pumps:
            self.open[pump].clear()
        try:
            yield
        finally:
            for pump in pumps:
                self.open[pump].set()

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """Resets every connection while the context is open, and open ones at once."""
        self._resets = True
        try:
            self._reset_all()
            yield
        finally:
            self._resets = False

    async def refuse(self) -> None:
        """Stops listening; `accept` undoes it."""
        self._close_listener()

    async def accept(self) -> None:
        """Listens again at the same address."""
        if self._server is None:
            await self._listen()

    # --- connections ---

    async def _listen(self) -> None:
        host, _, port = self.address.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._serve, host, int(port), limit=CHUNK_BYTES)
        except OSError as error:
            raise ConfigInvalid(f"A link cannot listen at {self.address}: {error.strerror}. Choose another.") from None
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def _close_listener(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _reset_all(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._resets:
                _reset(writer)
                return
            host, _, port = self._to.rpartition(":")
            try:
                server_reader, server_writer = await asyncio.open_connection(host, int(port), limit=CHUNK_BYTES)
            except OSError:
                _reset(writer)  # the client must see that there is no server
                return
            connection = _Connection(
                link=self,
                client_reader=reader,
                client_writer=writer,
                server_reader=server_reader,
                server_writer=server_writer,
            )
            self._connections.add(connection)
            try:
                await connection.run()
            finally:
                self._connections.discard(connection)
        finally:
            self._tasks.discard(task)


class _Connection:
    """Connection of two sockets with a pump in each direction."""

    def __init__(
        self,
        link: TcpLink,
        client_reader: asyncio.StreamReader,
        client_writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        self._link = link
        self._client = client_reader, client_writer
        self._server = server_reader, server_writer
        self._pumps: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Pumps until both ends have ended, or one broke; then the other end is broken too."""
        self._pumps = [
            asyncio.create_task(self._pump("to_server", self._client[0], self._server[1]), name="link to server"),
            asyncio.create_task(self._pump("to_client", self._server[0], self._client[1]), name="link to client"),
        ]
        try:
            done, _ = await asyncio.wait(self._pumps, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.cancelled() or task.exception() is not None for task in done):
                self.reset()
        finally:
            for task in self._pumps:
                task.cancel()
            await asyncio.wait(self._pumps)
            for task in self._pumps:
                if not task.cancelled():
                    task.exception()  # a broken end is not an error of the link
            for _, writer in (self._client, self._server):
                writer.close()

    def reset(self) -> None:
        """Resets both sockets, as a broken connection does."""
        for _, writer in (self._client, self._server):
            _reset(writer)

    async def _pump(self, pump: Pump, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carries bytes in one direction, each chunk when it is due; the end of the stream counts as a chunk."""
        held = _Held()
        reading = asyncio.create_task(self._read(reader, held), name="link reader")
        try:
            while chunk := await self._due(pump, held):
                writer.write(chunk)
                await writer.drain()
                if rate := self._link.bytes_per_s:
                    await asyncio.sleep(len(chunk) / rate)
            reading.result()  # raises if the sender's connection broke
            if writer.can_write_eof():
                writer.write_eof()
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()

    async def _read(self, reader: asyncio.StreamReader, held: "_Held") -> None:
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                await held.put(time.monotonic(), chunk)
        finally:
            held.end()

    async def _due(self, pump: Pump, held: "_Held") -> bytes:
        came_s, chunk = await held.next()
        await asyncio.sleep(max(0.0, came_s + self._link.delay_s - time.monotonic()))
        await self._link.open[pump].wait()
        return chunk


class _Held:
    """Bytes in transit in one direction, in order, at most `HELD_BYTES` of them."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._ended = False
        self._changed = asyncio.Event()

    async def put(self, came_s: float, chunk: bytes) -> None:
        self._chunks.append((came_s, chunk))
        self._bytes += len(chunk)
        self._changed.set()
        while self._bytes > HELD_BYTES:
            self._changed.clear()
            await self._changed.wait()

    def end(self) -> None:
        self._ended = True
        self._chunks.append((time.monotonic(), b""))
        self._changed.set()

    async def next(self) -> tuple[float, bytes]:
        """Returns the oldest chunk and when it came; an empty chunk is the end."""
        while not self._chunks:
            self._changed.clear()
            await self._changed.wait()
        came_s, chunk = self._chunks.popleft()
        self._bytes -= len(chunk)
        self._changed.set()
        return came_s, chunk


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
