"""Signs of life on a stream that has nothing to say.

Proxies and clients give up on a connection that is silent for long: while a request waits in the queue, and again when
its sequence has lost its place in the batch for a while. Comments, which every reader of event streams skips, keep it
open. Before the first token they also tell where the request stands.

A token must not pay for this, so a timer looks now and then at when something was last sent, and nothing is touched
where something was.
"""

import asyncio
import time
from types import TracebackType
from typing import Self

from maitred.api.exchange import HttpExchange
from maitred.core.answer import RequestContext
from maitred.core.flow import QueuePosition
from maitred.wire.sse import encode_comment


class StreamHeartbeat:
    """Sends a comment on a stream whenever nothing was sent for a while, as long as its block runs.

    The first comment sends the status line, if it has not gone out yet.

    Args:
        exchange: The stream's.
        every_s: The longest silence.
    """

    def __init__(self, exchange: HttpExchange, every_s: float) -> None:
        self._exchange = exchange
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._entered_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._entered_s = time.monotonic()
        self._timer = self._loop.call_later(self._every_s, self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])

    def _beat(self) -> None:
        quiet_s = time.monotonic() - max(self._exchange.sent_s, self._entered_s)
        left_s = self._every_s - quiet_s
        # The clock that timers go by can be a hair behind.
        if left_s > 0.001 * self._every_s:
            self._timer = self._loop.call_later(left_s, self._beat)
            return
        self._timer = self._loop.call_later(self._every_s, self._beat)
        # While a write waits for the client, there is more to read than it reads.
        if self._exchange.connection.writable and (self._sending is None or self._sending.done()):
            self._sending = self._loop.create_task(
                self._exchange.send_comment(encode_comment(sign_of_life(self._exchange.context)))
            )


def sign_of_life(context: RequestContext) -> str:
    """Makes the comment of a heartbeat: where the request stands, as far as that is known."""
    position = None if context.position is None else context.position()
    if position is not None:
        return queue_comment(position)
    return "waiting for the first token" if context.first_token_s is None else "waiting for the next token"


def queue_comment(position: QueuePosition) -> str:
    """A place in the queue, in words."""
    return f"queue position {position.position}, predicted wait {round(position.wait_s * 1000)} ms"
