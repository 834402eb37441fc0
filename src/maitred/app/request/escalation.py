"""One answer by the smallest of several models whose answer stands its checks.

Small models answer most questions well, and what they get wrong can sometimes be seen without knowing better: it is not
the JSON that was asked for, it is a refusal, or the model itself found it improbable. Such an answer is asked of the
next larger model. Nobody may have seen a part of the first one then, so all of it is held back until it has been
checked.

Each model that has answered is billed, as its tokens were computed: whoever allows this buys a better answer at up to
the price of all. What the request may cost holds for their sum.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from msgspec.structs import replace

from maitred.core.answer import InferenceRequest, RejectedAnswer, RequestContext, ResponseStream, TextDelta
from maitred.core.errors import MaitredError
from maitred.core.money import Price, to_usd
from maitred.core.request import FinishReason
from maitred.routing.auto.config import AutoModels
from maitred.routing.escalation.checks import CheckFailure, collect_choices, is_refusal, mean_logprob, requested_schema
from maitred.routing.escalation.config import EscalationConfig
from maitred.routing.escalation.schema import SchemaResult
from maitred.routing.escalation.schemas import SchemaChecker
from maitred.routing.pools.route_table import RoutePlan

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
