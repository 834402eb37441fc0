"""Answers that processes of one gateway read from each other while they are computed.

::

    worker B                      controller                        worker A
      AnswerClaim ------------------>  A has claimed this answer
      <----------------- ClaimReply    ReaderJoined ----------------->
      <----------------- AnswerPart    <------------------ AnswerPart     what there is of it, then what comes
      <---------------- AnswerEnded    <----------------- AnswerEnded
      ReaderLeft ------------------->  ReaderLeft ------------------->    in place of the end, when nobody reads in B

The process that first asks for an answer computes it; the controller knows which one that is. The controller computes
answers, too, and reads those of workers. Parts pass through the controller only where two processes share an answer.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from maitred.app.request.answer_sharing import AnswerSharing, ClaimResult
from maitred.app.request.coalescing import AnswerReader, CoalescedAnswer
from maitred.app.request.peer_answer import AnswerMessage, PeerAnswer
from maitred.app.workers.controller_client import ControllerClient
from maitred.core.errors import Bug, MaitredError, ReplicaLost, Unavailable
from maitred.core.inference import TextDelta
from maitred.wire.error_codec import encode_error
from maitred.wire.worker_protocol import (
    AnswerClaim,
    AnswerEnded,
    AnswerPart,
    AnswerReleased,
    ClaimReply,
    ReaderJoined,
    ReaderLeft,
    ResumeGrant,
    ToController,
    ToWorker,
)

_MOST_RELEASED = 256
SendPart = Callable[[AnswerMessage], None]


class PeerReader(AnswerReader):
    """Reader of a coalesced answer in another process. What it is given, it sends there.

    Args:
        number: Number of the reader in its messages.
        answer: The answer.
        send: Sends a message towards the other process.
    """

    def __init__(self, number: int, answer: CoalescedAnswer, send: SendPart) -> None:
        self._number = number
        self._answer = answer
        self._send = send

    def on_start(self) -> None:
        """Sends that the request is admitted; implements `AnswerReader.on_start`."""
        self.take(())

    def take(self, parts: Sequence[TextDelta]) -> None:
        """Sends the next deltas; implements `AnswerReader.take`."""
        context = self._answer.context
        self._send(
            AnswerPart(
                self._number,
                parts=[*parts],
                has_begun=self._answer.has_begun,
                usage=context.usage,
                finish_reasons=context.finish_reasons,
                ignored_fields=[*context.ignored_fields],
                is_passthrough=context.is_passthrough,
                priority=context.priority,
            )
        )

    def on_end(self, failure: BaseException | None) -> None:
        """Sends the end; implements `AnswerReader.on_end`."""
        error = None
        if failure is not None:
            error = encode_error(failure if isinstance(failure, MaitredError) else Bug())
        self._send(AnswerEnded(self._number, error, self._answer.is_lost))


class PeerReaders:
    """The readers of this process's answers in other processes.

    Args:
        sharing: Has the answers.
    """

    def __init__(self, sharing: AnswerSharing) -> None:
        self._sharing = sharing
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_number: dict[int, asyncio.Task[None]] = {}

    def join(self, number: int, digest: bytes, send: SendPart) -> None:
        """Lets another process read an answer.

        Args:
            number: Number of the reader in its messages.
            digest: Digest of the request.
            send: Sends a message towards the other process.
        """
        task = asyncio.create_task(self._read(number, digest, send), name=f"reader {number} of a peer")
        self._tasks.add(task)
        self._by_number[number] = task

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if self._by_number.get(number) is task:
                del self._by_number[number]

        task.add_done_callback(on_done)

    def leave(self, number: int) -> None:
        """Ends a reader, because nobody reads in the other process any more."""
        if (task := self._by_number.pop(number, None)) is not None:
            task.cancel()

    def leave_all(self) -> None:
        """Ends all readers, because the controller that has numbered them is lost."""
        for number in [*self._by_number]:
            self.leave(number)

    async def wait_left(self) -> None:
        """Waits until no other process reads an answer of this one."""
        while self._tasks:
            await asyncio.wait([*self._tasks])

    async def close(self) -> None:
        """Closes all readers of this process's answers."""
        self.leave_all()
        if self._tasks:
            await asyncio.wait([*self._tasks])

    async def _read(self, number: int, digest: bytes, send: SendPart) -> None:
        answer = self._sharing.find(digest)
        if answer is None:
            send(_end_of_lost(number))
            return
        ended = asyncio.Event()

        def pass_on(message: AnswerMessage) -> None:
            send(message)
            if isinstance(message, AnswerEnded):
                ended.set()

        reader = PeerReader(number, answer, pass_on)
        so_far = answer.attach(reader)
        if answer.has_started:
            reader.take(so_far)
        if answer.is_over:
            reader.on_end(answer.failure)
        failure: BaseException | None = None
        try:
            await ended.wait()
        except asyncio.CancelledError as cancelled:
            failure = cancelled
            raise
        finally:
            await answer.detach(reader, failure)


class ClaimListener:
    """Listener of a worker to what the controller says of one claim. Implements `RequestListener`."""

    def __init__(self, controller: ControllerClient) -> None:
        self._controller = controller
        self.number = controller.register(self)
        self.reply: asyncio.Future[ClaimReply] = asyncio.get_running_loop().create_future()
        self.answer = PeerAnswer(self._leave)
        self._is_over = False

    def on_message(self, message: ToWorker) -> None:
        """Handles a message of the controller."""
        if isinstance(message, ClaimReply):
            if not self.reply.done():
                self.reply.set_result(message)
        elif isinstance(message, AnswerPart | AnswerEnded):
            self._is_over = isinstance(message, AnswerEnded)
            self.answer.on_part(message)

    def on_disconnect(self) -> None:
        """Ends the answer: without the controller nothing more comes of it."""
        if not self.reply.done():
            self.reply.set_result(ClaimReply(self.number))
        self._is_over = True
        self.answer.on_part(_end_of_lost(self.number))

    def take_resume_grant(self) -> ResumeGrant | None:
        """Returns None: it has no grant."""
        return None

    @property
    def unanswered_id(self) -> str | None:
        """Id of a request without a reply: None, because this is no request."""
        return None

    def _leave(self) -> None:
        self._controller.unregister(self.number)
        if not self._is_over:
            self._controller.send(ReaderLeft(self.number))


class WorkerPeers:
    """The peers of a worker, which it reaches through the controller. Implements `AnswerPeers`.

    Args:
        controller: The client of the controller.
    """

    def __init__(self, controller: ControllerClient) -> None:
        self._controller = controller

    def serve(self, sharing: AnswerSharing) -> PeerReaders:
        """Lets peers read the answers of this worker; returns their readers."""
        readers = PeerReaders(sharing)

        def on_reader(message: ReaderJoined | ReaderLeft) -> None:
            if isinstance(message, ReaderJoined):
                readers.join(message.number, message.digest, self._controller.send)
            else:
                readers.leave(message.number)

        self._controller.on_reader = on_reader
        self._controller.on_lost = readers.leave_all
        return readers

    async def claim(self, digest: bytes) -> ClaimResult:
        """Claims an answer; implements `AnswerPeers.claim`. Without the controller, nothing is shared."""
        if not self._controller.is_connected:
            return ClaimResult()
        listener = ClaimListener(self._controller)
        self._controller.send(AnswerClaim(listener.number, digest))
        reply = None
        try:
            reply = await listener.reply
        finally:
            if reply is None:
                listener.answer.leave()
            elif not reply.is_read:
                self._controller.unregister(listener.number)
        return ClaimResult(listener.answer if reply.is_read else None, reply.may_be_stored)

    def release(self, digest: bytes) -> None:
        """Releases an answer; implements `AnswerPeers.release`."""
        if self._controller.is_connected:
            self._controller.send(AnswerReleased(digest))

    async def wait_connected(self) -> None:
        """Waits for the controller; implements `AnswerPeers.wait_connected`."""
        with suppress(Unavailable):
            await self._controller.wait_connected(has_grant=True)


class Peer(Protocol):
    """A process of this gateway, as the controller sees it."""

    def send(self, message: ReaderJoined | ReaderLeft | ClaimReply | AnswerPart | AnswerEnded) -> None:
        """Sends it a message."""
        ...


class _Reading(NamedTuple):
    """One process that reads an answer of another."""

    leader: Peer
    follower: Peer
    number: int
    """Number that the follower knows."""


class ControllerPeers:
    """The claims of all processes, in the controller. Implements `AnswerPeers` for the controller's own requests."""

    def __init__(self) -> None:
        self._readers: PeerReaders | None = None
        self._leaders: dict[bytes, Peer] = {}
        """Digest of a request -> the process that computes its answer."""
        self._released: OrderedDict[bytes, None] = OrderedDict()
        """Digests of answers that were computed last. Who has looked for one in vain may find it now."""
        self._readings: dict[int, _Reading] = {}
        self._readers_of: dict[tuple[Peer, int], int] = {}
        """Follower and the number that it knows -> number of the reader."""
        self._numbers = itertools.count(1)
        self._own: dict[int, PeerAnswer] = {}
        """Answers of workers that this process reads, by number."""

    def serve(self, sharing: AnswerSharing) -> PeerReaders:
        """Lets workers read the answers of the controller; returns their readers."""
        self._readers = PeerReaders(sharing)
        return self._readers

    # --- the controller's own requests ---

    async def claim(self, digest: bytes) -> ClaimResult:
        """Claims an answer for the controller; implements `AnswerPeers.claim`."""
        number = next(self._numbers)
        answer = self._own[number] = PeerAnswer(lambda: self._leave(number))
        reply = self.on_claim(self, number, digest)
        if not reply.is_read:
            del self._own[number]
        return ClaimResult(answer if reply.is_read else None, reply.may_be_stored)

    def release(self, digest: bytes) -> None:
        """Releases an answer of the controller; implements `AnswerPeers.release`."""
        self.on_release(self, digest)

    async def wait_connected(self) -> None:
        """Does nothing, because this process has the claims; implements `AnswerPeers.wait_connected`."""

    def send(self, message: ReaderJoined | ReaderLeft | ClaimReply | AnswerPart | AnswerEnded) -> None:
        """Handles a message to the controller as one of the peers; implements `Peer.send`."""
        match message:
            case ReaderJoined():
                assert self._readers is not None
                self._readers.join(message.number, message.digest, partial(self.on_part, self))
            case ReaderLeft():
                assert self._readers is not None
                self._readers.leave(message.number)
            case AnswerPart() | AnswerEnded():
                if (answer := self._own.get(message.number)) is not None:
                    answer.on_part(message)
            case ClaimReply():
                pass  # `claim` has the result

    def _leave(self, number: int) -> None:
        del self._own[number]
        self.on_left(self, number)

    # --- messages of all peers ---

    def on_claim(self, peer: Peer, number: int, digest: bytes) -> ClaimReply:
        """Handles a claim, and replies to it."""
        leader = self._leaders.setdefault(digest, peer)
        is_read = leader is not peer
        reply = ClaimReply(number, is_read=is_read, may_be_stored=digest in self._released)
        peer.send(reply)
        if is_read:
            reader = next(self._numbers)
            self._readings[reader] = _Reading(leader, peer, number)
            self._readers_of[peer, number] = reader
            leader.send(ReaderJoined(reader, digest))
        return reply

    def on_release(self, peer: Peer, digest: bytes) -> None:
        """Handles that a peer does not compute an answer any more."""
        if self._leaders.get(digest) is peer:
            del self._leaders[digest]
            self._released[digest] = None
            if len(self._released) > _MOST_RELEASED:
                self._released.popitem(last=False)

    def on_part(self, peer: Peer, message: AnswerMessage) -> None:
        """Passes on what a peer says of an answer to its reader, which has left if the number is not known."""
        reading = self._readings.get(message.number)
        if reading is None or reading.leader is not peer:
            return
        if isinstance(message, AnswerEnded):
            self._remove(message.number)
        reading.follower.send(replace(message, number=reading.number))

    def on_left(self, peer: Peer, number: int) -> None:
        """Handles that a peer does not read an answer any more."""
        reader = self._readers_of.get((peer, number))
        if reader is not None:
            self._remove(reader).leader.send(ReaderLeft(reader))

    def on_disconnect(self, peer: Peer) -> None:
        """Handles that a process has ended: what it computed has failed, and what it read is not read any more."""
        for digest in [digest for digest, leader in self._leaders.items() if leader is peer]:
            del self._leaders[digest]
        for reader, reading in [*self._readings.items()]:
            if reading.leader is peer:
                self.on_part(peer, _end_of_lost(reader))
            elif reading.follower is peer:
                self._remove(reader).leader.send(ReaderLeft(reader))

    def _remove(self, reader: int) -> _Reading:
        reading = self._readings.pop(reader)
        del self._readers_of[reading.follower, reading.number]
        return reading

    def handle(self, peer: Peer, message: ToController) -> None:
        """Handles a message of a worker about answers that processes share."""
        match message:
            case AnswerClaim():
                self.on_claim(peer, message.number, message.digest)
            case AnswerReleased():
                self.on_release(peer, message.digest)
            case AnswerPart() | AnswerEnded():
                self.on_part(peer, message)
            case ReaderLeft():
                self.on_left(peer, message.number)


def _end_of_lost(number: int) -> AnswerEnded:
    return AnswerEnded(number, encode_error(ReplicaLost()), is_lost=True)
