"""Pipeline of a request, from the model's name to its last token.

    route -> look up -> plan -> admit -> dispatch -> stream -> settle

`Pipeline.generate` routes a request, and `Pipeline.respond` takes it through the other stages at one model. Each stage
is called once for each model; no stage calls an earlier one. The pipeline works with tokens and deltas; it does not
know which API the request came through.
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
from maitred.app.request.answer_lookup import AnswerLookup, make_lookup
from maitred.app.request.answer_sharing import AnswerSharing
from maitred.app.request.continuation import TextContinuation
from maitred.app.request.engine_response import EngineResponse
from maitred.app.request.fallback import AnswerChecker, EscalatingStream, FallbackStream, OverflowStream, may_escalate
from maitred.app.request.flow_control import DispatchHandle, FlowController, GrantHandle
from maitred.app.request.planner import RequestBounds, RequestPlan, RequestPlanner
from maitred.app.request.prompt_scores import prompt_top
from maitred.app.request.retry_policy import RetryPolicy
from maitred.app.request.rollout_observer import RolloutObserver
from maitred.app.request.shadow_traffic import compute_copy, to_shadow_request
from maitred.app.request.tokenized import NamedTokenizer, TokenizedRequest, tokenize_prompts
from maitred.app.request.upstream_request import PreparedRequest, UpstreamRequest, count_upstream_tokens
from maitred.app.request.upstream_response import UpstreamResponse
from maitred.app.request.usage_counter import OutputGrant, UpstreamUsageCounter
from maitred.app.request.validation import check_beyond_chat, check_supported, rules_for, with_tools
from maitred.core.clock import Clock, SystemClock
from maitred.core.cohort import COHORT, CohortStage
from maitred.core.context import DeltaListener, RateLimitStatus, RequestContext
from maitred.core.errors import (
    InvalidRequest,
    LimitReached,
    NotCached,
    ReplicaLost,
    ResourceNotFound,
)
from maitred.core.flow import QueuePosition
from maitred.core.inference import InferenceRequest, Prompt
from maitred.core.replica import ModelCard
from maitred.core.request import EngineRequest
from maitred.core.resource_stack import ResourceStack
from maitred.core.service import PromptTokens, ResponseStream
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.core.text_replica import TextRequest
from maitred.core.timeline import SpanName
from maitred.dispatch.request import DispatchRequest
from maitred.routing.catalog import TextModel
from maitred.routing.escalation.schemas import SchemaChecker
from maitred.routing.pools.route_table import RoutePlan, RouteTarget
from maitred.text.tokenizer import Tokenizer
from maitred.wire.openai.sampling import TOOL_FIELDS

_draw_seed = partial(secrets.randbits, 63)
"""Draws an unpredictable seed for requests without one."""


class Pipeline:
    """Runs requests through the stages. Implements `maitred.core.service.InferenceService`.

    Args:
        router: Resolves and routes model names.
        flow_controller: Admission, queue and dispatch.
        ladders: Model -> degradation ladder.
        clock: Clock for the times in the context.
        draw_seed: Makes a seed where the caller names none.
        bounds: Bounds of what one request can ask for.
        retry_policy: Retry policy for upstream servers; None: no retries.
        schemas: JSON schema checker for escalation; None: no schema checks.
        grammars: Validates grammars; None: default settings.
        rollout_observer: Observes requests of canary rollouts; None: no rollouts.
        sharing: Shares answers among requests; None: every answer is computed.
    """

    def __init__(
        self,
        router: Router,
        flow_controller: FlowController,
        ladders: Mapping[str, DegradationLadder] | None = None,
        clock: Clock | None = None,
        *,
        draw_seed: Callable[[], int] = _draw_seed,
        bounds: RequestBounds = RequestBounds(),  # noqa: B008 - frozen
        retry_policy: RetryPolicy | None = None,
        schemas: SchemaChecker | None = None,
        rollout_observer: RolloutObserver | None = None,
        grammars: GrammarValidator | None = None,
        sharing: AnswerSharing | None = None,
    ) -> None:
        self._router = router
        self._flow_controller = flow_controller
        self._planner = RequestPlanner(
            router,
            flow_controller,
            ladders=ladders or {},
            bounds=bounds,
            grammars=grammars or GrammarValidator(),
        )
        self._clock = clock or SystemClock()
        self._draw_seed = draw_seed
        self._min_itl_s = bounds.min_itl_s
        self._schemas = schemas
        self._retry_policy = retry_policy or RetryPolicy(0, RetryBudget(0.0, 0), self._clock)
        self._rollout_observer = rollout_observer
        self._sharing = sharing

    def generate(
        self, request: InferenceRequest, context: RequestContext
    ) -> AbstractAsyncContextManager[ResponseStream]:
        """Generates the answer to a request; implements `InferenceService.generate`.

        The request is routed here. Entering the context plans and admits it (`respond`) at the first model of its route
        that takes it; reading the response waits for dispatch, and streams; exiting releases everything.
        """
        principal = context.principal or ANONYMOUS
        context.request = request
        route_plan = self._route(request, principal, context)
        response: AbstractAsyncContextManager[ResponseStream]
        escalation = self._router.escalation(request.model)
        if escalation is not None and may_escalate(escalation, request):
            # The answer is buffered until its checks pass.
            response = nullcontext(
                EscalatingStream(
                    self.respond,
                    request,
                    principal,
                    context,
                    route_plan=route_plan,
                    route_to_larger=self._router.route_to_larger,
                    checker=AnswerChecker(escalation, self._schemas),
                    price_of=self._flow_controller.price_of,
                    is_refusing=self._router.is_refusing,
                )
            )
        else:
            response = answer = FallbackStream(
                self.respond,
                request,
                principal,
                context,
                route_plan=route_plan,
                is_refusing=self._router.is_refusing,
            )
            if self._rollout_observer is not None and route_plan.arm is not None:
                response = self._rollout_observer.observe(answer, route_plan, request, context, self.respond)
        return response if context.listener is None else _tap(response, context.listener)

    async def respond(
        self,
        target: RouteTarget,
        request: InferenceRequest,
        principal: Principal,
        context: RequestContext,
        stack: ResourceStack,
    ) -> ResponseStream:
        """Plans a request at one model, admits and enqueues it; returns its response.

        The response waits for dispatch when it is first read, and settles the usage before its last delta.

        Args:
            target: The model.
            request: The request.
            principal: The caller.
            context: Record of the request.
            stack: Owns the resources of the request. Closing it cancels the attempt, releases the queue entry, and
                settles the grant.

        Raises:
            MaitredError: The request is rejected.
        """
        await COHORT.sync(CohortStage.READ)
        began_s = self._clock.monotonic_s()
        try:
            prepared = await self._planner.prepare(target, request, context)
            lookup = None
            if self._sharing is not None:
                most_tokens = self._planner.max_output_tokens(prepared)
                lookup = make_lookup(self._sharing.cache, target, prepared, principal, context, most_tokens)
        except BaseException as failure:
            context.timeline.fail(SpanName.PLAN, began_s, self._clock.monotonic_s(), {"model": target.name}, failure)
            raise
        overflow_request = self._planner.overflow_request(target, prepared.request, principal)
        compute = partial(self._compute, target, prepared, principal, context, lookup, overflow_request)
        if self._sharing is None or lookup is None:
            return await compute(stack)
        if overflow_request is not None:
            lookup.is_shared = False  # while it waits, it may move to another model
        if lookup.question is not None:
            lookup.compute_copy = partial(compute_copy, self.respond, target, to_shadow_request(request))
        admit = partial(self._admit_cached, target, prepared, principal, context)
        return await self._sharing.respond(lookup, context, admit, compute, stack)

    async def _compute(
        self,
        target: RouteTarget,
        prepared: PreparedRequest,
        principal: Principal,
        context: RequestContext,
        lookup: AnswerLookup | None,
        overflow_request: DegradedRequest | None,
        stack: ResourceStack,
    ) -> ResponseStream:
        """Plans a prepared request, admits and enqueues it; returns its response."""
        now_s, timeline = self._clock.monotonic_s, context.timeline
        began_s = now_s()
        try:
            if prepared.request.cache.only_if_cached:
                raise NotCached
            plan = await self._planner.plan(target, prepared, principal, context)
        except BaseException as failure:
            timeline.fail(SpanName.PLAN, began_s, now_s(), {"model": target.name}, failure)
            raise
        timeline.record(SpanName.PLAN, began_s, now_s(), _plan_attributes(plan, context))
        if overflow_request is None or plan.target is not target:
            bill = b"" if lookup is None else lookup.bill
            return await self._admit(plan, principal, context, stack, bill)
        # While the request waits, it may overflow to another model.
        movable_plan = replace(plan, dispatch_request=replace(plan.dispatch_request, movable=True))
        return await stack.enter_async_context(
            OverflowStream(
                self._admit,
                movable_plan,
                self._admit_overflow,
                variant=overflow_request,
                principal=principal,
                context=context,
            )
        )

    def _route(self, request: InferenceRequest, principal: Principal, context: RequestContext) -> RoutePlan:
        """Makes the route plan and records the span; raises if no model serves the name."""
        now_s = self._clock.monotonic_s
        facts: dict[str, Any] = {"asked": request.model}
        began_s = now_s()
        try:
            route_plan = self._router.route(request, principal, context.request_id)
        except BaseException as failure:
            context.timeline.fail(SpanName.RESOLVE, began_s, now_s(), facts, failure)
            raise
        selection = context.selection = route_plan.selection
        if selection is not None:
            facts |= {"reason": selection.reason, "score": selection.score, "chosen": selection.model}
        context.timeline.record(SpanName.RESOLVE, began_s, now_s(), facts)
        return route_plan

    async def _admit(
        self,
        plan: RequestPlan,
        principal: Principal,
        context: RequestContext,
        stack: ResourceStack,
        bill: bytes = b"",
    ) -> ResponseStream:
        """Reserves what a planned request may use, enqueues it, and returns its response."""
        context.predicted_position = plan.position
        admission_request = _admission_request(principal, context, plan.tokenized, bill)
        try:
            grant, entry = await self._flow_controller.admit(
                plan.target.pool, plan.dispatch_request, admission_request, context.timeline, stack
            )
        except LimitReached:
            if plan.instead_of is None:
                raise
            # The degraded model is limited too: report the refusal of the requested model.
            raise plan.instead_of from None
        await COHORT.sync(CohortStage.ADMITTED)
        context.position = entry.position
        if isinstance(plan.tokenized, UpstreamRequest):
            return self._upstream_response(plan.tokenized, plan.target, principal, context, grant, entry, stack)
        prefix = plan.tokenized.request.prefix
        given, thought_tokens = ((), 0) if prefix is None else plan.tokenized.prefix_tokens(prefix)
        if prefix is not None and len(given) >= grant.max_tokens:
            raise ReplicaLost
        if prefix is not None:
            context.reasoning_tokens = thought_tokens
        return EngineResponse(
            entry,
            stack,
            requests=self._engine_requests(plan.tokenized, context, plan.dispatch_request, grant, entry),
            outputs=plan.tokenized.output_processors(given),
            context=context,
            clock=self._clock,
            grant=grant,
            partial=plan.tokenized.request.partial,
            given=given,
        )

    async def _admit_cached(
        self,
        target: RouteTarget,
        prepared: PreparedRequest,
        principal: Principal,
        context: RequestContext,
        cache: str,
        tokens: int,
        bill: bytes,
        stack: ResourceStack,
    ) -> GrantHandle:
        """Admits a request whose answer is not computed for it; implements `Admit`."""
        admission_request = replace(
            _admission_request(principal, context, prepared, bill), cache=cache, cached_tokens=tokens
        )
        grant, _ = await self._flow_controller.admit(target.pool, None, admission_request, context.timeline, stack)
        return grant

    async def _admit_overflow(
        self, variant: DegradedRequest, principal: Principal, context: RequestContext, stack: ResourceStack
    ) -> ResponseStream:
        """Admits a waiting request at its overflow model; raises if that rejects it."""
        plan = await self._planner.plan_overflow(variant, principal, context)
        response = await self._admit(plan, principal, context, stack)
        context.degraded = list(variant.degraded)
        return response

    def _upstream_response(
        self,
        upstream_request: UpstreamRequest,
        target: RouteTarget,
        principal: Principal,
        context: RequestContext,
        grant: GrantHandle,
        entry: DispatchHandle,
        stack: ResourceStack,
    ) -> UpstreamResponse:
        """Makes the response of an upstream server."""
        inference_request = upstream_request.request
        deadline_s = (
            None if inference_request.deadline_in_s is None else context.started_s + inference_request.deadline_in_s
        )
        with_logprobs = inference_request.scored and self._router.supports_logprobs(target)
        request = _text_request(upstream_request, target, grant, scored=with_logprobs)
        read_fields, native = upstream_request.fields, inference_request.native
        if native is not None and native.api == "responses":
            read_fields = {**read_fields, **native.fields}  # chat completions have no words for all of them
        usage_counter = UpstreamUsageCounter(
            upstream_request.model,
            context,
            upstream_request.estimated,
            _output_grant(upstream_request, grant, is_sent=request.max_tokens is not None),
            fields=read_fields,
        )
        model, prefix, continuation = upstream_request.model, inference_request.prefix, None
        if prefix is not None or model.reprompts or model.continues_at_fallback:
            continuation = TextContinuation(
                request,
                len(upstream_request.prompts),
                "" if prefix is None else prefix.text,
                at_own_servers=model.reprompts,
                at_fallback=model.continues_at_fallback or prefix is not None,
            )
        if continuation is not None and prefix is not None:
            rest = None if prefix.thought else continuation.remaining_request(prefix.tokens)
            if rest is None:
                raise ReplicaLost
            request = rest
            usage_counter.resume_from(prefix)
        return UpstreamResponse(
            entry,
            stack,
            upstream_request=upstream_request,
            request=request,
            usage_counter=usage_counter,
            context=context,
            clock=self._clock,
            grant=grant,
            retry_state=self._retry_policy.new_state(principal.tenants[0], deadline_s, inference_request.most_retries),
            deadline_s=deadline_s,
            continuation=continuation,
        )

    def _engine_requests(
        self,
        tokenized: TokenizedRequest,
        context: RequestContext,
        dispatch_request: DispatchRequest,
        grant: GrantHandle,
        entry: DispatchHandle,
    ) -> list[EngineRequest]:
        """Makes the engine requests, one for each prompt, whose ids start with the lease."""
        request = tokenized.request
        scores_prompt = request.echo or request.sampling.prompt_logprobs is not None
        engine_requests = []
        for index, prompt in enumerate(tokenized.prompts):
            sampling = replace(
                request.sampling,
                max_tokens=min(tokenized.available_tokens[index], grant.max_tokens),
                seed=self._draw_seed() if request.seed is None else request.seed,
                prompt_logprobs=prompt_top(request) if scores_prompt else None,
            )
            engine_request = EngineRequest(
                id=f"{grant.lease}-{index}",  # a client may repeat its request id; at the replica it must be unique
                prompt=prompt,
                sampling=sampling,
                # The KV cache is shared within an organisation; clients cannot change this.
                cache_scope=dispatch_request.organisation,
                flow=dispatch_request.flow,
                deadline_in_s=request.deadline_in_s,  # from arrival; `TokenContinuation` subtracts the elapsed time
                itl_objective_s=None
                if request.itl_objective_s is None
                else max(request.itl_objective_s, self._min_itl_s),
                expected_tokens=entry.expected_tokens,
                partial=request.partial,
                known_as=context.request_id,
                trace_id=context.timeline.trace_id,
            )
            engine_requests.append(engine_request)
        return engine_requests

    async def tokenize(
        self, principal: Principal, model: str, prompt: Prompt, *, add_special_tokens: bool | None
    ) -> list[int]:
        """Tokenises a prompt with the model's tokenizer; implements `InferenceService.tokenize`."""
        named_tokenizer = NamedTokenizer(model, self._tokenizer(principal, model))
        (tokens,) = await tokenize_prompts(
            named_tokenizer, [prompt], add_special_tokens=add_special_tokens, principal=principal
        )
        return tokens

    async def count_tokens(self, principal: Principal, request: InferenceRequest) -> PromptTokens:
        """Counts the tokens of the prompts of a request; implements `InferenceService.count_tokens`."""
        target = self._router.route(request, principal).first_target()
        model = self._router.model(target)
        if isinstance(model, TextModel):
            return await count_upstream_tokens(model, target.model, request, principal)
        check_beyond_chat(request)
        if request.tools is not None:
            request = with_tools(request, rules_for(model, request.tools))
        check_supported([need for need in request.needs if need not in TOOL_FIELDS])
        prompts = await tokenize_prompts(model, request.prompts, principal=principal)
        return PromptTokens(sum(map(len, prompts)))

    def detokenize(self, principal: Principal, model: str, tokens: Sequence[int]) -> str:
        """Turns tokens into text; implements `InferenceService.detokenize`."""
        tokenizer = self._tokenizer(principal, model)
        if not all(0 <= token < tokenizer.vocab_size for token in tokens):
            raise InvalidRequest(f"Token ids run from 0 to {tokenizer.vocab_size - 1}.", param="tokens")
        return tokenizer.decode(tokens, skip_special_tokens=False)

    def _tokenizer(self, principal: Principal, model: str) -> Tokenizer:
        tokenizer = self._router.resolve(model, principal).tokenizer
        if tokenizer is None:
            raise InvalidRequest(
                f"The tokenizer of {model!r} is not known here: another server runs the model.", param="model"
            )
        return tokenizer

    def models(self, principal: Principal) -> Sequence[str]:
        """Returns the models that a caller may use; implements `InferenceService.models`."""
        return self._router.models_for(principal)

    def card(self, principal: Principal, model: str) -> ModelCard:
        """Returns the card of a model; implements `InferenceService.card`."""
        return self._router.resolve(model, principal).card()

    async def rate_limit_status(self, context: RequestContext) -> RateLimitStatus | None:
        """Returns what is left of the caller's rate limits; implements `InferenceService.rate_limit_status`."""
        if context.principal is None:
            return None
        return await self._flow_controller.rate_limit_status(context.principal, context.model)

    async def check_limits(self, context: RequestContext, least_output: int) -> None:
        """Checks whether the caller's limits have room for any request; see `maitred.api.large_body.CheckLimits`."""
        if context.principal is not None:
            await self._flow_controller.check_limits(context.principal, least_output)

    def queue_position(self, principal: Principal, request_id: str) -> QueuePosition:
        """Returns the queue position of a waiting request; implements `InferenceService.queue_position`."""
        position = self._flow_controller.position_of(request_id, principal.tenants[-1])
        if position is None:
            raise ResourceNotFound("No request of that id waits in the queue. It may run already, or have ended.")
        return position

    def ready(self, model: str | None = None) -> bool:
        """Whether a model, or any model, can serve; implements `InferenceService.ready`."""
        models = self._router.models_behind(model)
        return any(candidate.is_ready() and self._flow_controller.serving(candidate.name) for candidate in models)


@asynccontextmanager
async def _tap(
    answers: AbstractAsyncContextManager[ResponseStream], listener: DeltaListener
) -> AsyncIterator[ResponseStream]:
    """Wraps a response so that a listener also gets its deltas."""
    async with answers as answer:
        yield TappedStream(answer, listener)


def _plan_attributes(plan: RequestPlan, context: RequestContext) -> dict[str, Any]:
    """Returns the span attributes of a plan."""
    facts: dict[str, Any] = {"model": plan.target.name, "prompt_tokens": plan.tokenized.prompt_tokens}
    if plan.position is not None:
        facts["position"] = plan.position.position
        facts["predicted_wait_s"] = round(plan.position.wait_s, 6)
        facts["predicted_ttft_s"] = round(plan.position.ttft_s, 6)
    facts["degraded"] = [*context.degraded]
    return facts


def _output_grant(upstream_request: UpstreamRequest, grant: GrantHandle, *, is_sent: bool) -> OutputGrant:
    """Returns the output tokens that the servers may produce for the request."""
    return OutputGrant(
        choice_tokens=min(max(upstream_request.available_tokens), grant.max_tokens),
        choices=upstream_request.choice_count,
        max_prompt_tokens=upstream_request.card.context_tokens * len(upstream_request.prompts),
        is_sent=is_sent,
    )


def _text_request(
    upstream_request: UpstreamRequest, target: RouteTarget, grant: GrantHandle, *, scored: bool
) -> TextRequest:
    """Makes the request for a replica that takes text."""
    has_max_tokens = upstream_request.request.max_tokens is not None
    # Without a limit, send no `max_tokens`: the server knows its context window better than our estimate.
    is_limited = has_max_tokens or grant.max_tokens < max(upstream_request.available_tokens)
    return TextRequest(
        id=grant.lease,
        fields=upstream_request.fields,
        choices=upstream_request.choice_count,
        native=upstream_request.request.native,
        left_out=upstream_request.request.left_out,
        max_tokens=min(max(upstream_request.available_tokens), grant.max_tokens) if is_limited else None,
        scored=scored,
        model=target.model,
        chat="messages" in upstream_request.fields,
    )


def _admission_request(
    principal: Principal, context: RequestContext, tokenized: PreparedRequest, bill: bytes = b""
) -> AdmissionRequest:
    """Makes the admission request."""
    request = tokenized.request
    return AdmissionRequest(
        principal=principal,
        request_id=context.request_id,
        route=context.route,
        model=context.model,
        prompt_tokens=context.prompt_tokens,
        longest_prompt=None if len(tokenized.prompts) == 1 else max(map(len, tokenized.prompts)),
        max_tokens=request.max_tokens,
        min_tokens=request.sampling.min_tokens,
        window_left=max(tokenized.available_tokens),
        choices=tokenized.choice_count,
        max_tokens_param=request.max_tokens_param,
        prompt_param=request.prompt_param,
        bill=bill,
        is_counted=context.is_counted,
        context=context,
    )
