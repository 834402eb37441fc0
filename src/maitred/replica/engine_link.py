"""An engine behind a socket, as the gateway sees it.

A link outlives the engine's process. Whoever owns the engine (`fleet`, or `app` for a remote one) calls `connect`,
waits on `lost`, restarts what has to be restarted, and calls `connect` again; between two connections the link is
down, and says for how long it expects to be.

    down --connect()--> ready --end of stream | broken frame | close()--> down

Death needs no time-out: the end of the byte stream reaches every open stream within the same turn of the event loop.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from maitred.core.errors import ReplicaUnavailable
from maitred.core.ports import LoadReport, ModelCard, TokenStream
from maitred.core.request import Request
from maitred.replica.connection import EngineConnection
from maitred.replica.output_count import OutputCount
from maitred.replica.stream import PAUSE_AT_TOKENS
from maitred.wire.address import Address, UnixAddress

CONNECT_RETRY_S = 0.02
"""Between attempts while nobody listens yet; small beside any engine's start."""

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""A machine that vanishes without closing its connections is noticed after 5 + 3 x 2 seconds."""


class EngineLink:
    """Implements `core.ports.Replica` over the engine protocol.

    Args:
        address: Where the engine listens.
        retry_after_s: How long from now the engine is expected to be down; asked only while it is.

    Attributes:
        unread_tokens: How much of a stream may lie unread before the engine is told to pause it; for streams that are
            opened from now on.
        open_streams: Contexts of `generate` that have not been left, over all connections. 0 when nothing leaks.
    """

    def __init__(self, address: Address, *, retry_after_s: Callable[[], float] = lambda: 1.0) -> None:
        self.address = address
        self._retry_after_s = retry_after_s
        self.unread_tokens = PAUSE_AT_TOKENS
        self.open_streams = 0
        self._connection: EngineConnection | None = None
        self._count = OutputCount()
        self._listeners: list[Callable[[], None]] = []

    # --- the replica ---

    @property
    def ready(self) -> bool:
        """Whether `generate` would submit now."""
        return self._connection is not None and self._connection.alive

    @property
    def epoch(self) -> int:
        """Which start of the engine this is (see `Hello.epoch`).

        Raises:
            ReplicaUnavailable: The engine is down.
        """
        return self._live().hello.result().epoch

    def card(self) -> ModelCard:
        """See `core.ports.Replica`."""
        return self._live().hello.result().card

    def load(self) -> LoadReport:
        """The last report heard, from the engine's previous life if it is down."""
        return LoadReport() if self._connection is None else self._connection.load

    def unheard(self) -> int:
        """See `core.ports.Replica`; 0 while the engine is down."""
        return self._connection.unheard if self._connection is not None and self._connection.alive else 0

    @property
    def weight(self) -> float:
        """See `core.ports.Host`."""
        return 1.0

    def watch(self, listener: Callable[[], None]) -> None:
        """See `core.ports.Replica`. The listener must not raise: it runs where the engine's messages are read."""
        self._listeners.append(listener)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def output_tokens(self) -> int:
        """Tokens that the engine has counted since it was connected for the first time, over all its lives."""
        return self._count.total(self.load())

    @asynccontextmanager
    async def generate(self, request: Request) -> AsyncIterator[TokenStream]:
        """See `core.ports.Replica`.

        Nothing in here awaits: entering has submitted and leaving has cancelled when they return, also when it is a
        `CancelledError` that leaves.

        Raises:
            ReplicaUnavailable: The engine is down; nothing was submitted.
        """
        connection = self._live()
        stream = connection.submit(request, pause_at_tokens=self.unread_tokens)
        self.open_streams += 1
        try:
            yield stream
        finally:
            self.open_streams -= 1
            connection.release(stream)

    def _live(self) -> EngineConnection:
        if self._connection is None or not self._connection.alive:
            raise ReplicaUnavailable(retry_after_s=self._retry_after_s())
        return self._connection

    # --- its connection ---

    async def connect(self, timeout_s: float) -> None:
        """Connects and waits for the engine's hello; tries again while nobody listens.

        Raises:
            ReplicaUnavailable: Not within the time, or what listens there is not an engine of this version.
            RuntimeError: The link is connected.
        """
        if self.ready:
            raise RuntimeError("The link is connected; close it first.")
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._dial()
                try:
                    await asyncio.shield(connection.hello)
                except asyncio.CancelledError:
                    connection.end("nobody waits for its hello any more")
                    raise
        except TimeoutError:
            raise ReplicaUnavailable(f"No engine answered at {self.address} within {timeout_s:g} s.") from None
        self._count.met(connection.hello.result(), self.load())
        self._connection = connection
        self._tell()

    async def _dial(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        while True:
            try:
                if isinstance(self.address, UnixAddress):
                    return (await loop.create_unix_connection(self._new_connection, self.address.path))[1]
                transport, connection = await loop.create_connection(
                    self._new_connection, self.address.host, self.address.port
                )
                raw: socket.socket = transport.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    raw.setsockopt(socket.IPPROTO_TCP, option, value)
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(CONNECT_RETRY_S)

    def _new_connection(self) -> EngineConnection:
        return EngineConnection(self._tell)

    async def lost(self) -> str:
        """Waits until the connection has ended; returns the reason, at once if there is none."""
        if self._connection is None:
            return "it was never connected"
        return await asyncio.shield(self._connection.ended)

    def close(self) -> None:
        """Ends the connection: open streams raise `ReplicaLost`, and the engine cancels their requests."""
        if self._connection is not None:
            self._connection.end("the gateway closed it")
