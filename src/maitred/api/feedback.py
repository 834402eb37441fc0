"""`POST /v1/feedback`: what somebody thinks of an answer, given by whoever asked for it."""

from collections.abc import Callable
from typing import Protocol

from maitred.api.exchange import HttpExchange
from maitred.api.routes import Route
from maitred.core.feedback import Feedback, FeedbackReceipt
from maitred.core.tenancy import Principal, Scope
from maitred.wire.admin.decode import decode_body
from maitred.wire.admin.responses import encode
from maitred.wire.feedback import FeedbackGiven, GiveFeedback, to_feedback


class FeedbackSink(Protocol):
    """Keeps opinions; `maitred.store.feedback` is the one that serves."""

    async def store(self, principal: Principal, request_id: str, feedback: Feedback) -> FeedbackReceipt:
        """Keeps one in place of what was thought before; raises ResourceNotFound for a request that is not theirs."""
        ...


class FeedbackRoutes:
    """Routes of feedback on answers.

    Args:
        keeping: Keeps what is said.
        told: Is told of it.
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
        """Keeps one. There is no need to be idempotent by a key: the second replaces the first."""
        request = decode_body(exchange.body, GiveFeedback)
        kept = await self._keeping.store(exchange.principal, request.request_id, to_feedback(request))
        self._told(kept)
        await exchange.respond(encode(FeedbackGiven.of(request.request_id, kept)))
