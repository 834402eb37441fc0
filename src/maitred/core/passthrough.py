"""Requests that are passed on to an upstream server as they are: embeddings, images, sound, moderations.

What they cost is counted in tokens where the server counts them, and else in units of their kind: images, characters
that are spoken, seconds of sound.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import msgspec

from maitred.core.context import RequestContext
from maitred.core.inference import InferenceRequest
from maitred.core.replica import ReplicaBase
from maitred.core.tenancy import Principal
from maitred.core.trace_context import TraceContext

ModelMode = Literal["chat", "embedding", "image_generation", "audio_speech", "audio_transcription", "moderation"]
"""What a model of upstream servers is asked for, in LiteLLM's words."""
CHAT: ModelMode = "chat"

PATHS: Mapping[ModelMode, tuple[str, ...]] = {
    "chat": ("chat/completions", "completions", "messages", "responses"),
    "embedding": ("embeddings",),
    "image_generation": ("images/generations", "images/edits", "images/variations"),
    "audio_speech": ("audio/speech",),
    "audio_transcription": ("audio/transcriptions", "audio/translations"),
    "moderation": ("moderations",),
}
"""Mode of a model -> the paths below ``/v1`` that it answers."""


class UsageUnits(msgspec.Struct, frozen=True):
    """Units of one request that are no tokens."""

    images: int = 0
    image_size: str = ""
    """Size that was asked for, such as ``1024x1024``; empty: not stated."""
    image_quality: str = ""
    characters: int = 0
    """Characters that are spoken."""
    audio_s: float = 0.0
    """Seconds of sound that is transcribed."""
    estimated: bool = False
    """Whether the seconds are an estimate by the size of the file."""


class PassthroughBody(Protocol):
    """Body of a request, ready to be sent as often as it is needed."""

    @property
    def content_type(self) -> str:
        """Content type of the body."""
        ...

    @property
    def is_small(self) -> bool:
        """Whether it is sent in one piece."""
        ...

    def fields(self) -> Mapping[str, Any]:
        """Returns the fields of the request that are no files."""
        ...

    def encode(self, model: str, parameters: Mapping[str, Any]) -> tuple[int, Iterator[bytes]]:
        """Returns size and pieces of the body for a server.

        Args:
            model: What the server calls the model.
            parameters: Fields for requests that do not have them.
        """
        ...


class PassthroughRequest(msgspec.Struct, frozen=True):
    """One request that is passed on to a server of its model."""

    path: str
    """Path below the URL of the API, such as ``images/edits``."""
    mode: ModelMode
    inference_request: InferenceRequest
    """What the caller asks of queue, routes and limits, with the name of the model."""
    body: PassthroughBody
    prompt_tokens: int
    """Estimated tokens of the request."""
    units: UsageUnits = UsageUnits()
    id: str = ""
    """Id that the server gets."""
    trace: TraceContext | None = None
    """Trace context of the sending span, for the server's own spans; None: no trace."""
    server_model: str | None = None
    """Name of the model at the server; None: the configured name."""


class PassthroughAnswer(Protocol):
    """Answer of a server whose head has come."""

    @property
    def content_type(self) -> str:
        """Content type of the answer."""
        ...

    @property
    def is_stream(self) -> bool:
        """Whether its pieces are passed on as they come."""
        ...

    async def read_whole(self) -> tuple[bytes, Mapping[str, msgspec.Raw]]:
        """Returns the whole body, and its members if it is a JSON object.

        Raises:
            ReplicaLost: The body is not complete, too large, or no answer of this API.
        """
        ...

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields the pieces of the body; ends after the complete body.

        Raises:
            ReplicaLost: The body is not complete, or too large.
        """
        ...


class PassthroughReplica(ReplicaBase, Protocol):
    """Replica that takes requests of any kind as they are."""

    @property
    def trace_attributes(self) -> Mapping[str, str | int]:
        """Attributes for traces; see `core.text_replica.TextReplica.trace_attributes`."""
        ...

    def pass_through(self, request: PassthroughRequest) -> AbstractAsyncContextManager[PassthroughAnswer]:
        """Returns a context that sends the request and yields its answer; its exit cancels unfinished work.

        Raises:
            InvalidRequest: The replica says that the request is at fault.
            ReplicaUnavailable: The replica refuses the request, now or always.
            ReplicaLost: The replica failed.
        """
        ...


class PassthroughResponse(Protocol):
    """Response to the caller of a request that was passed on."""

    content_type: str
    whole: bytes | None
    """The whole answer, which is billed; None: read the pieces, before the last of which it is billed."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Yields the pieces of an answer that is not whole."""
        ...


class PassthroughService(Protocol):
    """Service that passes requests on; `maitred.app.request.passthrough` implements it."""

    def runs_elsewhere(self, principal: Principal, model: str) -> bool:
        """Returns whether upstream servers run the model that a name leads to.

        Raises:
            ModelNotFound: No model of that name is served to this caller.
        """
        ...

    def respond(
        self, request: PassthroughRequest, context: RequestContext
    ) -> AbstractAsyncContextManager[PassthroughResponse]:
        """Passes a request on; exit from the context ends unfinished work.

        Raises:
            ModelNotFound: No model of that name is served to this caller.
            InvalidRequest: The model is for something else, or its server says that the request is at fault.
            LimitReached: The caller's limits have no room for the request.
            ReplicaUnavailable: No server can run the request now.
        """
        ...
