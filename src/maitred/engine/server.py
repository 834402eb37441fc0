"""The engine's process: one loop that reads what gateways want, computes a step, and sends each its tokens.

There is one thread and no event loop. While there is work, every turn looks at the sockets without waiting and then
computes a step; with none it sleeps in the selector. So a cancellation is effective by the next step, and the model
never waits for a slow peer: what a gateway does not read is buffered, and one that leaves too much unread is taken for
dead, like one that closed its end. Whatever it had submitted is cancelled.

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

from maitred.core.clock import Clock
from maitred.core.errors import ProtocolViolation
from maitred.core.ports import LoadReport, ModelCard
from maitred.core.request import Request
from maitred.engine.connection import Connection
from maitred.wire.frames import PROTOCOL_VERSION, Cancel, Hello, Output, Pause, Rejection, Submit

DRAIN_GRACE_S = 30.0
_DRAIN_POLL_S = 0.05

logger = logging.getLogger("maitred.engine")


class Steps(Protocol):
    """What works in steps: `maitred.engine.engine.Engine`, or `maitred.engine.encoder.engine.EncoderEngine`.

    An *owner* is whoever submitted a request; request ids are unique per owner.
    """

    def submit(self, owner: Hashable, request: Request) -> None:
        """Takes a request in; raises ValueError, with the reason, if it can never run here."""
        ...

    def cancel(self, owner: Hashable, request_id: str, index: int | None) -> None:
        """Ends one choice of a request, or all. What is unknown or done is ignored."""
        ...

    def pause(self, owner: Hashable, request_id: str, *, paused: bool) -> None:
        """Computes no more of a request, or goes on with it."""
        ...

    def disown(self, owner: Hashable) -> None:
        """The owner is gone: ends all its requests."""
        ...

    def step(self) -> Mapping[Hashable, list[Output]]:
        """Computes one step; what came of it, by owner."""
        ...

    def load(self) -> LoadReport:
        """Where things stand."""
        ...

    def patience_s(self) -> float | None:
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
        card: What it runs, for `Hello`.
        listener: A bound, listening socket.
        clock: For the grace period of a drain.
    """

    def __init__(
        self,
        engine: Steps,
        card: ModelCard,
        listener: socket.socket,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._card = card
        self._clock = clock
        self._epoch = int(clock.wall_s() * 1e6)
        self._connections: dict[socket.socket, Connection] = {}
        self._drain_until_s: float | None = None
        self._stopped = False
        self._news = False
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
            if self._engine.patience_s() == 0:
                self._report(self._engine.step())
            elif self._news:
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
        patience_s = self._engine.patience_s()
        if self._drain_until_s is not None:
            patience_s = _DRAIN_POLL_S if patience_s is None else min(patience_s, _DRAIN_POLL_S)
        for key, _ in self._selector.select(patience_s):
            key.data()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock)
        self._connections[sock] = connection
        self._selector.register(
            sock, selectors.EVENT_READ, partial(self._guard, connection, partial(self._serve, connection))
        )
        hello = Hello(PROTOCOL_VERSION, self._epoch, os.getpid(), self._card, self._engine.load())
        self._guard(connection, partial(connection.send, hello))

    def _serve(self, connection: Connection) -> None:
        connection.send()
        messages = connection.receive()
        if messages is None:
            self._drop(connection, "it closed the connection")
            return
        for message in messages:
            self._news = True
            match message:
                case Submit(request):
                    self._submit(connection, request)
                case Cancel(request_id, index):
                    self._engine.cancel(connection, request_id, index)
                case Pause(request_id, paused):
                    self._engine.pause(connection, request_id, paused=paused)

    def _submit(self, connection: Connection, request: Request) -> None:
        if self._drain_until_s is not None:
            connection.rejections.append(Rejection(request.id, "The engine is shutting down.", retryable=True))
            return
        try:
            self._engine.submit(connection, request)
        except ValueError as refusal:
            connection.rejections.append(Rejection(request.id, str(refusal)))

    def _report(self, outputs: Mapping[Hashable, list[Output]]) -> None:
        """Sends everyone its tokens, and the load to all: what one gateway submits is news to the others."""
        self._news = False
        load = self._engine.load()
        for connection in list(self._connections.values()):
            self._guard(connection, partial(connection.send_step, outputs.get(connection, []), load))

    def _guard(self, connection: Connection, action: Callable[[], None]) -> None:
        """Runs an action on a connection; one that broke or breaks the protocol is dropped, with its requests."""
        if connection.socket not in self._connections:
            return
        try:
            action()
        except (OSError, ProtocolViolation) as error:
            self._drop(connection, str(error))
            return
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Asks for write readiness only while something is unsent."""
        if connection.socket in self._connections:
            key = self._selector.get_key(connection.socket)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            if key.events != events:
                self._selector.modify(connection.socket, events, key.data)

    def _drop(self, connection: Connection, why: str) -> None:
        logger.info("a gateway is gone (%s): its requests are cancelled", why)
        del self._connections[connection.socket]
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._engine.disown(connection)
        self._news = True
