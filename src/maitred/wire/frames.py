"""Protocol between a gateway and an engine: length-prefixed msgpack frames over any byte stream.

A frame is a 4-byte big-endian length and that many bytes of msgpack. The engine sends first: `EngineHello` (after the
proofs of `link.handshake`, if it has a secret). After that the gateway sends `Submit`, `Cancel`, `Pause`,
`SleepCommand` and `Ping` at any time, and the engine sends each gateway one `Step` after every model step (or, if no
step runs, after a message), with the new tokens of *all* requests of that gateway: with a hundred running sequences
this is one system call and one decode instead of a hundred. A `Ping` also has a `Pong` as its answer.

`Step.sequence` increases by one per message on a connection, from 1; a gap means a lost message, and the reader must
treat the connection as dead. `EngineHello.epoch` is different after each start of an engine, so a gateway never
confuses a restarted engine with the one that has its requests. The protocol has no closing message: the end of the byte
stream, at any point, means that the peer is dead. An engine cancels every request of a gateway whose connection has
ended.

An engine reports the contents of its prefix cache in `EngineHello`, and their changes in each `Step`. These updates
have their own sequence number: an engine that has more changes at once than it can report skips a number, and a gateway
that misses a number sends `ResendBlocks`.
"""

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from maitred.core.errors import ProtocolViolation
from maitred.core.prefix import BlockUpdate
from maitred.core.replica import LoadReport, ModelCard
from maitred.core.request import EngineRequest, TokenDelta

PROTOCOL_VERSION = 9
MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Gateway to engine: run this request."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Gateway to engine: cancel a request that is no longer needed.

    Attributes:
        request_id: Id of the request; unknown ids are ignored, because the request may have finished in the meantime.
        index: Index of one choice, or None for all remaining choices.
    """

    request_id: str
    index: int | None = None


class Pause(msgspec.Struct, frozen=True, array_like=True, tag="pause"):
    """Gateway to engine: pause a request whose reader is too slow, or resume it.

    Attributes:
        request_id: Id of the request; unknown ids are ignored, as with `Cancel`.
        paused: True: pause; False: resume.
    """

    request_id: str
    paused: bool = True


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Gateway to engine: asks the engine for a reply.

    The engine answers with a `Pong` as soon as it reads the message, and with a `Step`, as to every message.
    """

    number: int = 0
    """Number that the answer repeats."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Engine to gateway: the answer to a `Ping`, for the round-trip time."""

    number: int = 0


class ResendBlocks(msgspec.Struct, frozen=True, array_like=True, tag="recount"):
    """Gateway to engine: send all blocks of the prefix cache in the next step.

    The gateway sends this when it has missed an update.
    """


class SleepCommand(msgspec.Struct, frozen=True, array_like=True, tag="rest"):
    """Gateway to engine: sleep as soon as no request runs, or wake.

    A `Submit` also wakes the engine.

    Attributes:
        asleep: True: sleep; False: wake.
    """

    asleep: bool = True


class Unpin(msgspec.Struct, frozen=True, array_like=True, tag="unpin"):
    """Gateway to engine: release a prefix that a request has pinned.

    Attributes:
        scope: The cache scope of the request.
        name: Name of the pin; unknown names are ignored, because the pin may have expired.
    """

    scope: str
    name: str


class KeptQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Question that a search has brought to an encoder, and whose answer is in the cache now."""

    partition: bytes
    question: str
    key: bytes
    """Key of its answer."""


class UpdateSimilar(msgspec.Struct, frozen=True, array_like=True, tag="similar"):
    """Gateway to encoder: change the index of cached questions, or the verifiers that judge them."""

    kept: list[KeptQuestion] = []
    """Questions to add. One that no search has brought lately is ignored."""
    removed: list[bytes] = []
    """Keys of answers that are not in the cache any more."""
    served: list[bytes] = []
    """Keys of answers that were served for another question, so their questions stay longer."""
    verifiers: dict[str, bytes] = {}
    """Scope -> the weights of its verifier; empty: the scope has none any more."""


class EngineHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Engine to gateway, first of all: the engine's identity and capacity."""

    protocol: int
    epoch: int
    pid: int
    card: ModelCard
    load: LoadReport
    blocks: BlockUpdate | None = None
    """Contents of the engine's prefix cache, or None if the engine has no prefix cache."""
    model_s: float = 0.0
    """Seconds that the process has taken to make the model ready, after its own code was there."""
    start_id: str = ""
    """Identifier that the process's supervisor has given to this start; empty: it has no supervisor."""


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request's choice."""

    request_id: str
    delta: TokenDelta


class Rejection(msgspec.Struct, frozen=True, array_like=True):
    """Engine to gateway: the engine rejects a request and sends no tokens for it.

    Attributes:
        request_id: The rejected request.
        message: The reason.
        retryable: Whether another replica, or this one later, may accept the request, because the request is valid.
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
    """Changes of the engine's prefix cache, or None if there are none."""


ToEngine = Submit | Cancel | Pause | Ping | ResendBlocks | SleepCommand | Unpin | UpdateSimilar
ToGateway = EngineHello | Step | Pong

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """Encodes a message as one frame, ready to be written."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolViolation(f"A frame of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}.")
    return _LENGTH.pack(len(payload)) + payload


M = TypeVar("M")


class FrameReader(Generic[M]):
    """Reader that splits a byte stream into messages, and keeps the incomplete rest between calls.

    Args:
        message_type: The union of messages that this end reads, such as `ToEngine` or `ToGateway`.
    """

    def __init__(self, message_type: Any) -> None:  # noqa: ANN401 - a union is not a `type` to the type checker
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Returns the messages that are complete with these bytes.

        Raises:
            ProtocolViolation: A frame is too long or does not decode. The stream cannot be used any more: close it.
        """
        return list(self.messages(data))

    def messages(self, data: bytes) -> Iterator[M]:
        """Yields the messages that these bytes complete, including those before an invalid frame.

        The caller must read the iterator to its end.

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
