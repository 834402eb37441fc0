"""One answer, by the first of several models that gives one.

A model that fails before anything of its answer has been seen is followed by the next on the request's way (see
`maitred.routing.pools.route_table`); each is admitted, queued and billed as what it is. Where none gives an answer, the
caller is told of the first failure: it is that of the model that was asked for.

One answer by the smallest of several models whose answer stands its checks.

Small models answer most questions well, and what they get wrong can sometimes be seen without knowing better: it is not
the JSON that was asked for, it is a refusal, or the model itself found it improbable. Such an answer is asked of the
next larger model. Nobody may have seen a part of the first one then, so all of it is held back until it has been
checked.

Each model that has answered is billed, as its tokens were computed: whoever allows this buys a better answer at up to
the price of all. What the request may cost holds for their sum.
"""

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from maitred.core.answer import (
    InferenceRequest,
    PushStream,
    RejectedAnswer,
    RequestContext,
    ResponseStream,
    StreamSink,
    TextDelta,
)
from maitred.core.errors import DeadlineUnmeetable, MaitredError
from maitred.core.request import FinishReason
from maitred.core.usage import Price, to_usd
from maitred.dispatch.dispatcher import DispatchEntry, OverflowRequested
from maitred.routing.auto.config import AutoModels
from maitred.routing.escalation.checks import CheckFailure, collect_choices, is_refusal, mean_logprob, requested_schema
from maitred.routing.escalation.config import EscalationConfig
from maitred.routing.escalation.schema import SchemaResult
from maitred.routing.escalation.schemas import SchemaChecker
from maitred.routing.pools.route_table import RoutePlan, RouteTarget

Serve = Callable[[RouteTarget], Awaitable[AbstractAsyncContextManager[ResponseStream]]]
"""Plans the work at one model. Entering the context begins it; leaving ends it."""


class FallbackStream(PushStream):
    """Implements `maitred.core.answer.ResponseStream`. A context; leaving it ends what is unfinished.

    Args:
        serve: Plans the work at a model.
        route_plan: The models.
        context: What is known of the request.
        whole: Whether nobody sees a part of the answer before all of it is there.

    Attributes:
        first_failure: Of the model that was asked for; None: there is none yet.
    """

    def __init__(self, serve: Serve, route_plan: RoutePlan, context: RequestContext, *, whole: bool) -> None:
        self._start_model = serve
        self._route_plan = route_plan
        self._context = context
        self._whole = whole
        self._response: AbstractAsyncContextManager[ResponseStream] | None = None
        """Of the model that is at it."""
        self._batches: AsyncIterator[list[TextDelta]] | None = None
        self._seen: AsyncIterator[list[TextDelta]] | None = None
        """Its answer, once anything of it has been seen."""
        self.first_failure: MaitredError | None = None

    async def __aenter__(self) -> Self:
        await self._start(self._route_plan.first_target())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        work, self._response = self._response, None
        if work is not None:
            await work.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[list[TextDelta]]:
        # Once it has begun nothing stands between it and its reader; for each of its tokens that would be a frame more.
        return self._first() if self._seen is None else anext(self._seen)

    def push_to(self, sink: StreamSink) -> None:
        """Pushes deltas to a sink as they come; implements `PushStream.push_to`."""
        answer: object = self._seen
        if isinstance(answer, PushStream):
            answer.push_to(sink)

    async def _first(self) -> list[TextDelta]:
        """Returns the first deltas; a model that fails before them is followed by the next."""
        while True:
            assert self._batches is not None
            try:
                parts = await anext(self._batches)
            except MaitredError as failure:
                target = self._next(failure)
                await self.__aexit__(type(failure), failure, failure.__traceback__)
                await self._start(target)
            else:
                # With a stream's first batch its head goes out, text or not.
                self._seen = self._batches if parts or not self._whole else None
                return parts

    async def _start(self, target: RouteTarget) -> None:
        """Begins at a model, or at one of those after it."""
        while True:
            self._context.arm = self._route_plan.arm_for(target)
            try:
                work = await self._start_model(target)
                self._batches = aiter(await work.__aenter__())
            except MaitredError as failure:
                target = self._next(failure)
            else:
                self._response = work
                return

    def _next(self, failure: MaitredError) -> RouteTarget:
        """Starts the model that follows a failed one; raises the first failure where none follows."""
        self.first_failure = self.first_failure or failure
        target = self._route_plan.next_target(failure)
        if target is None:
            if self.first_failure is failure:
                raise failure
            raise self.first_failure from failure
        self._context.reset_for_fallback(f"{target.reason}={target.name}")
        return target


Work = Callable[[], AbstractAsyncContextManager[ResponseStream]]
"""Takes what a request needs at a model, and waits there; leaving the context gives everything back."""


class OverflowStream:
    """Implements `maitred.core.answer.ResponseStream`. A context; leaving it ends what is unfinished.

    A waiting request can be asked to move to the model that its own model's ladder names (`overflow`). It gives up
    nothing before it has everything there: the tokenised prompt, the budget, a place in the queue. A rejection there is
    as if it had not been asked. Once it has moved it does not come back: what has been sent to a provider costs.

    Args:
        here: Where it waits first.
        elsewhere: Where it may be sent.
        context: What is known of the request; as it was, when it stays.
    """

    def __init__(self, here: Work, elsewhere: Work, context: RequestContext) -> None:
        self._here = here
        self._start_elsewhere = elsewhere
        self._context = context
        self._resources = AsyncExitStack()
        self._batches: AsyncIterator[list[TextDelta]] | None = None

    async def __aenter__(self) -> Self:
        self._batches = aiter(await self._resources.enter_async_context(self._here()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._resources.__aexit__(kind, error, trace)

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
        """Leaves for elsewhere, if it is taken there and has not got its turn here meanwhile."""
        before, there = copy.copy(self._context), AsyncExitStack()
        try:
            batches = aiter(await there.enter_async_context(self._start_elsewhere()))
        except MaitredError:
            self._context.restore(before)
            entry.decline_overflow()
            return
        leaving = DeadlineUnmeetable("It waits for another model now.")
        if entry.accept_overflow():
            there, self._resources, self._batches = self._resources, there, batches
            await there.__aexit__(type(leaving), leaving, None)
        else:
            await there.__aexit__(type(leaving), leaving, None)
            self._context.restore(before)


Begin = Callable[[InferenceRequest, RoutePlan], AbstractAsyncContextManager[ResponseStream]]
"""Starts the work for a request at the models on a way; leaving the context ends it."""


@asynccontextmanager
async def open_schemas(autos: AutoModels) -> AsyncIterator[SchemaChecker]:
    """Opens the process that checks answers against schemas, once the first check needs it."""
    async with SchemaChecker(start_lazily=not any(auto.escalation.schema for auto in autos.values())) as schemas:
        yield schemas


def may_escalate(config: EscalationConfig, request: InferenceRequest) -> bool:
    """Whether an answer may be held back, to be asked of another model.

    Of a stream only where its caller has said so: it would come all at once, and late.
    """
    return config.is_enabled and (config.unasked and request.whole if request.escalate is None else request.escalate)


def with_scores(request: InferenceRequest) -> InferenceRequest:
    """Returns the request for an own model: with log-probabilities, if a check reads them."""
    if not request.scored or request.sampling.top_logprobs is not None:
        return request
    return replace(request, sampling=replace(request.sampling, top_logprobs=0))


class AnswerChecker:
    """Finds what speaks against an answer.

    Args:
        config: What is looked at.
        schemas: Puts answers to their schemas; None: it is not done.
    """

    def __init__(self, config: EscalationConfig, schemas: SchemaChecker | None) -> None:
        self.config = config
        self._schemas = schemas
        self._openings = [opening.strip().lower().replace("’", "'") for opening in config.openings]

    async def failure(self, request: InferenceRequest, parts: list[TextDelta]) -> CheckFailure | None:
        """The first check that one of the choices fails; None: all stand all that can be made."""
        config, choices = self.config, collect_choices(parts)
        if any(said.finish is FinishReason.DEADLINE for said in choices):
            return None  # there is no time left in which another one could do better
        if config.refusal and any(is_refusal(said, self._openings) for said in choices):
            return CheckFailure.REFUSAL
        if config.schema and (schema := _schema_of(request)) is not None and self._schemas is not None:
            for said in choices:
                if not said.has_tool_calls and await self._schemas.check(schema, said.text) is SchemaResult.INVALID:
                    return CheckFailure.SCHEMA
        if config.logprob is not None:
            means = [mean for said in choices if (mean := mean_logprob(said)) is not None]
            if any(mean < config.logprob for mean in means):
                return CheckFailure.LOGPROB
        return None


class EscalatingStream:
    """Implements `maitred.core.answer.ResponseStream`: all of it comes in one batch.

    A larger model that cannot answer takes nothing away: its caller gets the answer that is there.

    Args:
        begin: Starts the work.
        request: The request.
        route_plan: Its models.
        upward: The larger models, after those on a way.
        judge: Decides whether an answer is good enough.
        context: What is known of the request.
        price_of: What the tokens of a model cost.
    """

    def __init__(
        self,
        begin: Begin,
        request: InferenceRequest,
        route_plan: RoutePlan,
        upward: Callable[[RoutePlan], RoutePlan | None],
        judge: AnswerChecker,
        context: RequestContext,
        price_of: Callable[[str], Price],
    ) -> None:
        self._begin = begin
        self._request = request
        self._route_plan = route_plan
        self._route_to_larger = upward
        self._checker = judge
        self._context = context
        self._price_of = price_of
        self._spent_usd = 0.0

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        context, route_plan = self._context, self._route_plan
        parts = await self._answer(route_plan)
        for left in reversed(range(self._checker.config.most + 1)):
            reason = await self._checker.failure(self._request, parts)
            if reason is None:
                break
            failed = RejectedAnswer(context.model, reason, context.usage)
            context.rejected_answers.append(failed)
            larger = self._route_to_larger(route_plan) if left else None
            if larger is None:
                break
            known = context.escalate()
            try:
                parts = await self._answer(larger)
            except MaitredError:
                context.restore(known)
                break
            context.rejected_answers[-1] = replace(failed, replaced=True)
            route_plan = larger
        yield parts if self._scores_wanted else [replace(part, scores=None) for part in parts]

    async def _answer(self, route_plan: RoutePlan) -> list[TextDelta]:
        """The whole answer of the first model on a way that gives one."""
        request = replace(
            self._request,
            whole=True,
            scored=self._checker.config.logprob is not None,
            max_usd=None if self._request.max_usd is None else max(0.0, self._request.max_usd - self._spent_usd),
        )
        async with self._begin(request, route_plan) as answer:
            whole = [part async for parts in answer for part in parts]
        context = self._context
        cost_nusd = self._price_of(context.model).cost_nusd(
            context.prompt_tokens, context.cached_tokens, context.completion_tokens
        )
        self._spent_usd += to_usd(cost_nusd)
        return whole

    @property
    def _scores_wanted(self) -> bool:
        return self._request.sampling.top_logprobs is not None


def _schema_of(request: InferenceRequest) -> Any:  # noqa: ANN401 - whatever the caller sent
    """Returns the schema that the answer is to follow; None: the caller named none."""
    if request.to_openai is None or not {"response_format", "guided_json"}.intersection(request.needs):
        return None
    return requested_schema(request.to_openai())
