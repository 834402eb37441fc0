"""The `FlowController` of a worker: it asks the controller for each request over the IPC connection."""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import TracebackType
from typing import overload

from msgspec.structs import replace

from maitred.admission.config import AdmissionConfig
from maitred.admission.prices import PriceList
from maitred.admission.request import AdmissionRequest
from maitred.api.in_flight import CancelScope
from maitred.app.workers.controller_client import ControllerClient
from maitred.core.context import Outcome, RateLimitStatus
from maitred.core.errors import Bug, MaitredError, Overloaded, Unavailable
from maitred.core.flow import ONE_FLOW, QueuePosition
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
    Dispatched,
    LimitQuery,
    LimitReply,
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
    WorkerAttemptOutcome,
)


class SubmissionAcker:
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


class RemoteAdmission:
    """An admitted request at the controller, with its grant and its queue entry; leaving the context releases both.

    It survives a controller restart: the worker sends the grant to the next controller, which restores the queue entry
    and settles the grant.

    Implements `maitred.app.request.flow_control.GrantHandle` and `DispatchHandle`.

    Args:
        controller: The client of the controller.
        endpoints: The replicas of the model, by name.
        submission_ackers: The submission ackers of those replicas that are engines of this gateway, by name.
        cancel_scope: Is cancelled when the controller ends the request. It encloses this context.
        admission_request: The request, with its context.
        recoveries: How often the request may be requeued for another replica.

    Attributes:
        attempt_outcome: Outcome of the current attempt, for the circuit breaker of the upstream server.
        retry_after_s: Time that the server asks to wait, if it was busy and names one.
    """

    def __init__(
        self,
        controller: ControllerClient,
        endpoints: Mapping[str, AnyEndpoint],
        submission_ackers: Mapping[str, SubmissionAcker],
        cancel_scope: CancelScope,
        admission_request: AdmissionRequest,
        recoveries: int,
    ) -> None:
        assert admission_request.context is not None
        self._controller = controller
        self._endpoints = endpoints
        self._submission_ackers = submission_ackers
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
        self.attempt_outcome = WorkerAttemptOutcome.NEUTRAL
        self.retry_after_s: float | None = None

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
        context.rate_limits, context.predicted_position = accepted.rate_limits, accepted.queue_position
        context.clamped_max_tokens = accepted.max_tokens if accepted.clamped else None

    @property
    def number(self) -> int:
        """The number under which the controller knows this request."""
        return self._number

    async def __aenter__(self) -> "RemoteAdmission":
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
            number=self._number,
            usage=self._context.usage,
            first_token_s=self._context.first_token_s,
            attempt_outcome=self.attempt_outcome,
            error=None if is_cancelled else encoded_error,
            cancelled=is_cancelled,
            retry_after_s=self.retry_after_s,
        )
        if not self._is_disconnected:
            self._controller.send(release_request)
        elif (request_id := self.unanswered_id) is not None:
            self._controller.keep_unanswered_id(request_id)
        elif (resume_grant := self.take_resume_grant()) is not None:
            self._controller.keep_ended_grant(replace(resume_grant, ended=resume_grant.ended or release_request))
        if self._settle_request is not None:
            self._settle_reply = SettleReply(self._number)  # no reply reaches another task that waits for one
            self._wake()

    # --- messages of the controller ---

    def on_message(self, message: ToWorker) -> None:
        """Handles a message of the controller. Implements `RequestListener.on_message`."""
        if isinstance(message, AdmitRejected):
            self._is_finished = True
            error = decode_error(message.error)
            if message.rate_limits is not None:
                self._context.rate_limits = message.rate_limits
            if isinstance(error, Overloaded):
                self._context.predicted_position = error.position
            # Cancel the request, unless it waits for a message: then `_wait_message` raises the error.
            if self._waiter is None:
                self._cancel_scope.cancel(error)
            self._error = error
        elif isinstance(message, AdmitAccepted):
            self._accepted = message
        elif isinstance(message, Dispatched):
            self._dispatched = message
            self.attempt_outcome, self.retry_after_s = WorkerAttemptOutcome.NEUTRAL, None
        elif isinstance(message, SettleReply):
            self._settle_reply = message
            self._context.paid_tokens = message.paid_tokens
            self._is_finished = message.error is None  # a settled request holds nothing any more
        self._wake()

    def on_disconnect(self) -> None:
        """Marks the controller as disconnected. A running response continues."""
        self._is_disconnected = True
        self._wake()

    def take_resume_grant(self) -> ResumeGrant | None:
        """Takes the grant for the next controller. Implements `RequestListener.take_resume_grant`."""
        if self._admit_request is None or self._accepted is None or self._settle_reply is not None:
            return None
        self._is_disconnected = False
        self._unsent_tokens, self._first_token_unsent = _NO_TOKENS, False  # the usage below contains these tokens
        return ResumeGrant(
            admit_request=replace(
                self._admit_request, prompts=[replace(prompt, ids=[]) for prompt in self._admit_request.prompts]
            ),
            lease=self._accepted.lease,
            max_tokens=self._accepted.max_tokens,
            replica="" if self._dispatched is None else self._dispatched.replica,
            usage=self._context.usage,
            first_token_s=self._context.first_token_s,
            ended=self._settle_request,
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
        CURRENT_ADMISSION.set(self)
        replica = self._dispatched.replica
        if (acker := self._submission_ackers.get(replica)) is not None and not acker.is_connected:
            await acker.wait_connected()
        return self._endpoints[replica]

    @property
    def region(self) -> str | None:
        """Region of the replica to which the request was dispatched; None: it has no name."""
        return None if self._dispatched is None else self._dispatched.region

    def start_hedge_timer(self) -> float | None:
        """Returns None: a worker forwards requests that may be hedged."""
        return None

    def hedge(self) -> HedgeAllocation | None:
        """Returns None: a worker forwards requests that may be hedged."""
        return None

    @property
    def has_other_replica(self) -> bool:
        """Whether another replica could take the request, as of its dispatch."""
        return self._dispatched is not None and self._dispatched.has_other_replica

    @property
    def has_idle_replica(self) -> bool:
        """Whether another replica had room for the request when it was dispatched."""
        return self._dispatched is not None and self._dispatched.has_idle_replica

    def requeue(
        self, *, prompts: Sequence[int], answer_by_s: float | None = None, suspend_s: float | None = None
    ) -> bool:
        """Reports the failed replica, so that the request is requeued; returns False if no requeues are left."""
        if self._requeue_count >= self._recoveries or self._is_finished:
            return False
        self._requeue_count += 1
        self.flush()
        self._dispatched = None
        self._controller.send(
            ReplicaFailed(
                self._number,
                attempt_outcome=self.attempt_outcome,
                prompts=list(prompts),
                answer_by_s=answer_by_s,
                rest_s=suspend_s,
                retry_after_s=self.retry_after_s,
            )
        )
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
        return None if self._dispatched is not None else self._acceptance.queue_position

    def on_submitted(self) -> None:
        """Records a submission to the engine, whose next report acknowledges it."""
        if self._dispatched is None:
            return
        if (acker := self._submission_ackers.get(self._dispatched.replica)) is not None:
            acker.on_sent(self._number)

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
            raise RuntimeError("The request is not admitted yet.")
        return self._accepted


class RemoteFlowController:
    """Asks the controller for admission and dispatch. Implements `maitred.app.request.flow_control.FlowController`.

    Args:
        controller: The client of the controller.
        endpoints: Pool -> its replicas, by name.
        submission_ackers: Pool -> the submission ackers of its engines, by name.
        config: Prices, and the default length of responses.
        recoveries: How often a request may be requeued for another replica.
    """

    def __init__(
        self,
        controller: ControllerClient,
        endpoints: Mapping[str, Mapping[str, AnyEndpoint]],
        submission_ackers: Mapping[str, Mapping[str, SubmissionAcker]],
        config: AdmissionConfig,
        recoveries: int,
    ) -> None:
        self._controller = controller
        self._endpoints = endpoints
        self._submission_ackers = submission_ackers
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

    @overload
    async def admit(
        self,
        pool: str,
        dispatch_request: DispatchRequest,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[RemoteAdmission, RemoteAdmission]: ...
    @overload
    async def admit(
        self,
        pool: str,
        dispatch_request: None,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[RemoteAdmission, None]: ...
    async def admit(
        self,
        pool: str,
        dispatch_request: DispatchRequest | None,
        admission_request: AdmissionRequest,
        timeline: RequestTimeline,
        stack: ResourceStack,
    ) -> tuple[RemoteAdmission, RemoteAdmission | None]:
        """Has the controller admit the request; returns one handle for the grant and for the queue entry."""
        await self._controller.wait_connected()
        endpoints = self._endpoints[pool]
        admission = await stack.enter_async_context(
            RemoteAdmission(
                self._controller,
                endpoints,
                submission_ackers=self._submission_ackers.get(pool, {}),
                cancel_scope=CancelScope(),
                admission_request=admission_request,
                recoveries=self._recoveries,
            )
        )
        await admission.request_admission(
            _make_admit_request(
                admission.number, pool, dispatch_request, admission_request, with_token_ids=len(endpoints) > 1
            )
        )
        return admission, None if dispatch_request is None else admission

    async def rate_limit_status(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """Returns how far a client's rate limits are used; None while the controller is away."""
        try:
            reply = await self._controller.query(lambda number: RateLimitQuery(number, principal, model))
        except Unavailable:
            return None
        assert isinstance(reply, RateLimitReply)
        return reply.rate_limits

    async def check_limits(self, principal: Principal, least_output: int) -> None:
        """Has the controller check a caller's limits; does nothing while it is away."""
        try:
            reply = await self._controller.query(lambda number: LimitQuery(number, principal, least_output))
        except Unavailable:
            return
        assert isinstance(reply, LimitReply)
        if reply.error is not None:
            raise decode_error(reply.error)

    def position_of(self, request_id: str, organisation: str) -> QueuePosition | None:
        """Returns None: queries for a queue position are forwarded to the controller."""
        return None

    def serving(self, pool: str) -> bool:
        """Whether the controller is connected."""
        return self._controller.is_connected


def _make_admit_request(
    number: int,
    pool: str,
    dispatch_request: DispatchRequest | None,
    admission_request: AdmissionRequest,
    *,
    with_token_ids: bool,
) -> AdmitRequest:
    """Makes the message that asks the controller to admit a request.

    Args:
        number: The number under which the controller knows the request.
        pool: The pool in whose queue it waits.
        dispatch_request: The request as the queue sees it; None: it waits in no queue.
        admission_request: The request as admission sees it, with its context.
        with_token_ids: Whether replicas are compared by the prefixes that they have cached. Else only the length of
            each prompt is sent.
    """
    context = admission_request.context
    assert context is not None
    flow, prompts = ONE_FLOW, [PromptSummary(admission_request.prompt_tokens, [])]
    if dispatch_request is not None:
        flow = dispatch_request.flow
        prompts = [
            # A slice has the known ids, which may be fewer than the tokens; see `TruncatedPrompt`.
            PromptSummary(len(prompt), list(prompt[: len(prompt)]) if with_token_ids else [])
            for prompt in dispatch_request.prompts
        ]
    return AdmitRequest(
        number=number,
        pool=pool,
        principal=admission_request.principal,
        request_id=admission_request.request_id,
        route=admission_request.route,
        model=admission_request.model,
        arrived_s=context.started_s,
        flow=flow,
        prompts=prompts,
        choices=admission_request.choices,
        requested_output_tokens=0 if dispatch_request is None else dispatch_request.max_tokens,
        window_left=admission_request.window_left,
        max_tokens=admission_request.max_tokens,
        min_tokens=admission_request.min_tokens,
        deadline_s=None if dispatch_request is None else dispatch_request.ttft_deadline_s,
        session=None if dispatch_request is None else dispatch_request.session,
        max_tokens_param=admission_request.max_tokens_param,
        prompt_param=admission_request.prompt_param,
        is_counted=admission_request.is_counted,
        has_fallback=context.has_fallback,
        longest_prompt=admission_request.longest_prompt,
        cache=admission_request.cache,
        cached_tokens=admission_request.cached_tokens,
        bill=admission_request.bill,
        regions=None if dispatch_request is None else dispatch_request.regions,
    )


CURRENT_ADMISSION: ContextVar["RemoteAdmission | None"] = ContextVar("admission of the current request", default=None)
"""The admission of the request that the current task sends to a replica."""
_NO_TOKENS = (0, 0, 0)
"""Counts of prompt tokens, cached prompt tokens and output tokens."""
_log = logging.getLogger(__name__)


_WORKER_ATTEMPT_OUTCOMES = {
    AttemptOutcome.SUCCESS: WorkerAttemptOutcome.SUCCESS,
    AttemptOutcome.FAILURE: WorkerAttemptOutcome.FAILURE,
    AttemptOutcome.BUSY: WorkerAttemptOutcome.BUSY,
    AttemptOutcome.ACCOUNT_REFUSED: WorkerAttemptOutcome.ACCOUNT_REFUSED,
    AttemptOutcome.NEUTRAL: WorkerAttemptOutcome.NEUTRAL,
}


class RemoteUpstreamStatus(UpstreamStatus):
    """Status of an upstream server in a worker: lets every request through and records each outcome.

    The outcome is recorded at the current admission, which sends it to the controller.
    """

    def raise_if_unavailable(self) -> None:
        """Does nothing: the controller checks the status before it dispatches a request."""

    def is_refusing(self) -> bool:
        """Returns False: the controller counts the refusals of all workers, and rejects what can begin elsewhere."""
        return False

    def start_attempt(self) -> BreakerAttempt:
        """Returns a dummy attempt: the controller has the circuit breaker."""
        return BreakerAttempt(0, is_trial=False, started_s=0.0)

    def on_first_token(self, attempt: BreakerAttempt) -> None:
        """Does nothing: the admission tells the controller of the first token."""

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome, *, retry_after_s: float | None = None) -> None:
        """Records the outcome of the attempt at the current admission."""
        self._record(_WORKER_ATTEMPT_OUTCOMES[outcome], retry_after_s)

    def mark_down(self, reason: str) -> None:
        """Records at the current admission that the server could not be reached."""
        self.reason = reason
        self._record(WorkerAttemptOutcome.UNREACHABLE)

    def _record(self, outcome: WorkerAttemptOutcome, retry_after_s: float | None = None) -> None:
        admission = CURRENT_ADMISSION.get()
        if admission is not None and admission.attempt_outcome is not WorkerAttemptOutcome.UNREACHABLE:
            admission.attempt_outcome, admission.retry_after_s = outcome, retry_after_s


_ENGINE_CONNECT_TIMEOUT_S = 2.0
"""How long a request waits for this worker's connection to an engine that the controller has dispatched it to."""
