"""Route `GET /v1/queue/{request id}`: queue position for clients that do not read the stream."""

import msgspec

from maitred.api.exchange import HttpExchange
from maitred.api.response_head import milliseconds
from maitred.api.routes import Route
from maitred.core.service import InferenceService
from maitred.core.tenancy import Scope


class QueuePlace(msgspec.Struct, frozen=True, kw_only=True):
    """Queue position of a request, and the predicted times."""

    id: str
    """Id of the request, as in its `x-request-id`."""
    object: str = "queue.place"
    position: int
    """Number of requests that are expected to be served before it."""
    predicted_wait_ms: int
    """Time until the request leaves the queue."""
    predicted_ttft_ms: int
    """Time until the first token of the request."""


class QueueRoutes:
    """Routes of queue positions.

    Args:
        answering: The inference service behind the API.
    """

    def __init__(self, answering: InferenceService) -> None:
        self._service = answering

    def routes(self) -> list[Route]:
        """Returns the one route of queue positions."""
        return [
            Route(
                "GET",
                "/v1/queue/{id}",
                self.show,
                "Where a request of the caller's organisation stands in the queue.",
                returns=QueuePlace,
                needs=Scope.INFERENCE,
            )
        ]

    async def show(self, exchange: HttpExchange) -> None:
        """Shows the queue position of one request."""
        position = self._service.queue_position(exchange.principal, exchange.parameter)
        body = QueuePlace(
            id=exchange.parameter,
            position=position.position,
            predicted_wait_ms=milliseconds(position.wait_s),
            predicted_ttft_ms=milliseconds(position.ttft_s),
        )
        await exchange.respond(msgspec.json.encode(body))
