"""Connection to one engine: handshake, hello, streams and heartbeat.

If a secret is configured, both ends first prove that they know it. The connection owns the token streams: it gives
their requests ids, passes the output of every `Step` to them, and fails them all when it ends. Every failure (EOF, a
truncated or invalid frame, a sequence gap, a heartbeat time-out) ends it in the same way; `EngineClient` then opens a
new connection.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import cast

import msgspec

from maitred.core.errors import CallerError, ProtocolViolation, ReplicaLost, ReplicaUnavailable
from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport
from maitred.core.request import EngineRequest
from maitred.core.secret import Secret
from maitred.replica.engine.round_trip import RoundTrip
from maitred.replica.engine.stream import PAUSE_AT_TOKENS, EngineStream
from maitred.wire.frames import (
    PROTOCOL_VERSION,
    Cancel,
    EngineHello,
    FrameReader,
    Pause,
    Ping,
    Pong,
    ResendBlocks,
    SleepCommand,
    Step,
    Submit,
    ToGateway,
    Unpin,
    UpdateSimilar,
    encode_frame,
)
from maitred.wire.link.credentials import channel_binding
from maitred.wire.link.handshake import MAGIC, DialerHandshake

_WAKE_BATCH_SIZE = 8
"""Number of stream readers that are woken in one event loop iteration.

Forwarding one delta takes about 0.05 ms, and a new request needs several event loop iterations to start: with a small
batch it does not wait in each of them for all running responses.
"""

_log = logging.getLogger(__name__)


class HeartbeatAction(Enum):
    """Action to take after one heartbeat interval."""

    NOTHING = auto()
    PING = auto()
    DISCONNECT = auto()


class HeartbeatMonitor:
    """Heartbeat time-out: counts silent intervals and decides when to ping and when to disconnect.

    The system ends a connection whose other end has vanished, but a process that hangs keeps its connections: TCP
    keep-alive detects an unreachable machine but not a process that hangs, because its kernel still acknowledges
    packets. So the heartbeat divides time into intervals. After one silent interval it pings the engine, and any data
    counts as the reply; after `HEARTBEAT_TICKS` silent intervals it disconnects. It counts intervals, not seconds: if
    this process itself was suspended for a minute, that counts as one interval, and the waiting frames are read before
    the next one ends.

    An engine reads its socket only between two model steps. If the predicted duration of a step is long, the time limit
    is raised to `HEARTBEAT_STEPS` predicted steps.

    Args:
        timeout_s: Longest time without data from the engine. The connection ends after 5/6 of it at the earliest, and
            never if the engine replies within 2/3 of it.

    Attributes:
        interval_s: Interval at which `tick` must be called.
    """

    def __init__(self, timeout_s: float) -> None:
        self.interval_s = timeout_s / HEARTBEAT_TICKS
        self._silent_intervals = 0

    def on_data(self) -> None:
        """Resets the count of silent intervals, because the engine has sent something, if only a part of a frame."""
        self._silent_intervals = 0

    def tick(self, load: LoadReport) -> HeartbeatAction:
        """Counts one interval without data and returns the action to take.

        Args:
            load: Last load report, from which the duration of a step is predicted.
        """
        self._silent_intervals += 1
        if self._silent_intervals == 1:
            return HeartbeatAction.PING
        step_s = load.times.of(load.step_tokens, 0, chunks=1)
        if self._silent_intervals >= max(HEARTBEAT_TICKS, math.ceil(HEARTBEAT_STEPS * step_s / self.interval_s)):
            return HeartbeatAction.DISCONNECT
        return HeartbeatAction.NOTHING


class EngineConnection(asyncio.Protocol):
    """Gateway side of one engine protocol connection.

    Back-pressure: nothing waits until the write buffer of the socket is drained. While an engine stalls, at most one
    `Submit` and a few `Cancel` and `Pause` messages per open request are buffered, and `server.max_in_flight` bounds
    the open requests. In the other direction, a stream whose reader is slow pauses the engine (see `EngineStream`).

    Args:
        on_report: Called after every load report, when its tokens are in the streams, and after the connection has
            ended. Must not raise.
        on_block_update: Called with each change of the prefix cache, without gaps; the first call has a snapshot. Must
            not raise.
        secret: Secret that the engine must know; None: no secret is used.
        silence_timeout_s: Time after which an engine that sends nothing counts as lost; None: there is no heartbeat.

    Attributes:
        hello: Future of the engine's hello; it fails if the connection ends before.
        ended: Future of the reason for the end of the connection.
        load: Last load report of the engine.
        unreported: Number of submitted requests that the engine had not read when it wrote `load`.
        round_trip: Round-trip time of the connection.
        is_alive: Whether the engine has sent its hello and the connection has not ended.
        is_rejected: Whether it has ended because the engine is of another version.
    """

    def __init__(
        self,
        on_report: Callable[[], None] = lambda: None,
        on_block_update: Callable[[BlockUpdate], None] = lambda update: None,
        *,
        secret: Secret | None = None,
        silence_timeout_s: float | None = None,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[EngineHello] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.load = LoadReport()
        self.unreported = 0
        self.round_trip = RoundTrip()
        self.is_alive = self.is_rejected = False
        self._transport: asyncio.Transport | None = None
        self._frame_reader: FrameReader[ToGateway] = FrameReader(ToGateway)
        self._streams: dict[str, EngineStream] = {}
        self._steps_received = 0
        self._submit_count = 0
        self._acked_submit_count = 0
        self._on_report = on_report
        self._on_block_update = on_block_update
        self._last_block_sequence: int | None = None
        """Sequence number of the last block update; None: a snapshot is awaited."""
        self._secret = secret
        self._handshake: DialerHandshake | None = None
        self._heartbeat = None if silence_timeout_s is None else HeartbeatMonitor(silence_timeout_s)
        self._heartbeat_timer: asyncio.TimerHandle | None = None

    # --- messages to the engine ---

    def submit(self, request: EngineRequest, *, pause_at_tokens: int = PAUSE_AT_TOKENS) -> EngineStream:
        """Submits a request and returns its stream, which the caller must pass to `release`.

        The id on the wire has a suffix that is unique in the connection. Clients may choose ids: if a client uses an id
        twice, the second request must not receive tokens of the first.
        """
        self._submit_count += 1
        self.unreported += 1
        wire_id = f"{request.id}/{self._submit_count}"
        frame = encode_frame(Submit(msgspec.structs.replace(request, id=wire_id)))
        stream = EngineStream(wire_id, request, self._send_cancel, self._send_pause, pause_at_tokens=pause_at_tokens)
        self._streams[wire_id] = stream
        self._write(frame)
        return stream

    def request_asleep(self, *, asleep: bool) -> None:
        """Tells the engine to sleep when it is idle, or to wake up; `load` shows when it has done so."""
        self._write(encode_frame(SleepCommand(asleep)))

    def unpin(self, scope: str, name: str) -> None:
        """Unpins a prefix in the engine's prefix cache."""
        self._write(encode_frame(Unpin(scope, name)))

    def update_similar(self, update: UpdateSimilar) -> None:
        """Changes the encoder's index of cached questions, or its verifiers."""
        self._write(encode_frame(update))

    def request_blocks(self) -> None:
        """Requests a snapshot of the prefix cache, for a new listener or after a missed update."""
        self._last_block_sequence = None
        self._write(encode_frame(ResendBlocks()))

    def release(self, stream: EngineStream) -> None:
        """Closes a stream and forgets it; what the engine still sends for it is ignored."""
        stream.close()
        self._streams.pop(stream.wire_id, None)

    def end(self, reason: str) -> None:
        """Ends the connection and fails every incomplete stream. Later calls change nothing."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        self.is_alive = False
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        if not self.hello.done():
            self.hello.set_exception(ReplicaUnavailable(f"The engine's connection ended before its hello: {reason}"))
            self.hello.exception()  # marks the exception as retrieved, in case nothing awaits the hello
        if self._transport is not None:
            self._transport.abort()
        for stream in self._streams.values():
            stream.fail(ReplicaLost())
        self._on_report()

    def _send_cancel(self, wire_id: str, index: int | None) -> None:
        # Never called after `end`: a failed stream has no running choices.
        self._write(encode_frame(Cancel(wire_id, index)))

    def _send_pause(self, wire_id: str, paused: bool) -> None:
        self._write(encode_frame(Pause(wire_id, paused)))

    def _write(self, frame: bytes) -> None:
        assert self._transport is not None, "nothing is sent before it is made"
        self._transport.write(frame)

    # --- messages from the engine ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the handshake if there is a secret. Implements `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        if self._secret is not None:
            tls = transport.get_extra_info("ssl_object")
            certificate = None if tls is None else tls.getpeercert(binary_form=True)
            self._handshake = DialerHandshake(
                self._secret, b"" if certificate is None else channel_binding(certificate)
            )

    def data_received(self, data: bytes) -> None:
        """Reads the handshake and the engine's messages. Implements `asyncio.Protocol`."""
        if self.ended.done():
            return
        if self._heartbeat is not None:
            self._heartbeat.on_data()
        pushed_streams: dict[EngineStream, None] = {}
        try:
            if self._handshake is not None:
                data = self._continue_handshake(self._handshake, data)
            elif not self.hello.done() and data.startswith(MAGIC):
                raise ProtocolViolation("It asks for a secret, and this gateway has none. Set engine_link.secret.")
            for message in self._frame_reader.messages(data):
                if isinstance(message, Step):
                    self._on_step(message, pushed_streams)
                elif isinstance(message, Pong):
                    self.round_trip.on_pong(message.number, self._loop.time())
                else:
                    self._on_hello(message)
        except ProtocolViolation as violation:
            _log.error("The engine broke the protocol; its connection is closed: %s", violation)
            self.end(violation.message)
        # Each reader is woken once, even if several steps have arrived together.
        self._wake([*pushed_streams])

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the connection with the reason of its loss. Implements `asyncio.Protocol`."""
        if exc is not None:
            reason = f"the connection broke: {exc}"
        elif self._handshake is not None and self._handshake.proof_sent:
            reason = "the engine closed the connection; it has another engine_link.secret than this gateway"
        else:
            reason = "the engine closed the connection"
        self.end(reason)

    def _continue_handshake(self, handshake: DialerHandshake, data: bytes) -> bytes:
        """Continues the handshake and returns the bytes that follow it."""
        self._write(handshake.feed(data))
        if handshake.rest is None:
            return b""
        self._handshake = None
        return handshake.rest

    def _on_hello(self, hello: EngineHello) -> None:
        if self.hello.done():
            raise ProtocolViolation("The engine said hello twice.")
        if hello.protocol != PROTOCOL_VERSION:
            self.is_rejected = True
            raise ProtocolViolation(
                f"The engine speaks protocol {hello.protocol} and this gateway {PROTOCOL_VERSION}. "
                "Run the same version of maitred on both ends."
            )
        self.load = hello.load
        self.hello.set_result(hello)
        self.is_alive = True
        if hello.blocks is not None:
            self._on_blocks(hello.blocks)
        if self._heartbeat is not None:
            self._ping()
        self._schedule_heartbeat()

    def _ping(self) -> None:
        self._write(encode_frame(Ping(self.round_trip.on_ping(self._loop.time()))))

    def _schedule_heartbeat(self) -> None:
        """Starts the timer of the next heartbeat interval, if `silence_timeout_s` is set."""
        if self._heartbeat is not None:
            self._heartbeat_timer = asyncio.get_running_loop().call_later(
                self._heartbeat.interval_s, self._tick, self._heartbeat
            )

    def _tick(self, heartbeat: HeartbeatMonitor) -> None:
        match heartbeat.tick(self.load):
            case HeartbeatAction.DISCONNECT:
                self.end("it does not answer; its process hangs, or the network is cut")
                return
            case HeartbeatAction.PING:
                self._ping()
            case HeartbeatAction.NOTHING:
                pass
        self._schedule_heartbeat()

    def _on_step(self, step: Step, pushed_streams: dict[EngineStream, None]) -> None:
        """Pushes the output of a step into the streams, and adds these streams to `pushed_streams`."""
        if not self.hello.done():
            raise ProtocolViolation("The engine sent a step before its hello.")
        self._steps_received += 1
        if step.sequence != self._steps_received:
            raise ProtocolViolation(f"Step {self._steps_received} was lost: the engine sent step {step.sequence}.")
        if not self._acked_submit_count <= step.submits_heard <= self._submit_count:
            raise ProtocolViolation(f"The engine has heard {step.submits_heard} of {self._submit_count} requests.")
        self.load, self._acked_submit_count = step.load, step.submits_heard
        self.unreported = self._submit_count - step.submits_heard
        if step.blocks is not None:
            self._on_blocks(step.blocks)
        streams = self._streams
        for output in step.outputs:
            stream = streams.get(output.request_id)
            if stream is not None:  # None if the stream was released while the message was in transit
                stream.push(output.delta)
                pushed_streams[stream] = None
        for rejection in step.rejections:
            stream = streams.get(rejection.request_id)
            if stream is not None:
                error_class = ReplicaUnavailable if rejection.retryable else CallerError
                stream.fail(error_class(rejection.message))
        self._on_report()

    def _wake(self, streams: Sequence[EngineStream]) -> None:
        """Wakes the readers of these streams, a batch in each event loop iteration."""
        for stream in streams[:_WAKE_BATCH_SIZE]:
            stream.wake()
        if len(streams) > _WAKE_BATCH_SIZE:
            asyncio.get_running_loop().call_soon(self._wake, streams[_WAKE_BATCH_SIZE:])

    def _on_blocks(self, update: BlockUpdate) -> None:
        if not update.whole and self._last_block_sequence is None:
            return  # a snapshot was requested and will include this change
        if (
            not update.whole
            and self._last_block_sequence is not None
            and update.sequence != self._last_block_sequence + 1
        ):
            self.request_blocks()
            return
        self._last_block_sequence = update.sequence
        self._on_block_update(update)


HEARTBEAT_TICKS = 6
HEARTBEAT_STEPS = 3
