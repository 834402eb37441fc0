"""Responses by one of several models: fallback after a failure, overflow while waiting, escalation after a check.

**Fallback.** A model that fails before anything of its answer has been seen is followed by the next on the request's
way (see `maitred.routing.pools.route_table`); each is admitted, queued and billed as what it is. Where none gives an
answer, the caller is told of the first failure: it is that of the model that was asked for.

A stream that breaks off later goes on at the next model only if the operator allows it for the model that began it. The
one that ends the answer is then billed for the whole of it, and the one that broke off for nothing, as for any failure.

**Overflow.** A request that waits for its model can move to another one, if that would serve it sooner.

**Escalation.** Small models answer most questions well, and what they get wrong can sometimes be seen without knowing
better: it is not the JSON that was asked for, it is a refusal, or the model itself found it improbable. Such an answer
is asked of the next larger model. Nobody may have seen a part of the first one then, so all of it is held back until it
has been checked.

Every model that answered is billed, because its tokens were computed. `max_usd` limits the sum.
"""

import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from maitred.admission.policy.ladder import DegradedRequest
from maitred.app.request.planner import RequestPlan
from maitred.app.request.response import ContinuableResponse
from maitred.core.context import RejectedAnswer, RequestContext
from maitred.core.errors import DeadlineUnmeetable, MaitredError, ReplicaBusy, ReplicaLost
from maitred.core.inference import InferenceRequest, TextDelta
from maitred.core.request import FinishReason
from maitred.core.resource_stack import ResourceStack
from maitred.core.service import PushStream, ResponseStream, StreamSink
from maitred.core.tenancy import Principal
from maitred.core.usage import Price, to_usd
from maitred.dispatch.dispatcher import DispatchEntry, OverflowRequested
from maitred.routing.auto.config import AutoModels
from maitred.routing.escalation.checks import CheckFailure, collect_choices, is_refusal, mean_logprob, requested_schema
from maitred.routing.escalation.config import EscalationConfig
from maitred.routing.escalation.schema import SchemaResult
from maitred.routing.escalation.schemas import SchemaChecker
from maitred.routing.pools.route_table import RoutePlan, RouteTarget

Respond = Callable[[RouteTarget, InferenceRequest, Principal, RequestContext, ResourceStack], Awaitable[ResponseStream]]
"""Plans, admits and enqueues a request at one model; the stack owns the grant and the queue entry
(`Pipeline.respond`)."""


class FallbackStream(PushStream):
    """Response of the first model of a route that answers; the next one is asked while nothing was returned.

    Implements `maitred.core.service.ResponseStream`. Entering it starts the response; leaving it ends what is
    unfinished.

    Args:
        respond: Starts the response of one model.
        request: The request.
        principal: The caller.
        context: Record of the request.
        route_plan: The models to try, in order.
        is_refusing: Returns whether a model has refused so many requests that this one begins at the next.

    Attributes:
        first_failure: The first failure of a model; None: none has failed.
    """

    def __init__(
        self,
        respond: Respond,
        request: InferenceRequest,
        principal: Principal,
        context: RequestContext,
        route_plan: RoutePlan,
        is_refusing: Callable[[RouteTarget], bool],
    ) -> None:
        self._respond = respond
        self._is_refusing = is_refusing
        self._request = request
        self._principal = principal
        self._context = context
        self._route_plan = route_plan
        self._stack = ResourceStack()
        """Owns the grant and queue entry at the current model."""
        self._batches: AsyncIterator[list[TextDelta]] | None = None
        self._seen: AsyncIterator[list[TextDelta]] | None = None
        """The response, once its first batch was returned; no fallback from then on, unless another model may continue
        it."""
        self._continuable: ContinuableResponse | None = None
        """The same response if another model may continue it."""
        self._sink: StreamSink | None = None
        self.first_failure: MaitredError | None = None

    def __aenter__(self) -> Coroutine[Any, Any, Self]:
        return self._start(self._route_plan.first_target())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[list[TextDelta]]:
        # After the first batch, read the inner stream directly: saves a coroutine frame per token.
        if self._continuable is not None:
            return self._next_or_continue(self._continuable)
        return self._first_batch() if self._seen is None else anext(self._seen)

    def push_to(self, sink: StreamSink) -> None:
        """Pushes deltas to a sink as they come; implements `PushStream.push_to`."""
        self._sink = sink
        response: object = self._seen
        if isinstance(response, PushStream):
            response.push_to(sink)

    async def _first_batch(self) -> list[TextDelta]:
        """Returns the first batch; falls back to the next model while none was returned."""
        while True:
            assert self._batches is not None
            try:
                parts = await anext(self._batches)
            except MaitredError as failure:
                target = self._next_target(failure)
                await self.__aexit__(type(failure), failure, failure.__traceback__)
                await self._start(target)
            else:
                # The first batch of a stream sends the response head, even if it is empty.
                if parts or not self._request.whole:
                    self._seen = response = self._batches
                    if isinstance(response, ContinuableResponse) and response.continues_at_fallback:
                        self._continuable = response
                return parts

    async def _next_or_continue(self, response: ContinuableResponse) -> list[TextDelta]:
        """Returns the next batch; if the stream breaks off, that of the next model that continues it."""
        while True:
            try:
                return await anext(response)
            except ReplicaLost as failure:
                prefix = response.prefix
                if prefix is None:
                    raise
                self.first_failure = failure
                await self.__aexit__(ReplicaLost, failure, failure.__traceback__)
                self._request = replace(self._request, prefix=prefix)
                await self._start(self._next_target(failure))
            self._context.recoveries += 1
            self._context.continued += 1
            self._seen, self._continuable = self._batches, None
            if self._sink is not None:
                self.push_to(self._sink)
            assert self._seen is not None
            if not isinstance(self._seen, ContinuableResponse):
                return await anext(self._seen)  # it may overflow to a third model, which then ends the answer
            response = self._continuable = self._seen

    async def _start(self, target: RouteTarget) -> Self:
        """Starts the response at a model, or at one of those after it."""
        route_plan = self._route_plan
        while True:
            if route_plan.has_other_targets or route_plan.stable_fallback is not None:
                while route_plan.has_general_target and self._is_refusing(target):
                    target = self._next_target(ReplicaBusy())
                self._context.has_fallback = route_plan.has_general_target
            self._context.arm = None if self._route_plan.arm is None else self._route_plan.arm_for(target)
            try:
                async with ResourceStack() as stack:
                    response = await self._respond(target, self._request, self._principal, self._context, stack)
                    self._batches, self._stack = aiter(response), stack.pop_all()
            except MaitredError as failure:
                target = self._next_target(failure)
            else:
                return self

    def _next_target(self, failure: MaitredError) -> RouteTarget:
        """Returns the target after a failed one; raises the first failure if there is none."""
        self.first_failure = self.first_failure or failure
        target = self._route_plan.next_target(failure)
        if target is None:
            if self.first_failure is failure:
                raise failure
            raise self.first_failure from failure
        self._context.reset_for_fallback(f"{target.reason}={target.name}")
        return target


class OverflowStream:
    """Response of a request that may move to its overflow model while it waits.

    Implements `maitred.core.service.ResponseStream`. Entering it enqueues the request; leaving it ends what is
    unfinished.

    A waiting request can be asked to move to the model that its own model's ladder names (`overflow`). It gives up
    nothing before it has everything there: the tokenised prompt, the budget, a place in the queue. A rejection there is
    as if it had not been asked. Once it has moved it does not come back: what has been sent to a provider costs.

    Args:
        admit: Admits and enqueues the plan at its own model.
        plan: Plan of the request at its own model.
        admit_overflow: Admits and enqueues the request at the other model.
        variant: The request for the overflow model.
        principal: The caller.
        context: Request context; restored if the request stays.
    """

    def __init__(
        self,
        admit: Callable[[RequestPlan, Principal, RequestContext, ResourceStack], Awaitable[ResponseStream]],
        plan: RequestPlan,
        admit_overflow: Callable[
            [DegradedRequest, Principal, RequestContext, ResourceStack], Awaitable[ResponseStream]
        ],
        variant: DegradedRequest,
        principal: Principal,
        context: RequestContext,
    ) -> None:
        self._admit = admit
        self._plan = plan
        self._admit_overflow = admit_overflow
        self._variant = variant
        self._principal = principal
        self._context = context
        self._stack = ResourceStack()
        self._batches: AsyncIterator[list[TextDelta]] | None = None

    async def __aenter__(self) -> Self:
        async with ResourceStack() as stack:
            self._batches = aiter(await self._admit(self._plan, self._principal, self._context, stack))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[TextDelta]:
        assert self._batches is not None
        while True:
            try:
                return await anext(self._batches)
            except OverflowRequested as asked:
                await self._overflow(asked.entry)

    async def _overflow(self, entry: DispatchEntry) -> None:
        """Moves to the overflow model, unless it is rejected there or was dispatched here in the meantime."""
        saved_context = copy.copy(self._context)
        try:
            async with ResourceStack() as stack:
                batches = aiter(await self._admit_overflow(self._variant, self._principal, self._context, stack))
                overflow_stack = stack.pop_all()
        except MaitredError:
            self._context.restore(saved_context)
            entry.decline_overflow()
            return
        cancel_error = DeadlineUnmeetable("It waits for another model now.")
        if entry.accept_overflow():
            overflow_stack, self._stack, self._batches = self._stack, overflow_stack, batches
            await overflow_stack.__aexit__(type(cancel_error), cancel_error, None)
        else:
            await overflow_stack.__aexit__(type(cancel_error), cancel_error, None)
            self._context.restore(saved_context)


@asynccontextmanager
async def open_schemas(autos: AutoModels) -> AsyncIterator[SchemaChecker]:
    """Opens the schema checker; its process starts with the first check, unless a model always needs it."""
    async with SchemaChecker(start_lazily=not any(auto.escalation.schema for auto in autos.values())) as schemas:
        yield schemas


def may_escalate(config: EscalationConfig, request: InferenceRequest) -> bool:
    """Whether an answer may be held back, to be asked of another model.

    Of a stream only where its caller has said so: it would come all at once, and late.
    """
    return config.is_enabled and (config.unasked and request.whole if request.escalate is None else request.escalate)


class AnswerChecker:
    """Checks whether an answer is good enough.

    Args:
        config: The enabled checks.
        schemas: Validates answers against JSON schemas; None: no schema check.
    """

    def __init__(self, config: EscalationConfig, schemas: SchemaChecker | None) -> None:
        self.config = config
        self._schemas = schemas
        self._refusal_prefixes = [opening.strip().lower().replace("’", "'") for opening in config.openings]

    async def failure(self, request: InferenceRequest, parts: list[TextDelta]) -> CheckFailure | None:
        """Returns the first check that a choice fails; None: all choices pass."""
        config, choices = self.config, collect_choices(parts)
        if any(choice.finish is FinishReason.DEADLINE for choice in choices):
            return None  # the deadline leaves no time for another model
        if config.refusal and any(is_refusal(choice, self._refusal_prefixes) for choice in choices):
            return CheckFailure.REFUSAL
        if config.schema and (schema := _requested_schema(request)) is not None and self._schemas is not None:
            for choice in choices:
                if not choice.has_tool_calls and await self._schemas.check(schema, choice.text) is SchemaResult.INVALID:
                    return CheckFailure.SCHEMA
        if config.logprob is not None:
            mean_logprobs = [mean for choice in choices if (mean := mean_logprob(choice)) is not None]
            if any(mean < config.logprob for mean in mean_logprobs):
                return CheckFailure.LOGPROB
        return None


class EscalatingStream:
    """Response that is held back until it passes its checks, and asked of larger models while it fails one.

    A larger model that cannot answer takes nothing away: its caller gets the answer that is there. Implements
    `maitred.core.service.ResponseStream`; the whole answer comes in one batch.

    Args:
        respond: Starts the response of one model.
        request: The request.
        principal: The caller.
        context: Record of the request.
        route_plan: Route plan of the requested name.
        route_to_larger: Returns the route plan of the next larger model; None: there is none.
        checker: Decides whether an answer is good enough.
        price_of: Returns the price of a model's tokens.
        is_refusing: Returns whether a model has refused so many requests that this one begins at the next.
    """

    def __init__(
        self,
        respond: Respond,
        request: InferenceRequest,
        principal: Principal,
        context: RequestContext,
        route_plan: RoutePlan,
        *,
        route_to_larger: Callable[[InferenceRequest, Principal, RoutePlan], RoutePlan | None],
        checker: AnswerChecker,
        price_of: Callable[[str], Price],
        is_refusing: Callable[[RouteTarget], bool],
    ) -> None:
        self._respond = respond
        self._is_refusing = is_refusing
        self._request = request
        self._principal = principal
        self._context = context
        self._route_plan = route_plan
        self._route_to_larger = route_to_larger
        self._checker = checker
        self._price_of = price_of
        self._spent_usd = 0.0

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        context, route_plan = self._context, self._route_plan
        parts = await self._collect_answer(route_plan)
        for left in reversed(range(self._checker.config.most + 1)):
            reason = await self._checker.failure(self._request, parts)
            if reason is None:
                break
            failed = RejectedAnswer(context.model, reason, context.usage)
            context.rejected_answers.append(failed)
            larger = self._route_to_larger(self._request, self._principal, route_plan) if left else None
            if larger is None:
                break
            known = context.reset_for_next_answer()
            try:
                parts = await self._collect_answer(larger)
            except MaitredError:
                context.restore(known)
                break
            context.rejected_answers[-1] = replace(failed, replaced=True)
            route_plan = larger
        yield parts if self._wants_logprobs else [*map(_without_scores, parts)]

    async def _collect_answer(self, route_plan: RoutePlan) -> list[TextDelta]:
        """Returns all deltas of the first model of the route plan that answers."""
        request = replace(
            self._request,
            whole=True,
            scored=self._checker.config.logprob is not None,
            max_usd=None if self._request.max_usd is None else max(0.0, self._request.max_usd - self._spent_usd),
        )
        async with FallbackStream(
            self._respond,
            request,
            self._principal,
            self._context,
            route_plan=route_plan,
            is_refusing=self._is_refusing,
        ) as answer:
            whole = [part async for parts in answer for part in parts]
        context = self._context
        self._spent_usd += to_usd(self._price_of(context.model).cost_nusd(context.usage))
        return whole

    @property
    def _wants_logprobs(self) -> bool:
        return self._request.sampling.top_logprobs is not None


def _without_scores(part: TextDelta) -> TextDelta:
    """Returns a delta without the log-probabilities that only the check of the answer needed."""
    prompt_scores = part.prompt_scores
    if prompt_scores is not None:
        prompt_scores = replace(prompt_scores, echoed=None)
    return replace(part, scores=None, prompt_scores=prompt_scores)


def _requested_schema(request: InferenceRequest) -> Any:  # noqa: ANN401 - whatever the caller sent
    """Returns the JSON schema of `response_format` or `guided_json`; None: the request has none."""
    if request.to_openai is None or not {"response_format", "guided_json"}.intersection(request.needs):
        return None
    return requested_schema(request.to_openai())
