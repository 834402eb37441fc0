"""Server loop of an engine: reads the gateways' messages, computes a step and sends the tokens.

The server has one thread and uses no asyncio event loop. While there is work, each iteration polls the sockets and then
computes a step. Without work it waits in the selector. So a cancellation takes effect by the next step, and the model
never waits for a slow peer. Data that a gateway does not read is buffered. A gateway that leaves too much data unread
is treated as dead, like one that closed its connection. All its requests are cancelled. A connection is pending until
it is established (see `connection`). The number and the duration of pending connections are limited.

A failure inside a step ends the process on purpose. Every gateway sees the end of its stream at once, and the
supervisor starts a new process with an empty cache.
"""

import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from types import FrameType
from typing import Protocol

from msgspec.structs import replace

from maitred.core.clock import Clock
from maitred.core.errors import ProtocolViolation
from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport, ModelCard
from maitred.core.request import EngineRequest
from maitred.engine import request_log
from maitred.engine.connection import GatewayConnection
from maitred.engine.process_stats import ProcessStats
from maitred.wire.frames import (
    PROTOCOL_VERSION,
    Cancel,
    EngineHello,
    Pause,
    Ping,
    Pong,
    Rejection,
    ResendBlocks,
    SleepCommand,
    Submit,
    TokenOutput,
    Unpin,
    UpdateSimilar,
)
from maitred.wire.link.credentials import Credentials

HANDSHAKE_TIMEOUT_S = 30.0
"""Timeout of a handshake, which takes several iterations of the loop, and so several steps."""
MAX_PENDING_HANDSHAKES = 64
"""Maximum of pending connections; beyond it the oldest one is closed."""
_DRAIN_POLL_S = 0.05

logger = logging.getLogger("maitred.engine")


class StepEngine(Protocol):
    """Engine that works in steps: `maitred.engine.engine.Engine`, or `maitred.engine.encoder.engine.EncoderEngine`.

    An *owner* is the connection that submitted a request; request ids are unique per owner.
    """

    def submit(self, owner: Hashable, request: EngineRequest) -> None:
        """Accepts a request; raises ValueError, with the reason, if it can never run here."""
        ...

    def cancel(self, owner: Hashable, request_id: str, index: int | None) -> None:
        """Cancels one choice of a request, or all choices. Unknown or finished requests are ignored."""
        ...

    def pause(self, owner: Hashable, request_id: str, *, paused: bool) -> None:
        """Pauses a request, or resumes it."""
        ...

    def cancel_owner(self, owner: Hashable) -> None:
        """Cancels all requests of an owner that has disconnected."""
        ...

    def set_asleep(self, *, asleep: bool) -> None:
        """Releases the model's memory as soon as no request runs, or restores it.

        An engine that cannot sleep ignores the call.
        """
        ...

    def unpin(self, scope: str, name: str) -> None:
        """Unpins a prefix before its time is over. Unknown or expired pins are ignored."""
        ...

    def update_similar(self, update: UpdateSimilar) -> None:
        """Changes the index of cached questions, or the verifiers; an engine that is no encoder ignores the call."""
        ...

    def step(self) -> Mapping[Hashable, list[TokenOutput]]:
        """Computes one step and returns its outputs by owner."""
        ...

    def rejections(self) -> list[tuple[Hashable, Rejection]]:
        """Returns the requests that were rejected since the last call, each with its owner."""
        ...

    def load(self) -> LoadReport:
        """Returns the engine's current load report."""
        ...

    def block_update(self, *, whole: bool = False) -> BlockUpdate | None:
        """Returns the changes of the prefix cache, or its whole content; None: nothing has changed."""
        ...

    def max_idle_s(self) -> float | None:
        """Returns the seconds until the next step is due; None: not before a message comes."""
        ...

    @property
    def occupied(self) -> bool:
        """Whether any request has not ended."""
        ...


class EngineServer:
    """Server of one engine for any number of gateways.

    Args:
        engine: Engine to serve.
        card: Model card for `EngineHello`.
        listener: A bound, listening socket.
        clock: Clock for the grace period of a drain and for handshake timeouts.
        credentials: Certificate and secret for the handshake with gateways.
        vitals: Resource use of the process; None: a reader without a GPU is made.
        stranger_s: Seconds that a connection may stay open without a completed handshake.
        model_s: Seconds that the process has taken to make the model ready, for `EngineHello`.
        start_id: Identifier of this start of the process, for `EngineHello`.
        drain_grace_s: Seconds that a drain gives to the running requests.
    """

    def __init__(
        self,
        engine: StepEngine,
        card: ModelCard,
        listener: socket.socket,
        clock: Clock,
        credentials: Credentials = Credentials(),  # noqa: B008 - frozen
        *,
        vitals: ProcessStats | None = None,
        stranger_s: float = HANDSHAKE_TIMEOUT_S,
        model_s: float = 0.0,
        start_id: str = "",
        drain_grace_s: float = 30.0,
    ) -> None:
        self._engine = engine
        self._drain_grace_s = drain_grace_s
        self._model_s = model_s
        self._start_id = start_id
        self._vitals = vitals or ProcessStats(clock)
        self._card = card
        self._clock = clock
        self._epoch = int(clock.wall_s() * 1e6)
        self._credentials = credentials
        self._handshake_timeout_s = stranger_s
        self._connections: dict[socket.socket, GatewayConnection] = {}
        self._handshaking: dict[GatewayConnection, float] = {}
        """Pending connection -> deadline of its handshake, the oldest first."""
        self._drain_until_s: float | None = None
        self._stopped = False
        self._block_updates = False
        """Whether the load has changed since it was last reported."""
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serves until a drain is complete or `stop` was called, then closes all sockets."""
        try:
            self._serve_steps()
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection, "the engine stops")
            self._selector.close()
            self._listener.close()

    def drain(self) -> None:
        """Refuses new requests, and stops when all requests are done or the grace period is over."""
        self._drain_until_s = self._clock.monotonic_s() + self._drain_grace_s

    def stop(self) -> None:
        """Stops before the next step."""
        self._stopped = True

    def watch_signals(self) -> None:
        """Installs handlers: SIGTERM or SIGINT starts a drain, a second signal stops the server.

        Call this only in the main thread of an engine's own process.
        """
        # The handler runs between two bytecodes, so it cannot wake the selector. The byte that Python writes to this
        # socket pair wakes it.
        wake, self._wakeup = socket.socketpair()
        wake.setblocking(False)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno())
        self._selector.register(wake, selectors.EVENT_READ, partial(wake.recv, 4096))
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)

    def _serve_steps(self) -> None:
        while not self._stopped:
            self._poll()
            if self._engine.max_idle_s() == 0:
                self._report(self._engine.step())
            elif self._block_updates:
                self._report({})
            if self._drain_until_s is not None:
                if not self._engine.occupied and not any(c.unsent for c in self._connections.values()):
                    break
                if self._clock.monotonic_s() > self._drain_until_s:
                    logger.warning("the grace period is over with work left: its streams end here")
                    break

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._drain_until_s is None:
            self.drain()
        else:
            self.stop()

    def _poll(self) -> None:
        """Handles the sockets that are ready, and waits only when there is nothing to compute."""
        patience_s = self._engine.max_idle_s()
        if self._drain_until_s is not None:
            patience_s = _DRAIN_POLL_S if patience_s is None else min(patience_s, _DRAIN_POLL_S)
        if self._handshaking:
            left_s = max(0.0, next(iter(self._handshaking.values())) - self._clock.monotonic_s())
            patience_s = left_s if patience_s is None else min(patience_s, left_s)
        for key, _ in self._selector.select(patience_s):
            key.data()
        if self._handshaking:
            self._reject()

    def _reject(self) -> None:
        """Closes pending connections past their deadlines, after the data that they sent was read."""
        now_s = self._clock.monotonic_s()
        for connection, until_s in list(self._handshaking.items()):
            if now_s < until_s and len(self._handshaking) <= MAX_PENDING_HANDSHAKES:
                break
            self._drop(connection, "it did not introduce itself in time")

    def _accept(self) -> None:
        try:
            connection = GatewayConnection(self._listener.accept()[0], self._credentials, self._hello)
        except OSError as error:
            logger.warning("a connection could not be accepted: %s", error)
            return
        self._connections[connection.socket] = connection
        self._handshaking[connection] = self._clock.monotonic_s() + self._handshake_timeout_s
        serve = partial(self._guard, connection, partial(self._serve, connection))
        self._selector.register(connection.socket, selectors.EVENT_READ, serve)
        self._guard(connection, connection.open)

    def _hello(self) -> EngineHello:
        load, blocks = self._load(), self._engine.block_update(whole=True)
        return EngineHello(
            protocol=PROTOCOL_VERSION,
            epoch=self._epoch,
            pid=os.getpid(),
            card=self._card,
            load=load,
            blocks=blocks,
            model_s=self._model_s,
            start_id=self._start_id,
        )

    def _load(self) -> LoadReport:
        return replace(self._engine.load(), process=self._vitals.now())

    def _serve(self, connection: GatewayConnection) -> None:
        connection.send()
        messages = connection.receive()
        if messages is None:
            self._drop(connection, "it closed the connection")
            return
        for message in messages:
            self._block_updates = True
            match message:
                case Submit(request):
                    self._submit(connection, request)
                case Cancel(request_id, index):
                    self._engine.cancel(connection, request_id, index)
                case Pause(request_id, paused):
                    self._engine.pause(connection, request_id, paused=paused)
                case ResendBlocks():
                    connection.recounts = True
                case SleepCommand(asleep):
                    self._engine.set_asleep(asleep=asleep)
                case Unpin(scope, name):
                    self._engine.unpin(scope, name)
                case UpdateSimilar():
                    self._engine.update_similar(message)
                case Ping(number):
                    connection.send(Pong(number))  # the next report answers it, too

    def _submit(self, connection: GatewayConnection, request: EngineRequest) -> None:
        if self._drain_until_s is not None:
            connection.rejections.append(Rejection(request.id, "The engine is shutting down.", retryable=True))
            return
        try:
            self._engine.submit(connection, request)
        except ValueError as refusal:
            request_log.log_refusal(request, str(refusal))
            connection.rejections.append(Rejection(request.id, str(refusal)))

    def _report(self, outputs: Mapping[Hashable, list[TokenOutput]]) -> None:
        """Sends each gateway its tokens and the load, which requests of other gateways may have changed."""
        self._block_updates = False
        for owner, rejection in self._engine.rejections():
            if isinstance(owner, GatewayConnection):
                owner.rejections.append(rejection)
        load, changes = self._load(), self._engine.block_update()
        for connection in list(self._connections.values()):
            if not connection.established:
                continue
            blocks = self._engine.block_update(whole=True) if connection.recounts else changes
            connection.recounts = False
            self._guard(connection, partial(connection.send_step, outputs.get(connection, []), load, blocks))

    def _guard(self, connection: GatewayConnection, action: Callable[[], None]) -> None:
        """Runs an action on a connection; drops the connection if it breaks or violates the protocol."""
        if connection.socket not in self._connections:
            return
        try:
            action()
        except (OSError, ProtocolViolation) as error:
            self._drop(connection, str(error))
            return
        if connection.established:
            self._handshaking.pop(connection, None)
        self._watch(connection)

    def _watch(self, connection: GatewayConnection) -> None:
        """Watches for write readiness only while there is data to write."""
        if connection.socket in self._connections:
            key = self._selector.get_key(connection.socket)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.wants_to_write else 0)
            if key.events != events:
                self._selector.modify(connection.socket, events, key.data)

    def _drop(self, connection: GatewayConnection, why: str) -> None:
        if self._handshaking.pop(connection, None) is not None:
            logger.warning("a stranger is gone: %s", why)
        else:
            logger.info("a gateway is gone (%s): its requests are cancelled", why)
        del self._connections[connection.socket]
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._engine.cancel_owner(connection)
        self._block_updates = True
