"""Response that another process of this gateway computes; its parts come as messages."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from maitred.app.request.coalescing import PeerLost
from maitred.core.context import RequestContext
from maitred.core.inference import TextDelta
from maitred.core.resource_stack import ResourceStack
from maitred.core.service import ResponseStream
from maitred.wire.error_codec import decode_error
from maitred.wire.worker_protocol import AnswerEnded, AnswerPart

AnswerMessage = AnswerPart | AnswerEnded


class PeerAnswer:
    """Answer that another process of this gateway computes. Implements `maitred.core.service.ResponseStream`.

    Args:
        leave: Called when nobody reads it here any more.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        self.leave = leave
        self._context: RequestContext | None = None
        self._messages: list[AnswerMessage] = []
        self._waiter: asyncio.Future[None] | None = None

    def on_part(self, message: AnswerMessage) -> None:
        """Takes a message of the process that computes it."""
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self, context: RequestContext, stack: ResourceStack) -> ResponseStream:
        """Waits until the request is admitted there, and returns what comes of it.

        Args:
            context: Gets what the answer is in tokens.
            stack: Closing it ends the reading.

        Raises:
            PeerLost: The other process does not compute it any more.
        """
        self._context = context
        stack.push_async_exit(self)
        await self._wait_message()
        if isinstance(message := self._messages[0], AnswerEnded):
            raise PeerLost if message.is_lost or message.error is None else decode_error(message.error)
        self._note(message)
        if not message.has_begun:
            del self._messages[0]
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TextDelta]:
        await self._wait_message()
        message = self._messages.pop(0)
        if isinstance(message, AnswerEnded):
            if message.is_lost:
                raise PeerLost
            if message.error is not None:
                raise decode_error(message.error)
            raise StopAsyncIteration
        self._note(message)
        return message.parts

    def _note(self, message: AnswerPart) -> None:
        context = self._context
        assert context is not None
        context.priority = message.priority
        context.set_usage(message.usage)
        context.finish_reasons = message.finish_reasons
        context.ignored_fields = message.ignored_fields
        context.is_passthrough = message.is_passthrough

    async def _wait_message(self) -> None:
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
