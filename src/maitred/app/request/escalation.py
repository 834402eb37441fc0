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
from maitred.core.money import Price, usd_of
from maitred.core.request import FinishReason
from maitred.routing.auto.config import AutoModels
from maitred.routing.escalation.checks import CheckFailure, is_refusal, mean_logprob, said_in, schema_in
from maitred.routing.escalation.config import EscalationConfig
from maitred.routing.escalation.schema import SchemaResult
from maitred.routing.escalation.schemas import Schemas
from maitred.routing.pools.route_table import RoutePlan

Begin = Callable[[InferenceRequest, RoutePlan], AbstractAsyncContextManager[ResponseStream]]
"""Starts the work for a request at the models on a way; leaving the context ends it."""


@asynccontextmanager
async def open_schemas(autos: AutoModels) -> AsyncIterator[Schemas]:
    """What puts answers to their schemas. It waits for the first one, where nobody asks for it yet."""
    async with Schemas(waits=not any(auto.escalation.schema for auto in autos.values())) as schemas:
        yield schemas


def may_escalate(config: EscalationConfig, ask: InferenceRequest) -> bool:
    """Whether an answer may be held back, to be asked of another model.

    Of a stream only where its caller has said so: it would come all at once, and late.
    """
    return config.looks and (config.unasked and ask.whole if ask.escalate is None else ask.escalate)


def with_scores(ask: InferenceRequest) -> InferenceRequest:
    """What a model of our own is asked: with log-probabilities, if they are looked at here."""
    if not ask.scored or ask.sampling.top_logprobs is not None:
        return ask
    return replace(ask, sampling=replace(ask.sampling, top_logprobs=0))


class AnswerChecker:
    """Finds what speaks against an answer.

    Args:
        config: What is looked at.
        schemas: Puts answers to their schemas; None: it is not done.
    """

    def __init__(self, config: EscalationConfig, schemas: Schemas | None) -> None:
        self.config = config
        self._schemas = schemas
        self._openings = [opening.strip().lower().replace("’", "'") for opening in config.openings]

    async def objection(self, ask: InferenceRequest, parts: list[TextDelta]) -> CheckFailure | None:
        """The first check that one of the choices fails; None: all stand all that can be made."""
        config, choices = self.config, said_in(parts)
        if any(said.finish is FinishReason.DEADLINE for said in choices):
            return None  # there is no time left in which another one could do better
        if config.refusal and any(is_refusal(said, self._openings) for said in choices):
            return CheckFailure.REFUSAL
        if config.schema and (schema := _schema_of(ask)) is not None and self._schemas is not None:
            for said in choices:
                if not said.calls_tools and await self._schemas.check(schema, said.text) is SchemaResult.BREAKS:
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
        ask: The request.
        way: Its models.
        upward: The larger models, after those on a way.
        judge: Decides whether an answer is good enough.
        tally: What is known of the request.
        price_of: What the tokens of a model cost.
    """

    def __init__(
        self,
        begin: Begin,
        ask: InferenceRequest,
        way: RoutePlan,
        upward: Callable[[RoutePlan], RoutePlan | None],
        judge: AnswerChecker,
        tally: RequestContext,
        price_of: Callable[[str], Price],
    ) -> None:
        self._begin = begin
        self._ask = ask
        self._way = way
        self._upward = upward
        self._judge = judge
        self._tally = tally
        self._price_of = price_of
        self._spent_usd = 0.0

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        tally, way = self._tally, self._way
        parts = await self._answer(way)
        for left in reversed(range(self._judge.config.most + 1)):
            reason = await self._judge.objection(self._ask, parts)
            if reason is None:
                break
            failed = RejectedAnswer(tally.model, reason, tally.usage)
            tally.failed.append(failed)
            larger = self._upward(way) if left else None
            if larger is None:
                break
            known = tally.escalate()
            try:
                parts = await self._answer(larger)
            except MaitredError:
                tally.go_back(known)
                break
            tally.failed[-1] = replace(failed, replaced=True)
            way = larger
        yield parts if self._scores_wanted else [replace(part, scores=None) for part in parts]

    async def _answer(self, way: RoutePlan) -> list[TextDelta]:
        """The whole answer of the first model on a way that gives one."""
        ask = replace(
            self._ask,
            whole=True,
            scored=self._judge.config.logprob is not None,
            most_usd=None if self._ask.most_usd is None else max(0.0, self._ask.most_usd - self._spent_usd),
        )
        async with self._begin(ask, way) as answer:
            whole = [part async for parts in answer for part in parts]
        tally = self._tally
        cost_nusd = self._price_of(tally.model).cost_nusd(
            tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens
        )
        self._spent_usd += usd_of(cost_nusd)
        return whole

    @property
    def _scores_wanted(self) -> bool:
        return self._ask.sampling.top_logprobs is not None


def _schema_of(ask: InferenceRequest) -> Any:  # noqa: ANN401 - whatever the caller sent
    """What the answer is to follow; None: nothing was said."""
    if ask.written is None or not {"response_format", "guided_json"}.intersection(ask.needs):
        return None
    return schema_in(ask.written())
