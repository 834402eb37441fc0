"""Response from the cache of answers: all of it at once, settled before it is given."""

from collections.abc import AsyncIterator

from maitred.app.request.flow_control import GrantHandle
from maitred.cache.answer import CachedAnswer
from maitred.core.context import Outcome, RequestContext
from maitred.core.inference import TextDelta
from maitred.core.service import PushStream, StreamSink


class CachedResponse(PushStream):
    """Response that an earlier request has computed. Implements `maitred.core.service.ResponseStream`.

    Args:
        answer: The answer.
        grant: The reservation of the request.
        context: Record of the request, with the usage of the answer.
    """

    def __init__(self, answer: CachedAnswer, grant: GrantHandle, context: RequestContext) -> None:
        self._answer: CachedAnswer | None = answer
        self._grant = grant
        self._context = context

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        return self

    async def __anext__(self) -> list[TextDelta]:
        answer, self._answer = self._answer, None
        if answer is None:
            raise StopAsyncIteration
        await self._grant.settle(self._context.usage, Outcome.FINISHED)
        return answer.deltas

    def push_to(self, sink: StreamSink) -> None:
        """Does nothing, because the reader gets the whole answer; implements `PushStream.push_to`."""
