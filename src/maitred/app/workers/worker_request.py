"""Controller side of a request that a worker serves: admission, dispatch and settlement.

A request that an earlier controller admitted is resumed.

The task of a request holds the same resources in the same order as `Pipeline` in a single process. So cancelling the
task, also after the death of the worker, releases everything.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from maitred.admission.grant import Grant
from maitred.admission.request import AdmissionRequest
from maitred.api.in_flight import ClientDisconnected, InFlightLimiter, InFlightSlot
from maitred.app.request.flow_control import LocalFlowController
from maitred.app.request.upstream_request import TruncatedPrompt
from maitred.core.clock import Clock
from maitred.core.context import RequestContext
from maitred.core.errors import Bug, MaitredError, ReplicaBusy, ReplicaUnavailable
from maitred.core.flow import QueuePosition
from maitred.core.resource_stack import ResourceStack
from maitred.core.tenancy import ANONYMOUS
from maitred.core.timeline import TimelineSpan
from maitred.dispatch.dispatcher import DispatchEntry
from maitred.dispatch.request import AnyEndpoint, DispatchRequest
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt
from maitred.wire.error_codec import decode_error, encode_error
from maitred.wire.worker_protocol import (
    AdmitAccepted,
    AdmitRejected,
    AdmitRequest,
    Dispatched,
    PromptSummary,
    ReleaseRequest,
    ReplicaFailed,
    ResumeGrant,
    SettleReply,
    SettleRequest,
    TokensUsed,
    ToWorker,
    WorkerAttemptOutcome,
)

if TYPE_CHECKING:
    from maitred.replica.upstream.replica import UpstreamReplica

_ATTEMPT_OUTCOMES = {
    WorkerAttemptOutcome.SUCCESS: AttemptOutcome.SUCCESS,
    WorkerAttemptOutcome.FAILURE: AttemptOutcome.FAILURE,
    WorkerAttemptOutcome.UNREACHABLE: AttemptOutcome.FAILURE,
    WorkerAttemptOutcome.BUSY: AttemptOutcome.BUSY,
    WorkerAttemptOutcome.ACCOUNT_REFUSED: AttemptOutcome.ACCOUNT_REFUSED,
}
WorkerCommand = ReplicaFailed | SettleRequest | ReleaseRequest


class WorkerRequest:
    """One request of a worker at one model, from its `AdmitRequest` to its release.

    Args:
        admit_request: The message of the worker.
        flow_controller: Admits and dispatches the request.
        in_flight: Limits the requests in flight.
        clock: The time, for the request timeline.
        send: Sends the worker a message.
        resume_grant: What an earlier controller, now dead, had granted; None: the request is new.

    Attributes:
        admit_request: The message of the worker.
        resume_done: Set when grant and queue entry are restored; None: the request is new.
    """

    def __init__(
        self,
        admit_request: AdmitRequest,
        flow_controller: LocalFlowController,
        in_flight: InFlightLimiter,
        clock: Clock,
        send: Callable[[ToWorker], None],
        resume_grant: ResumeGrant | None = None,
    ) -> None:
        self.admit_request = admit_request
        self.resume_done = None if resume_grant is None else asyncio.Event()
        self._resume_grant = resume_grant
        # The anonymous principal cannot be revoked, and is recognised by the identity of this object.
        self._principal = ANONYMOUS if admit_request.principal == ANONYMOUS else admit_request.principal
        self._flow_controller = flow_controller
        self._in_flight = in_flight
        self._clock = clock
        self._send = send
        self._commands: deque[WorkerCommand] = deque()
        self._command_waiter: asyncio.Future[None] | None = None
        """Future of the task that waits for the next command."""
        self._in_flight_slot: InFlightSlot | None = None
        self._entry: DispatchEntry | None = None
        self._accepts_commands = False
        """Whether the task reads commands."""
        self._is_released = False
        self._upstream_attempt: tuple[UpstreamReplica, BreakerAttempt] | None = None
        self.context = RequestContext(
            admit_request.request_id,
            started_s=admit_request.arrived_s,
            route=admit_request.route,
            principal=self._principal,
            model=admit_request.model,
            priority=admit_request.flow.priority,
            prompt_tokens=sum(prompt.tokens for prompt in admit_request.prompts),
        )

    @property
    def spans(self) -> list[TimelineSpan]:
        """Spans that this process has recorded of the request."""
        return self.context.timeline.spans

    # --- messages of the worker ---

    def charge_tokens(self, tokens_used: TokensUsed) -> None:
        """Charges tokens that the request has consumed, and records the first output token."""
        context = self.context
        context.cached_tokens += tokens_used.cached_tokens
        context.completion_tokens += tokens_used.output_tokens
        if self._entry is None:
            return
        if tokens_used.first:
            context.first_token_s = self._clock.monotonic_s()
            self._entry.on_first_token()
            if self._upstream_attempt is not None:
                upstream, attempt = self._upstream_attempt
                upstream.status.on_first_token(attempt)
        self._entry.charge_tokens(
            prompt_tokens=tokens_used.prompt_tokens,
            cached_tokens=tokens_used.cached_tokens,
            output_tokens=tokens_used.output_tokens,
        )

    def on_submission_acked(self) -> None:
        """Records that the engine has received the next prompt, so that its load reports count it."""
        if self._entry is not None:
            self._entry.on_submitted()

    def on_command(self, command: WorkerCommand) -> None:
        """Handles a command of the worker: settle, requeue or release the request."""
        if self._accepts_commands or not isinstance(command, ReleaseRequest):
            self._commands.append(command)
            if self._command_waiter is not None and not self._command_waiter.done():
                self._command_waiter.set_result(None)
        elif self._in_flight_slot is None:
            self._is_released = True
        else:
            self._in_flight_slot.cancel(ClientDisconnected() if command.error is None else decode_error(command.error))

    # --- life of the request ---

    async def run(self) -> None:
        """Runs the request from admission to its end. Raises nothing but a cancellation or a bug."""
        number = self.admit_request.number
        if self._is_released:
            return
        resume_grant = self._resume_grant
        try:
            with self._in_flight.acquire(
                self._principal, even_if_full=resume_grant is not None
            ) as self._in_flight_slot:
                if self.admit_request.pool not in self._flow_controller.pools:
                    raise ReplicaUnavailable(retry_after_s=1.0)  # the worker uses an older configuration
                await (self._serve() if resume_grant is None else self._serve_resumed(resume_grant))
        except ClientDisconnected:
            pass
        except MaitredError as error:
            self._send(AdmitRejected(number, encode_error(error), self.context.rate_limits))
        except Exception:
            self._send(AdmitRejected(number, encode_error(Bug()), self.context.rate_limits))
            raise

    async def _serve(self) -> None:
        admit_request, context = self.admit_request, self.context
        if admit_request.cache:
            await self._serve_cached()
            return
        if admit_request.has_fallback and self._flow_controller.is_refusing(admit_request.pool):
            raise ReplicaBusy()
        dispatch_request = self._dispatch_request(admit_request.requested_output_tokens)
        context.predicted_position = position = self._flow_controller.check(admit_request.pool, dispatch_request)
        async with ResourceStack() as stack:
            grant, entry = await self._flow_controller.admit(
                admit_request.pool, dispatch_request, self._admission_request(), context.timeline, stack
            )
            self._entry = entry
            self._accept(grant, position, entry.expected_tokens)
            try:
                while await self._run_at_replica(grant, entry):
                    pass
            finally:
                self._end_attempt(WorkerAttemptOutcome.NEUTRAL)

    async def _serve_cached(self) -> None:
        """Reserves limits for an answer that the worker has from a cache, and waits until it is settled."""
        async with ResourceStack() as stack:
            grant, _ = await self._flow_controller.admit(
                self.admit_request.pool, None, self._admission_request(), self.context.timeline, stack
            )
            self._accepts_commands = True
            self._accept(grant)
            await self._run_commands(grant, None)

    def _accept(self, grant: Grant, position: QueuePosition | None = None, expected_tokens: int = 0) -> None:
        self._send(
            AdmitAccepted(
                number=self.admit_request.number,
                lease=grant.lease,
                max_tokens=grant.max_tokens,
                clamped=grant.clamped,
                rate_limits=self.context.rate_limits,
                queue_position=position,
                expected_tokens=expected_tokens,
            )
        )

    async def _serve_resumed(self, resume_grant: ResumeGrant) -> None:
        """Takes over grant and queue entry of an earlier controller and resumes the request."""
        self._update_usage(resume_grant)
        is_cached = bool(self.admit_request.cache)
        async with ResourceStack() as stack:
            grant, entry = await self._flow_controller.reattach(
                self.admit_request.pool,
                None if is_cached else self._dispatch_request(resume_grant.max_tokens),
                self._admission_request(),
                resume_grant.lease,
                resume_grant.replica,
                stack,
            )
            self._entry, must_dispatch = entry, not resume_grant.replica and not is_cached
            self._accepts_commands = not must_dispatch
            if self.resume_done is not None:
                self.resume_done.set()
            try:
                if not must_dispatch:
                    await self._restore_progress(resume_grant, grant, entry)
                    must_dispatch = await self._run_commands(grant, entry)
                while must_dispatch and entry is not None:
                    must_dispatch = await self._run_at_replica(grant, entry)
            finally:
                self._end_attempt(WorkerAttemptOutcome.NEUTRAL)

    async def _restore_progress(self, resume_grant: ResumeGrant, grant: Grant, entry: DispatchEntry | None) -> None:
        """Restores the attempt at the replica and the tokens that it has charged."""
        grant.set_replica(resume_grant.replica)
        if entry is None:
            return
        with suppress(ReplicaUnavailable):
            self._start_attempt(await entry.wait_dispatched())
        if resume_grant.first_token_s is not None:
            entry.charge_tokens(
                prompt_tokens=resume_grant.usage.prompt_tokens, cached_tokens=resume_grant.usage.cached_tokens
            )

    async def _run_at_replica(self, grant: Grant, entry: DispatchEntry) -> bool:
        """Waits for dispatch, then serves the attempt at the replica; returns whether the request was requeued."""
        self._accepts_commands = False
        endpoint = await entry.wait_dispatched()
        self._accepts_commands = True
        try:
            self._start_attempt(endpoint)
        except ReplicaUnavailable:
            if entry.requeue(prompts=range(len(self.admit_request.prompts))):
                return True
            raise
        grant.set_replica(endpoint.name)
        self._send(
            Dispatched(
                self.admit_request.number,
                endpoint.name,
                entry.waited_ms,
                has_other_replica=entry.has_other_replica,
                has_idle_replica=entry.has_idle_replica,
                region=entry.region,
            )
        )
        return await self._run_commands(grant, entry)

    async def _run_commands(self, grant: Grant, entry: DispatchEntry | None) -> bool:
        """Executes the worker's commands while the request runs; returns whether the request was requeued."""
        number = self.admit_request.number
        while True:
            match await self._next_command():
                case ReplicaFailed() as command:
                    self._end_attempt(command.attempt_outcome, command.retry_after_s)
                    if entry is None or not entry.requeue(
                        prompts=command.prompts, answer_by_s=command.answer_by_s, suspend_s=command.rest_s
                    ):
                        raise ReplicaUnavailable
                    return True
                case SettleRequest() as command:
                    self._update_usage(command)
                    self._end_attempt(WorkerAttemptOutcome.SUCCESS)
                    try:
                        await grant.settle(command.usage, command.outcome)
                    except MaitredError as error:
                        self._send(SettleReply(number, encode_error(error)))
                    else:
                        # No message of this request follows: its worker sends no `ReleaseRequest`.
                        self._send(SettleReply(number, paid_tokens=self.context.paid_tokens))
                        return False
                case ReleaseRequest() as command:
                    self._update_usage(command)
                    grant.record_usage(command.usage)
                    self._end_attempt(command.attempt_outcome, command.retry_after_s)
                    if command.cancelled and self._in_flight_slot is not None:
                        # A client disconnect cancels the request; tokens until then are billed.
                        self._in_flight_slot.cancel(ClientDisconnected())
                        await asyncio.sleep(0)
                    if command.error is not None:
                        raise decode_error(command.error)
                    return False

    async def _next_command(self) -> WorkerCommand:
        while not self._commands:
            self._command_waiter = asyncio.get_running_loop().create_future()
            await self._command_waiter
        return self._commands.popleft()

    def _update_usage(self, message: SettleRequest | ReleaseRequest | ResumeGrant) -> None:
        """Takes over the usage that the worker has counted, since it has seen every token."""
        context, usage = self.context, message.usage
        context.prompt_tokens, context.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        context.completion_tokens, context.first_token_s = usage.completion_tokens, message.first_token_s
        context.cache_write_tokens, context.cache_write_1h_tokens = (
            usage.cache_write_tokens,
            usage.cache_write_1h_tokens,
        )

    def _start_attempt(self, endpoint: AnyEndpoint) -> None:
        if endpoint.reports_capacity:
            return  # an engine of this gateway reports its own state
        upstream: UpstreamReplica = endpoint.replica
        self._upstream_attempt = upstream, upstream.status.start_attempt()
        upstream.open_streams += 1

    def _end_attempt(self, outcome: WorkerAttemptOutcome, retry_after_s: float | None = None) -> None:
        if self._upstream_attempt is None:
            return
        (upstream, attempt), self._upstream_attempt = self._upstream_attempt, None
        upstream.open_streams -= 1
        attempt_outcome = _ATTEMPT_OUTCOMES.get(outcome, AttemptOutcome.NEUTRAL)
        upstream.status.on_end(attempt, attempt_outcome, retry_after_s=retry_after_s)
        if outcome is WorkerAttemptOutcome.UNREACHABLE:
            upstream.status.mark_down("a worker could not reach it")

    # --- the request as dispatch and admission see it ---

    def _dispatch_request(self, max_tokens: int) -> DispatchRequest:
        admit_request = self.admit_request
        return DispatchRequest(
            id=admit_request.request_id,
            organisation=self._principal.tenants[-1],
            flow=admit_request.flow,
            prompt_tokens=sum(prompt.tokens for prompt in admit_request.prompts),
            prompts=[_make_prompt(summary) for summary in admit_request.prompts],
            max_tokens=max_tokens,
            choices=admit_request.choices,
            arrived_s=admit_request.arrived_s,
            ttft_deadline_s=admit_request.deadline_s,
            session=admit_request.session,
            regions=admit_request.regions,
            timeline=self.context.timeline,
        )

    def _admission_request(self) -> AdmissionRequest:
        admit_request = self.admit_request
        return AdmissionRequest(
            principal=self._principal,
            request_id=admit_request.request_id,
            route=admit_request.route,
            model=admit_request.model,
            prompt_tokens=self.context.prompt_tokens,
            longest_prompt=admit_request.longest_prompt,
            max_tokens=admit_request.max_tokens,
            min_tokens=admit_request.min_tokens,
            window_left=admit_request.window_left,
            choices=admit_request.choices,
            max_tokens_param=admit_request.max_tokens_param,
            prompt_param=admit_request.prompt_param,
            cache=admit_request.cache,
            cached_tokens=admit_request.cached_tokens,
            bill=admit_request.bill,
            is_counted=admit_request.is_counted,
            context=self.context,
        )


def _make_prompt(summary: PromptSummary) -> Sequence[int]:
    return summary.ids if len(summary.ids) == summary.tokens else TruncatedPrompt(summary.ids, summary.tokens)
