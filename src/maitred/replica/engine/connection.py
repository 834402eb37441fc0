"""One connection to one engine, from the proofs of a secret, where there is one, and its `EngineHello` to its end.

The streams belong to the connection: it numbers their requests, hands them what every `Step` brings, and fails them
all, at once, when it ends. It ends the same way whatever the cause (end of the byte stream, half a frame, a broken
frame, a gap in the sequence, silence), and never comes back; `EngineLink` makes the next one.
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

_WOKEN_AT_ONCE = 8
"""Of those who read what a step has brought, so many before the event loop looks at its sockets again. A piece takes
some 0.05 ms to be sent on, and a request that has just come is accepted, read and begun in several turns of the
loop: it must not wait in each of them for all the answers under way."""

_log = logging.getLogger(__name__)


class HeartbeatAction(Enum):
    """What to do after an interval."""

    NOTHING = auto()
    ASK = auto()
    GIVE_UP = auto()


class HeartbeatMonitor:
    """Counts silent intervals.

    The system ends a connection whose other end has vanished, but a process that hangs keeps its connections: the
    kernel answers for it. So time is cut into intervals. After the first silent interval the engine is pinged (any
    frame is an answer); after `TICKS` of them it is lost. Intervals are counted, not seconds: if it is this process
    that was stopped for a minute, that is one interval, and the engine's frames are read before the next one ends.

    An engine reads between two steps. Where its measured times foresee a step longer than all that, it is given `STEPS`
    times as long.

    Args:
        timeout_s: The most time without a word. It takes 5/6 of it at least, and an engine that answers within 2/3 is
            never given up.

    Attributes:
        interval_s: How often to call `tick`.
    """

    def __init__(self, timeout_s: float) -> None:
        self.interval_s = timeout_s / TICKS
        self._silent = 0

    def on_frame(self) -> None:
        """Something came."""
        self._silent = 0

    def tick(self, load: LoadReport) -> HeartbeatAction:
        """Another interval is over.

        Args:
            load: The engine's last report, which foresees how long a step takes.
        """
        self._silent += 1
        if self._silent == 1:
            return HeartbeatAction.ASK
        step_s = load.times.of(load.step_tokens, 0, chunks=1)
        if self._silent >= max(TICKS, math.ceil(STEPS * step_s / self.interval_s)):
            return HeartbeatAction.GIVE_UP
        return HeartbeatAction.NOTHING


class EngineConnection(asyncio.Protocol):
    """The gateway's end of the engine protocol.

    Back-pressure: nothing here waits for the socket to drain. What can pile up before a stalled engine is one
    `Submit` and a few `Cancel` and `Pause` per open request, and the gateway bounds the open requests
    (`server.max_in_flight`); in the other direction a stream that is not read pauses (see `EngineStream`).

    Args:
        news: Called after every report, once its tokens are handed out, and after the end. Must not raise.
        blocks: Called with what changes in the prefix cache, without gaps: first of all with the whole. Must not raise.
        secret: What the engine must know; None: it asks for none.
        silence_timeout_s: When an engine that says nothing is lost; None: never.

    Attributes:
        hello: Done when the engine has introduced itself, or failed with the reason why it did not.
        ended: Done, with the reason, when the connection is over.
        load: The engine's last report.
    """

    def __init__(
        self,
        news: Callable[[], None] = lambda: None,
        blocks: Callable[[BlockUpdate], None] = lambda news: None,
        *,
        secret: Secret | None = None,
        silence_timeout_s: float | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[EngineHello] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.load = LoadReport()
        self._transport: asyncio.Transport | None = None
        self._reader: FrameReader[ToGateway] = FrameReader(ToGateway)
        self._streams: dict[str, EngineStream] = {}
        self._steps_received = 0
        self._submitted = 0
        self._submits_acked = 0
        self._on_report = news
        self._blocks = blocks
        self._block_updates_received: int | None = None
        """Number of the last news of blocks; None: the whole was asked for, or has not come yet."""
        self._secret = secret
        self._handshake: GatewayHandshake | None = None
        self._heartbeat = None if silence_timeout_s is None else HeartbeatMonitor(silence_timeout_s)
        self._beat: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        """Whether the engine has said hello and the connection has not ended."""
        return self.hello.done() and not self.ended.done()

    @property
    def unreported(self) -> int:
        """Requests submitted that `load` cannot know of: they were, or may have been, on their way when it was made."""
        return self._submitted - self._submits_acked

    # --- the gateway's side ---

    def submit(self, request: EngineRequest, *, pause_at_tokens: int = PAUSE_AT_TOKENS) -> EngineStream:
        """Sends a request and opens its stream, which must be given to `release` in the end.

        On the wire a request's id carries a number that is unique in the connection. Clients may choose ids, and one
        that leaves and comes back with the same id must not receive tokens that were still travelling to its first
        request.
        """
        self._submitted += 1
        wire_id = f"{request.id}/{self._submitted}"
        frame = encode_frame(Submit(msgspec.structs.replace(request, id=wire_id)))
        stream = EngineStream(wire_id, request, self._send_cancel, self._send_pause, pause_at_tokens=pause_at_tokens)
        self._streams[wire_id] = stream
        self._write(frame)
        return stream

    def set_asleep(self, *, asleep: bool) -> None:
        """Tells the engine to sleep as soon as nothing runs, or to wake; `load` says when it has."""
        self._write(encode_frame(SleepCommand(asleep)))

    def unpin(self, scope: str, name: str) -> None:
        """Lets a prefix go that was pinned."""
        self._write(encode_frame(Unpin(scope, name)))

    def recount(self) -> None:
        """Asks for the whole of the prefix cache: somebody follows it who has not heard of it, or news were missed."""
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
        if self._beat is not None:
            self._beat.cancel()
        if not self.hello.done():
            self.hello.set_exception(ReplicaUnavailable(f"The engine's connection ended before its hello: {reason}"))
            self.hello.exception()  # marked as seen: whoever waits for the hello may have given up
        if self._transport is not None:
            self._transport.abort()
        for stream in self._streams.values():
            stream.fail(ReplicaLost())
        self._on_report()

    def _send_cancel(self, wire_id: str, index: int | None) -> None:
        self._write(encode_frame(Cancel(wire_id, index)))  # never after the end: nothing of a failed stream runs

    def _send_pause(self, wire_id: str, paused: bool) -> None:
        self._write(encode_frame(Pause(wire_id, paused)))

    def _write(self, frame: bytes) -> None:
        assert self._transport is not None, "nothing is sent before it is made"
        self._transport.write(frame)

    # --- the engine's side ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        if self._secret is not None:
            tls = transport.get_extra_info("ssl_object")
            certificate = None if tls is None else tls.getpeercert(binary_form=True)
            self._handshake = GatewayHandshake(
                self._secret, b"" if certificate is None else channel_binding(certificate)
            )

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self.ended.done():
            return
        if self._heartbeat is not None:
            self._heartbeat.on_frame()
        pushed: dict[EngineStream, None] = {}
        try:
            if self._handshake is not None:
                data = self._prove(self._handshake, data)
            elif not self.hello.done() and data.startswith(MAGIC):
                raise ProtocolViolation("It asks for a secret, and this gateway has none. Set engine_link.secret.")
            for message in self._reader.messages(data):
                if isinstance(message, Step):
                    self._on_step(message, pushed)
                else:
                    self._on_hello(message)
        except ProtocolViolation as violation:
            _log.error("The engine broke the protocol; its connection is closed: %s", violation)
            self.end(violation.message)
        # Of several steps that have come at once, each stream has one piece to send on.
        self._wake([*pushed])

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if exc is not None:
            reason = f"the connection broke: {exc}"
        elif self._handshake is not None and self._handshake.proof_sent:
            reason = "the engine closed the connection; it has another engine_link.secret than this gateway"
        else:
            reason = "the engine closed the connection"
        self.end(reason)

    def _prove(self, handshake: GatewayHandshake, data: bytes) -> bytes:
        """Goes on with the proofs; the frames that came behind them."""
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
        self._on_blocks(hello.blocks)
        self._listen()

    def _listen(self) -> None:
        """Waits for the end of an interval, if there are intervals."""
        if self._heartbeat is not None:
            self._beat = asyncio.get_running_loop().call_later(self._heartbeat.interval_s, self._tick, self._heartbeat)

    def _tick(self, heartbeat: HeartbeatMonitor) -> None:
        match heartbeat.tick(self.load):
            case HeartbeatAction.GIVE_UP:
                self.end("it does not answer; its process hangs, or the network is cut")
                return
            case HeartbeatAction.ASK:
                self._write(encode_frame(Ping()))
            case HeartbeatAction.NOTHING:
                pass
        self._listen()

    def _on_step(self, step: Step, pushed: dict[EngineStream, None]) -> None:
        """Hands out what a step has brought; notes who has got something."""
        if not self.hello.done():
            raise ProtocolViolation("The engine sent a step before its hello.")
        self._steps_received += 1
        if step.sequence != self._steps_received:
            raise ProtocolViolation(f"Step {self._steps_received} was lost: the engine sent step {step.sequence}.")
        if not self._submits_acked <= step.submits_heard <= self._submitted:
            raise ProtocolViolation(f"The engine has heard {step.submits_heard} of {self._submitted} requests.")
        self.load, self._submits_acked = step.load, step.submits_heard
        self._on_blocks(step.blocks)
        streams = self._streams
        for output in step.outputs:
            stream = streams.get(output.request_id)
            if stream is not None:  # else: left while the message travelled
                stream.push(output.delta)
                pushed[stream] = None
        for rejection in step.rejections:
            stream = streams.get(rejection.request_id)
            if stream is not None:
                refusal = ReplicaUnavailable if rejection.retryable else CallerError
                stream.fail(refusal(rejection.message))
        self._on_report()

    def _wake(self, streams: Sequence[EngineStream]) -> None:
        """Wakes readers, a few at a time."""
        for stream in streams[:_WOKEN_AT_ONCE]:
            stream.wake()
        if len(streams) > _WOKEN_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._wake, streams[_WOKEN_AT_ONCE:])

    def _on_blocks(self, news: BlockUpdate | None) -> None:
        if news is None:
            return
        if not news.whole and self._block_updates_received is None:
            return  # the whole is on its way, and knows it
        if (
            not news.whole
            and self._block_updates_received is not None
            and news.sequence != self._block_updates_received + 1
        ):
            self.recount()
            return
        self._block_updates_received = news.sequence
        self._blocks(news)


TICKS = 6
STEPS = 3
