"""Work whose response is recorded: the client and later readers get it from the recording, at their own pace.

The handler runs as usual, in the request's own task and with its own in-flight slot: it counts as in flight, drains, is
cancelled when the server must stop, and ends with one request context. But its response goes into a recording, and a
child task sends it to the client. So a disconnect of the client ends only that child task, and the work continues for
later readers.
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from maitred.api.dialect import Header, clamped_headers
from maitred.api.exchange import JSON, HttpExchange, ResponseState
from maitred.api.in_flight import CancelScope, ClientDisconnected
from maitred.api.response_head import degraded_headers
from maitred.api.routes import Handler
from maitred.api.streaming import StreamHeartbeat
from maitred.cache.idempotency import RecordedHead, RecordedResponse, RecordedResponseReader
from maitred.core.errors import Draining

_LAST_WORDS_S = 1.0
"""Time to send the end of a response when the server must stop."""


async def perform(
    exchange: HttpExchange,
    handler: Handler,
    recording: RecordedResponse,
    reader: RecordedResponseReader,
    send: Coroutine[Any, Any, None],
) -> None:
    """Does the work for the client and for all later readers, even if the client disconnects.

    Args:
        exchange: The exchange with the client.
        handler: Does the work, and gets an exchange whose response goes into the recording.
        recording: The recording.
        reader: The client's reader of it.
        send: Sends the response to the client.

    Raises:
        ClientDisconnected: The client has left before the end, and the work has succeeded.
    """
    sending = asyncio.create_task(send)
    left = False

    def leave() -> None:
        nonlocal left
        left = True
        reader.close()
        sending.cancel()

    exchange.on_disconnect = leave
    sending.add_done_callback(lambda _: exchange.leave_connection())
    try:
        failure = await _record(exchange, handler, recording)
        await asyncio.wait([sending])
    finally:
        if recording.ended:  # also when the server must stop, the client gets what was recorded
            await asyncio.wait([sending], timeout=_LAST_WORDS_S)
        sending.cancel()
        await asyncio.wait([sending])
        error = None if sending.cancelled() else sending.exception()
    if left:
        raise failure or ClientDisconnected
    if (fault := error or failure) is not None:
        raise fault


async def _record(exchange: HttpExchange, handler: Handler, recording: RecordedResponse) -> Exception | None:
    """Runs the handler into the recording; returns its failure, which the readers get too."""
    try:
        with CancelScope() as block:
            await handler(RecordedExchange(exchange, recording, block))
    except ClientDisconnected as left:
        # No reader is left and the response cannot be stored: the recording ends here, so that the work is not
        # repeated.
        if not recording.ended:
            await recording.finish()
        return left
    except Exception as error:
        if not recording.ended:
            await recording.fail(error)
        return error
    except BaseException:
        if not recording.ended:
            await recording.fail(
                Draining("The server shut down before the answer was complete. Send the request again.")
            )
        raise
    if not recording.ended:
        await recording.finish()
    return None


async def send_recorded(reader: RecordedResponseReader, exchange: HttpExchange, heartbeat_s: float) -> None:
    """Sends the recorded response to a client."""
    with reader:  # a reader that cannot send must not stay counted while the work continues
        head = await reader.head()
        if exchange.context.clamped_max_tokens is None:  # a repeat's context does not know the first request's work
            exchange.answer_headers += clamped_headers(head.clamped_max_tokens)
        if not exchange.context.degraded:
            exchange.answer_headers += degraded_headers(head.degraded)
        if head.streams:
            # The handler may have started its response only to send heartbeats.
            await exchange.stream(b"")
            async with StreamHeartbeat(exchange, heartbeat_s):
                while piece := await reader.piece():
                    await exchange.stream(piece)
            await exchange.finish()
            return
        pieces = []
        while piece := await reader.piece():
            pieces.append(piece)
    await exchange.respond(b"".join(pieces), status=head.status, content_type=head.content_type, headers=head.headers)


class RecordedExchange(HttpExchange):
    """HTTP exchange whose response goes into a recording.

    Attributes:
        recording: The recording.
        needs_reader: Whether the work ends when the response cannot be kept and nobody reads it.
    """

    needs_reader = True

    def __init__(self, exchange: HttpExchange, recording: RecordedResponse, block: CancelScope) -> None:
        vars(self).update(vars(exchange))
        self.recording = recording
        self._block = block

    async def respond(
        self, body: bytes, *, status: int = 200, content_type: bytes = JSON, headers: Sequence[Header] = ()
    ) -> None:
        """Records a whole response, like `HttpExchange.respond`; the recording ends, though work may go on."""
        self.status, self.state = status, ResponseState.COMPLETE
        await self._begin(RecordedHead(status, content_type, tuple(headers), streams=False))
        await self.recording.add(body)
        await self.recording.finish()

    async def stream(self, events: bytes) -> None:
        """Records a part of a stream, like `HttpExchange.stream`.

        The call waits for no reader, unless the answer is too large to store.
        """
        if self.state is ResponseState.NOTHING_SENT:
            self.status, self.state = 200, ResponseState.STREAMING
            await self._begin(RecordedHead(200, b"text/event-stream", (), streams=True))
        self.sent_s = time.monotonic()
        if not events:
            return
        await self.recording.add(events)
        if self.recording.unwanted and self.needs_reader:
            # The work is cancelled in the same way as after a disconnect of an ordinary request, so it is settled in
            # the same way.
            self._block.cancel(ClientDisconnected())
            await asyncio.sleep(0)

    @property
    def ready(self) -> bool:
        """Returns False: a write to the recording may have to wait for space."""
        return False

    async def send_comment(self, comment: bytes) -> None:
        """Starts the stream without recording the comment: each reader of a recording sends its own comments."""
        await self.stream(b"")

    async def finish(self, events: bytes = b"") -> None:
        """Records the end of a stream; the reader of the recording ends the response."""
        if events:
            await self.stream(events)
        self.state = ResponseState.COMPLETE

    async def _begin(self, head: RecordedHead) -> None:
        context = self.context
        await self.recording.begin(
            head._replace(clamped_max_tokens=context.clamped_max_tokens, degraded=tuple(context.degraded))
        )
