"""Responses in the background: they go on without their client, which reads them later, and may cancel them.

Such a response takes the path of any other, in the task of its request and with its slot, so it counts as in flight,
drains, and is settled and billed the same way. Its events go into a recording, which serves the client that began it
and those who come later. Its row exists from the beginning, so every gateway that shares the database sees its state.

    POST -> admission -> row: queued -> answer to the client
                            |-> row: in_progress -> events -> recording -> streams of POST and GET
                            `-> row: completed | incomplete | failed | cancelled, with the ledger entry
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from maitred.api.dialect import to_public_error
from maitred.api.exchange import HttpExchange
from maitred.api.in_flight import CancelScope, ClientDisconnected, InFlightLimiter
from maitred.api.recorded_exchange import RecordedExchange, perform, send_recorded
from maitred.api.responses.formatter import ResponsesFormatter
from maitred.api.responses.items import foreign_ids
from maitred.api.responses.replay import ResumeFilter, replay
from maitred.api.streaming import StreamHeartbeat
from maitred.cache.idempotency import IdempotencyKey, RecordedResponse, RecordedResponseReader
from maitred.cache.memory import MemoryIdempotencyStore
from maitred.core.errors import (
    Draining,
    IdempotencyConflict,
    MaitredError,
    ResourceNotFound,
    StoreUnavailable,
)
from maitred.core.service import ResponseStream
from maitred.core.stored_response import StoredResponse
from maitred.core.tenancy import Principal
from maitred.store.responses import ResponseStore
from maitred.wire.responses.resource import encode

log = logging.getLogger(__name__)

_POLL_S = 0.5
"""Time between two looks at rows that another gateway may change, or runs."""
_CANCEL_WAIT_S = 15.0
"""Longest time that a cancellation waits for the end of the work."""
_STOPPED = "The server stopped before the answer was complete. Send the request again."
_CLAIM_LOST = "The server could not reach its database for so long that the response counted as lost. Send it again."

Read = Callable[[ResponseStream], Awaitable[None]]
"""Reads an answer to its end."""
Generate = Callable[[HttpExchange, Read], Awaitable[None]]
"""Generates the answer of a request, and hands it to a reader."""


class ResponseCancelled(ClientDisconnected):
    """The caller has cancelled the response. It is settled as if the caller had left."""


class BackgroundResponse:
    """Response that runs in the background at this gateway.

    Args:
        row: Its row when it begins.
        formatter: Writes its events, and knows its state.

    Attributes:
        row: See above.
        formatter: See above.
        scope: Scope of its generation, which can be cancelled.
        is_begun: Whether its row is stored.
        ended: Set when its last state is known.
    """

    def __init__(self, row: StoredResponse, formatter: ResponsesFormatter) -> None:
        self.row = row
        self.formatter = formatter
        self.scope = CancelScope()
        self.is_begun = False
        self.ended = asyncio.Event()

    def last_row(self, owner: str) -> StoredResponse:
        """Returns the row of the response that has ended, as its owner stores it."""
        has_answer = self.formatter.resource.status in ("completed", "incomplete")
        items = self.formatter.items_to_keep()
        return replace(
            self.row,
            owner=owner,
            previous=None if self.formatter.has_compaction else self.row.previous,
            conversation=self.row.conversation if has_answer else None,  # to which nothing is added then
            output=encode(items),
            item_ids=foreign_ids(items, self.formatter.digits),
            resource=self.formatter.written(),
            last_event=self.formatter.last_event,
        )


class BackgroundResponses:
    """Runs responses in the background, and answers for those that other gateways run.

    Args:
        store: Stores the responses.
        recordings: Keeps the events of responses.
        in_flight: Limits the streams of those who read a response later.
        heartbeat_s: Longest time in seconds without an event on a stream.
    """

    def __init__(
        self,
        store: ResponseStore,
        recordings: MemoryIdempotencyStore,
        in_flight: InFlightLimiter,
        *,
        heartbeat_s: float,
    ) -> None:
        self._store = store
        self._claims = store.claims
        self._recordings = recordings
        self._in_flight = in_flight
        self._heartbeat_s = heartbeat_s
        self._running: dict[str, BackgroundResponse] = {}

    def reconfigure(self, heartbeat_s: float) -> None:
        """Sets the longest time without an event on a stream that begins from now on."""
        self._heartbeat_s = heartbeat_s

    async def answer(
        self, exchange: HttpExchange, response: BackgroundResponse, generate: Generate, *, streams: bool
    ) -> None:
        """Answers the request that begins a response, and generates the response to its end.

        Args:
            exchange: The exchange of the request.
            response: The response.
            generate: Generates the answer.
            streams: Whether the client wants a stream; else it gets the response in its first state.

        Raises:
            MaitredError: The request is refused, and nothing is kept of it; or the response has failed.
        """
        work = partial(self._run, response, generate)
        key = _key_of(response.row.id, response.row.organisation)
        if streams and isinstance(exchange, RecordedExchange):
            self.keep_events(exchange, response.row.id)
            await work(exchange)
            return
        claim = await self._recordings.claim(key, b"", exchange.context.request_id)
        with claim.recording.reader() as reader:
            if streams:
                send = send_recorded(reader, exchange, self._heartbeat_s)
            else:
                send = _send_first_state(reader, exchange, response)
            try:
                await perform(exchange, work, claim.recording, reader, send)
            except ResponseCancelled:
                raise
            except ClientDisconnected:
                pass  # that is what it was for

    def keep_events(self, exchange: RecordedExchange, response_id: str) -> None:
        """Lets readers of a response have the events of its stream that are recorded for repeats of the request."""
        self._recordings.link(_key_of(response_id, exchange.principal.tenants[-1]), exchange.recording)

    async def _run(self, response: BackgroundResponse, generate: Generate, exchange: RecordedExchange) -> None:
        """Generates a response into the recording of the exchange, and stores how it has ended."""
        formatter, context = response.formatter, exchange.context
        exchange.needs_reader = False
        failure: BaseException | None = None
        try:
            try:
                with response.scope:
                    await generate(exchange, partial(self._read, response, exchange))
            except ResponseCancelled as cancelled:
                failure = cancelled
                end = formatter.cancel(None if context.first_token_s is None else context.usage)
            except (Exception, asyncio.CancelledError) as error:
                if not response.is_begun:
                    raise
                failure = error
                end = formatter.error_events(to_public_error(_cause_of(error), context.request_id))
            else:
                end = formatter.end(context.usage)
            await self._save(response)
            await exchange.finish(end)
            await exchange.recording.finish()
        finally:
            response.ended.set()
        if failure is not None:
            raise failure

    async def _read(self, response: BackgroundResponse, exchange: HttpExchange, answer: ResponseStream) -> None:
        """Records an answer that was admitted."""
        row, formatter = response.row, response.formatter
        if not response.is_begun:
            await self._begin(response)
            await exchange.stream(formatter.queue())
        async for parts in answer:
            started = b""
            if not formatter.has_started:
                started = formatter.start()
                try:
                    await self._claims.update(row.id, encode(formatter.resource))
                except StoreUnavailable as error:
                    log.warning("The state of response %s cannot be stored now: %s", row.id, error)
            await exchange.stream(started + formatter.events(parts))

    async def _begin(self, response: BackgroundResponse) -> None:
        """Stores that a response has begun; a cancellation waits until it is known whether that is stored.

        Raises:
            StoreUnavailable: It is not stored.
        """
        storing = asyncio.create_task(self._claims.begin(response.row), name="row of a response")
        try:
            await asyncio.shield(storing)
        finally:
            await asyncio.wait([storing])
            if storing.exception() is None:
                response.is_begun = True
                self._running[response.row.id] = response

    async def _save(self, response: BackgroundResponse) -> None:
        """Stores the end of a response. If the database is away, `run` tries again; until then its row goes on."""
        try:
            await self._store.save(response.last_row(self._claims.owner))
        except StoreUnavailable as error:
            log.warning("Response %s cannot be stored now: %s", response.row.id, error)
        else:
            self._running.pop(response.row.id, None)

    async def run(self) -> None:
        """Renews the claims of this gateway, and heeds what others do to its responses, until the task is cancelled."""
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        try:
            while True:
                await asyncio.sleep(_POLL_S)
                try:
                    for response in [response for response in self._running.values() if response.ended.is_set()]:
                        await self._save(response)
                    if not self._running:
                        renewed_s = loop.time()
                    elif self._claims.has_others:
                        if loop.time() - renewed_s >= self._claims.renew_every_s:
                            await self._claims.renew([*self._running])
                            renewed_s = loop.time()
                        await self._look_at_claims()
                # After any error, the loop must try again, so that claims are renewed when the cause is gone
                except Exception as error:
                    log.warning(
                        "Claims on responses in the background cannot be renewed now: %s",
                        error,
                        exc_info=not isinstance(error, StoreUnavailable),
                    )
        finally:
            with suppress(StoreUnavailable):
                await self._claims.release()

    async def _look_at_claims(self) -> None:
        """Ends the responses that were cancelled, deleted or taken for lost by other gateways."""
        running = dict(self._running)
        claims = await self._claims.read([*running])
        for response_id, response in running.items():
            claim = claims.get(response_id)
            if claim is None or claim.cancelled:
                response.scope.cancel(ResponseCancelled())
            elif claim.owner != self._claims.owner:
                response.scope.cancel(StoreUnavailable(_CLAIM_LOST))

    def resource_of(self, stored: StoredResponse) -> bytes:
        """Returns a response in its present state, with its output so far if it runs here.

        Nobody is told of an end that is not stored: it would be lost with this gateway.
        """
        running = self._running.get(stored.id)
        if running is None or running.formatter.has_ended:
            return stored.resource
        return encode(running.formatter.snapshot())

    async def cancel(self, principal: Principal, stored: StoredResponse) -> bytes:
        """Cancels a response, wherever it runs, and returns it in its last state; one that has ended stays as it is.

        Raises:
            ResourceNotFound: It was deleted meanwhile.
            StoreUnavailable: The gateway that runs it does not answer in time; it is cancelled when that is possible.
        """
        try:
            async with asyncio.timeout(_CANCEL_WAIT_S):
                if (running := self._running.get(stored.id)) is not None:
                    running.scope.cancel(ResponseCancelled())
                    await running.ended.wait()
                    return running.formatter.written()
                if stored.owner is not None:
                    await self._claims.cancel(stored.id)
                    stored = await self._wait_end(principal, stored)
        except TimeoutError:
            raise StoreUnavailable(
                "The response is being cancelled, but its end is not known yet. Ask for it again shortly."
            ) from None
        return stored.resource

    async def delete(self, principal: Principal, stored: StoredResponse) -> bool:
        """Cancels a response that runs, and deletes it; returns whether it was still there."""
        if stored.owner is not None:
            await self.cancel(principal, stored)
        self._recordings.discard(_key_of(stored.id, stored.organisation))
        return await self._store.delete(principal, stored.id)

    async def stream(self, exchange: HttpExchange, stored: StoredResponse, starting_after: int | None) -> None:
        """Sends the events of a response: those that were, from its recording, and those to come.

        Where there is no recording, which is only at the gateway that ran it and not for ever, the events are made from
        what is stored when it has ended.
        """
        with self._in_flight.acquire(exchange.principal) as block, exchange.cancel_on_disconnect(block):
            await exchange.stream(b"")
            async with StreamHeartbeat(exchange, self._heartbeat_s):
                recording = self._recordings.find(_key_of(stored.id, stored.organisation))
                if recording is not None:
                    await _send_recording(recording, exchange, -1 if starting_after is None else starting_after)
                else:
                    stored = await self._wait_end(exchange.principal, stored)
                    await exchange.stream(replay(stored, starting_after))
            await exchange.finish()

    async def _wait_end(self, principal: Principal, stored: StoredResponse) -> StoredResponse:
        """Waits until a response has ended, and returns it as it is stored then.

        Raises:
            ResourceNotFound: It was deleted meanwhile.
        """
        while stored.owner is not None:
            await asyncio.sleep(_POLL_S)
            found = await self._store.find(principal, stored.id)
            if found is None:
                raise ResourceNotFound("The response was deleted.")
            stored = found
        return stored


def _key_of(response_id: str, organisation: str) -> IdempotencyKey:
    """Returns the key of the recording of a response."""
    return IdempotencyKey("", "/v1/responses/{id}", response_id, organisation)


def _cause_of(error: BaseException) -> Exception:
    """Returns the error that ended a response; the reason of a cancellation is its argument."""
    if isinstance(error, Exception):
        return error
    reason = error.args[0] if error.args else None
    if isinstance(reason, MaitredError) and not isinstance(reason, Draining):
        return reason
    return Draining(_STOPPED)


async def _send_first_state(
    reader: RecordedResponseReader, exchange: HttpExchange, response: BackgroundResponse
) -> None:
    """Sends the state in which a response was stored first, or raises why it was not."""
    with reader:
        await reader.head()
    await exchange.respond(response.row.resource)


async def _send_recording(recording: RecordedResponse, exchange: HttpExchange, starting_after: int) -> None:
    """Sends the events after one with this number, as long as there are any.

    Raises:
        IdempotencyConflict: The events are too many to keep, and the client was too slow.
    """
    resume_filter = ResumeFilter(starting_after)
    with recording.reader() as reader:
        try:
            while piece := await reader.piece():
                if events := resume_filter.feed(piece):
                    await exchange.stream(events)
        except IdempotencyConflict:
            raise IdempotencyConflict(
                "The events of this response became too many to keep, and this connection read them too slowly. Read "
                "the response without stream."
            ) from None
