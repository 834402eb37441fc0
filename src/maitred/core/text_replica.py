"""Text replicas: their requests and batches, the counterpart of `core.replica.Replica`.

A text replica is an external server that takes a conversation and returns text. The server has the chat template and
the tokenizer, so it counts the tokens, and its reported usage is billed. Until it reports the usage, token counts are
estimates (`maitred.text.estimate`).

Requests for embeddings, images, sound and moderations are passed on as they are: a `PassthroughReplica` takes them.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import msgspec

from maitred.core.inference import InferenceRequest, NativeApi, NativeRequest, TextDelta
from maitred.core.replica import ReplicaBase
from maitred.core.request import Usage
from maitred.core.trace_context import TraceContext
from maitred.core.usage import UsageUnits

ModelMode = Literal["chat", "embedding", "image_generation", "audio_speech", "audio_transcription", "moderation"]
"""Kind of requests that a model of upstream servers takes, in LiteLLM's words."""
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


class TextRequest(msgspec.Struct, frozen=True):
    """One admitted request for a text replica."""

    id: str
    fields: Mapping[str, Any]
    """Request fields in OpenAI's format, as the caller wrote them, without omitted fields."""
    choices: int
    """Number of choices of all prompts together; their indexes start at 0."""
    max_tokens: int | None = None
    """Maximum output tokens of each choice; None: as many as the replica has room for."""
    chat: bool = True
    """Whether the request is a conversation; otherwise it has texts to continue."""
    scored: bool = False
    """Whether maitred wants log-probabilities that the caller did not request, if the replica has them."""
    model: str | None = None
    """Name of the model at the replica; None: the configured name."""
    has_other_target: bool = False
    """Whether another replica or another model can be asked instead, so that waiting long for this one makes no
    sense."""
    native: NativeRequest | None = None
    """The request in the API of the client, for a replica that speaks it; None: chat completions."""
    left_out: tuple[str, ...] = ()
    """Fields of the client's API that `fields` does not have."""
    given: str = ""
    """Text of the only choice that the caller already has; the answer continues after it. Empty: a new answer."""
    trace: TraceContext | None = None
    """Trace context of the sending span, for the replica's own spans; None: no trace."""


class TextBatch(msgspec.Struct, frozen=True, gc=False):
    """Text that has come from an upstream since the last batch."""

    parts: list[TextDelta]
    usage: Usage | None = None
    """Usage that the replica has counted so far, if it reports it."""
    chunks: int = 0
    """Number of chunks of the upstream answer in this batch."""
    whole: bool = False
    """Whether this is known to be the last batch; False: not known yet."""


class TextStream(Protocol):
    """Text stream of the answer to one `TextRequest`."""

    @property
    def ignored_fields(self) -> Sequence[str]:
        """Fields of the request that the replica was not given, because the answer is the same without them."""
        ...

    @property
    def is_passthrough(self) -> bool:
        """Whether the replica was given the request as its client wrote it, in the API that both speak."""
        ...

    def listen(self, pour: Callable[[TextBatch], bool]) -> None:
        """Offers each batch to `pour` while the reader waits; the reader gets the batches it declines."""
        ...

    def __aiter__(self) -> AsyncIterator[TextBatch]:
        """Yields batches, starting with the first part of the answer; ends after the complete answer.

        Raises:
            ReplicaUnavailable: The replica took the request and sent no data in time.
            ReplicaLost: The answer ended early or violates its API. The text so far is incomplete.
        """
        ...


class TextReplica(ReplicaBase, Protocol):
    """A replica that serves requests of one model as text."""

    @property
    def name(self) -> str:
        """Name of the replica in the ledger and in logs."""
        ...

    @property
    def trace_attributes(self) -> Mapping[str, str | int]:
        """Attributes for traces: ``provider``, ``host``, ``port`` and the server's name for the ``model``."""
        ...

    @property
    def answer_identity(self) -> bytes:
        """Digest of everything here that its answers depend on: its address, its name for the model, its settings."""
        ...

    @property
    def native_api(self) -> NativeApi | None:
        """API in which it gets requests as their clients wrote them; None: it speaks chat completions only."""
        ...

    def is_refusing(self) -> bool:
        """Returns whether the replica has refused so many requests in a row that the next one begins elsewhere.

        The answer is False for one request in a while, which finds out. Only ask for a request that has somewhere else
        to begin.
        """
        ...

    async def count_tokens(self, request: NativeRequest, model: str | None) -> Mapping[str, Any] | None:
        """Returns what the replica says of the tokens of a prompt; None: it cannot be asked, or it does not answer.

        Args:
            request: The request in the API of its client.
            model: Name of the model at the replica; None: the configured name.

        Raises:
            InvalidRequest: The replica says that the request is at fault.
        """
        ...

    def generate(self, request: TextRequest) -> AbstractAsyncContextManager[TextStream]:
        """Returns a context that sends the request and yields its stream; its exit cancels unfinished work.

        Raises:
            InvalidRequest: The replica says that the request is at fault.
            ReplicaUnavailable: The replica refuses the request, now or always.
            ReplicaLost: The replica failed at once.
        """
        ...


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
    """Request as queue, routes and limits see it, with the name of the model."""
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
