"""The protocol between a gateway and an engine: length-prefixed msgpack frames over any byte stream.

A frame is a 4-byte big-endian length and that many bytes of msgpack. The engine speaks first, with `EngineHello` (after
the proofs of `link.handshake`, where it has a secret). Then the gateway sends `Submit`, `Cancel`, `Pause`,
`SleepCommand` and `Ping` whenever it likes, and the engine sends each gateway one `Step` after every model step (and,
when it has none to do, after what it was told), carrying the new tokens of *all* of its requests: at a hundred running
sequences this is one system call and one decode instead of a hundred.

`Step.sequence` counts up by one per connection, from 1; a gap means a lost message, and the reader must treat the
connection as dead. `EngineHello.epoch` differs each time an engine starts, so a gateway never takes a restarted engine
for the one that it gave its requests to. There is no goodbye: the end of the byte stream, at any point, is the death of
the peer. An engine cancels everything a vanished gateway had submitted.

What its prefix cache holds an engine tells in `EngineHello`, and the changes in each `Step`. They have a number of
their own: an engine with more of them at once than it tells skips one, and a gateway that misses a number sends
`ResendBlocks`.
"""

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from maitred.core.errors import ProtocolViolation
from maitred.core.prefix import BlockNews
from maitred.core.replica import LoadReport, ModelCard
from maitred.core.request import EngineRequest, TokenDelta

PROTOCOL_VERSION = 6
MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Gateway to engine: run this."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Gateway to engine: nobody wants this any more.

    Attributes:
        request_id: Unknown ids are ignored: the request may have finished while the message travelled.
        index: One choice, or None for all that are left.
    """

    request_id: str
    index: int | None = None


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """Gateway to engine: the reader has fallen behind, so compute no more of this; or go on.

    Attributes:
        request_id: Unknown ids are ignored, as with `Cancel`.
        paused: False: go on.
    """

    request_id: str
    paused: bool = True


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Gateway to engine: are you there? Answered by a `Step`, as everything is."""


class ResendBlocks(msgspec.Struct, frozen=True, array_like=True, tag="recount"):
    """Gateway to engine: news of blocks were missed, so tell all that there are in the next step."""


class SleepCommand(msgspec.Struct, frozen=True, array_like=True, tag="rest"):
    """Gateway to engine: sleep as soon as nothing runs, or wake. A `Submit` wakes it, too.

    Attributes:
        asleep: False: wake.
    """

    asleep: bool = True


class Unpin(msgspec.Struct, frozen=True, array_like=True, tag="unpin"):
    """Gateway to engine: let a prefix go that a request has pinned.

    Attributes:
        scope: The request's cache scope.
        name: The pin's; an unknown one is ignored, for it may be over.
    """

    scope: str
    name: str


class EngineHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Engine to gateway, first of all: who I am and what I can hold."""

    protocol: int
    epoch: int
    pid: int
    card: ModelCard
    load: LoadReport
    blocks: BlockNews | None = None
    """All that its prefix cache holds; None: it has none."""


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request's choice."""

    request_id: str
    delta: TokenDelta


class Rejection(msgspec.Struct, frozen=True, array_like=True):
    """The engine will not run a request; no delta of it follows.

    Attributes:
        request_id: Which one.
        message: Why.
        retryable: The request is sound; another replica, or this one later, may take it.
    """

    request_id: str
    message: str
    retryable: bool = False


class Step(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Engine to gateway: what one step did for you."""

    sequence: int
    outputs: list[TokenOutput]
    rejections: list[Rejection]
    load: LoadReport
    submits_heard: int = 0
    """Messages `Submit` that the engine had read on this connection when it wrote `load`."""
    blocks: BlockNews | None = None
    """What has changed in its prefix cache; None: nothing."""


ToEngine = Submit | Cancel | Pause | Ping | ResendBlocks | SleepCommand | Unpin
ToGateway = EngineHello | Step

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """The message as one frame, ready to be written."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolViolation(f"A frame of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}.")
    return _LENGTH.pack(len(payload)) + payload


M = TypeVar("M")


class FrameReader(Generic[M]):
    """Cuts a byte stream into messages; holds the unfinished rest between calls.

    Args:
        expected: Which direction this end reads, such as `ToEngine` or `ToGateway`.
    """

    def __init__(self, expected: Any) -> None:  # noqa: ANN401 - a union is not a `type` to the type checker
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(expected)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """The messages that are complete with these bytes.

        Raises:
            ProtocolViolation: A frame is too long or does not decode. The stream is beyond repair: close it.
        """
        return list(self.messages(data))

    def messages(self, data: bytes) -> Iterator[M]:
        """`feed`, one by one: the messages before a broken frame are still handed out. Read it to its end.

        Raises:
            ProtocolViolation: See `feed`.
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
