"""The ASGI application: what is done for every request, whatever its route.

Each request gets a request id, a slot under the in-flight limit (or a refusal), and exactly one outcome. The order of
the `except` clauses below is the whole error policy of the HTTP API.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from maitred.admission.policy.retries import RetryBudget
from maitred.api.dialect import ANTHROPIC, Header, clear_traceback, to_public_error
from maitred.api.exchange import HttpExchange, Receive, ResponseState, Scope, Send
from maitred.api.in_flight import ClientDisconnected, InFlightLimiter
from maitred.api.large_body import LARGE_BODY_BYTES, CheckLimits, LargeBody, LargeBodyReader
from maitred.api.origin_policy import OriginPolicy, is_preflight
from maitred.api.routes import RouteTable
from maitred.core.clock import Clock
from maitred.core.cohort import COHORT, CohortStage
from maitred.core.context import LOG_CONTEXT, LogContext, Outcome, RateLimitStatus, RequestContext, RequestObserver
from maitred.core.errors import (
    BodyTooSlow,
    CallerError,
    DeadlineUnmeetable,
    Draining,
    LimitReached,
    MaitredError,
    MethodNotAllowed,
    QueueFull,
    Refused,
    ReplicaUnavailable,
    Saturated,
)
from maitred.core.tenancy import ANONYMOUS, Authenticator, require
from maitred.core.tenancy import Scope as KeyScope

_CLIENT_LEFT_STATUS = 499
"""Status of a request whose client left before any answer, as nginx counts it; it is only counted, not sent."""


Begin = Callable[[RequestContext, Callable[[bytes], str | None]], None]


_SATURATION = (Saturated, QueueFull, DeadlineUnmeetable, ReplicaUnavailable)
"""Errors of an overloaded gateway: they do not depend on the request, and many clients get them at once."""


class RetryAdvisor:
    """Advises clients on retries, by the retry budget of their tenant.

    Args:
        budget: The policy of retries.
        clock: The clock of the policy.
    """

    def __init__(self, budget: RetryBudget, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock

    def on_request(self, exchange: HttpExchange) -> None:
        """Counts a request of a known caller, and sets on it how often the client sent it before."""
        exchange.retries = self._budget.on_request(
            (exchange.context.principal or ANONYMOUS).tenants[0],
            exchange.context.started_s,
            retries=exchange.parsed_head.retries,
            key=exchange.parsed_head.repeat_key,
        )

    def headers(self, exchange: HttpExchange, failure: MaitredError) -> list[Header]:
        """Returns the headers that tell the client not to retry; empty if the client's own retries do no harm."""
        if exchange.context.principal is None or not isinstance(failure, _SATURATION):
            return []
        key = exchange.parsed_head.repeat_key
        if self._budget.on_refusal(exchange.principal.tenants[0], self._clock.monotonic_s(), key=key):
            return []
        return [(b"x-should-retry", b"false")]


class GatewayApp:
    """ASGI application that the HTTP server runs.

    Args:
        table: The routes.
        identity: Identifies the caller on routes that need a scope.
        in_flight: Limits the requests with a body. Requests for health, metrics and lists are not limited.
        observers: Observers that get every ended request.
        rate_limit_status: Returns how far a caller's limits are used, for requests that are refused before admission.
        retries: Decides which clients should retry after a refusal.
        begin: Called with the context and the headers of every inference request; None: nothing is called.
        max_body_bytes: Largest size of a body that is read.
        body_timeout_s: Longest time that reading the body may take.
        origin_policy: Checks requests without a key, and says which web pages may use the API.
        clock: Clock for the times in request contexts.
    """

    def __init__(
        self,
        table: RouteTable,
        identity: Authenticator,
        in_flight: InFlightLimiter,
        observers: Sequence[RequestObserver],
        rate_limit_status: Callable[[RequestContext], Awaitable[RateLimitStatus | None]],
        retries: RetryAdvisor,
        *,
        begin: Begin | None = None,
        check_limits: CheckLimits | None = None,
        max_body_bytes: int,
        body_timeout_s: float,
        origin_policy: OriginPolicy,
        clock: Clock,
    ) -> None:
        self._table = table
        self._identity = identity
        self._in_flight = in_flight
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._origin_policy = origin_policy
        self._observers = observers
        self._rate_limit_status = rate_limit_status
        self._large_bodies = LargeBodyReader(check_limits)
        self._retry_advisor = retries
        self._begin = begin
        self._clock = clock
        self._requests = 0
        """Number of requests that have begun in this application and have not ended."""
        self._on_idle: Callable[[], None] | None = None

    def on_idle(self, emptied: Callable[[], None]) -> None:
        """Calls `emptied` once, when all requests have ended; no new request may come after this call."""
        if self._requests:
            self._on_idle = emptied
        else:
            emptied()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serves one request: the entry point of ASGI."""
        if scope["type"] != "http":
            raise RuntimeError(f"The server offered {scope['type']!r}; maitred speaks HTTP only.")
        return self.serve(HttpExchange(scope, receive, send, self._clock.monotonic_s()))

    async def serve(self, exchange: HttpExchange) -> None:
        """Serves one request with its response, which has just begun."""
        in_hand = LogContext(exchange.context.request_id)
        LOG_CONTEXT.set(in_hand)  # no two requests run in one task at a time, so each has a context
        outcome = Outcome.FAILED
        self._requests += 1
        try:
            outcome = await self._serve(exchange, in_hand)
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            raise
        finally:
            self._requests -= 1
            if exchange.state in (ResponseState.STREAMING, ResponseState.SENDING):
                exchange.connection.linger()
            exchange.context.stalled = exchange.connection.stalled
            exchange.context.close(outcome, exchange.status, self._clock.monotonic_s())
            if exchange.context.on_work_end is None:
                for observer in self._observers:
                    observer.on_request_end(exchange.context)
            else:
                exchange.context.on_work_end(lambda _: self._report_end(exchange.context))
            in_hand.over = True
            if self._on_idle is not None and not self._requests:
                self._on_idle()

    def _report_end(self, context: RequestContext) -> None:
        for observer in self._observers:
            observer.on_request_end(context)

    async def _serve(self, exchange: HttpExchange, in_hand: LogContext) -> Outcome:
        """Answers the request, whatever happens; returns its outcome."""
        headers: list[Header] = []
        try:
            head = exchange.parsed_head
            if head.origin is not None:
                exchange.answer_headers += self._origin_policy.response_headers(head.origin)
                if is_preflight(exchange.method, exchange.header):
                    allowed = self._origin_policy.preflight_headers(head.origin, exchange.header)
                    await exchange.respond(b"", content_type=b"text/plain", headers=allowed)
                    return Outcome.FINISHED
            if head.route is None or head.route[0] is not self._table:
                if exchange.header(b"anthropic-version") is not None:
                    exchange.dialect = ANTHROPIC  # also for a path without a route
                head.route = (self._table, *self._table.find(exchange.method, exchange.path))
                head.is_checked = False
            _, route, exchange.parameter = head.route
            exchange.context.route, exchange.dialect = route.path, route.dialect
            if self._begin is not None and route.reads is not None and route.needs is KeyScope.INFERENCE:
                self._begin(exchange.context, exchange.header)
                in_hand.trace_id = exchange.context.timeline.trace_id
            if route.needs is not None:
                # The caller is identified before the body is read and before a slot is taken, so an unknown caller
                # costs very little.
                principal = head.principal
                if principal is None or not self._identity.is_still_valid(principal, exchange.header):
                    principal = head.principal = await self._identity.identify(exchange.header)
                if route.needs not in principal.scopes:
                    require(principal, route.needs)
                exchange.context.principal = principal
            if not head.is_checked and exchange.principal is ANONYMOUS:
                self._origin_policy.check_without_key(exchange.method, exchange.header)
                head.is_checked = True
            if route.reads is None:
                await route.handler(exchange)
            else:
                if route.needs is KeyScope.INFERENCE:
                    self._retry_advisor.on_request(exchange)
                # A full server must still accept the admin request that relieves it.
                # An admin request also runs to its end when it revokes the key that it was sent with.
                administers = route.needs is KeyScope.ADMIN
                visitor = None if administers else exchange.context.principal
                await COHORT.sync(CohortStage.KNOWN)
                with self._in_flight.acquire(visitor, even_if_full=administers) as block:
                    if not route.reads_form and not exchange.has_body(self._max_body_bytes):
                        await exchange.read_body(self._max_body_bytes, self._body_timeout_s)
                    is_checked = False
                    if head.content_encoding is not None and not route.reads_form:
                        # A repeated request is answered from its recording, whatever the limits are.
                        least_output = route.least_output if head.repeat_key is None else None
                        is_checked = await exchange.decompress_body(
                            self._max_body_bytes, self._large_bodies, least_output
                        )
                    if len(exchange.body) > LARGE_BODY_BYTES:
                        least_output = None if is_checked else route.least_output
                        exchange.large_body = LargeBody(
                            exchange.body, exchange.context, self._large_bodies, least_output
                        )
                    with exchange.cancel_on_disconnect(block):  # the client may disconnect
                        handler = route.handler if head.repeat_key is None else route.repeat_handler or route.handler
                        await handler(exchange)
            # If the client stopped reading within a whole response, the connection was cut; `send` does not report
            # that.
            return Outcome.CANCELLED if exchange.connection.stalled else Outcome.FINISHED
        except ClientDisconnected as left:
            clear_traceback(left)
            if exchange.state is ResponseState.NOTHING_SENT:
                exchange.status = _CLIENT_LEFT_STATUS
            return Outcome.CANCELLED
        except MethodNotAllowed as error:
            failure: MaitredError = error
            headers = [(b"allow", ", ".join(self._table.methods_of(exchange.path)).encode("ascii"))]
        except BodyTooSlow as error:
            failure = error
            headers = [(b"connection", b"close")]  # the rest of the body may never come
        except Exception as error:
            failure = to_public_error(error, exchange.context.request_id)
            clear_traceback(error)
        clear_traceback(failure)
        exchange.context.failure = failure
        if isinstance(failure, LimitReached):
            exchange.context.refused_by = failure.limit
        untouched = exchange.context.first_token_s is None and exchange.state is ResponseState.NOTHING_SENT
        if untouched and exchange.context.principal is not None and exchange.context.rate_limits is None:
            exchange.context.rate_limits = await self._rate_limit_status(exchange.context)
        await exchange.send_error(failure, [*headers, *self._retry_advisor.headers(exchange, failure)])
        refusal = isinstance(failure, CallerError | Refused | Draining | ReplicaUnavailable)
        return Outcome.REFUSED if refusal and untouched else Outcome.FAILED
