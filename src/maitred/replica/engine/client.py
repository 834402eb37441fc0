"""Client of one engine process behind a socket.

An `EngineClient` outlives the engine's process. The owner of the engine (`fleet`) calls `connect`, awaits `wait_lost`,
restarts what has to be restarted, and calls `connect` again. Between two connections the client is down, and says for
how long it expects to be.

    down --connect()--> ready --end of stream | broken frame | silence | close()--> down

The death of a process needs no time-out: the end of the byte stream reaches every open stream within the same turn of
the event loop. Only a failure that closes no connection (a process that hangs, a cut cable) is noticed by its silence.
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
"""Time between attempts to connect while nothing listens yet; small beside any engine's start."""

_KEEPALIVE_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""Socket options of TCP keep-alive.

The system notices a machine that vanishes after 30 s, if its silence is not noticed earlier.
"""


class EngineClient:
    """Replica over the engine protocol: one engine process behind a socket. Implements `core.replica.Replica`.

    Args:
        address: Address at which the engine listens.
        retry_after_s: Returns for how many seconds from now the engine is expected to be down; called only while it is.
        credentials: Secret and certificates by which the engine and the gateway know each other.
        silence_timeout_s: Time after which an engine that sends nothing counts as lost; None: it never does.
        check_card: Raises ReplicaUnavailable, with the reason, if the engine runs a model that may not be used.

    Attributes:
        pause_at_tokens: Unread tokens of a stream at which the engine is told to pause it; for streams that are opened
            from now on.
        open_streams: Contexts of `generate` that have not been left, over all connections. 0 when nothing leaks.
    """

    def __init__(
        self,
        address: Address,
        *,
        retry_after_s: Callable[[], float] = lambda: 1.0,
        credentials: Credentials = Credentials(),  # noqa: B008 - frozen
        silence_timeout_s: float | None = None,
        check_card: Callable[[ModelCard], None] = lambda card: None,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._silence_timeout_s = silence_timeout_s
        self._check_card = check_card
        self._retry_after_s = retry_after_s
        self.pause_at_tokens = PAUSE_AT_TOKENS
        self.open_streams = 0
        self._connection: EngineConnection | None = None
        self._token_count = LifetimeTokenCount()
        self._listeners: list[Callable[[], None]] = []
        self._block_listeners: list[Callable[[BlockUpdate], None]] = []
        self._resend_on_connect = False
        self._changed = asyncio.Event()

    # --- replica interface ---

    @property
    def is_ready(self) -> bool:
        """Whether `generate` would submit a request now."""
        return self._connection is not None and self._connection.is_alive

    @property
    def epoch(self) -> int:
        """Number of this start of the engine (see `EngineHello.epoch`).

        Raises:
            ReplicaUnavailable: The engine is down.
        """
        return self._live_connection().hello.result().epoch

    def card(self) -> ModelCard:
        """Returns the card of the model that the engine runs. Implements `core.replica.Replica`."""
        connection = self._connection
        if connection is None or not connection.is_alive:
            raise ReplicaUnavailable(retry_after_s=self._retry_after_s())
        return connection.hello.result().card

    def load(self) -> LoadReport:
        """Returns the last load report; it is from the engine's previous life while the engine is down."""
        return LoadReport() if self._connection is None else self._connection.load

    def count_unreported(self) -> int:
        """Returns the number of submitted requests that the last report cannot know of; 0 while the engine is down."""
        return self._connection.unreported if self._connection is not None and self._connection.is_alive else 0

    @property
    def weight(self) -> float:
        """Weight of the replica among its peers; always 1. Implements `core.replica.ReplicaBase`."""
        return 1.0

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every report, and when the engine is connected or lost.

        Implements `core.replica.ReplicaBase`.

        The listener must not raise: it runs where the engine's messages are read.
        """
        self._listeners.append(listener)

    def subscribe_blocks(self, listener: Callable[[BlockUpdate], None]) -> None:
        """Sends the listener the content of the engine's prefix cache and its changes, over all lives of the engine.

        The first update holds the whole content, and so does the first one after an update was missed. A subscription
        lasts as long as the client. The listener must not raise.
        """
        self._block_listeners.append(listener)
        if self._connection is not None and self._connection.is_alive:
            self._connection.request_blocks()
        else:
            self._resend_on_connect = True  # a connection may be waiting for its hello just now

    def _notify_blocks(self, update: BlockUpdate) -> None:
        for listener in self._block_listeners:
            listener(update)

    def _notify(self) -> None:
        self._changed.set()
        for listener in self._listeners:
            listener()

    @property
    def output_tokens(self) -> int:
        """Output tokens that the engine has counted since its first connection, over all its lives."""
        return self._token_count.total(self.load())

    @property
    def is_asleep(self) -> bool:
        """Whether the engine sleeps, by its last report."""
        return self.is_ready and self.load().asleep

    @property
    def wakes_in_s(self) -> float:
        """Seconds that waking should take, by the last report."""
        return self.load().wakes_in_s

    def unpin(self, scope: str, name: str) -> None:
        """Releases a prefix that a request has pinned.

        An engine that is down has no pins, so nothing happens while it is.
        """
        if self.is_ready:
            self._live_connection().unpin(scope, name)

    def request_sleep(self, *, asleep: bool) -> None:
        """Tells the engine to sleep as soon as nothing runs, or to wake, and returns at once.

        Raises:
            ReplicaUnavailable: The engine is down.
        """
        self._live_connection().set_asleep(asleep=asleep)

    async def sleep(self, *, asleep: bool) -> None:
        """Tells the engine to sleep or to wake, and waits until it does.

        Raises:
            ReplicaUnavailable: The engine is down, or was lost before that.
        """
        self.request_sleep(asleep=asleep)
        while self.load().asleep is not asleep:
            self._live_connection()
            self._changed.clear()
            await self._changed.wait()

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenStream]:
        """Submits the request and yields its token stream. Implements `core.replica.Replica`.

        No line of this function awaits: the request is submitted when entering returns, and cancelled when leaving
        returns, also if a `CancelledError` is the reason for leaving.

        Raises:
            ReplicaUnavailable: The engine is down; nothing was submitted.
        """
        connection = self._live_connection()
        stream = connection.submit(request, pause_at_tokens=self.pause_at_tokens)
        self.open_streams += 1
        try:
            yield stream
        finally:
            self.open_streams -= 1
            connection.release(stream)

    def _live_connection(self) -> EngineConnection:
        if self._connection is None or not self._connection.is_alive:
            raise ReplicaUnavailable(retry_after_s=self._retry_after_s())
        return self._connection

    # --- connection ---

    async def connect(self, timeout_s: float) -> None:
        """Connects and waits for the engine's hello; tries again while nothing listens at the address.

        Raises:
            ReplicaUnavailable: There was no hello within the time; or the process there is no engine of this version,
                does not know the secret, has not the right certificate, or does not run the right model.
            RuntimeError: The client is connected already.
        """
        if self.is_ready:
            raise RuntimeError("The link is connected; close it first.")
        connection: EngineConnection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect_with_retry()
                try:
                    hello = await asyncio.shield(connection.hello)
                except asyncio.CancelledError:
                    connection.end("nobody waits for its hello any more")
                    raise
        except TimeoutError:
            hint = "" if connection is None else " Something listens there: it is busy, or it speaks TLS."
            reason = f"No engine answered at {self.address} within {timeout_s:g} s.{hint}"
            raise ReplicaUnavailable(reason) from None
        try:
            self._check_card(hello.card)
        except ReplicaUnavailable as rejection:
            connection.end(rejection.message)
            raise
        self._token_count.on_connect(hello, self.load())
        self._connection = connection
        if self._resend_on_connect:
            self._resend_on_connect = False
            connection.request_blocks()
        self._notify()

    async def _connect_with_retry(self) -> EngineConnection:
        while True:
            try:
                return await self._open_connection()
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

    async def _open_connection(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        if isinstance(self.address, UnixAddress):
            return (await loop.create_unix_connection(self._new_connection, self.address.path))[1]
        transport, connection = await loop.create_connection(
            self._new_connection, self.address.host, self.address.port, ssl=self._credentials.tls
        )
        sock: socket.socket = transport.get_extra_info("socket")
        for option in _KEEPALIVE_OPTIONS:
            sock.setsockopt(*option)
        return connection

    def _new_connection(self) -> EngineConnection:
        return EngineConnection(
            self._notify,
            self._notify_blocks,
            secret=self._credentials.secret,
            silence_timeout_s=self._silence_timeout_s,
        )

    async def wait_lost(self) -> str:
        """Waits until the connection has ended and returns the reason; returns at once if there is no connection."""
        if self._connection is None:
            return "it was never connected"
        return await asyncio.shield(self._connection.ended)

    def close(self) -> None:
        """Ends the connection: open streams raise `ReplicaLost`, and the engine cancels their requests."""
        if self._connection is not None:
            self._connection.end("the gateway closed it")


class LifetimeTokenCount:
    """Sum of the output tokens in an engine's reports, over all lives of the engine.

    Each life counts from its own start. A life is known by its epoch and not by its count, because a new life may have
    counted more than the last one before the next look. Tokens that a life counted after its last report are lost.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._earlier_tokens = 0
        """Tokens of the lives before this one."""
        self._base_tokens = 0
        """Tokens that this life had counted before the first connection to it; they were not for this gateway."""

    def on_connect(self, hello: EngineHello, last_load: LoadReport) -> None:
        """Notes a new connection, which may have met a new life of the engine.

        Args:
            hello: First message of the connection. An engine may be met again in the same life, in which it has gone on
                counting meanwhile.
            last_load: Last report of the connection before.
        """
        if hello.epoch == self._epoch:
            return
        if self._epoch is not None:
            self._earlier_tokens = self.total(last_load)
        self._epoch, self._base_tokens = hello.epoch, hello.load.output_tokens

    def total(self, load: LoadReport) -> int:
        """Returns the tokens of all lives together.

        Args:
            load: Last report of the latest connection.
        """
        return 0 if self._epoch is None else self._earlier_tokens + load.output_tokens - self._base_tokens
