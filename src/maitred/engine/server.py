"""The engine's process: one loop that reads what gateways want, computes a step, and sends each its tokens.

There is one thread and no event loop. While there is work, every turn looks at the sockets without waiting and then
computes a step; with none it sleeps in the selector. So a cancellation is effective by the next step, and the model
never waits for a slow peer: what a gateway does not read is buffered, and one that leaves too much unread is taken for
dead, like one that closed its end. Whatever it had submitted is cancelled. Whoever connects is a stranger until the
connection is established (see `connection`); strangers are few at a time and do not stay long.

A failure inside a step is not survived on purpose: the process dies, every gateway sees the end of the stream at once,
and the supervisor starts a new one with an empty cache.
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
    Rejection,
    ResendBlocks,
    SleepCommand,
    Submit,
    TokenOutput,
    Unpin,
)
from maitred.wire.link.credentials import Credentials

DRAIN_GRACE_S = 30.0
HANDSHAKE_TIMEOUT_S = 30.0
"""From the accepted connection to the established one: a handshake takes some turns of the loop, so some steps."""
MAX_PENDING_HANDSHAKES = 64
"""Of more, the one that has been there longest has to go."""
_DRAIN_POLL_S = 0.05

logger = logging.getLogger("maitred.engine")


class StepEngine(Protocol):
    """Engine that works in steps: `maitred.engine.engine.Engine`, or `maitred.engine.encoder.engine.EncoderEngine`.

    An *owner* is whoever submitted a request; request ids are unique per owner.
    """

    def submit(self, owner: Hashable, request: EngineRequest) -> None:
        """Takes a request in; raises ValueError, with the reason, if it can never run here."""
        ...

    def cancel(self, owner: Hashable, request_id: str, index: int | None) -> None:
        """Ends one choice of a request, or all. What is unknown or done is ignored."""
        ...

    def pause(self, owner: Hashable, request_id: str, *, paused: bool) -> None:
        """Computes no more of a request, or goes on with it."""
        ...

    def cancel_owner(self, owner: Hashable) -> None:
        """The owner is gone: ends all its requests."""
        ...

    def set_asleep(self, *, asleep: bool) -> None:
        """Gives its memory back as soon as nothing runs, or has it again. What cannot sleep stays awake."""
        ...

    def unpin(self, scope: str, name: str) -> None:
        """Lets a prefix go that was pinned. What is unknown or over is ignored."""
        ...

    def step(self) -> Mapping[Hashable, list[TokenOutput]]:
        """Computes one step; what came of it, by owner."""
        ...

    def rejections(self) -> list[tuple[Hashable, Rejection]]:
        """The requests that turned out to be impossible since this was last asked, each with its owner."""
        ...

    def load(self) -> LoadReport:
        """Returns the load report of now."""
        ...

    def block_update(self, *, whole: bool = False) -> BlockUpdate | None:
        """Returns the changes of the prefix cache, or all that it holds; None: nothing has changed."""
        ...

    def max_idle_s(self) -> float | None:
        """How long the next step may be put off; None: until somebody asks."""
        ...

    @property
    def occupied(self) -> bool:
        """Whether any request has not ended."""
        ...


class EngineServer:
    """Serves an engine to any number of gateways until it is told to stop.

    Args:
        engine: What to serve.
        card: What it runs, for `EngineHello`.
        listener: A bound, listening socket.
        clock: For the grace period of a drain.
        credentials: What gateways have to know and show.
        vitals: What its process takes; None: looked up without a GPU.
        stranger_s: How long one that has not done so may stay.
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
    ) -> None:
        self._engine = engine
        self._vitals = vitals or ProcessStats(clock)
        self._card = card
        self._clock = clock
        self._epoch = int(clock.wall_s() * 1e6)
        self._credentials = credentials
        self._handshake_timeout_s = stranger_s
        self._connections: dict[socket.socket, GatewayConnection] = {}
        self._handshaking: dict[GatewayConnection, float] = {}
        """Until when each may stay; those that came first are first."""
        self._drain_until_s: float | None = None
        self._stopped = False
        self._block_updates = False
        """Whether the load has changed since it was last reported."""
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serves until `drain` has ended the work, or `stop` was called; then closes every socket it has."""
        try:
            self._serve_steps()
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection, "the engine stops")
            self._selector.close()
            self._listener.close()

    def drain(self) -> None:
        """Refuses new requests and stops once those at hand are done, or the grace period is over."""
        self._drain_until_s = self._clock.monotonic_s() + DRAIN_GRACE_S

    def stop(self) -> None:
        """Stops before the next step."""
        self._stopped = True

    def watch_signals(self) -> None:
        """SIGTERM or SIGINT drains; a second one stops. Only in the main thread of a process that is ours."""
        # The handler runs between two bytecodes, so it alone would not end the selector's sleep; the byte that Python
        # writes on this pair does.
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
        """Handles what is ready on the sockets; sleeps only when there is nothing to compute."""
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
        """Strangers whose time is over; only after what they have sent was read."""
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
        return EngineHello(PROTOCOL_VERSION, self._epoch, os.getpid(), self._card, load, blocks)

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
                case Ping():
                    pass  # the next report answers it

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
        """Sends everyone its tokens, and the load to all: what one gateway submits is news to the others."""
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
        """Runs an action on a connection; one that broke or breaks the protocol is dropped, with its requests."""
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
        """Asks for write readiness only while something is to be written."""
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
