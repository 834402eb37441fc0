"""Route `POST /v1/feedback`: a caller's rating of an answer to its own request."""

from collections.abc import Callable
from typing import Protocol

from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.errors import BodyTooLarge
from maitred.core.tenancy import Principal, Scope
from maitred.core.usage import Feedback, FeedbackReceipt
from maitred.wire.admin.decode import decode_body
from maitred.wire.admin.responses import encode
from maitred.wire.feedback import FeedbackGiven, GiveFeedback, to_feedback


class FeedbackSink(Protocol):
    """Stores feedback; the production implementation is in `maitred.store.feedback`."""

    async def store(self, principal: Principal, request_id: str, feedback: Feedback) -> FeedbackReceipt:
        """Stores feedback in place of the earlier one; raises ResourceNotFound for another caller's request."""
        ...


class FeedbackRoutes:
    """Routes of feedback on answers.

    Args:
        keeping: Stores the feedback.
        told: on_receipt: Called with every receipt.
    """

    def __init__(self, keeping: FeedbackSink, on_receipt: Callable[[FeedbackReceipt], None]) -> None:
        self._keeping = keeping
        self._told = on_receipt

    def routes(self) -> list[Route]:
        """Returns the route that takes feedback."""
        return [
            Route(
                *("POST", "/v1/feedback", self.give, "Say what you think of an answer."),
                reads=GiveFeedback,
                returns=FeedbackGiven,
                needs=Scope.INFERENCE,
            )
        ]

    async def give(self, exchange: HttpExchange) -> None:
        """Stores the feedback of a request. It needs no idempotency key: later feedback replaces the earlier one."""
        if exchange.large_body is not None:
            raise BodyTooLarge("This is too long for feedback. Send less text.")
        request = decode_body(exchange.body, GiveFeedback)
        kept = await self._keeping.store(exchange.principal, request.request_id, to_feedback(request))
        self._told(kept)
        await exchange.respond(encode(FeedbackGiven.of(request.request_id, kept)))
