"""The ASGI application: what happens to every request, whatever its route.

Each one gets a request id, a place inside (or a refusal), and exactly one outcome. The order of the `except` clauses
below is the whole error policy of the HTTP edge.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from maitred.api.errors import Header, let_go_of_frames, public
from maitred.api.exchange import HttpExchange, Receive, ResponseState, Scope, Send
from maitred.api.in_flight import ClientDisconnected, InFlightLimiter
from maitred.api.retry_advice import RetryAdvisor
from maitred.api.routes import Route, RouteTable
from maitred.core.answer import Outcome, RateLimitStatus, RequestContext, RequestObserver
from maitred.core.clock import Clock
from maitred.core.cohort import COHORT, CohortStage
from maitred.core.errors import (
    BodyTooSlow,
    CallerError,
    Draining,
    LimitReached,
    MaitredError,
    MethodNotAllowed,
    Refused,
    ReplicaUnavailable,
)
from maitred.core.log_context import LOG_CONTEXT, LogContext
from maitred.core.tenancy import Authenticator, require
from maitred.core.tenancy import Scope as KeyScope

_CLIENT_LEFT_STATUS = 499
"""Never sent, only counted; the number that nginx made customary for it."""


Begin = Callable[[RequestContext, Callable[[bytes], str | None]], None]


class GatewayApp:
    """The application that the HTTP server runs.

    Args:
        table: The routes.
        identity: Tells who calls, on routes that need a scope.
        gate: Who may come in. Health, metrics and lists pass beside it.
        observers: Told of every ended request.
        standing: Where a caller stands with its limits, for what is refused before they were asked.
        retries: Who should come back after a refusal.
        begin: Told of every request that asks a model for something, with its headers; None: nobody is.
        max_body_bytes: Largest body that is read.
        body_timeout_s: Longest time that reading it may take.
        clock: For the times in the tally.
    """

    def __init__(
        self,
        table: RouteTable,
        identity: Authenticator,
        gate: InFlightLimiter,
        observers: Sequence[RequestObserver],
        standing: Callable[[RequestContext], Awaitable[RateLimitStatus | None]],
        retries: RetryAdvisor,
        *,
        begin: Begin | None = None,
        max_body_bytes: int,
        body_timeout_s: float,
        clock: Clock,
    ) -> None:
        self._table = table
        self._identity = identity
        self._gate = gate
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._observers = observers
        self._standing = standing
        self._retries = retries
        self._begin = begin
        self._clock = clock
        self._requests = 0
        """How many have begun here and not ended."""
        self._emptied: Callable[[], None] | None = None

    def when_empty(self, emptied: Callable[[], None]) -> None:
        """No more requests will come; calls back, once, when those that are here have ended, or at once."""
        if self._requests:
            self._emptied = emptied
        else:
            emptied()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's entry point."""
        if scope["type"] != "http":
            raise RuntimeError(f"The server offered {scope['type']!r}; maitred speaks HTTP only.")
        call = HttpExchange(scope, receive, send, self._clock.monotonic_s())
        in_hand = LogContext(call.tally.request_id)
        LOG_CONTEXT.set(in_hand)  # each request has a task of its own, and so a context
        outcome = Outcome.FAILED
        self._requests += 1
        try:
            outcome = await self._serve(call, in_hand)
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            raise
        finally:
            self._requests -= 1
            if call.progress in (ResponseState.STREAMING, ResponseState.SENDING):
                call.connection.linger()
            call.tally.stalled = call.connection.stalled
            call.tally.close(outcome, call.status, self._clock.monotonic_s())
            for observer in self._observers:
                observer.ended(call.tally)
            in_hand.over = True
            if self._emptied is not None and not self._requests:
                self._emptied()

    async def _serve(self, call: HttpExchange, in_hand: LogContext) -> Outcome:
        """Answers the call, whatever happens; returns how it ended."""
        headers: list[Header] = []
        try:
            route, call.parameter = self._found(call)
            call.tally.route, call.dialect = route.path, route.dialect
            if self._begin is not None and route.reads is not None and route.needs is KeyScope.INFERENCE:
                self._begin(call.tally, call.header)
                in_hand.trace_id = call.tally.story.trace_id
            if route.needs is not None:
                # Before the body is read and before a place is taken: who is not known here costs next to nothing.
                principal = call.greeting.principal
                if principal is None or not self._identity.stands(principal, call.header):
                    principal = call.greeting.principal = await self._identity.identify(call.header)
                require(principal, route.needs)
                call.tally.principal = principal
            if route.reads is None:
                await route.handler(call)
            else:
                if route.needs is KeyScope.INFERENCE:
                    self._retries.arrived(call)
                # A server that is full must still take the change that relieves it.
                # Nor does it stop halfway because it has ended the very key that it came with.
                administers = route.needs is KeyScope.ADMIN
                visitor = None if administers else call.tally.principal
                await COHORT.regroup(CohortStage.KNOWN)
                with self._gate.enter(visitor, even_if_full=administers) as block:
                    if not call.has_body(self._max_body_bytes):
                        await call.read_body(self._max_body_bytes, self._body_timeout_s)
                    with call.watched(block):  # its client may leave
                        await route.handler(call)
            # Who stopped reading in the middle of a whole answer was cut off, of which `send` says nothing.
            return Outcome.CANCELLED if call.connection.stalled else Outcome.FINISHED
        except ClientDisconnected as left:
            let_go_of_frames(left)
            if call.progress is ResponseState.NOTHING_SENT:
                call.status = _CLIENT_LEFT_STATUS
            return Outcome.CANCELLED
        except MethodNotAllowed as error:
            failure: MaitredError = error
            headers = [(b"allow", ", ".join(self._table.methods_of(call.path)).encode("ascii"))]
        except BodyTooSlow as error:
            failure = error
            headers = [(b"connection", b"close")]  # the rest of the body may never come
        except Exception as error:
            failure = public(error, call.tally.request_id)
            let_go_of_frames(error)
        let_go_of_frames(failure)
        call.tally.failure = failure
        if isinstance(failure, LimitReached):
            call.tally.refused_by = failure.limit
        untouched = call.tally.first_token_s is None and call.progress is ResponseState.NOTHING_SENT
        if untouched and call.tally.principal is not None and call.tally.standing is None:
            call.tally.standing = await self._standing(call.tally)
        await call.refuse(failure, [*headers, *self._retries.headers(call, failure)])
        refusal = isinstance(failure, CallerError | Refused | Draining | ReplicaUnavailable)
        return Outcome.REFUSED if refusal and untouched else Outcome.FAILED

    def _found(self, call: HttpExchange) -> tuple[Route, str]:
        """Where it leads; raises where it leads nowhere."""
        found = call.greeting.found
        if found is None or found[0] is not self._table:
            found = call.greeting.found = (self._table, *self._table.find(call.method, call.path))
        return found[1:]
