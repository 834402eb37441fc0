"""Plans a request before anything is reserved: model, tokens, predicted queue position.

A request that would miss its deadline is degraded, if the model's ladder has a step that helps; otherwise it is
rejected at once. A plan reserves nothing.
"""

from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from maitred.admission.grammars.validator import GrammarValidator
from maitred.admission.policy.ladder import DEGRADABLE, DegradationLadder, DegradedRequest, overflowing
from maitred.app.models.router import Router
from maitred.app.request.flow_control import FlowController
from maitred.app.request.tokenized import TokenizedRequest, tokenize_prompts, unread_arguments
from maitred.app.request.upstream_request import (
    PreparedRequest,
    UpstreamRequest,
    estimate_upstream_request,
    prepare_upstream_request,
)
from maitred.app.request.validation import (
    check_beyond_chat,
    check_generates,
    check_mode,
    check_prompt_logprobs,
    check_sampling,
    check_size,
    check_supported,
    max_output_tokens,
    prompt_truncation,
    refuse_whole_vocabulary,
    rules_for,
    with_defaults,
    with_grammar,
    with_logprobs,
    with_token_masks,
    with_tools,
)
from maitred.core.context import RequestContext
from maitred.core.errors import MaitredError, Overloaded, TooExpensive
from maitred.core.flow import Flow, FlowLevel, PriorityClass, QueuePosition, priority_class_for
from maitred.core.inference import Conversation, InferenceRequest
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.core.text_replica import CHAT
from maitred.core.usage import to_usd
from maitred.dispatch.request import DispatchRequest
from maitred.routing.catalog import TextModel
from maitred.routing.pools.route_table import RouteTarget
from maitred.text.generation_defaults import GenerationDefaults
from maitred.wire.openai.sampling import WHOLE_VOCABULARY

_NO_DEFAULTS = GenerationDefaults()


class RequestPlan(Struct, frozen=True):
    """Plan of one request: target, tokens, dispatch request, predicted position."""

    target: RouteTarget
    tokenized: PreparedRequest
    dispatch_request: DispatchRequest
    position: QueuePosition | None
    """Predicted queue position; None: the controller predicts it on admission."""
    instead_of: MaitredError | None = None
    """The error of the requested model, if the plan is for another model; None: it is for the requested model."""


class RequestBounds(Struct, frozen=True):
    """Bounds of what one request can ask for."""

    max_choices: int = 128
    """Largest `n`, also for a replica that allows more."""
    max_prompt_logprobs: int = 1 << 18
    """Most log-probabilities of prompt tokens in one answer."""
    min_itl_s: float = 0.0
    """Shortest time between two tokens that a request can ask for."""


class RequestPlanner:
    """Makes the plans of one pipeline.

    Args:
        router: What is served, under which names.
        flow_controller: Predicts queue positions; has prices and default lengths.
        ladders: Model -> what is tried before a request is refused for the load; nothing where none is given.
        bounds: Bounds of what one request can ask for.
        grammars: Validates grammars.
    """

    def __init__(
        self,
        router: Router,
        flow_controller: FlowController,
        ladders: Mapping[str, DegradationLadder],
        bounds: RequestBounds,
        grammars: GrammarValidator,
    ) -> None:
        self._router = router
        self._flow_controller = flow_controller
        self._ladders = ladders
        _overflow_models = {pool: ladder.overflow_to for pool, ladder in ladders.items()}
        self._overflows = {pool: model for pool, model in _overflow_models.items() if model is not None}
        """Pool -> overflow model for waiting requests."""
        self._bounds = bounds
        self._grammars = grammars

    async def prepare(self, target: RouteTarget, request: InferenceRequest, context: RequestContext) -> PreparedRequest:
        """Tokenises and checks a request for a model.

        Raises:
            MaitredError: The request is rejected.
        """
        model = self._router.model(target)
        if isinstance(model, TextModel) and model.mode != CHAT:
            check_mode(model, CHAT)
        if isinstance(model, TextModel) and model.tokenizer is None:
            # The common case of upstream servers; needs no await.
            context.model = target.name
            return self._accept(estimate_upstream_request(model, request, self._bounds.max_choices), target, context)
        return await self._tokenize(target, request, context)

    async def plan(
        self, target: RouteTarget, tokenized: PreparedRequest, principal: Principal, context: RequestContext
    ) -> RequestPlan:
        """Plans a prepared request; degraded, or at another model, if it cannot be served in time.

        Raises:
            MaitredError: The request is rejected.
        """
        try:
            return self._make_plan(target, tokenized, principal, context)
        except DEGRADABLE as refusal:
            if target.pool in self._ladders:
                return await self._plan_degraded(target, tokenized, principal, context, refusal)
            context.predicted_position = _predicted_position(refusal)
            raise

    async def plan_overflow(
        self, variant: DegradedRequest, principal: Principal, context: RequestContext
    ) -> RequestPlan:
        """Plans a waiting request at its overflow model; raises if that rejects it."""
        target = self._router.route(variant.ask, principal).first_target()
        return self._make_plan(target, await self._tokenize(target, variant.ask, context), principal, context)

    def overflow_request(
        self, target: RouteTarget, request: InferenceRequest, principal: Principal
    ) -> DegradedRequest | None:
        """Returns the request for the overflow model; None: there is none, or the request may not use it."""
        overflow_model = self._overflows.get(target.pool)
        if overflow_model is None or not request.degradable:
            return None
        variant = overflowing(request, overflow_model)
        try:
            self._router.route(variant.ask, principal).first_target()
        except MaitredError:
            return None
        return variant

    async def _tokenize(
        self, target: RouteTarget, request: InferenceRequest, context: RequestContext
    ) -> PreparedRequest:
        """Tokenises and checks the request for a model: capabilities, size, cost."""
        model = self._router.model(target)
        context.model = target.name
        if isinstance(model, TextModel):
            return self._accept(
                await prepare_upstream_request(
                    model, request, self._bounds.max_choices, context.principal or ANONYMOUS
                ),
                target,
                context,
            )
        card = model.card()
        check_beyond_chat(request)
        context.ignored_fields = request.left_out + request.hints
        for prompt in request.prompts:
            if isinstance(prompt, Conversation) and prompt.template_arguments and prompt.chat_template is None:
                context.ignored_fields += unread_arguments(model, prompt.template_arguments)
        check_generates(card, model.name)
        if request.scored:
            request = with_logprobs(request)
        tool_rules = None
        if request.tools is not None:
            tool_rules = rules_for(model, request.tools)
            request = with_tools(request, tool_rules)
        if model.defaults != _NO_DEFAULTS:
            request = with_defaults(request, model.defaults)
        if request.needs:
            check_supported(request.needs)
        check_sampling(card, request, self._bounds.max_choices)
        if WHOLE_VOCABULARY in (request.sampling.top_logprobs, request.sampling.prompt_logprobs):
            raise refuse_whole_vocabulary(card, request.sampling)
        check_size(card, model.tokenizer, request)
        if request.allowed_token_ids or request.bad_words:
            request = with_token_masks(model.tokenizer, request)
        truncation = None if request.truncate_prompt_tokens is None else prompt_truncation(card, request)
        prompts = await tokenize_prompts(
            model, request.prompts, truncation=truncation, principal=context.principal or ANONYMOUS
        )
        available_tokens = max_output_tokens(card, prompts, request)
        if request.echo or request.sampling.prompt_logprobs is not None:
            check_prompt_logprobs(request, prompts, self._bounds.max_prompt_logprobs)
        context.prompt_tokens = sum(map(len, prompts))
        context.prompt_token_ids = prompts if request.return_token_ids else ()
        context.relaxed = []
        if request.constraint is not None or tool_rules is not None:
            principal = context.principal or ANONYMOUS
            request = await with_grammar(
                self._grammars, principal, model, request, tool_rules, prompts=prompts, relaxed=context.relaxed
            )
        tokenized = TokenizedRequest(
            model=model,
            card=card,
            request=request,
            prompts=prompts,
            prompt_tokens=context.prompt_tokens,
            choice_count=len(prompts) * request.sampling.n,
            available_tokens=available_tokens,
            rules=tool_rules,
        )
        if request.max_usd is not None:
            self._check_cost(tokenized, target, request.max_usd)
        return tokenized

    def _accept(
        self, upstream_request: UpstreamRequest, target: RouteTarget, context: RequestContext
    ) -> UpstreamRequest:
        """Checks the cost of an upstream request; returns the request."""
        context.prompt_tokens = upstream_request.prompt_tokens
        context.prompt_token_ids = ()
        if upstream_request.request.max_usd is not None:
            self._check_cost(upstream_request, target, upstream_request.request.max_usd)
        return upstream_request

    def _check_cost(self, tokenized: PreparedRequest, target: RouteTarget, max_usd: float) -> None:
        """Raises TooExpensive if the request may cost more than `max_usd`."""
        output_tokens = self.max_output_tokens(tokenized) * tokenized.choice_count
        price = self._flow_controller.price_of(target.name)
        usd = to_usd(price.max_cost_nusd(tokenized.prompt_tokens, output_tokens))
        if usd > max_usd:
            raise TooExpensive(
                f"With {output_tokens:,} tokens of output it may cost ${usd:.4g}, and ${max_usd:.4g} are allowed. "
                f"Lower {tokenized.request.max_tokens_param}, or allow more."
            )

    def _make_plan(
        self, target: RouteTarget, tokenized: PreparedRequest, principal: Principal, context: RequestContext
    ) -> RequestPlan:
        """Makes the plan with the predicted position; raises if the request would wait too long."""
        dispatch_request = _dispatch_request(principal, context, tokenized, self.max_output_tokens(tokenized))
        context.priority = dispatch_request.flow.priority
        return RequestPlan(
            target, tokenized, dispatch_request, self._flow_controller.check(target.pool, dispatch_request)
        )

    def max_output_tokens(self, tokenized: PreparedRequest) -> int:
        """Returns the most output tokens of a choice, before limits clamp it."""
        available = max(tokenized.available_tokens)
        return (
            available
            if tokenized.request.max_tokens is not None
            else min(available, self._flow_controller.default_output_tokens or available)
        )

    async def _plan_degraded(
        self,
        target: RouteTarget,
        tokenized: PreparedRequest,
        principal: Principal,
        context: RequestContext,
        refusal: MaitredError,
    ) -> RequestPlan:
        """Plans a degraded request, where a step of the model's ladder helps; otherwise raises the refusal."""

        async def attempt(variant: DegradedRequest) -> RequestPlan:
            if variant.overflows:
                overflow_request = self.overflow_request(target, tokenized.request, principal)
                if (
                    plan := await self._plan_after_overflow(
                        target, tokenized, principal, context, overflow_request is not None
                    )
                ) is not None:
                    return plan
            request, there = variant.ask, target
            if request.model != tokenized.request.model:
                there = self._router.route(request, principal).first_target()
            plan = self._make_plan(there, await self._tokenize(there, request, context), principal, context)
            return plan if there is target else replace(plan, instead_of=refusal)

        ladder = self._ladders[target.pool]
        try:
            variant, plan = await ladder.first_that_fits(
                tokenized.request, self.max_output_tokens(tokenized), refusal, attempt
            )
        except MaitredError:
            # A variant may have changed the model in the context.
            context.model, context.prompt_tokens = target.name, tokenized.prompt_tokens
            context.predicted_position = _predicted_position(refusal)
            raise
        context.degraded = [] if plan.tokenized is tokenized else list(variant.degraded)
        return plan

    async def _plan_after_overflow(
        self,
        target: RouteTarget,
        tokenized: PreparedRequest,
        principal: Principal,
        context: RequestContext,
        movable: bool,
    ) -> RequestPlan | None:
        """Plans the whole request here after others have overflowed; None: none has, or it is still too late."""
        dispatch_request = replace(
            _dispatch_request(principal, context, tokenized, self.max_output_tokens(tokenized)), movable=movable
        )
        if not await self._flow_controller.overflow_others(target.pool, dispatch_request):
            return None
        try:
            return self._make_plan(target, tokenized, principal, context)
        except DEGRADABLE:
            return None


def _predicted_position(refusal: MaitredError) -> QueuePosition | None:
    """Returns the predicted queue position of a refusal; None: it has none."""
    return refusal.position if isinstance(refusal, Overloaded) else None


def _dispatch_request(
    principal: Principal, context: RequestContext, tokenized: PreparedRequest, max_tokens: int
) -> DispatchRequest:
    """Makes the dispatch request."""
    request = tokenized.request
    ttft_deadline_s = None
    if request.ttft_in_s is not None or request.deadline_in_s is not None:
        deadlines = [wish_s for wish_s in (request.ttft_in_s, request.deadline_in_s) if wish_s is not None]
        ttft_deadline_s = context.started_s + min(deadlines)
    return DispatchRequest(
        id=context.request_id,
        organisation=principal.tenants[-1],
        flow=flow_of(principal, request),
        prompt_tokens=tokenized.prompt_tokens,
        prompts=tokenized.prompts,
        max_tokens=max_tokens,
        choices=tokenized.choice_count,
        arrived_s=context.started_s,
        ttft_deadline_s=ttft_deadline_s,
        session=None if request.session is None else f"{principal.tenants[-1]}/{request.session}",
        regions=principal.regions if request.regions is None else principal.regions_for(request.regions),
        timeline=context.timeline,
    )


def flow_of(principal: Principal, request: InferenceRequest) -> Flow:
    """Returns the flow of a request; its priority is capped by the tenant's ceiling."""
    requested_priority = PriorityClass.STANDARD.priority if request.priority is None else request.priority
    ceiling = principal.priority_ceiling
    return _cached_flow(
        principal.shares or (FlowLevel(principal.key),), requested_priority if requested_priority < ceiling else ceiling
    )


@lru_cache(maxsize=4096)
def _cached_flow(path: tuple[FlowLevel, ...], priority: int) -> Flow:
    """Cached, so that all requests of a flow share one object with a cached hash."""
    return Flow(path, priority_class_for(priority))
