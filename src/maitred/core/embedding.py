"""Embedding service as an API uses it: texts to vectors."""

from collections.abc import Sequence
from typing import Protocol

from maitred.core.context import RequestContext
from maitred.core.inference import InferenceRequest

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
