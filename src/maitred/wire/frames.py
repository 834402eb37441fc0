"""The protocol between a gateway and an engine: length-prefixed msgpack frames over any byte stream.

A frame is a 4-byte big-endian length and that many bytes of msgpack. The engine sends first: `EngineHello` (after the
proofs of `link.handshake`, where it has a secret). Then the gateway sends `Submit`, `Cancel`, `Pause`, `SleepCommand`
and `Ping` at any time, and the engine sends each gateway one `Step` after every model step (and, when it has none to
run, after a message), with the new tokens of *all* of the gateway's requests: at a hundred running sequences this is
one system call and one decode instead of a hundred.

`Step.sequence` counts up by one per connection, from 1; a gap means a lost message, and the reader must treat the
connection as dead. `EngineHello.epoch` differs each time an engine starts, so a gateway never takes a restarted engine
for the one that has its requests. There is no closing message: the end of the byte stream, at any point, is the death
of the peer. An engine cancels every request of a gateway whose connection has ended.

An engine reports the contents of its prefix cache in `EngineHello`, and their changes in each `Step`. These updates
have
a number of their own: an engine that has more changes at once than it reports skips a number, and a gateway that misses
a number sends `ResendBlocks`.
"""

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from maitred.core.errors import ProtocolViolation
from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport, ModelCard
from maitred.core.request import EngineRequest, TokenDelta

PROTOCOL_VERSION = 6
MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Gateway to engine: run this request."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Gateway to engine: cancel a request that is not wanted any more.

    Attributes:
        request_id: Unknown ids are ignored: the request may have finished while the message travelled.
        index: One choice, or None for all that are left.
    """

    request_id: str
    index: int | None = None


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """Gateway to engine: pause a request whose reader has fallen behind, or resume it.

    Attributes:
        request_id: Unknown ids are ignored, as with `Cancel`.
        paused: False: resume.
    """

    request_id: str
    paused: bool = True


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Gateway to engine: asks for a sign of life. The engine answers with a `Step`, as to every message."""


class ResendBlocks(msgspec.Struct, frozen=True, array_like=True, tag="recount"):
    """Gateway to engine: send all blocks of the prefix cache in the next step, since an update was missed."""


class SleepCommand(msgspec.Struct, frozen=True, array_like=True, tag="rest"):
    """Gateway to engine: sleep as soon as no request runs, or wake. A `Submit` wakes the engine, too.

    Attributes:
        asleep: False: wake.
    """

    asleep: bool = True


class Unpin(msgspec.Struct, frozen=True, array_like=True, tag="unpin"):
    """Gateway to engine: release a prefix that a request has pinned.

    Attributes:
        scope: The cache scope of the request.
        name: The name of the pin; an unknown one is ignored, since the pin may have expired.
    """

    scope: str
    name: str


class EngineHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Engine to gateway, first of all: the engine's identity and capacity."""

    protocol: int
    epoch: int
    pid: int
    card: ModelCard
    load: LoadReport
    blocks: BlockUpdate | None = None
    """Contents of the engine's prefix cache; None: the engine has no prefix cache."""


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request's choice."""

    request_id: str
    delta: TokenDelta


class Rejection(msgspec.Struct, frozen=True, array_like=True):
    """Engine to gateway: the engine does not run a request; no delta of it follows.

    Attributes:
        request_id: The rejected request.
        message: The reason.
        retryable: The request is valid; another replica, or this one later, may take it.
    """

    request_id: str
    message: str
    retryable: bool = False


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Engine to gateway: the results of one model step for this gateway."""

    sequence: int
    outputs: list[TokenOutput]
    rejections: list[Rejection]
    load: LoadReport
    submits_heard: int = 0
    """Number of `Submit` messages that the engine had read on this connection when it wrote `load`."""
    blocks: BlockUpdate | None = None
    """Changes of the engine's prefix cache; None: there are none."""


ToEngine = Submit | Cancel | Pause | Ping | ResendBlocks | SleepCommand | Unpin
ToGateway = EngineHello | Step

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """Encodes a message as one frame, ready to be written."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolViolation(f"A frame of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}.")
    return _LENGTH.pack(len(payload)) + payload


M = TypeVar("M")


class FrameReader(Generic[M]):
    """Cuts a byte stream into messages; holds the unfinished rest between calls.

    Args:
        message_type: The union of messages that this end reads, such as `ToEngine` or `ToGateway`.
    """

    def __init__(self, message_type: Any) -> None:  # noqa: ANN401 - a union is not a `type` to the type checker
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Returns the messages that are complete with these bytes.

        Raises:
            ProtocolViolation: A frame is too long or does not decode. The stream is beyond repair: close it.
        """
        return list(self.messages(data))

    def messages(self, data: bytes) -> Iterator[M]:
        """Yields the messages that are complete with these bytes, also those before a broken frame. Read it to its end.

        Raises:
            ProtocolViolation: A frame is too long or does not decode, as with `feed`.
        """
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ProtocolViolation(f"The peer announced a frame of {length} bytes.")
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                message = self._decoder.decode(memoryview(self._buffer)[start + _LENGTH.size : end])
            except msgspec.MsgspecError as error:
                raise ProtocolViolation(f"The peer sent a frame that does not decode: {error}") from error
            start = end
            yield message
        del self._buffer[:start]
