"""The spine: one request from the model's name to its last token.

`Pipeline.answer` names the stages in order. Each is called once per request, and nothing upstream is reached for from
downstream. The pipeline speaks in tokens and parts; which API the request came through is not its business.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from msgspec.structs import replace

from maitred.admission.grammars.validator import GrammarValidator
from maitred.admission.policy.ladder import DegradationLadder, DegradedRequest
from maitred.admission.policy.retries import RetryBudget
from maitred.admission.request import AdmissionRequest
from maitred.app.assembly.tracing import TappedStream
from maitred.app.models.router import Router
from maitred.app.request.continuation import TextContinuation
from maitred.app.request.engine_response import EngineResponse
from maitred.app.request.escalation import AnswerChecker, EscalatingStream, may_escalate
from maitred.app.request.fallback import FallbackStream, OverflowStream
from maitred.app.request.flow_control import DispatchHandle, FlowController, GrantHandle
from maitred.app.request.planner import AnyReading, RequestPlan, RequestPlanner
from maitred.app.request.prompts import NamedTokenizer, tokens_of
from maitred.app.request.resources import Holder, ResourceStack
from maitred.app.request.retry_policy import RetryPolicy
from maitred.app.request.rollout_observer import RolloutObserver
from maitred.app.request.tokenized import TokenizedRequest
from maitred.app.request.upstream_plan import UpstreamRequestPlan
from maitred.app.request.upstream_response import UpstreamResponse
from maitred.app.request.usage_counter import UpstreamUsageCounter
from maitred.core.answer import DeltaListener, InferenceRequest, Prompt, RateLimitStatus, RequestContext, ResponseStream
from maitred.core.clock import Clock, SystemClock
from maitred.core.cohort import COHORT, CohortStage
from maitred.core.errors import (
    InvalidRequest,
    LimitReached,
    ResourceNotFound,
)
from maitred.core.flow import QueuePosition
from maitred.core.replica import ModelCard
from maitred.core.request import EngineRequest
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.core.text_replica import TextRequest
from maitred.core.timeline import SpanName
from maitred.dispatch.request import DispatchRequest
from maitred.routing.escalation.schemas import Schemas
from maitred.routing.pools.route_table import RoutePlan, RouteTarget
from maitred.text.tokenizer import Tokenizer


def draw_seed() -> int:
    """A seed that nobody can guess, for requests that name none."""
    return secrets.randbits(63)


class Pipeline:
    """Takes requests through the stages. Implements `maitred.core.answer.InferenceService`.

    Args:
        router: What is served, under which names.
        control: Who may run, when and where, and how long answers may be.
        ladders: Model -> what is tried before a request is refused for the load; nothing where none is given.
        clock: For the times in the tally.
        draw_seed: Makes a seed where the caller names none.
        max_choices: Largest `n`, if the replica would take more.
        least_itl_s: Shortest time between two tokens that a request can ask for.
        retries: How often servers of others may be tried; None: once.
        schemas: Puts answers to their schemas; None: it is not done.
        grammars: Tries what answers are to look like; None: with the default settings.
        trials: Told of requests behind whose names a new version is tried; None: there are none.
    """

    def __init__(
        self,
        router: Router,
        control: FlowController,
        ladders: Mapping[str, DegradationLadder] | None = None,
        clock: Clock | None = None,
        *,
        draw_seed: Callable[[], int] = draw_seed,
        max_choices: int = 128,
        least_itl_s: float = 0.0,
        retries: RetryPolicy | None = None,
        schemas: Schemas | None = None,
        trials: RolloutObserver | None = None,
        grammars: GrammarValidator | None = None,
    ) -> None:
        self._router = router
        self._control = control
        self._planner = RequestPlanner(router, control, ladders or {}, max_choices, grammars or GrammarValidator())
        self._clock = clock or SystemClock()
        self._draw_seed = draw_seed
        self._least_itl_s = least_itl_s
        self._schemas = schemas
        self._retries = retries or RetryPolicy(0, RetryBudget(0.0, 0), self._clock)
        self._trials = trials

    def answer(self, ask: InferenceRequest, tally: RequestContext) -> AbstractAsyncContextManager[ResponseStream]:
        """See `Answering.answer`."""
        answers = self._answers(ask, tally)
        # Somebody may hear it beside its caller.
        return answers if tally.listener is None else _overheard(answers, tally.listener)

    def _answers(self, ask: InferenceRequest, tally: RequestContext) -> AbstractAsyncContextManager[ResponseStream]:
        """Where it may go, and who watches it there. Nothing has begun before the context is entered."""
        principal = tally.principal or ANONYMOUS
        tally.ask = ask
        way = self._way(ask, principal, tally)
        escalation = self._router.escalation(ask.model)
        if escalation is not None and may_escalate(escalation, ask):
            # Nobody sees anything before the answer has stood its checks, or that of a larger model has.
            upward = partial(self._router.way_upward, ask, principal)
            begin = partial(self._begin, principal, tally)
            escalated = EscalatingStream(
                *(begin, ask, way, upward, AnswerChecker(escalation, self._schemas), tally, self._control.price_of)
            )
            return nullcontext(escalated)
        answers = self._begin(principal, tally, ask, way)
        # Where a new version is tried behind the name, the trial wants to know how it went.
        return answers if self._trials is None else self._trials.watched(answers, way, ask, tally, self._serve)

    def _way(self, ask: InferenceRequest, principal: Principal, tally: RequestContext) -> RoutePlan:
        """Where it may go; raises where its name leads nowhere."""
        now_s = self._clock.monotonic_s
        facts: dict[str, Any] = {"asked": ask.model}
        began_s = now_s()
        try:
            way = self._router.way(ask, principal, tally.request_id)
        except BaseException as failure:
            tally.story.fail(SpanName.RESOLVE, began_s, now_s(), facts, failure)
            raise
        chosen = tally.chosen = way.chosen
        if chosen is not None:
            facts |= {"reason": chosen.reason, "score": chosen.score, "chosen": chosen.model}
        tally.story.tell(SpanName.RESOLVE, began_s, now_s(), facts)
        return way

    def _begin(
        self, principal: Principal, tally: RequestContext, ask: InferenceRequest, way: RoutePlan
    ) -> FallbackStream:
        """One model after the other, until one begins to answer."""
        return FallbackStream(partial(self._serve, ask, principal, tally), way, tally, whole=ask.whole)

    async def _serve(
        self, ask: InferenceRequest, principal: Principal, tally: RequestContext, target: RouteTarget
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """The answer of one model, not begun. Who is refused by the plan has held nothing, and leaves no context."""
        await COHORT.regroup(CohortStage.READ)
        # Can it do what is asked, and when would its turn come? Who would be served too late may get less, or is told
        # so now.
        now_s, story = self._clock.monotonic_s, tally.story
        began_s = now_s()
        try:
            plan = await self._planner.plan(target, ask, principal, tally)
        except BaseException as failure:
            story.fail(SpanName.PLAN, began_s, now_s(), {"model": target.name}, failure)
            raise
        story.tell(SpanName.PLAN, began_s, now_s(), _facts_of(plan, tally))
        # Where it may still be sent elsewhere while it waits, it gives up its place here only for one there.
        leaving = self._planner.leaving(target, ask, principal) if plan.target is target else None
        if leaving is None:
            return self._work(plan, principal, tally)
        plan = replace(plan, errand=replace(plan.errand, movable=True))
        here, there = partial(self._work, plan), partial(self._elsewhere, leaving)
        return OverflowStream(partial(here, principal, tally), partial(there, principal, tally), tally)

    def _work(self, plan: RequestPlan, principal: Principal, tally: RequestContext) -> ResourceStack[ResponseStream]:
        """What is planned.

        Leaving it cancels what has not finished and gives up its place; only then is settled what has not been settled.
        """
        return ResourceStack(partial(self._begun, plan, principal, tally))

    async def _begun(
        self, plan: RequestPlan, principal: Principal, tally: RequestContext, running: Holder
    ) -> ResponseStream:
        """What is planned: admitted, queued, answered."""
        tally.forecast = plan.place
        # May the caller have it, and how long may it be?
        work = _work(principal, tally, plan.reading)
        try:
            grant, seat = await self._control.admit(plan.target.pool, plan.errand, work, tally.story, running)
        except LimitReached:
            if plan.instead_of is None:
                raise
            # The caller has no claim to another model: what it asked for cannot be served in time.
            raise plan.instead_of from None
        await COHORT.regroup(CohortStage.ADMITTED)
        # It waits in line, and runs where there is room, when the answer is read.
        tally.place = seat.place
        if isinstance(plan.reading, UpstreamRequestPlan):
            return self._relayed(plan.reading, plan.target, principal, tally, grant, seat, running)
        return EngineResponse(
            seat,
            running,
            partial(self._requests, plan.reading, tally, plan.errand, grant, seat),
            plan.reading.choices(),
            tally,
            self._clock,
            grant,
            partial=plan.reading.ask.partial,
        )

    @asynccontextmanager
    async def _elsewhere(
        self, variant: DegradedRequest, principal: Principal, tally: RequestContext
    ) -> AsyncIterator[ResponseStream]:
        """The work at the model that a waiting request is sent to; raises what stands against it there."""
        plan = await self._planner.elsewhere(variant, principal, tally)
        async with self._work(plan, principal, tally) as answer:
            tally.degraded = list(variant.degraded)
            yield answer

    def _relayed(
        self,
        reading: UpstreamRequestPlan,
        target: RouteTarget,
        principal: Principal,
        tally: RequestContext,
        grant: GrantHandle,
        seat: DispatchHandle,
        running: Holder,
    ) -> UpstreamResponse:
        """The answer of a server of somebody else's."""
        ask = reading.ask
        deadline_s = None if ask.deadline_in_s is None else tally.started_s + ask.deadline_in_s
        scored = ask.scored and self._router.tells_logprobs(target)
        request = _text_request(reading, target, grant, scored=scored)
        return UpstreamResponse(
            seat,
            running,
            request,
            len(reading.prompts),
            UpstreamUsageCounter(reading.model, tally, reading.estimated),
            tally,
            self._clock,
            grant,
            self._retries.attempts(principal.tenants[0], deadline_s),
            deadline_s=deadline_s,
            partial=ask.partial,
            whole=ask.whole,
            manuscript=TextContinuation(request, len(reading.prompts)) if reading.model.reprompts else None,
        )

    def _requests(
        self,
        reading: TokenizedRequest,
        tally: RequestContext,
        errand: DispatchRequest,
        grant: GrantHandle,
        seat: DispatchHandle,
        now_s: float,
    ) -> list[EngineRequest]:
        """What the replica is asked to generate, one for each prompt, under ids that lead to the line in the ledger."""
        ask = reading.ask
        return [
            EngineRequest(
                id=f"{grant.lease}-{index}",  # a client may repeat its request id; at the replica it must be unique
                prompt=prompt,
                sampling=replace(
                    ask.sampling,
                    max_tokens=min(room, grant.max_tokens),
                    seed=self._draw_seed() if ask.seed is None else ask.seed,
                ),
                cache_scope=errand.principal_org,  # its teams may share KV blocks; clients have no say in this
                flow=errand.flow,
                deadline_in_s=None if ask.deadline_in_s is None else tally.started_s + ask.deadline_in_s - now_s,
                itl_objective_s=None if ask.itl_objective_s is None else max(ask.itl_objective_s, self._least_itl_s),
                expected_tokens=seat.expected_tokens,
                partial=ask.partial,
                known_as=tally.request_id,
                trace_id=tally.story.trace_id,
            )
            for index, (prompt, room) in enumerate(zip(reading.prompts, reading.rooms, strict=True))
        ]

    async def tokenize(
        self, principal: Principal, model: str, prompt: Prompt, *, add_special_tokens: bool | None
    ) -> list[int]:
        """See `Answering.tokenize`."""
        served = NamedTokenizer(model, self._tokenizer(principal, model))
        (tokens,) = await tokens_of(served, [prompt], add_special_tokens=add_special_tokens)
        return tokens

    def detokenize(self, principal: Principal, model: str, tokens: Sequence[int]) -> str:
        """See `Answering.detokenize`."""
        tokenizer = self._tokenizer(principal, model)
        if not all(0 <= token < tokenizer.vocab_size for token in tokens):
            raise InvalidRequest(f"Token ids run from 0 to {tokenizer.vocab_size - 1}.", param="tokens")
        return tokenizer.decode(tokens, skip_special_tokens=False)

    def _tokenizer(self, principal: Principal, model: str) -> Tokenizer:
        tokenizer = self._router.named(model, principal).tokenizer
        if tokenizer is None:
            raise InvalidRequest(
                f"The tokenizer of {model!r} is not known here: another server runs the model.", param="model"
            )
        return tokenizer

    def models(self, principal: Principal) -> Sequence[str]:
        """See `Answering.models`."""
        return self._router.open_to(principal)

    def card(self, principal: Principal, model: str) -> ModelCard:
        """See `Answering.card`."""
        return self._router.named(model, principal).card()

    async def standing(self, tally: RequestContext) -> RateLimitStatus | None:
        """See `Answering.standing`."""
        if tally.principal is None:
            return None
        return await self._control.peek(tally.principal, tally.model)

    def place(self, principal: Principal, request_id: str) -> QueuePosition:
        """See `Answering.place`."""
        place = self._control.place_of(request_id, principal.tenants[-1])
        if place is None:
            raise ResourceNotFound("No request of that id waits in the queue. It may run already, or have ended.")
        return place

    def ready(self, model: str | None = None) -> bool:
        """See `Answering.ready`."""
        served = self._router.behind(model)
        return any(each.ready() and self._control.serving(each.name) for each in served)


@asynccontextmanager
async def _overheard(
    answers: AbstractAsyncContextManager[ResponseStream], listener: DeltaListener
) -> AsyncIterator[ResponseStream]:
    """The same answer, which somebody hears beside its caller."""
    async with answers as answer:
        yield TappedStream(answer, listener)


def _facts_of(plan: RequestPlan, tally: RequestContext) -> dict[str, Any]:
    """What a plan was decided by."""
    facts: dict[str, Any] = {"model": plan.target.name, "prompt_tokens": plan.reading.prompt_tokens}
    if plan.place is not None:
        facts |= plan.place.facts
    facts["degraded"] = [*tally.degraded]
    return facts


def _text_request(
    reading: UpstreamRequestPlan, target: RouteTarget, grant: GrantHandle, *, scored: bool
) -> TextRequest:
    """What a replica that takes text is asked."""
    named = reading.ask.max_tokens is not None
    # Where nobody has limited the length, the server knows better than an estimate how much room there is.
    limited = named or grant.max_tokens < max(reading.rooms)
    return TextRequest(
        id=grant.lease,
        fields=reading.fields,
        choices=reading.choice_count,
        max_tokens=min(max(reading.rooms), grant.max_tokens) if limited else None,
        scored=scored,
        model=target.model,
        chat="messages" in reading.fields,
    )


def _work(principal: Principal, tally: RequestContext, reading: AnyReading) -> AdmissionRequest:
    """The request as admission sees it."""
    ask = reading.ask
    return AdmissionRequest(
        principal=principal,
        request_id=tally.request_id,
        route=tally.route,
        model=tally.model,
        prompt_tokens=tally.prompt_tokens,
        longest_prompt=None if len(reading.prompts) == 1 else max(map(len, reading.prompts)),
        max_tokens=ask.max_tokens,
        min_tokens=ask.sampling.min_tokens,
        window_left=max(reading.rooms),
        choices=reading.choice_count,
        max_tokens_param=ask.max_tokens_param,
        prompt_param=ask.prompt_param,
        tally=tally,
    )
