"""Requests with an `Idempotency-Key`: the first one does the work, and its repeats get its response.

The first request's response is recorded (`maitred.api.recorded_exchange`), so the work continues for later repeats when
the client disconnects. A repeat is a request with its own slot, id and outcome, but it does no work: it sends the
recording.

A failure is not recorded. Every attached reader gets the error, and answers it with its own request id.
"""

import dataclasses
import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import partial

from maitred.api.exchange import HttpExchange
from maitred.api.recorded_exchange import perform, send_recorded
from maitred.api.routes import Route
from maitred.cache.idempotency import AnswerStore, IdempotencyKey
from maitred.core.context import RateLimitStatus, RequestContext
from maitred.core.errors import InvalidRequest

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
                send = send_recorded(reader, exchange, self._heartbeat_s)
                await perform(exchange, route.handler, claim.recording, reader, send)
                return
            exchange.answer_headers += [
                (b"x-maitred-idempotent-replay", b"true"),
                (b"x-maitred-original-request-id", claim.recording.request_id.encode("ascii")),
            ]
            exchange.context.rate_limits = await self._rate_limit_status(exchange.context)
            await send_recorded(reader, exchange, self._heartbeat_s)
