"""Client of one engine process behind a socket.

An `EngineClient` stays usable when the engine process restarts. Its owner (`maitred.fleet`) calls `connect`, awaits
`wait_lost`, restarts the engine if necessary, and calls `connect` again. Between two connections every call raises
`ReplicaUnavailable` with the expected downtime in `retry_after_s`.

    down --connect()--> ready --end of stream | broken frame | silence | close()--> down

A process that dies is detected without a time-out: the socket reaches EOF, and all open streams fail in the same event
loop iteration. A failure that does not close the socket (a process that hangs, a cut cable) is detected by the
heartbeat time-out.
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
from maitred.wire.frames import EngineHello, UpdateSimilar
from maitred.wire.link.credentials import Credentials

CONNECT_RETRY_S = 0.02
"""Time between attempts to connect while nothing listens yet; much shorter than an engine start."""

KEEPALIVE_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
"""Socket options of TCP keep-alive.

The kernel ends a connection to an unreachable machine after 30 s, unless the heartbeat ends it earlier.
"""


class EngineClient:
    """Replica over the engine protocol: one engine process behind a socket. Implements `core.replica.Replica`.

    Args:
        address: Address at which the engine listens.
        expected_downtime_s: Returns the expected remaining downtime in seconds; called only while the engine is down.
        credentials: Secret and TLS certificates with which the engine and the gateway authenticate each other.
        silence_timeout_s: Time after which an engine that sends nothing counts as lost; None: there is no heartbeat.
        check_card: Checks the model card of the engine; raises ReplicaUnavailable to reject the connection.

    Attributes:
        pause_at_tokens: Number of unread tokens at which a stream pauses the engine; a change applies to new streams.
        start_id: Identifier that the hello must have, so that it comes from the process which was started; empty: any.
        open_streams: Number of open `generate` contexts, over all connections. It is 0 when no request is running.
        on_idle: Called when the last one has ended; None: nobody waits for that.
        is_rejected: Whether the last engine that answered may not be used, because of its model or its version.
    """

    def __init__(
        self,
        address: Address,
        *,
        expected_downtime_s: Callable[[], float] = lambda: 1.0,
        credentials: Credentials = Credentials(),  # noqa: B008 - frozen
        silence_timeout_s: float | None = None,
        check_card: Callable[[ModelCard], None] = lambda card: None,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._silence_timeout_s = silence_timeout_s
        self._check_card = check_card
        self._expected_downtime_s = expected_downtime_s
        self.pause_at_tokens = PAUSE_AT_TOKENS
        self.start_id = ""
        self.open_streams = 0
        self.on_idle: Callable[[], None] | None = None
        self.is_rejected = False
        self._connection: EngineConnection | None = None
        self._lifetime_tokens = LifetimeTokenCount()
        self._change_listeners: list[Callable[[], None]] = []
        self._block_listeners: list[Callable[[BlockUpdate], None]] = []
        self._request_blocks_on_connect = False

    # --- replica interface ---

    @property
    def is_ready(self) -> bool:
        """Whether the engine is connected, so that `generate` would not raise."""
        return self._connection is not None and self._connection.is_alive

    @property
    def epoch(self) -> int:
        """Epoch of the engine process, which changes with every start (see `EngineHello.epoch`).

        Raises:
            ReplicaUnavailable: The engine is down.
        """
        return self._live_connection().hello.result().epoch

    @property
    def model_s(self) -> float:
        """Seconds that the engine's process has taken to make its model ready; 0 while the engine is down."""
        return self._live_connection().hello.result().model_s if self.is_ready else 0.0

    def card(self) -> ModelCard:
        """Returns the card of the model that the engine runs. Implements `core.replica.Replica`."""
        connection = self._connection
        if connection is None or not connection.is_alive:
            raise ReplicaUnavailable(retry_after_s=self._expected_downtime_s())
        return connection.hello.result().card

    def load(self) -> LoadReport:
        """Returns the last load report; while the engine is down, the last one before the connection was lost."""
        return LoadReport() if self._connection is None else self._connection.load

    def count_unreported(self) -> int:
        """Returns the number of submitted requests that the last load report does not include; 0 while down."""
        return self._connection.unreported if self._connection is not None and self._connection.is_alive else 0

    @property
    def weight(self) -> float:
        """Weight of the replica among its peers; always 1. Implements `core.replica.ReplicaBase`."""
        return 1.0

    def round_trip_s(self) -> float | None:
        """Returns the round-trip time to the engine in seconds; None: it has not been measured since it connected."""
        return None if self._connection is None else self._connection.round_trip.seconds

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every load report, and when the engine is connected or lost.

        Implements `core.replica.ReplicaBase`.

        The listener must not raise, because it runs inside `data_received` of the connection.
        """
        self._change_listeners.append(listener)

    def subscribe_blocks(self, listener: Callable[[BlockUpdate], None]) -> None:
        """Calls `listener` with the content of the engine's prefix cache, then with its changes.

        The first update is a snapshot of the cache, and so is the first update after a missed one. A subscription lasts
        as long as the client. The listener must not raise.
        """
        self._block_listeners.append(listener)
        if self._connection is not None and self._connection.is_alive:
            self._connection.request_blocks()
        else:
            self._request_blocks_on_connect = True  # `connect` may be waiting for the hello at this moment

    def _notify_blocks(self, update: BlockUpdate) -> None:
        for listener in self._block_listeners:
            listener(update)

    def _notify_change(self) -> None:
        for listener in self._change_listeners:
            listener()

    @property
    def output_tokens(self) -> int:
        """Number of output tokens since the first connection, over all restarts of the engine."""
        return self._lifetime_tokens.total(self.load())

    @property
    def is_asleep(self) -> bool:
        """Whether the engine is sleeping, according to its last load report."""
        return self.is_ready and self.load().asleep

    @property
    def wakes_in_s(self) -> float:
        """Expected duration of waking up, according to the last load report."""
        return self.load().wakes_in_s

    def unpin(self, scope: str, name: str) -> None:
        """Unpins a prefix that a request has pinned in the engine's prefix cache.

        While the engine is down this does nothing, because the pins are lost with its cache.
        """
        if self.is_ready:
            self._live_connection().unpin(scope, name)

    def update_similar(self, update: UpdateSimilar) -> None:
        """Changes the encoder's index of cached questions, or its verifiers; does nothing while the encoder is down."""
        if self.is_ready:
            self._live_connection().update_similar(update)

    def request_asleep(self, *, asleep: bool) -> None:
        """Tells the engine to sleep when it is idle, or to wake up; does not wait until it has done so.

        Raises:
            ReplicaUnavailable: The engine is down.
        """
        self._live_connection().request_asleep(asleep=asleep)

    @asynccontextmanager
    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenStream]:
        """Submits the request and yields its token stream. Implements `core.replica.Replica`.

        This function never awaits: the request is submitted when `__aenter__` returns and cancelled when `__aexit__`
        returns, even if the task is cancelled.

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
            if self.on_idle is not None and not self.open_streams:
                self.on_idle()

    def _live_connection(self) -> EngineConnection:
        if self._connection is None or not self._connection.is_alive:
            raise ReplicaUnavailable(retry_after_s=self._expected_downtime_s())
        return self._connection

    # --- connection ---

    async def connect(self, timeout_s: float) -> None:
        """Connects and waits for the engine's hello; tries again while nothing listens at the address.

        Raises:
            ReplicaUnavailable: No hello arrived in time; or the engine has another protocol version, another secret, an
                invalid certificate or a wrong model, or is another process than the one that was started.
            RuntimeError: The client is connected already.
        """
        if self.is_ready:
            raise RuntimeError("The engine is connected already; close the client first.")
        connection: EngineConnection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                connection = await self._connect_with_retry()
                try:
                    hello = await asyncio.shield(connection.hello)
                except asyncio.CancelledError:
                    connection.end("nobody waits for its hello any more")
                    raise
                except ReplicaUnavailable:
                    self.is_rejected = connection.is_rejected
                    raise
        except TimeoutError:
            hint = "" if connection is None else " Something listens there: it is busy, or it speaks TLS."
            reason = f"No engine answered at {self.address} within {timeout_s:g} s.{hint}"
            raise ReplicaUnavailable(reason) from None
        try:
            if self.start_id not in ("", hello.start_id):
                raise ReplicaUnavailable(
                    f"Another engine answers at {self.address}, with process id {hello.pid}. Give each its own address."
                )
            self._check_card(hello.card)
        except ReplicaUnavailable as rejection:
            self.is_rejected = True
            connection.end(rejection.message)
            raise
        self.is_rejected = False
        self._lifetime_tokens.on_connect(hello, self.load())
        self._connection = connection
        if self._request_blocks_on_connect:
            self._request_blocks_on_connect = False
            connection.request_blocks()
        self._notify_change()

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
            self._new_connection,
            self.address.host,
            self.address.port,
            ssl=self._credentials.tls,
            server_hostname=self._credentials.server_name,
        )
        sock: socket.socket = transport.get_extra_info("socket")
        for option in KEEPALIVE_OPTIONS:
            sock.setsockopt(*option)
        return connection

    def _new_connection(self) -> EngineConnection:
        return EngineConnection(
            self._notify_change,
            self._notify_blocks,
            secret=self._credentials.secret,
            silence_timeout_s=self._silence_timeout_s,
        )

    async def wait_lost(self) -> str:
        """Waits until the connection has ended and returns the reason; returns at once if there was none."""
        if self._connection is None:
            return "it was never connected"
        return await asyncio.shield(self._connection.ended)

    def close(self) -> None:
        """Ends the connection: open streams raise `ReplicaLost`, and the engine cancels their requests."""
        if self._connection is not None:
            self._connection.end("the gateway closed it")


class LifetimeTokenCount:
    """Counter of an engine's output tokens over all its restarts.

    Every engine process starts its count at 0. A restart is detected by the epoch, not by a smaller count: the new
    process may already have counted more tokens. Tokens that a process counted after its last load report are not
    included.
    """

    def __init__(self) -> None:
        self._epoch: int | None = None
        self._previous_epochs_tokens = 0
        """Tokens of the previous epochs."""
        self._baseline_tokens = 0
        """Tokens that this epoch had counted before this gateway first connected; they are subtracted."""

    def on_connect(self, hello: EngineHello, last_load: LoadReport) -> None:
        """Updates the counter for a new connection; the engine may have restarted.

        Args:
            hello: First message of the new connection. If its epoch is unchanged, the engine has not restarted and its
                count continues.
            last_load: Last load report of the previous connection.
        """
        if hello.epoch == self._epoch:
            return
        if self._epoch is not None:
            self._previous_epochs_tokens = self.total(last_load)
        self._epoch, self._baseline_tokens = hello.epoch, hello.load.output_tokens

    def total(self, load: LoadReport) -> int:
        """Returns the output tokens of all epochs.

        Args:
            load: Last report of the latest connection.
        """
        return 0 if self._epoch is None else self._previous_epochs_tokens + load.output_tokens - self._baseline_tokens
