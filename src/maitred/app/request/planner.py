"""What is to be done for a request, before anything is done: at which model, as what, and when its turn would come.

Who would be served too late may get less than it asked for, where the model's ladder has a step that helps; otherwise
it is told so now. Nothing is held by a plan, and nothing has to be given back.
"""

from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from maitred.admission.grammars.validator import GrammarValidator
from maitred.admission.policy.ladder import DEGRADABLE, DegradationLadder, DegradedRequest, overflowing
from maitred.app.models.router import Router
from maitred.app.request.constraints import in_form, rules_for, with_tools
from maitred.app.request.escalation import with_scores
from maitred.app.request.flow_control import FlowController
from maitred.app.request.limits import check_fits, check_generates, check_needs, check_sampling, check_size
from maitred.app.request.prompts import tokens_of
from maitred.app.request.tokenized import TokenizedRequest
from maitred.app.request.upstream_plan import UpstreamRequestPlan, estimate_text, read_text
from maitred.core.answer import InferenceRequest, RequestContext
from maitred.core.errors import MaitredError, Overloaded, TooExpensive
from maitred.core.flow import Flow, FlowLevel, PriorityClass, QueuePosition, class_of
from maitred.core.money import usd_of
from maitred.core.tenancy import ANONYMOUS, Principal
from maitred.dispatch.request import DispatchRequest
from maitred.routing.catalog import TextModel
from maitred.routing.pools.route_table import RouteTarget

AnyReading = TokenizedRequest | UpstreamRequestPlan
"""For a replica that takes tokens, or for one that takes text."""


class RequestPlan(Struct, frozen=True):
    """What is to be done for a request."""

    target: RouteTarget
    reading: AnyReading
    errand: DispatchRequest
    place: QueuePosition | None
    """What is predicted; None: that is told with its place in the line."""
    instead_of: MaitredError | None = None
    """Why another model than the one that was asked for; None: it is that one."""


class RequestPlanner:
    """Makes the plans of one pipeline.

    Args:
        router: What is served, under which names.
        control: Says when a turn would come, what tokens cost, and how long answers are by default.
        ladders: Model -> what is tried before a request is refused for the load; nothing where none is given.
        max_choices: Largest `n`, if the replica would take more.
        grammars: Tries what answers are to look like.
    """

    def __init__(
        self,
        router: Router,
        control: FlowController,
        ladders: Mapping[str, DegradationLadder],
        max_choices: int,
        grammars: GrammarValidator,
    ) -> None:
        self._router = router
        self._control = control
        self._ladders = ladders
        over = {pool: ladder.overflow_to for pool, ladder in ladders.items()}
        self._overflows = {pool: model for pool, model in over.items() if model is not None}
        """Where requests may be sent to while they wait."""
        self._max_choices = max_choices
        self._grammars = grammars

    async def plan(
        self, target: RouteTarget, ask: InferenceRequest, principal: Principal, tally: RequestContext
    ) -> RequestPlan:
        """What is to be done at a model, or with less, or at another one.

        Raises:
            MaitredError: What stands against it.
        """
        model = self._router.model(target)
        if isinstance(model, TextModel) and model.tokenizer is None:
            # As most requests to other servers; nothing of it waits.
            tally.model = target.name
            reading: AnyReading = self._taken(estimate_text(model, ask, self._max_choices), target, tally)
        else:
            reading = await self._read(target, ask, tally)
        try:
            return self._queued(target, reading, principal, tally)
        except DEGRADABLE as refusal:
            if target.pool in self._ladders:
                return await self._degraded(target, reading, principal, tally, refusal)
            tally.forecast = _place_of(refusal)
            raise

    async def elsewhere(self, variant: DegradedRequest, principal: Principal, tally: RequestContext) -> RequestPlan:
        """What is to be done for a waiting request at the model that it is sent to; raises what stands against it."""
        there = self._router.way(variant.ask, principal).first()
        return self._queued(there, await self._read(there, variant.ask, tally), principal, tally)

    def leaving(self, target: RouteTarget, ask: InferenceRequest, principal: Principal) -> DegradedRequest | None:
        """What becomes of a request if it is sent elsewhere while it waits; None: it may not leave, or cannot."""
        to = self._overflows.get(target.pool)
        if to is None or not ask.degradable:
            return None
        variant = overflowing(ask, to)
        try:
            self._router.way(variant.ask, principal).first()
        except MaitredError:
            return None
        return variant

    async def _read(self, target: RouteTarget, ask: InferenceRequest, tally: RequestContext) -> AnyReading:
        """What the request is to a model, if it can do what is asked, it fits, and may cost as much."""
        model = self._router.model(target)
        tally.model = target.name
        if isinstance(model, TextModel):
            return self._taken(await read_text(model, ask, self._max_choices), target, tally)
        card = model.card()
        check_generates(card, model.name)
        rules = rules_for(model, ask)
        ask = with_tools(with_scores(ask), rules)
        ask = replace(ask, sampling=model.defaults.settle(ask.sampling, ask.left_open))
        check_needs(ask)
        check_sampling(card, ask, self._max_choices)
        check_size(card, model.tokenizer, ask)
        prompts = await tokens_of(model, ask.prompts)
        rooms = [check_fits(card, prompt, ask) for prompt in prompts]
        tally.prompt_tokens = sum(map(len, prompts))
        organisation = (tally.principal or ANONYMOUS).tenants[-1]
        ask = await in_form(self._grammars, organisation, model, ask, rules, prompts)
        reading = TokenizedRequest(model, card, ask, prompts, rooms, rules)
        if ask.most_usd is not None:
            self._check_cost(reading, target, ask.most_usd)
        return reading

    def _taken(self, text: UpstreamRequestPlan, target: RouteTarget, tally: RequestContext) -> UpstreamRequestPlan:
        """What was read, if it may cost as much."""
        tally.prompt_tokens = text.prompt_tokens
        if text.ask.most_usd is not None:
            self._check_cost(text, target, text.ask.most_usd)
        return text

    def _check_cost(self, reading: AnyReading, target: RouteTarget, most_usd: float) -> None:
        """Raises TooExpensive if it may cost more than its caller allows."""
        output_tokens = self._length(reading) * reading.choice_count
        usd = usd_of(self._control.price_of(target.name).cost_nusd(reading.prompt_tokens, 0, output_tokens))
        if usd > most_usd:
            raise TooExpensive(
                f"With {output_tokens:,} tokens of output it may cost ${usd:.4g}, and ${most_usd:.4g} are allowed. "
                f"Lower {reading.ask.max_tokens_param}, or allow more."
            )

    def _queued(
        self, target: RouteTarget, reading: AnyReading, principal: Principal, tally: RequestContext
    ) -> RequestPlan:
        """How it would wait; raises what refuses it for the load."""
        errand = _errand(principal, tally, reading, self._length(reading))
        tally.priority = errand.flow.priority
        return RequestPlan(target, reading, errand, self._control.check(target.pool, errand))

    def _length(self, reading: AnyReading) -> int:
        """Most tokens of a choice, before any limit has had a look at it."""
        room = max(reading.rooms)
        return room if reading.ask.max_tokens is not None else min(room, self._control.default_output_tokens or room)

    async def _degraded(
        self,
        target: RouteTarget,
        reading: AnyReading,
        principal: Principal,
        tally: RequestContext,
        refusal: MaitredError,
    ) -> RequestPlan:
        """The same with less, where the model's ladder has a step that helps; otherwise raises the refusal."""

        async def attempt(variant: DegradedRequest) -> RequestPlan:
            if variant.overflows:
                leaving = self.leaving(target, reading.ask, principal)
                if (plan := await self._relieved(target, reading, principal, tally, leaving is not None)) is not None:
                    return plan
            ask, there = variant.ask, target
            if ask.model != reading.ask.model:
                there = self._router.way(ask, principal).first()
            plan = self._queued(there, await self._read(there, ask, tally), principal, tally)
            return plan if there is target else replace(plan, instead_of=refusal)

        ladder = self._ladders[target.pool]
        try:
            variant, plan = await ladder.first_that_fits(reading.ask, self._length(reading), refusal, attempt)
        except MaitredError:
            # An attempt may have been at another model.
            tally.model, tally.prompt_tokens = target.name, reading.prompt_tokens
            tally.forecast = _place_of(refusal)
            raise
        tally.degraded = [] if plan.reading is reading else list(variant.degraded)
        return plan

    async def _relieved(
        self, target: RouteTarget, reading: AnyReading, principal: Principal, tally: RequestContext, movable: bool
    ) -> RequestPlan | None:
        """The whole request here after all, where others that wait leave in its place."""
        errand = replace(_errand(principal, tally, reading, self._length(reading)), movable=movable)
        if not await self._control.relieve(target.pool, errand):
            return None
        try:
            return self._queued(target, reading, principal, tally)
        except DEGRADABLE:
            return None


def _place_of(refusal: MaitredError) -> QueuePosition | None:
    """What was predicted for what is refused."""
    return refusal.place if isinstance(refusal, Overloaded) else None


def _errand(principal: Principal, tally: RequestContext, reading: AnyReading, max_tokens: int) -> DispatchRequest:
    """The request as the queue sees it."""
    ask = reading.ask
    deadline_s = None
    if ask.ttft_in_s is not None or ask.deadline_in_s is not None:
        wishes = [wish_s for wish_s in (ask.ttft_in_s, ask.deadline_in_s) if wish_s is not None]
        deadline_s = tally.started_s + min(wishes)
    return DispatchRequest(
        id=tally.request_id,
        principal_org=principal.tenants[-1],
        flow=flow_of(principal, ask),
        prompt_tokens=reading.prompt_tokens,
        prompts=reading.prompts,
        max_tokens=max_tokens,
        choices=reading.choice_count,
        arrived_s=tally.started_s,
        deadline_s=deadline_s,
        session=None if ask.session is None else f"{principal.tenants[-1]}/{ask.session}",
        story=tally.story,
    )


def flow_of(principal: Principal, ask: InferenceRequest) -> Flow:
    """The flow of a request: as urgent as it asks to be, up to its tenant's ceiling."""
    asked = PriorityClass.STANDARD.priority if ask.priority is None else ask.priority
    ceiling = principal.priority_ceiling
    return _flow(principal.shares or (FlowLevel(principal.key),), asked if asked < ceiling else ceiling)


@lru_cache(maxsize=4096)
def _flow(path: tuple[FlowLevel, ...], priority: int) -> Flow:
    """One object for all requests of a flow: it is looked up several times on each one's way."""
    return Flow(path, class_of(priority))
