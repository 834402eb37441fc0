"""Service behind an API, as the API uses it, and the streams that it answers with."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from maitred.core.context import RateLimitStatus, RequestContext
from maitred.core.flow import QueuePosition
from maitred.core.inference import InferenceRequest, Prompt, TextDelta
from maitred.core.replica import ModelCard
from maitred.core.tenancy import Principal


class ResponseStream(Protocol):
    """An answer as it comes; iterate once."""

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        """One list for every batch that the replica delivers, with the parts of each choice in their order.

        The list is empty while all new text is held back. The first one, empty or not, says that the replica has
        begun to answer.
        """
        ...


class StreamSink(Protocol):
    """Where text goes out to a client."""

    @property
    def open(self) -> bool:
        """Whether it can go out now."""
        ...

    def send(self, parts: Sequence[TextDelta]) -> None:
        """Sends it; only while it is `open`."""
        ...


class PushStream(ABC):
    """An answer of which most need not be read.

    No protocol: every stream asks whether its answer is one, and to look for a method by its name takes thirty calls.
    """

    @abstractmethod
    def push_to(self, sink: StreamSink) -> None:
        """Lets what is nothing but text out here, from when it comes and while its reader waits for it.

        The reader is left to sleep then; it gets the rest, in the order in which it came: whatever is not text alone,
        what comes while the outlet is not open, and the end.
        """
        ...


class InferenceService(Protocol):
    """System behind an API, as the API uses it; `maitred.app.request.pipeline` implements it."""

    def generate(
        self, request: InferenceRequest, context: RequestContext
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """Starts the work for a request; leaving the context ends whatever is unfinished.

        Raises:
            ModelNotFound: Nothing of that name is served to this caller.
            InvalidRequest: The prompt cannot be rendered or does not fit.
            LimitReached: The caller's limits have no room for it.
            ReplicaUnavailable: Nothing can run it now.
        """
        ...

    async def tokenize(
        self, principal: Principal, model: str, prompt: Prompt, *, add_special_tokens: bool | None
    ) -> list[int]:
        """The prompt as the model would get it; see `InferenceService.generate` for what it raises."""
        ...

    def detokenize(self, principal: Principal, model: str, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        ...

    def models(self, principal: Principal) -> Sequence[str]:
        """Returns the models that a caller may use, by the names that requests use."""
        ...

    async def rate_limit_status(self, context: RequestContext) -> RateLimitStatus | None:
        """Where the caller stands with its limits, for a request that was refused before anything was reserved."""
        ...

    def card(self, principal: Principal, model: str) -> ModelCard:
        """Returns the card of a model.

        Raises:
            ModelNotFound: Nothing of that name is served to this caller.
            ReplicaUnavailable: Its replica has never been ready.
        """
        ...

    def queue_position(self, principal: Principal, request_id: str) -> QueuePosition:
        """Where a request of this caller's organisation stands in the queue.

        Raises:
            ResourceNotFound: None of that id waits.
        """
        ...

    def ready(self, model: str | None = None) -> bool:
        """Whether a request that arrives now can run: at this model, or at any."""
        ...


Vector = bytes
"""Numbers as fp32, little-endian, one behind the other: as the engine sends them and as base64 wants them."""


class EmbeddingService(Protocol):
    """Computes vectors; `maitred.app.request.embeddings` is the one that serves."""

    async def embed(
        self, request: InferenceRequest, context: RequestContext, dimensions: int | None
    ) -> Sequence[Vector]:
        """One vector for each prompt of the request, in their order.

        Args:
            request: What is asked; its sampling says nothing.
            context: What is known of the request.
            dimensions: Length of the vectors; None: the model's own.

        Raises:
            ModelNotFound: Nothing of that name is served to this caller.
            InvalidRequest: The model generates text, or a prompt does not fit it, or it has fewer dimensions.
            LimitReached: The caller's limits have no room for it.
            ReplicaUnavailable: Nothing can run it now.
        """
        ...
