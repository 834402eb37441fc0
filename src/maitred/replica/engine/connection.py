"""Connection to one engine, from its handshake and `EngineHello` to its end.

Where a secret is configured, both ends first prove that they know it. The streams belong to the connection: it numbers
their requests, hands each the output of every `Step`, and fails them all at once when it ends. It ends the same way
whatever the cause (end of the byte stream, half a frame, a broken frame, a gap in the sequence, silence), and is never
reused; `EngineClient` opens the next one.
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
from maitred.replica.engine.stream import PAUSE_AT_TOKENS, EngineStream
from maitred.wire.frames import (
    PROTOCOL_VERSION,
    Cancel,
    EngineHello,
    FrameReader,
    Pause,
    Ping,
    ResendBlocks,
    SleepCommand,
    Step,
    Submit,
    ToGateway,
    Unpin,
    encode_frame,
)
from maitred.wire.link.credentials import channel_binding
from maitred.wire.link.handshake import MAGIC, GatewayHandshake

_WAKE_BATCH_SIZE = 8
"""Readers of one step's output that are woken before the event loop looks at its sockets again.

A piece takes some 0.05 ms to be sent on, and a request that has just arrived is accepted, read and started in several
turns of the loop: it must not wait in each of these turns for all running answers.
"""

_log = logging.getLogger(__name__)


class HeartbeatAction(Enum):
    """Action to take after an interval of the heartbeat."""

    NOTHING = auto()
    PING = auto()
    DISCONNECT = auto()


class HeartbeatMonitor:
    """Counter of silent intervals, which decides when to ping the engine and when to give it up.

    The system ends a connection whose other end has vanished, but a process that hangs keeps its connections: the
    kernel answers for it. So time is cut into intervals. After the first silent interval the engine is pinged (any
    frame is an answer); after `HEARTBEAT_TICKS` of them it is lost. Intervals are counted, not seconds: if it is this
    process that was stopped for a minute, that is one interval, and the engine's frames are read before the next one
    ends.

    An engine reads between two steps. Where its measured times foresee a step longer than all that, it is given
    `HEARTBEAT_STEPS` times as long.

    Args:
        timeout_s: Longest silence. An engine is given up after 5/6 of it at the earliest, and never if it answers
            within 2/3.

    Attributes:
        interval_s: How often to call `tick`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.interval_s = timeout_s / HEARTBEAT_TICKS
        self._silent_intervals = 0

    def on_frame(self) -> None:
        """Notes that data has come; the silence starts anew."""
        self._silent_intervals = 0

    def tick(self, load: LoadReport) -> HeartbeatAction:
        """Counts an interval that has ended and returns what to do.

        Args:
            load: The engine's last report, which predicts how long a step takes.
        """
        self._silent_intervals += 1
        if self._silent_intervals == 1:
            return HeartbeatAction.PING
        step_s = load.times.of(load.step_tokens, 0, chunks=1)
        if self._silent_intervals >= max(HEARTBEAT_TICKS, math.ceil(HEARTBEAT_STEPS * step_s / self.interval_s)):
            return HeartbeatAction.DISCONNECT
        return HeartbeatAction.NOTHING


class EngineConnection(asyncio.Protocol):
    """The gateway's end of a connection of the engine protocol.

    Back-pressure: no code here waits for the socket to drain. A stalled engine is owed at most one `Submit` and a few
    `Cancel` and `Pause` messages per open request, and the gateway bounds the open requests (`server.max_in_flight`).
    In the other direction, a stream that is not read pauses (see `EngineStream`).

    Args:
        on_report: Called after every report, once its tokens are handed out, and after the end. Must not raise.
        on_block_update: Called with the changes of the prefix cache, without gaps; the first call has the whole
            content. Must not raise.
        secret: Secret that the engine must know; None: no secret is used.
        silence_timeout_s: Time after which an engine that sends nothing counts as lost; None: it never does.

    Attributes:
        hello: Done when the engine has introduced itself, or failed with the reason why it did not.
        ended: Done, with the reason, when the connection is over.
        load: The engine's last report.
        unreported: Submitted requests that `load` cannot know of: they may have been on their way when it was made.
        is_alive: Whether the engine has sent its hello and the connection has not ended.
    """

    def __init__(
        self,
        on_report: Callable[[], None] = lambda: None,
        on_block_update: Callable[[BlockUpdate], None] = lambda on_report: None,
        *,
        secret: Secret | None = None,
        silence_timeout_s: float | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[EngineHello] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.load = LoadReport()
        self.unreported = 0
        self.is_alive = False
        self._transport: asyncio.Transport | None = None
        self._reader: FrameReader[ToGateway] = FrameReader(ToGateway)
        self._streams: dict[str, EngineStream] = {}
        self._steps_received = 0
        self._submitted = 0
        self._submits_acked = 0
        self._on_report = on_report
        self._on_block_update = on_block_update
        self._block_updates_received: int | None = None
        """Sequence number of the last block update; None: the whole content was requested, or has not come yet."""
        self._secret = secret
        self._handshake: GatewayHandshake | None = None
        self._heartbeat = None if silence_timeout_s is None else HeartbeatMonitor(silence_timeout_s)
        self._heartbeat_timer: asyncio.TimerHandle | None = None

    # --- messages to the engine ---

    def submit(self, request: EngineRequest, *, pause_at_tokens: int = PAUSE_AT_TOKENS) -> EngineStream:
        """Sends a request and opens its stream, which must be given to `release` in the end.

        On the wire the request's id gets a number that is unique in the connection. Clients may choose ids, and a
        client that sends a second request with the same id must not receive tokens that were still on their way to its
        first one.
        """
        self._submitted += 1
        self.unreported += 1
        wire_id = f"{request.id}/{self._submitted}"
        frame = encode_frame(Submit(msgspec.structs.replace(request, id=wire_id)))
        stream = EngineStream(wire_id, request, self._send_cancel, self._send_pause, pause_at_tokens=pause_at_tokens)
        self._streams[wire_id] = stream
        self._write(frame)
        return stream

    def set_asleep(self, *, asleep: bool) -> None:
        """Tells the engine to sleep as soon as nothing runs, or to wake; `load` shows when it has done so."""
        self._write(encode_frame(SleepCommand(asleep)))

    def unpin(self, scope: str, name: str) -> None:
        """Releases a prefix that was pinned."""
        self._write(encode_frame(Unpin(scope, name)))

    def request_blocks(self) -> None:
        """Requests the whole content of the prefix cache, for a new listener or after a missed update."""
        self._block_updates_received = None
        self._write(encode_frame(ResendBlocks()))

    def release(self, stream: EngineStream) -> None:
        """Closes a stream and forgets it; what the engine still sends for it is ignored."""
        stream.close()
        self._streams.pop(stream.wire_id, None)

    def end(self, reason: str) -> None:
        """Ends the connection, and with it every stream that is not complete. Later calls change nothing."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        self.is_alive = False
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        if not self.hello.done():
            self.hello.set_exception(ReplicaUnavailable(f"The engine's connection ended before its hello: {reason}"))
            self.hello.exception()  # marked as retrieved: nothing may await the hello any more
        if self._transport is not None:
            self._transport.abort()
        for stream in self._streams.values():
            stream.fail(ReplicaLost())
        self._on_report()

    def _send_cancel(self, wire_id: str, index: int | None) -> None:
        self._write(encode_frame(Cancel(wire_id, index)))  # never after the end: a failed stream has no running choices

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
            self._handshake = GatewayHandshake(
                self._secret, b"" if certificate is None else channel_binding(certificate)
            )

    def data_received(self, data: bytes) -> None:
        """Reads the handshake and the engine's messages. Implements `asyncio.Protocol`."""
        if self.ended.done():
            return
        if self._heartbeat is not None:
            self._heartbeat.on_frame()
        pushed_streams: dict[EngineStream, None] = {}
        try:
            if self._handshake is not None:
                data = self._continue_handshake(self._handshake, data)
            elif not self.hello.done() and data.startswith(MAGIC):
                raise ProtocolViolation("It asks for a secret, and this gateway has none. Set engine_link.secret.")
            for message in self._reader.messages(data):
                if isinstance(message, Step):
                    self._on_step(message, pushed_streams)
                else:
                    self._on_hello(message)
        except ProtocolViolation as violation:
            _log.error("The engine broke the protocol; its connection is closed: %s", violation)
            self.end(violation.message)
        # Each stream sends on one piece, also if several steps have come at once.
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

    def _continue_handshake(self, handshake: GatewayHandshake, data: bytes) -> bytes:
        """Continues the handshake; returns the frames that came behind it."""
        self._write(handshake.feed(data))
        if handshake.rest is None:
            return b""
        self._handshake = None
        return handshake.rest

    def _on_hello(self, hello: EngineHello) -> None:
        if self.hello.done():
            raise ProtocolViolation("The engine said hello twice.")
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolViolation(
                f"The engine speaks protocol {hello.protocol} and this gateway {PROTOCOL_VERSION}. "
                "Run the same version of maitred on both ends."
            )
        self.load = hello.load
        self.hello.set_result(hello)
        self.is_alive = True
        if hello.blocks is not None:
            self._handle_blocks(hello.blocks)
        self._schedule_heartbeat()

    def _schedule_heartbeat(self) -> None:
        """Starts the timer of the next heartbeat interval, if there is a heartbeat."""
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
                self._write(encode_frame(Ping()))
            case HeartbeatAction.NOTHING:
                pass
        self._schedule_heartbeat()

    def _on_step(self, step: Step, pushed_streams: dict[EngineStream, None]) -> None:
        """Hands out the output of a step, and notes in `pushed_streams` which streams have got something."""
        if not self.hello.done():
            raise ProtocolViolation("The engine sent a step before its hello.")
        self._steps_received += 1
        if step.sequence != self._steps_received:
            raise ProtocolViolation(f"Step {self._steps_received} was lost: the engine sent step {step.sequence}.")
        if not self._submits_acked <= step.submits_heard <= self._submitted:
            raise ProtocolViolation(f"The engine has heard {step.submits_heard} of {self._submitted} requests.")
        self.load, self._submits_acked = step.load, step.submits_heard
        self.unreported = self._submitted - step.submits_heard
        if step.blocks is not None:
            self._handle_blocks(step.blocks)
        streams = self._streams
        for output in step.outputs:
            stream = streams.get(output.request_id)
            if stream is not None:  # else: released while the message was on its way
                stream.push(output.delta)
                pushed_streams[stream] = None
        for rejection in step.rejections:
            stream = streams.get(rejection.request_id)
            if stream is not None:
                error_class = ReplicaUnavailable if rejection.retryable else CallerError
                stream.fail(error_class(rejection.message))
        self._on_report()

    def _wake(self, streams: Sequence[EngineStream]) -> None:
        """Wakes the readers of these streams, a few in each turn of the event loop."""
        for stream in streams[:_WAKE_BATCH_SIZE]:
            stream.wake()
        if len(streams) > _WAKE_BATCH_SIZE:
            asyncio.get_running_loop().call_soon(self._wake, streams[_WAKE_BATCH_SIZE:])

    def _handle_blocks(self, update: BlockUpdate) -> None:
        if not update.whole and self._block_updates_received is None:
            return  # the whole content is on its way and includes this change
        if (
            not update.whole
            and self._block_updates_received is not None
            and update.sequence != self._block_updates_received + 1
        ):
            self.request_blocks()
            return
        self._block_updates_received = update.sequence
        self._on_block_update(update)


HEARTBEAT_TICKS = 6
HEARTBEAT_STEPS = 3
