"""The `FlowController` of a worker: it asks the controller for each request over the IPC connection."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType

from msgspec.structs import replace

from maitred.admission.config import AdmissionConfig
from maitred.admission.prices import PriceList
from maitred.admission.request import AdmissionRequest
from maitred.api.in_flight import CancelScope
from maitred.app.workers.client import ControllerClient
from maitred.core.context import Outcome, RateLimitStatus
from maitred.core.errors import Bug, MaitredError, Overloaded, Unavailable
from maitred.core.flow import QueuePosition
from maitred.core.request import Usage
from maitred.core.resource_stack import ResourceStack
from maitred.core.tenancy import Principal
from maitred.core.timeline import RequestTimeline
from maitred.core.usage import Price
from maitred.dispatch.dispatcher import HedgeAllocation
from maitred.dispatch.request import AnyEndpoint, DispatchRequest
from maitred.replica.engine.client import EngineClient
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt
from maitred.replica.upstream.status import UpstreamStatus
from maitred.wire.error_codec import decode_error, encode_error
from maitred.wire.worker_protocol import (
    AdmitAccepted,
    AdmitRejected,
    AdmitRequest,
    AttemptResult,
    Dispatched,
    PromptSummary,
    RateLimitQuery,
    RateLimitReply,
    ReleaseRequest,
    ReplicaFailed,
    ResumeGrant,
    SettleReply,
    SettleRequest,
    SubmissionAcked,
    TokensUsed,
    ToWorker,
)


class SubmissionTracker:
    """Reports to the controller which submissions of this worker an engine has received.

    An engine receives submissions in the order in which they were sent.

    Args:
        engine: The client of the engine.
        controller: The client of the controller.
    """

    def __init__(self, engine: EngineClient, controller: ControllerClient) -> None:
        self._engine = engine
        self._controller = controller
        self._unacked_numbers: deque[int] = deque()
        self._report_received = asyncio.Event()
        engine.on_change(self._on_report)

    def on_sent(self, number: int) -> None:
        """Records that a prompt of the request of this number was sent to the engine."""
        self._unacked_numbers.append(number)

    @property
    def is_connected(self) -> bool:
        """Whether this worker is connected to the engine. It is not yet if either has just been started."""
        return self._engine.is_ready

    async def wait_connected(self) -> None:
        """Waits until the engine is connected, for at most `_ENGINE_CONNECT_TIMEOUT_S`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENGINE_CONNECT_TIMEOUT_S):
                while not self.is_connected:
                    self._report_received.clear()
                    await self._report_received.wait()

    def _on_report(self) -> None:
        """Handles a report of the engine: acknowledges the submissions that it counts."""
        self._report_received.set()
        while len(self._unacked_numbers) > self._engine.count_unreported():
            self._controller.send(SubmissionAcked(self._unacked_numbers.popleft()))


class RemoteDispatch:
    """A grant and a queue entry that the controller holds for this worker; leaving the context releases both.

    It survives a controller restart: the worker sends the grant to the next controller,
    which restores the queue entry and settles the grant.

    Implements `maitred.app.request.flow_control.GrantHandle` and `DispatchHandle`.

    Args:
        controller: The client of the controller.
        endpoints: The replicas of the model, by name.
        submissions: The submission trackers of those replicas that are engines of this gateway.
        cancel_scope: Is cancelled when the controller ends the request. It encloses this context.
        admission_request: The request, with its context.
        recoveries: How often the request may be requeued for another replica.

    Attributes:
        attempt_result: Result of the current attempt for the circuit breaker of the upstream server.
    """

    def __init__(
        self,
        controller: ControllerClient,
        endpoints: Mapping[str, AnyEndpoint],
        submissions: Mapping[str, SubmissionTracker],
        cancel_scope: CancelScope,
        admission_request: AdmissionRequest,
        recoveries: int,
    ) -> None:
        assert admission_request.context is not None
        self._controller = controller
        self._endpoints = endpoints
        self._submissions = submissions
        self._context = admission_request.context
        self._cancel_scope = cancel_scope
        self._recoveries = recoveries
        self._number = controller.register(self)
        self._admit_request: AdmitRequest | None = None
        self._accepted: AdmitAccepted | None = None
        self._dispatched: Dispatched | None = None
        self._settle_request: SettleRequest | None = None
        self._settle_reply: SettleReply | None = None
        self._error: MaitredError | None = None
        """The error with which the controller rejected the request, until it is raised."""
        self._waiter: asyncio.Future[None] | None = None
        """Future of the task that waits for the next message of the controller."""
        self._requeue_count = 0
        self._is_finished = False
        self._is_disconnected = False
        """Whether the granting controller has disconnected and no new one has the grant yet."""
        self._unsent_tokens = _NO_TOKENS
        """Token counts that were not sent to the controller yet: prompt, cached and output tokens."""
        self._first_token_unsent = False
        """Whether the first output token of the request is among the unsent tokens."""
        self.attempt_result = AttemptResult.NEITHER

    async def request_admission(self, admit_request: AdmitRequest) -> None:
        """Asks the controller to admit the request; raises the error of a rejection.

        A controller that dies before it replies has granted nothing, so the next one is asked again.
        """
        self._admit_request = admit_request
        while self._accepted is None:
            await self._controller.wait_connected()
            self._is_disconnected = False
            self._controller.send(admit_request)
            while self._accepted is None and not self._is_disconnected:
                await self._wait_message()
        context, accepted = self._context, self._accepted
        context.rate_limits, context.predicted_position = accepted.standing, accepted.place
        context.clamped_max_tokens = accepted.max_tokens if accepted.clamped else None

    @property
    def number(self) -> int:
        """The number under which the controller knows this request."""
        return self._number

    async def __aenter__(self) -> "RemoteDispatch":
        self._cancel_scope.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._release(error)
        finally:
            self._cancel_scope.__exit__(kind, error, trace)

    def _release(self, error: BaseException | None) -> None:
        self._controller.unregister(self._number)
        if self._is_finished:
            return
        cause = error.args[0] if isinstance(error, asyncio.CancelledError) and error.args else error
        encoded_error = None if cause is None else encode_error(cause if isinstance(cause, MaitredError) else Bug())
        is_cancelled = error is not None and not isinstance(error, Exception) and not isinstance(cause, MaitredError)
        self.flush()
        release_request = ReleaseRequest(
            *(self._number, self._context.usage, self._context.first_token_s),
            *(self.attempt_result, None if is_cancelled else encoded_error, is_cancelled),
        )
        if not self._is_disconnected:
            self._controller.send(release_request)
        elif (request_id := self.unanswered_id) is not None:
            self._controller.abandon(request_id)
        elif (resume_grant := self.resume_message()) is not None:
            self._controller.settle_later(replace(resume_grant, ended=resume_grant.ended or release_request))

    # --- messages of the controller ---

    def on_message(self, message: ToWorker) -> None:
        """Handles a message of the controller. Implements `RequestListener.on_message`."""
        if isinstance(message, AdmitRejected):
            self._is_finished = True
            error = decode_error(message.error)
            if message.standing is not None:
                self._context.rate_limits = message.standing
            if isinstance(error, Overloaded):
                self._context.predicted_position = error.position
            # Cancel the request, unless it waits for a message: then `_wait_message` raises the error.
            if self._waiter is None:
                self._cancel_scope.cancel(error)
            self._error = error
        elif isinstance(message, AdmitAccepted):
            self._accepted = message
        elif isinstance(message, Dispatched):
            self._dispatched, self.attempt_result = message, AttemptResult.NEITHER
        elif isinstance(message, SettleReply):
            self._settle_reply = message
            self._is_finished = message.error is None  # a settled request holds nothing any more
        self._wake()

    def on_disconnect(self) -> None:
        """Marks the controller as disconnected. A running response continues."""
        self._is_disconnected = True
        self._wake()

    def resume_message(self) -> ResumeGrant | None:
        """Returns the grant for the next controller. Implements `RequestListener.resume_message`."""
        if self._admit_request is None or self._accepted is None or self._settle_reply is not None:
            return None
        self._is_disconnected = False
        self._unsent_tokens, self._first_token_unsent = _NO_TOKENS, False  # the usage below contains these tokens
        return ResumeGrant(
            replace(self._admit_request, prompts=[replace(prompt, ids=[]) for prompt in self._admit_request.prompts]),
            self._accepted.lease,
            self._accepted.max_tokens,
            "" if self._dispatched is None else self._dispatched.replica,
            self._context.usage,
            self._context.first_token_s,
            self._settle_request,
        )

    @property
    def unanswered_id(self) -> str | None:
        """The request id if the controller has not replied yet. Implements `RequestListener.unanswered_id`."""
        return (
            self._admit_request.request_id
            if self._admit_request is not None and self._accepted is None and not self._is_finished
            else None
        )

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait_message(self) -> None:
        """Waits for the next message of the controller; raises the error of a rejection."""
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error

    # --- the grant ---

    @property
    def lease(self) -> str:
        """The id of the lease that the controller granted."""
        return self._acceptance.lease

    @property
    def max_tokens(self) -> int:
        """Most output tokens of each choice, as granted."""
        return self._acceptance.max_tokens

    def set_replica(self, replica: str) -> None:
        """Does nothing: the controller knows the replica that it dispatched to."""

    def record_usage(self, usage: Usage) -> None:
        """Does nothing: the context of the request holds the usage."""

    async def settle(self, usage: Usage, outcome: Outcome) -> None:
        """Has the controller settle the grant, and waits until it is in the ledger."""
        if self._settle_reply is None:
            self.flush()
            self._settle_request = SettleRequest(self._number, usage, outcome, self._context.first_token_s)
            self._controller.send(self._settle_request)
        while self._settle_reply is None:
            try:
                if self._is_disconnected:
                    await self._controller.wait_connected(has_grant=True)
                else:
                    await self._wait_message()
            except Unavailable:
                if not self._is_disconnected:
                    raise
                # Do not keep the client waiting: the next controller settles the grant.
                _log.warning("Request %s ended while the controller was away.", self._context.request_id)
                return
        if (error := self._settle_reply.error) is not None:
            self._settle_request = self._settle_reply = None
            raise decode_error(error)

    # --- the queue entry ---

    async def wait_dispatched(self) -> AnyEndpoint:
        """Waits until the controller dispatches the request; returns the endpoint to send it to."""
        while self._dispatched is None:
            if self._is_disconnected:
                await self._controller.wait_connected(has_grant=True)
            else:
                await self._wait_message()
        CURRENT_DISPATCH.set(self)
        replica = self._dispatched.replica
        if (engine := self._submissions.get(replica)) is not None and not engine.is_connected:
            await engine.wait_connected()
        return self._endpoints[replica]

    def start_hedge_timer(self) -> float | None:
        """Returns None: a worker forwards requests that may be hedged."""
        return None

    def hedge(self) -> HedgeAllocation | None:
        """Returns None: a worker forwards requests that may be hedged."""
        return None

    @property
    def has_other_replica(self) -> bool:
        """Whether another replica could take the request, as of its dispatch."""
        return self._dispatched is not None and self._dispatched.elsewhere

    def requeue(
        self, *, prompts: Sequence[int], answer_by_s: float | None = None, suspend_s: float | None = None
    ) -> bool:
        """Reports the failed replica and waits for another dispatch; returns False if no requeues are left."""
        if self._requeue_count >= self._recoveries or self._is_finished:
            return False
        self._requeue_count += 1
        self.flush()
        self._dispatched = None
        self._controller.send(ReplicaFailed(self._number, self.attempt_result, list(prompts), answer_by_s, suspend_s))
        return True

    @property
    def expected_tokens(self) -> int:
        """Expected output tokens of the request, as the controller estimated them."""
        return self._acceptance.expected_tokens

    @property
    def waited_ms(self) -> dict[str, float]:
        """How long the request waited in the queue, by cause."""
        return {} if self._dispatched is None else self._dispatched.waited_ms

    def position(self) -> QueuePosition | None:
        """Returns the queue position as of the request's arrival; None once it is dispatched."""
        return None if self._dispatched is not None else self._acceptance.place

    def on_submitted(self) -> None:
        """Records a submission to the engine, whose next report acknowledges it."""
        if self._dispatched is not None and (engine := self._submissions.get(self._dispatched.replica)) is not None:
            engine.on_sent(self._number)

    def charge_tokens(self, *, prompt_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> None:
        """Adds tokens to the unsent counts, which are sent to the controller a little later."""
        if self._unsent_tokens is _NO_TOKENS:
            self._controller.schedule_flush(self)
        prompt, cached, output = self._unsent_tokens
        self._unsent_tokens = prompt + prompt_tokens, cached + cached_tokens, output + output_tokens

    def on_first_token(self) -> None:
        """Records the first output token, and sends the counts at the end of this turn of the event loop."""
        # Flush at the end of this event loop iteration: the token counts are added before then.
        self._first_token_unsent = True
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Sends the token counts that were gathered."""
        if self._first_token_unsent or self._unsent_tokens is not _NO_TOKENS:
            self._controller.send(TokensUsed(self._number, *self._unsent_tokens, first=self._first_token_unsent))
            self._unsent_tokens, self._first_token_unsent = _NO_TOKENS, False

    @property
    def _acceptance(self) -> AdmitAccepted:
        if self._accepted is None:
            raise RuntimeError("The entry was waited for before it was entered.")
        return self._accepted


class RemoteFlowController:
    """Asks the controller for admission and dispatch. Implements `maitred.app.request.flow_control.FlowController`.

    Args:
        controller: The client of the controller.
        endpoints: Pool -> its replicas, by name.
        submissions: Pool -> the submission trackers of its engines.
        config: Prices, and the default length of responses.
        recoveries: How often a request may be requeued for another replica.
    """

    def __init__(
        self,
        controller: ControllerClient,
        endpoints: Mapping[str, Mapping[str, AnyEndpoint]],
        submissions: Mapping[str, Mapping[str, SubmissionTracker]],
        config: AdmissionConfig,
        recoveries: int,
    ) -> None:
        self._controller = controller
        self._endpoints = endpoints
        self._submissions = submissions
        self._prices = PriceList(config.prices)
        self._default_output_tokens = config.default_output_tokens
        self._recoveries = recoveries

    @property
    def default_output_tokens(self) -> int | None:
        """Output tokens of a choice of a request without `max_tokens`; None: as many as fit."""
        return self._default_output_tokens

    def price_of(self, model: str) -> Price:
        """Returns the price of a model's tokens."""
        return self._prices.price_for(model).price

    def check(self, pool: str, dispatch_request: DispatchRequest) -> None:
        """Returns None: the controller predicts the queue position when it admits the request."""

    async def overflow_others(self, pool: str, dispatch_request: DispatchRequest) -> bool:
        """Returns False: a worker forwards every request that could move to another model."""
        return False

    async def admit(
        self,
        pool: str,
        dispatch_request: DispatchRequest,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[RemoteDispatch, RemoteDispatch]:
        """Has the controller admit the request; returns one handle for the grant and for the queue entry."""
        await self._controller.wait_connected()
        endpoints = self._endpoints[pool]
        entry = await stack.enter_async_context(
            RemoteDispatch(
                self._controller,
                endpoints,
                self._submissions.get(pool, {}),
                CancelScope(),
                admission_request,
                self._recoveries,
            )
        )
        await entry.request_admission(
            _admit_request(entry.number, pool, dispatch_request, admission_request, with_token_ids=len(endpoints) > 1)
        )
        return entry, entry

    async def rate_limit_status(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """Returns how far a client's rate limits are used; None while the controller is away."""
        try:
            reply = await self._controller.query(lambda number: RateLimitQuery(number, principal, model))
        except Unavailable:
            return None
        assert isinstance(reply, RateLimitReply)
        return reply.standing

    def position_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """Returns None: queries for a queue position are forwarded to the controller."""
        return None

    def serving(self, pool: str) -> bool:
        """Whether the controller is connected."""
        return self._controller.is_connected


def _admit_request(
    number: int,
    pool: str,
    dispatch_request: DispatchRequest,
    admission_request: AdmissionRequest,
    *,
    with_token_ids: bool,
) -> AdmitRequest:
    """Builds the message that asks the controller to admit a request.

    Args:
        number: The number under which the controller knows the request.
        pool: The pool in whose queue it waits.
        dispatch_request: The request as the queue sees it.
        admission_request: The request as admission sees it.
        with_token_ids: Whether replicas are compared by the prefixes that they have cached. Else only the length of
            each
            prompt is sent.
    """
    return AdmitRequest(
        number=number,
        pool=pool,
        principal=admission_request.principal,
        request_id=dispatch_request.id,
        route=admission_request.route,
        model=admission_request.model,
        arrived_s=dispatch_request.arrived_s,
        flow=dispatch_request.flow,
        prompts=[
            PromptSummary(len(prompt), list(prompt[: len(prompt)]) if with_token_ids else [])
            for prompt in dispatch_request.prompts
        ],
        choices=dispatch_request.choices,
        length=dispatch_request.max_tokens,
        window_left=admission_request.window_left,
        max_tokens=admission_request.max_tokens,
        min_tokens=admission_request.min_tokens,
        deadline_s=dispatch_request.ttft_deadline_s,
        session=dispatch_request.session,
        max_tokens_param=admission_request.max_tokens_param,
        prompt_param=admission_request.prompt_param,
    )


CURRENT_DISPATCH: ContextVar["RemoteDispatch | None"] = ContextVar("dispatch of the current request", default=None)
"""The dispatch for which the current task sends something to a replica."""
_NO_TOKENS = (0, 0, 0)
"""Counts of prompt tokens, cached prompt tokens and output tokens."""
_log = logging.getLogger(__name__)


_ATTEMPT_RESULTS = {
    AttemptOutcome.SUCCESS: AttemptResult.SUCCESS,
    AttemptOutcome.FAILURE: AttemptResult.FAILURE,
    AttemptOutcome.NEUTRAL: AttemptResult.NEITHER,
}


class RemoteUpstreamStatus(UpstreamStatus):
    """Status of an upstream server in a worker: lets every request through and records each result.

    The result is recorded at the current dispatch, which sends it to the controller.
    """

    def check(self) -> None:
        """Does nothing: the controller checks the status before it dispatches a request."""

    def start_attempt(self) -> BreakerAttempt:
        """Returns a dummy attempt: the controller has the circuit breaker."""
        return BreakerAttempt(0, is_probe=False, started_s=0.0)

    def on_first_part(self, attempt: BreakerAttempt) -> None:
        """Does nothing: the controller learns of the first token from the dispatch."""

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome) -> None:
        """Records the outcome of the attempt at the current dispatch."""
        self._record(_ATTEMPT_RESULTS[outcome])

    def on_unreachable(self, reason: str) -> None:
        """Records at the current dispatch that the server could not be reached."""
        self.reason = reason
        self._record(AttemptResult.UNREACHABLE)

    def _record(self, result: AttemptResult) -> None:
        entry = CURRENT_DISPATCH.get()
        if entry is not None and entry.attempt_result is not AttemptResult.UNREACHABLE:
            entry.attempt_result = result


_ENGINE_CONNECT_TIMEOUT_S = 2.0
"""How long a request waits for this worker's connection to an engine that the controller has dispatched it to."""
