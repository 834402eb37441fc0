"""An engine behind a socket, as the gateway sees it.

A link outlives the engine's process. Whoever owns the engine (`fleet`, or `app` for a remote one) calls `connect`,
waits on `lost`, restarts what has to be restarted, and calls `connect` again; between two connections the link is
down, and says for how long it expects to be.

    down --connect()--> ready --end of stream | broken frame | silence | close()--> down

The death of a process needs no time-out: the end of the byte stream reaches every open stream within the same turn of
the event loop. Only what ends without a word (a process that hangs, a cut cable) is noticed by its silence.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from maitred.core.errors import ReplicaUnavailable
from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport, ModelCard, TokenStream
from maitred.core.request import EngineRequest
from maitred.replica.engine.connection import EngineConnection
from maitred.replica.engine.stream import PAUSE_AT_TOKENS
from maitred.wire.address import Address, UnixAddress
from maitred.wire.frames import EngineHello
from maitred.wire.link.credentials import Credentials

CONNECT_RETRY_S = 0.02
"""Between attempts while nobody listens yet; small beside any engine's start."""

_TCP = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""A machine that vanishes is noticed after 30 s by the system, if not earlier by its silence."""


class EngineClient:
    """Implements `core.ports.Replica` over the engine protocol.

    Args:
        address: Where the engine listens.
        retry_after_s: How long from now the engine is expected to be down; asked only while it is.
        credentials: What the engine has to know and show.
        silence_timeout_s: When an engine that says nothing is lost; None: never.
        accept: Raises ReplicaUnavailable, with the reason, where what the engine says of its model will not do.

    Attributes:
        unread_tokens: How much of a stream may lie unread before the engine is told to pause it; for streams that are
            opened from now on.
        open_streams: Contexts of `generate` that have not been left, over all connections. 0 when nothing leaks.
    """

    def __init__(
        self,
        address: Address,
        *,
        retry_after_s: Callable[[], float] = lambda: 1.0,
        credentials: Credentials = Credentials(),  # noqa: B008 - frozen
        silence_timeout_s: float | None = None,
        accept: Callable[[ModelCard], None] = lambda card: None,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._silence_timeout_s = silence_timeout_s
        self._accept = accept
        self._retry_after_s = retry_after_s
        self.unread_tokens = PAUSE_AT_TOKENS
        self.open_streams = 0
        self._connection: EngineConnection | None = None
        self._count = LifetimeTokenCount()
        self._listeners: list[Callable[[], None]] = []
        self._followers: list[Callable[[BlockUpdate], None]] = []
        self._followed_late = False
        self._changed = asyncio.Event()

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

    def unreported(self) -> int:
        """See `core.ports.Replica`; 0 while the engine is down."""
        return self._connection.unreported if self._connection is not None and self._connection.alive else 0

    @property
    def weight(self) -> float:
        """See `core.ports.Host`."""
        return 1.0

    def on_change(self, listener: Callable[[], None]) -> None:
        """See `core.ports.Replica`. The listener must not raise: it runs where the engine's messages are read."""
        self._listeners.append(listener)

    def follow_blocks(self, listener: Callable[[BlockUpdate], None]) -> None:
        """Tells what the engine's prefix cache holds and what changes in it, over all its lives; for good.

        The listener hears the whole first, and again whenever something was missed. It must not raise.
        """
        self._followers.append(listener)
        if self._connection is not None and self._connection.alive:
            self._connection.recount()
        else:
            self._followed_late = True  # an engine may be saying hello just now

    def _notify_blocks(self, news: BlockUpdate) -> None:
        for follower in self._followers:
            follower(news)

    def _notify(self) -> None:
        self._changed.set()
        for listener in self._listeners:
            listener()

    @property
    def output_tokens(self) -> int:
        """Tokens that the engine has counted since it was connected for the first time, over all its lives."""
        return self._count.total(self.load())

    @property
    def asleep(self) -> bool:
        """Whether the engine sleeps, by its last report."""
        return self.ready and self.load().asleep

    @property
    def wakes_in_s(self) -> float:
        """How long waking should take."""
        return self.load().wakes_in_s

    def unpin(self, scope: str, name: str) -> None:
        """Lets a prefix go that a request has pinned; an engine that is down holds none."""
        if self.ready:
            self._live().unpin(scope, name)

    def request_sleep(self, *, asleep: bool) -> None:
        """Tells the engine to sleep as soon as nothing runs, or to wake.

        Raises:
            ReplicaUnavailable: The engine is down.
        """
        self._live().set_asleep(asleep=asleep)

    async def sleep(self, *, asleep: bool) -> None:
        """The same, and waits until it does.

        Raises:
            ReplicaUnavailable: The engine is down, or was lost before that.
        """
        self.request_sleep(asleep=asleep)
        while self.load().asleep is not asleep:
            self._live()
            self._changed.clear()
            await self._changed.wait()

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenStream]:
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
            ReplicaUnavailable: Not within the time; or what listens there is not an engine of this version, does not
                know the secret, has not the right certificate, or does not run the right model.
            RuntimeError: The link is connected.
        """
        if self.ready:
            raise RuntimeError("The link is connected; close it first.")
        connection: EngineConnection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._dial()
                try:
                    hello = await asyncio.shield(connection.hello)
                except asyncio.CancelledError:
                    connection.end("nobody waits for its hello any more")
                    raise
        except TimeoutError:
            silent = "" if connection is None else " Something listens there: it is busy, or it speaks TLS."
            reason = f"No engine answered at {self.address} within {timeout_s:g} s.{silent}"
            raise ReplicaUnavailable(reason) from None
        try:
            self._accept(hello.card)
        except ReplicaUnavailable as refusal:
            connection.end(refusal.message)
            raise
        self._count.on_connect(hello, self.load())
        self._connection = connection
        if self._followed_late:
            self._followed_late = False
            connection.recount()
        self._notify()

    async def _dial(self) -> EngineConnection:
        while True:
            try:
                return await self._dial_once()
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(CONNECT_RETRY_S)
            except ssl.SSLCertVerificationError as error:
                raise ReplicaUnavailable(
                    f"The certificate of the engine at {self.address} is not accepted: {error.verify_message}."
                ) from None
            except ssl.SSLError as error:
                raise ReplicaUnavailable(
                    f"No TLS could be agreed on with what listens at {self.address}: {error.reason}. Has the engine a "
                    "certificate (engine_link.certificate_file)?"
                ) from None

    async def _dial_once(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        if isinstance(self.address, UnixAddress):
            return (await loop.create_unix_connection(self._new_connection, self.address.path))[1]
        transport, connection = await loop.create_connection(
            self._new_connection, self.address.host, self.address.port, ssl=self._credentials.tls
        )
        raw: socket.socket = transport.get_extra_info("socket")
        for option in _TCP:
            raw.setsockopt(*option)
        return connection

    def _new_connection(self) -> EngineConnection:
        return EngineConnection(
            self._notify,
            self._notify_blocks,
            secret=self._credentials.secret,
            silence_timeout_s=self._silence_timeout_s,
        )

    async def lost(self) -> str:
        """Waits until the connection has ended; returns the reason, at once if there is none."""
        if self._connection is None:
            return "it was never connected"
        return await asyncio.shield(self._connection.ended)

    def close(self) -> None:
        """Ends the connection: open streams raise `ReplicaLost`, and the engine cancels their requests."""
        if self._connection is not None:
            self._connection.end("the gateway closed it")


class LifetimeTokenCount:
    """Adds up what the engine's reports count, each life of the engine from its own start.

    A life is told by its epoch and not by its counts: a new one may have counted more than the last before anybody
    looks. What a life counted after its last report went with it, and nobody has seen it.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._earlier = 0
        """Of the lives before this one."""
        self._base = 0
        """What this life had counted when it was met first: not for this gateway."""

    def on_connect(self, hello: EngineHello, last: LoadReport) -> None:
        """There is a new connection.

        Args:
            hello: How it began. An engine may be met again in the same life; it has gone on counting meanwhile.
            last: The last report of the connection before.
        """
        if hello.epoch == self._epoch:
            return
        if self._epoch is not None:
            self._earlier = self.total(last)
        self._epoch, self._base = hello.epoch, hello.load.output_tokens

    def total(self, load: LoadReport) -> int:
        """The count.

        Args:
            load: The last report of the connection that was met last.
        """
        return 0 if self._epoch is None else self._earlier + load.output_tokens - self._base
