"""Limit plans: combined limits and prices for the requests of one caller to one model, and the output they allow.

Limits change rarely, prices change only with the configuration, and budget windows change once a day, but requests
arrive all the time. So the constant part is computed once and cached, and a request finds it with one lookup.
"""

import logging
from collections.abc import Sequence

import msgspec

from maitred.admission.config import CachedAnswers
from maitred.admission.policy.claims import LimitDemand, WatchedCounter, day_at, make_demand, watched_counters
from maitred.admission.policy.refusal import of_model, whose
from maitred.admission.policy.rules import LimitRule, rules_for, tightest
from maitred.admission.prices import PriceList, PriceTag
from maitred.admission.request import AdmissionRequest
from maitred.core.counters import CounterKind
from maitred.core.errors import ContextLengthExceeded, InvalidRequest
from maitred.core.limits import LimitKind, LimitSource
from maitred.core.request import Usage
from maitred.core.tenancy import Principal

log = logging.getLogger(__name__)

_MOST_KEPT = 10_000
"""Maximum number of cached plans, about 3 KiB each with seven counters; the oldest is dropped first."""


class PerRequestLimits(msgspec.Struct, frozen=True):
    """The limits on single requests; None: no limit of that kind."""

    context: LimitRule | None = None
    output: LimitRule | None = None


class LimitPlan(msgspec.Struct, frozen=True):
    """Limits and prices for the requests of one caller to one model."""

    edition: int
    """Edition of the limits that the plan was made from."""
    day: int
    """Day that determines the budget windows."""
    bounds: PerRequestLimits
    demand: LimitDemand
    tag: PriceTag
    cached_answers: CachedAnswers = "requests"
    """Which limits count what a cache has."""

    def with_saved_tokens(self, tokens: int) -> "LimitPlan":
        """Returns the plan of a request of which a cache has so many tokens, beside those that are computed."""
        counted, cost_nusd = tokens if self.cached_answers == "all" else 0, self.saved_cost_nusd(tokens)
        if not counted and not cost_nusd:
            return self
        return msgspec.structs.replace(self, demand=self.demand.with_saved_tokens(counted, cost_nusd))

    def with_cost(self, cost_nusd: int) -> "LimitPlan":
        """Returns the plan of a request that costs so much beside its tokens."""
        return msgspec.structs.replace(self, demand=self.demand.with_saved_tokens(0, cost_nusd))

    def saved_cost_nusd(self, tokens: int) -> int:
        """Returns what budgets count for tokens that a cache has."""
        return 0 if self.cached_answers == "none" else self.tag.price.of_hits.cost_nusd(Usage(tokens, 0))


class LimitPlanCache:
    """Makes and caches limit plans.

    Args:
        limits: Source of the limits.
        prices: Prices of the tokens.
        cached_answers: Which limits count cached answers; see `AdmissionConfig.cached_answers`.
    """

    def __init__(self, limits: LimitSource, prices: PriceList, cached_answers: CachedAnswers = "requests") -> None:
        self._limits = limits
        self._prices = prices
        self._cached_answers = cached_answers
        self._plans: dict[tuple[str, tuple[str, ...], str | None, bool], LimitPlan] = {}
        self._warned_free: set[str] = set()

    def plan_for(self, principal: Principal, model: str | None, wall_s: float, *, is_cached: bool = False) -> LimitPlan:
        """Returns the current plan of a caller for a model; None: the part that holds for every model, as a least.

        Args:
            principal: The caller.
            model: The model, or None.
            wall_s: The time, which determines the windows of budgets.
            is_cached: Whether the plan is for requests whose answers come from a cache.
        """
        name = (principal.key, principal.tenants, model, is_cached)
        plan = self._plans.get(name)
        if plan is None or plan.edition != self._limits.edition or plan.day != day_at(wall_s):
            plan = self._make_plan(principal, model, day_at(wall_s), is_cached=is_cached)
            self._plans.pop(name, None)
            if len(self._plans) >= _MOST_KEPT:
                del self._plans[next(iter(self._plans))]
            self._plans[name] = plan
        return plan

    def _make_plan(self, principal: Principal, model: str | None, day: int, *, is_cached: bool) -> LimitPlan:
        rules = rules_for(principal.subjects, self._limits, model)
        watches, tag = watched_counters(rules), self._prices.price_for(model)
        if is_cached:
            watches, tag = self._watches_of_hits(watches), tag.of_hits
        demand = make_demand(watches, tag.price, day)
        counts_budget = any(watch.claim.kind is CounterKind.BUDGET for watch in watches)
        if model is not None and counts_budget and not demand.budgets and not is_cached:
            self._warn_free(model)
        bounds = per_request_limits(rules)
        return LimitPlan(self._limits.edition, day, bounds, demand=demand, tag=tag, cached_answers=self._cached_answers)

    def _watches_of_hits(self, watches: list[WatchedCounter]) -> list[WatchedCounter]:
        """Returns the counters that count cached answers."""
        if self._cached_answers == "requests":
            return [watch for watch in watches if not watch.claim.per_prompt and not watch.claim.per_output]
        return watches if self._cached_answers == "all" else []

    def _warn_free(self, model: str) -> None:
        """Warns once that budgets count nothing for a free model, which the operator may not expect."""
        if model not in self._warned_free:
            self._warned_free.add(model)
            log.warning(
                "Budgets hold for requests to %s, but its tokens have no price, so they count nothing. "
                "Set admission.prices for this model, or for `*`.",
                model,
            )


class OutputLimit(msgspec.Struct, frozen=True):
    """Output tokens that each choice may have."""

    wanted: int
    """The caller's value, or the default if the caller gave none."""
    most: int
    """This value after the limit on output is applied."""


def per_request_limits(rules: Sequence[LimitRule]) -> PerRequestLimits:
    """Returns the tightest per-request limits among the limits that apply."""
    return PerRequestLimits(tightest(rules, LimitKind.CONTEXT_TOKENS), tightest(rules, LimitKind.OUTPUT_TOKENS))


def output_limit(request: AdmissionRequest, bounds: PerRequestLimits, default_output_tokens: int | None) -> OutputLimit:
    """Returns the `max_tokens` that a request gets, within the limits that hold for it.

    A limit on the context works like a smaller context window: it lowers a default length, and it refuses an explicit
    length that does not fit. A limit on the output lowers a default length and an explicit length.

    Args:
        request: The request.
        bounds: Per-request limits that apply to the request.
        default_output_tokens: Output tokens for a request without `max_tokens`; None: as many as fit.

    Raises:
        ContextLengthExceeded: Prompt and answer do not fit a limit on the context.
        InvalidRequest: `min_tokens` cannot be reached.
    """
    left = request.window_left
    if bounds.context is not None:
        left = min(left, _output_budget(request, bounds.context))
    wanted = request.max_tokens
    if wanted is None:
        wanted = left if default_output_tokens is None else min(left, max(default_output_tokens, request.min_tokens))
    most = wanted
    if bounds.output is not None:
        most = min(wanted, bounds.output.limit.value)
    if most < request.min_tokens:
        raise InvalidRequest(
            f"min_tokens is {request.min_tokens:,}, but the limits of this key leave room for {most:,} tokens. "
            "Lower it.",
            param="min_tokens",
        )
    return OutputLimit(wanted, most)


def _output_budget(request: AdmissionRequest, context: LimitRule) -> int:
    """Returns the tokens that a limit on the context leaves for the answer."""
    limit = context.limit
    allowed = f"{whose(context.subject)} may use {limit.value:,} for both together{of_model(limit)}"
    longest_prompt = request.prompt_tokens if request.longest_prompt is None else request.longest_prompt
    left = limit.value - longest_prompt
    if left < 0 or (left == 0 and request.max_tokens != 0):
        raise ContextLengthExceeded(
            f"The prompt has {longest_prompt:,} tokens and the answer needs some, but {allowed}. "
            + (f"Shorten the prompt to at most {limit.value - 1:,} tokens." if limit.value > 1 else "Have it raised."),
            param=request.prompt_param,
            window=limit.value,
            prompt_tokens=longest_prompt,
        )
    if request.max_tokens is not None and request.max_tokens > left:
        raise ContextLengthExceeded(
            f"The prompt has {longest_prompt:,} tokens and {request.max_tokens_param} asks for "
            f"{request.max_tokens:,} more, but {allowed}. Lower {request.max_tokens_param} to at most {left:,}, or "
            "shorten the prompt.",
            param=request.max_tokens_param,
            window=limit.value,
            prompt_tokens=longest_prompt,
            max_tokens=request.max_tokens,
        )
    return left
