"""Requests with an `Idempotency-Key`: the first one does the work, and its repeats get its response.

The first request's handler runs as usual, in the request's own task and with its own in-flight slot: it counts as in
flight, drains, is cancelled when the server must stop, and ends with one request context. But its response goes into a
recording, and a child task sends the recording to the client. So a disconnect of the client ends only that child task,
and the work continues for later repeats. A repeat is a request with its own slot, id and outcome, but it does no work:
it sends the recording.

A failure is not recorded. Every attached reader gets the error, and answers it with its own request id.
"""

import asyncio
import dataclasses
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from maitred.api.dialect import Header, clamped_headers
from maitred.api.exchange import JSON, HttpExchange, ResponseState
from maitred.api.in_flight import CancelScope, ClientDisconnected
from maitred.api.response_head import degraded_headers
from maitred.api.routes import Handler, Route
from maitred.api.streaming import StreamHeartbeat
from maitred.cache.idempotency import (
    AnswerStore,
    IdempotencyKey,
    RecordedHead,
    RecordedResponse,
    RecordedResponseReader,
)
from maitred.core.context import RateLimitStatus, RequestContext
from maitred.core.errors import Draining, InvalidRequest

_VALUE = re.compile(r"[\x20-\x7e]{1,255}")


class Idempotency:
    """Handles requests with an `Idempotency-Key`.

    Args:
        store: Stores the responses.
        rate_limit_status: Returns how far the limits of a repeat's caller are used; a repeat does not use any limit.
        heartbeat_s: Longest time in seconds without an event on a stream.
    """

    def __init__(
        self,
        store: AnswerStore,
        rate_limit_status: Callable[[RequestContext], Awaitable[RateLimitStatus | None]],
        *,
        heartbeat_s: float = 15.0,
    ) -> None:
        self._store = store
        self._rate_limit_status = rate_limit_status
        self._heartbeat_s = heartbeat_s

    def guard(self, route: Route) -> Route:
        """Returns the route with a handler for requests with the header, or the route itself if it takes none."""
        if not route.idempotent:
            return route
        return dataclasses.replace(route, repeat_handler=partial(self._answer, route))

    async def _answer(self, route: Route, exchange: HttpExchange) -> None:
        value = exchange.parsed_head.repeat_key or ""
        if not _VALUE.fullmatch(value):
            raise InvalidRequest(
                "An Idempotency-Key has 1 to 255 characters of printable ASCII. A random UUID does well.",
                param="Idempotency-Key",
            )
        principal = exchange.principal
        key = IdempotencyKey(f"{principal.tenants[0]}/{principal.key}", route.path, value, principal.tenants[-1])
        claim = await self._store.claim(key, hashlib.sha256(exchange.body).digest(), exchange.context.request_id)
        with claim.recording.reader() as reader:
            if claim.fresh:
                await _perform(exchange, route.handler, claim.recording, reader, self._heartbeat_s)
                return
            exchange.answer_headers += [
                (b"x-maitred-idempotent-replay", b"true"),
                (b"x-maitred-original-request-id", claim.recording.request_id.encode("ascii")),
            ]
            exchange.context.rate_limits = await self._rate_limit_status(exchange.context)
            await _send(reader, exchange, self._heartbeat_s)


async def _perform(
    exchange: HttpExchange,
    handler: Handler,
    recording: RecordedResponse,
    reader: RecordedResponseReader,
    heartbeat_s: float,
) -> None:
    """Does the work for the client and for all repeats, even if the client disconnects."""
    sending = asyncio.create_task(_send(reader, exchange, heartbeat_s))
    left = False

    def leave() -> None:
        nonlocal left
        left = True
        reader.close()
        sending.cancel()

    exchange.on_disconnect = leave
    try:
        failure = await _record(exchange, handler, recording)
        await asyncio.wait([sending])
    finally:
        sending.cancel()
        await asyncio.wait([sending])
        error = None if sending.cancelled() else sending.exception()
    if left:
        raise failure or ClientDisconnected
    if error is not None:
        raise error


async def _record(exchange: HttpExchange, handler: Handler, recording: RecordedResponse) -> Exception | None:
    """Runs the handler into the recording; returns its failure, which the readers get too."""
    try:
        with CancelScope() as block:
            await handler(RecordedExchange(exchange, recording, block))
    except ClientDisconnected as left:
        # No reader is left and the response cannot be stored: the recording ends here, so that the work is not
        # repeated.
        await recording.finish()
        return left
    except Exception as error:
        await recording.fail(error)
        return error
    except BaseException:
        await recording.fail(Draining("The server shut down before the answer was complete. Send the request again."))
        raise
    await recording.finish()
    return None


async def _send(reader: RecordedResponseReader, exchange: HttpExchange, heartbeat_s: float) -> None:
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
    """HTTP exchange whose response goes into a recording."""

    def __init__(self, exchange: HttpExchange, recording: RecordedResponse, block: CancelScope) -> None:
        vars(self).update(vars(exchange))
        self._recording = recording
        self._block = block

    async def respond(
        self, body: bytes, *, status: int = 200, content_type: bytes = JSON, headers: Sequence[Header] = ()
    ) -> None:
        """Records a whole response, like `HttpExchange.respond`."""
        self.status, self.state = status, ResponseState.COMPLETE
        await self._begin(RecordedHead(status, content_type, tuple(headers), streams=False))
        await self._recording.add(body)

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
        await self._recording.add(events)
        if self._recording.unwanted:
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
        await self._recording.begin(
            head._replace(clamped_max_tokens=context.clamped_max_tokens, degraded=tuple(context.degraded))
        )
