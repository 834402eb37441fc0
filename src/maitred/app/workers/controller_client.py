"""The worker's end of the connection to the controller: it sends messages and hands each reply to its request.

A connection that ends is opened again, for as long as that takes. A request that needs the controller meanwhile waits
for a moment and is then rejected with a `Retry-After`; a request that the controller has admitted before goes on. The
next controller first receives a `WorkerHello` with every grant that has not been settled: those of requests that still
run, and those of requests that have ended since.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from maitred.core.errors import MaitredError, StoreUnavailable, Unavailable
from maitred.core.tenancy import DirectoryChanges
from maitred.fleet.agent.connection import MessageConnection
from maitred.wire.error_codec import decode_error
from maitred.wire.worker_protocol import (
    AnswerReply,
    ControllerSnapshot,
    DirectoryQuery,
    DirectoryReply,
    LimitReply,
    RateLimitReply,
    ReaderJoined,
    ReaderLeft,
    ResumeGrant,
    ToWorker,
    WorkerHello,
)

CONTROLLER_UNAVAILABLE = (
    "The process of this gateway that decides on requests is being started again. Try again shortly."
)
_CONNECT_TIMEOUT_S = 5.0
"""How long a request waits for a controller that is away. A start takes one or two seconds on a busy machine."""
_RECONNECT_TIMEOUT_S = 10.0
"""How long a request with a grant waits for the next controller."""
_RETRY_AFTER_S = 2.0
_RECONNECT_S = 0.05
_FLUSH_INTERVAL_S = 0.25
"""How long token counts are gathered before they are sent to the controller, whose fair queue charges them.

For a stream of 20 tokens a second the controller receives 4 messages a second.
"""
_DELAY_S = 0.025
"""How long a message of `send_soon` waits for other messages to be sent with."""
_MAX_DELAYED_MESSAGES = 10_000
"""Most messages of `send_soon` that are kept while there is no controller.

They report ended requests, whose usage is not lost: `ControllerClient._ended_grants` keeps it.
"""


class RequestListener(Protocol):
    """A request of this worker that receives messages from the controller.

    A Protocol, because `RemoteAdmission`, which implements it, imports this module.
    """

    def on_message(self, message: ToWorker) -> None:
        """Handles a message of the controller about this request."""
        ...

    def on_disconnect(self) -> None:
        """Handles the loss of the connection to the controller."""
        ...

    def take_resume_grant(self) -> ResumeGrant | None:
        """Takes the grant for a new controller, which gets the tokens until now with it; None: there is no grant."""
        ...

    @property
    def unanswered_id(self) -> str | None:
        """The id of the request if it has asked for admission and has no reply yet; None otherwise."""
        ...


class Flushable(Protocol):
    """A request that has gathered token counts, which can be sent a little later."""

    def flush(self) -> None:
        """Sends the gathered counts now; does nothing if they were sent meanwhile."""
        ...


class ControllerClient:
    """Client of the controller in one worker process.

    Args:
        worker: The number of this worker.
        pid: The process id of this worker.
        path: The Unix socket where the controller listens.
        on_snapshot: Called with every `ControllerSnapshot`.

    Attributes:
        on_reader: Called when another process begins or ends to read an answer of this worker.
        on_lost: Called when the connection to the controller is lost.
    """

    def __init__(self, worker: int, pid: int, path: Path, on_snapshot: Callable[[ControllerSnapshot], None]) -> None:
        self._worker, self._pid = worker, pid
        self._path = path
        self._on_snapshot = on_snapshot
        self._connection: MessageConnection[ToWorker] | None = None
        self._connected = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._numbers = itertools.count(1)
        self._listeners: dict[int, RequestListener] = {}
        self._pending_replies: dict[int, asyncio.Future[ToWorker]] = {}
        self._ended_grants: list[ResumeGrant] = []
        """Grants whose requests have ended while there was no controller."""
        self._unanswered_ids: list[str] = []
        """Ids of requests that have ended without a reply to their `AdmitRequest`, while there was no controller."""
        self.on_reader: Callable[[ReaderJoined | ReaderLeft], None] = lambda _: None
        self.on_lost: Callable[[], None] = lambda: None
        self._delayed_messages: deque[msgspec.Struct] = deque(maxlen=_MAX_DELAYED_MESSAGES)
        self._flushables: list[Flushable] = []

    @property
    def is_connected(self) -> bool:
        """Whether the controller is connected."""
        return self._connected.is_set()

    async def run(self) -> None:
        """Keeps the connection open, and opens it again after a loss, until the task is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, connection = await loop.create_unix_connection(
                    lambda: MessageConnection(ToWorker, self._on_message, self._on_disconnect), str(self._path)
                )
            except OSError:
                await asyncio.sleep(_RECONNECT_S)
                continue
            self._disconnected.clear()
            self._connection = connection
            listeners = self._listeners.values()
            resume_grants = [
                resume_grant for listener in listeners if (resume_grant := listener.take_resume_grant()) is not None
            ]
            unanswered_ids = [
                request_id for listener in listeners if (request_id := listener.unanswered_id) is not None
            ]
            connection.send(
                WorkerHello(
                    self._worker,
                    self._pid,
                    [*self._ended_grants, *resume_grants],
                    [*self._unanswered_ids, *unanswered_ids],
                )
            )
            self._send_delayed()
            try:
                await self._disconnected.wait()
            finally:
                self._send_delayed()
                connection.close()

    async def wait_connected(self, *, has_grant: bool = False) -> None:
        """Waits for the connection to the controller; longer with `has_grant`.

        Raises:
            Unavailable: The timeout has expired.
        """
        if self._connected.is_set():
            return
        try:
            async with asyncio.timeout(_RECONNECT_TIMEOUT_S if has_grant else _CONNECT_TIMEOUT_S):
                while not self._connected.is_set():
                    await self._connected.wait()
        except TimeoutError:
            raise Unavailable(CONTROLLER_UNAVAILABLE, retry_after_s=_RETRY_AFTER_S) from None

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message; drops it while the controller is away."""
        if self._connection is not None:
            self._send_delayed()
            self._connection.send(message)

    def send_soon(self, message: msgspec.Struct) -> None:
        """Queues a message that can wait for a moment, or for the next controller.

        The message is sent together with the next one that cannot wait, so that a busy controller is not woken for it.
        """
        if not self._delayed_messages and self._connection is not None:
            asyncio.get_running_loop().call_later(_DELAY_S, self._send_delayed)
        self._delayed_messages.append(message)

    def _send_delayed(self) -> None:
        if (connection := self._connection) is not None:
            while self._delayed_messages:
                connection.send(self._delayed_messages.popleft())

    def schedule_flush(self, flushable: Flushable) -> None:
        """Schedules `flush` of this request within `_FLUSH_INTERVAL_S`, together with other requests."""
        if not self._flushables:
            asyncio.get_running_loop().call_later(_FLUSH_INTERVAL_S, self._flush)
        self._flushables.append(flushable)

    def _flush(self) -> None:
        flushables, self._flushables = self._flushables, []
        for flushable in flushables:
            flushable.flush()

    def keep_ended_grant(self, resume_grant: ResumeGrant) -> None:
        """Keeps the grant of an ended request; the next `WorkerHello` has it settled."""
        self._ended_grants.append(resume_grant)

    def keep_unanswered_id(self, request_id: str) -> None:
        """Keeps the id of a request that ended without a reply; the next `WorkerHello` reports it."""
        self._unanswered_ids.append(request_id)

    def register(self, listener: RequestListener) -> int:
        """Registers a request for messages; returns the number under which the controller knows it."""
        number = next(self._numbers)
        self._listeners[number] = listener
        return number

    def unregister(self, number: int) -> None:
        """Stops delivering messages to the request of this number."""
        self._listeners.pop(number, None)

    async def query(self, make_query: Callable[[int], msgspec.Struct]) -> ToWorker:
        """Sends a query that the controller answers at once; returns the reply.

        Raises:
            Unavailable: The controller is away.
        """
        await self.wait_connected()
        number = next(self._numbers)
        reply: asyncio.Future[ToWorker] = asyncio.get_running_loop().create_future()
        self._pending_replies[number] = reply
        self.send(make_query(number))
        try:
            return await reply
        finally:
            del self._pending_replies[number]

    async def changes(self, since: int) -> DirectoryChanges:
        """Reads the changes of the directory since a version. Implements `maitred.core.tenancy.DirectorySource`."""
        try:
            reply = await self.query(lambda number: DirectoryQuery(number, since))
        except Unavailable as error:
            raise StoreUnavailable(error.message, retry_after_s=error.retry_after_s) from None
        assert isinstance(reply, DirectoryReply)
        if reply.changes is None:
            raise MaitredError if reply.error is None else decode_error(reply.error)
        return reply.changes

    def _on_message(self, message: ToWorker) -> None:
        match message:
            case ControllerSnapshot():
                self._ended_grants.clear()  # the new controller has settled them
                self._unanswered_ids.clear()
                self._connected.set()
                self._on_snapshot(message)
            case DirectoryReply() | RateLimitReply() | LimitReply() | AnswerReply():
                reply = self._pending_replies.get(message.number)
                if reply is not None and not reply.done():
                    reply.set_result(message)
            case ReaderJoined() | ReaderLeft():
                self.on_reader(message)
            case _:
                if (listener := self._listeners.get(message.number)) is not None:
                    listener.on_message(message)

    def _on_disconnect(self) -> None:
        self._connection = None
        self._connected.clear()
        self._disconnected.set()
        self.on_lost()
        for listener in list(self._listeners.values()):
            listener.on_disconnect()
        for reply in self._pending_replies.values():
            if not reply.done():
                reply.set_exception(Unavailable(CONTROLLER_UNAVAILABLE, retry_after_s=_RETRY_AFTER_S))
