"""Interfaces between an API and the service behind it, with the response streams."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from maitred.core.context import RateLimitStatus, RequestContext
from maitred.core.flow import QueuePosition
from maitred.core.inference import InferenceRequest, Prompt, TextDelta
from maitred.core.replica import ModelCard
from maitred.core.tenancy import Principal
from maitred.core.text_replica import PassthroughRequest


class ResponseStream(Protocol):
    """Stream of one answer; iterate it once."""

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """Yields one list of deltas per batch from the replica, in order for each choice.

        A list is empty while all new text is held back. The first list, even an empty one, means that the replica has
        begun to answer.
        """
        ...


class StreamSink(Protocol):
    """Output for the text to one client."""

    @property
    def open(self) -> bool:
        """Whether the sink can send text now."""
        ...

    def send(self, parts: Sequence[TextDelta]) -> None:
        """Sends the deltas; call it only while the sink is `open`."""
        ...


class PushStream(ABC):
    """Answer stream that can push most of its deltas directly to a sink.

    This is a base class instead of a Protocol: every stream runs an `isinstance` check, and such a check on a Protocol
    takes thirty function calls.
    """

    @abstractmethod
    def push_to(self, sink: StreamSink) -> None:
        """Sends text-only deltas directly to `sink` while the reader waits for them.

        The reader stays asleep for these deltas. It receives all other items in order: deltas with more than text,
        deltas that arrive while the sink is closed, and the end.
        """
        ...


class PromptTokens(msgspec.Struct, frozen=True):
    """Number of tokens of the prompts of a request."""

    tokens: int
    estimated: bool = False
    """Whether nothing that can be asked here counts them."""
    reported: Mapping[str, Any] | None = None
    """Answer of the server that has counted them, in the API of the client; None: they were counted here."""


class InferenceService(Protocol):
    """Inference service for the APIs; `maitred.app.request.pipeline` implements it."""

    def generate(
        self, request: InferenceRequest, context: RequestContext
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """Starts the work for a request; exit from the context ends unfinished work.

        Raises:
            ModelNotFound: No model of that name is served to this caller.
            InvalidRequest: The prompt cannot be rendered or does not fit.
            LimitReached: The caller's limits have no room for the request.
            ReplicaUnavailable: No replica can run the request now.
        """
        ...

    async def tokenize(
        self, principal: Principal, model: str, prompt: Prompt, *, add_special_tokens: bool | None
    ) -> list[int]:
        """Returns the prompt tokens for the model; raises the same errors as `InferenceService.generate`."""
        ...

    async def count_tokens(self, principal: Principal, request: InferenceRequest) -> PromptTokens:
        """Counts the tokens of the prompts of a request, with its tools; raises as `InferenceService.generate` does."""
        ...

    def detokenize(self, principal: Principal, model: str, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        ...

    def models(self, principal: Principal) -> Sequence[str]:
        """Returns the models that a caller may use, by the names that requests use."""
        ...

    async def rate_limit_status(self, context: RequestContext) -> RateLimitStatus | None:
        """Returns the rate limit status of a caller whose request was refused before a reservation."""
        ...

    def card(self, principal: Principal, model: str) -> ModelCard:
        """Returns the card of a model.

        Raises:
            ModelNotFound: No model of that name is served to this caller.
            ReplicaUnavailable: Its replica has never been ready.
        """
        ...

    def queue_position(self, principal: Principal, request_id: str) -> QueuePosition:
        """Returns the queue position of a request of this caller's organisation.

        Raises:
            ResourceNotFound: No waiting request has that id.
        """
        ...

    def ready(self, model: str | None = None) -> bool:
        """Whether a request that arrives now can run: at this model, or at any."""
        ...


Vector = bytes
"""Concatenated little-endian fp32 numbers, in the format of the engine and of base64 answers."""


class EmbeddingService(Protocol):
    """Service that computes embeddings; `maitred.app.request.embeddings` implements it."""

    async def embed(
        self, request: InferenceRequest, context: RequestContext, dimensions: int | None
    ) -> Sequence[Vector]:
        """Returns one vector for each prompt of the request, in order.

        Args:
            request: The request; its sampling parameters are ignored.
            context: The request context.
            dimensions: Length of the vectors; None: the model's own.

        Raises:
            ModelNotFound: No model of that name is served to this caller.
            InvalidRequest: The model generates text, or a prompt does not fit it, or it has fewer dimensions.
            LimitReached: The caller's limits have no room for the request.
            ReplicaUnavailable: No replica can run the request now.
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
