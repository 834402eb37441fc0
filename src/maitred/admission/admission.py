"""Admits requests: reserve the maximum use, clamp the output to fit, settle the real use.

A request without any limit passes without a call to the counters, and only the ledger records it. Every other request
reserves its maximum use in one atomic step before any work is done, so no race between requests can overspend a budget.
"""

import asyncio
import copy
import random
from collections.abc import Callable, Sequence

import msgspec

from maitred.admission.bill_book import BillBook
from maitred.admission.budgets import BudgetState, OnSoftBudget, SoftBudgets, budget_usage
from maitred.admission.config import AdmissionConfig
from maitred.admission.grant import Grant, GrantServices
from maitred.admission.leases import Leases
from maitred.admission.limit_plans import LimitPlanCache, OutputLimit, output_limit
from maitred.admission.limit_status import LimitUsage, limit_usage, rate_limit_status
from maitred.admission.policy.claims import LimitDemand
from maitred.admission.policy.refusal import RequestedTokens, find_denial, make_refusal
from maitred.admission.policy.retries import RetryTurns
from maitred.admission.prices import PriceList
from maitred.admission.request import AdmissionRequest
from maitred.core.clock import Clock
from maitred.core.context import RateLimitStatus
from maitred.core.counters import (
    CounterKind,
    Counters,
    CounterState,
    RequestSize,
    Reservation,
    ReservationDenied,
    ReservationGranted,
)
from maitred.core.errors import CachedAnswerTooLong, StoreUnavailable
from maitred.core.ids import new_object_id
from maitred.core.limits import LimitSource
from maitred.core.tenancy import Principal
from maitred.core.usage import Ledger, Price


def _ignore_free(*_: object) -> None:
    """Ignores soft budgets that were passed."""


class Admission:
    """Decides which request may run and how long its answer may be.

    Args:
        limits: Source of the limits.
        counters: The counters of the limits.
        ledger: Records the usage of every request.
        config: Prices, the default length of answers, the length of leases.
        clock: Clock for budget windows and durations.
        jitter: Draws a random number from 0 to 1 for `Retry-After` times.
        on_soft_budget: Called once for each soft budget that is passed, per window and subject.

    Attributes:
        leases: Leases of the running requests. Its `run` task must be running.
        default_output_tokens: Output tokens of each choice if the request names no `max_tokens`; None: as many as fit.
    """

    def __init__(
        self,
        limits: LimitSource,
        counters: Counters,
        ledger: Ledger,
        config: AdmissionConfig,
        clock: Clock,
        *,
        jitter: Callable[[], float] = random.random,
        on_soft_budget: OnSoftBudget = _ignore_free,
    ) -> None:
        self.leases = Leases(counters, config.lease_s)
        self._limits = limits
        self.reconfigure(config)
        self._counters = counters
        self._clock = clock
        self._jitter = jitter
        self._soft = SoftBudgets(on_soft_budget, clock)
        self._retry_turns = RetryTurns()
        self._books = GrantServices(ledger, self.leases, clock, soft=self._soft, bills=BillBook())

    def reconfigure(self, config: AdmissionConfig) -> None:
        """Applies new settings to later requests. Admitted requests stay unchanged."""
        self._config = config
        self.default_output_tokens = config.default_output_tokens
        self._prices = PriceList(config.prices)
        self._plans = LimitPlanCache(self._limits, self._prices, config.cached_answers)

    def snapshot(self) -> "Admission":
        """Returns a copy that keeps the current settings and shares counters, leases and turns."""
        return copy.copy(self)

    async def admit(self, admission_request: AdmissionRequest) -> Grant:
        """Reserves the use of a request; exit from the grant settles it if nothing else has.

        A request whose answer comes from a cache reserves what `AdmissionConfig.cached_answers` says, or all that it
        may have to pay of a bill that it shares; its answer is never clamped.

        Raises:
            InvalidRequest: The request asks for more than any single request may have.
            CachedAnswerTooLong: The limits allow only a shorter answer than the cached one.
            RateLimited: A rate or concurrency limit has no room now.
            QuotaExceeded: A budget is used up.
            StoreUnavailable: The counters or the journal cannot be reached, and admission does not fail open.
        """
        plan = self._plans.plan_for(
            admission_request.principal,
            admission_request.model,
            self._clock.wall_s(),
            is_cached=bool(admission_request.cache) and not admission_request.bill,
        )
        if admission_request.is_counted:
            plan = msgspec.structs.replace(plan, demand=plan.demand.without_request_rates())
        if admission_request.saved_tokens:
            plan = plan.with_saved_tokens(admission_request.saved_tokens)
        if admission_request.units_nusd:
            plan = plan.with_cost(admission_request.units_nusd)
        demand = plan.demand
        length = output_limit(admission_request, plan.bounds, self.default_output_tokens)
        if admission_request.cache:
            if length.most < admission_request.cached_tokens:
                raise CachedAnswerTooLong
            length = OutputLimit(admission_request.cached_tokens, admission_request.cached_tokens)
        size = RequestSize(admission_request.prompt_tokens, admission_request.choices)
        lease = new_object_id("use")
        output, rate_limits = length.most, None
        readings: Sequence[CounterState] = ()
        if demand.claims:
            least = min(output, max(self._config.least_output_tokens, admission_request.min_tokens))
            if admission_request.cache:
                least = output
            wanted = Reservation(
                lease=lease,
                claims=demand.claims,
                output=output,
                least_output=least,
                lease_s=self.leases.lease_s,
                size=size,
            )
            granted = await self._reserve(admission_request, demand, wanted)
            output, readings = granted.output, granted.readings
            rate_limits = rate_limit_status(demand.claims, readings)
        clamped = output < length.wanted
        if (context := admission_request.context) is not None:
            if admission_request.is_counted and (counted := context.rate_limits) is not None:
                rate_limits = RateLimitStatus(counted.requests, None if rate_limits is None else rate_limits.tokens)
            context.rate_limits = rate_limits
            context.clamped_max_tokens = output if clamped else None
        try:
            return Grant(
                lease,
                admission_request,
                plan,
                size,
                books=self._books,
                max_tokens=output,
                clamped=clamped,
                rate_limits=rate_limits,
                readings=readings,
            )
        except BaseException:
            # The journal failed to store the request, so it cannot begin.
            if demand.claims:
                await self.leases.settle(lease, {})
            raise

    async def resume(self, admission_request: AdmissionRequest, lease: str, max_tokens: int) -> Grant:
        """Restores the grant of a running request that a dead process had admitted.

        The request keeps its reservation, even if the limits have no room now.

        Args:
            admission_request: The request.
            lease: Id of the lease in the ledger, which has carried the request over.
            max_tokens: Output tokens of each choice, as granted.

        Raises:
            StoreUnavailable: The spent amount of a budget cannot be read.
        """
        plan = self._plans.plan_for(
            admission_request.principal,
            admission_request.model,
            self._clock.wall_s(),
            is_cached=bool(admission_request.cache) and not admission_request.bill,
        )
        if admission_request.is_counted:
            plan = msgspec.structs.replace(plan, demand=plan.demand.without_request_rates())
        size = RequestSize(admission_request.prompt_tokens, admission_request.choices)
        readings: Sequence[CounterState] = ()
        if claims := plan.demand.claims:
            readings = await self._counters.resume(
                Reservation(
                    lease=lease,
                    claims=claims,
                    output=max_tokens,
                    least_output=max_tokens,
                    lease_s=self.leases.lease_s,
                    size=size,
                )
            )
            self.leases.hold(lease)
        return Grant(
            lease,
            admission_request,
            plan,
            size,
            books=self._books,
            max_tokens=max_tokens,
            clamped=False,
            rate_limits=None,
            readings=readings,
            resumed=True,
        )

    def price_of(self, model: str) -> Price:
        """Returns the price of a model's tokens."""
        return self._prices.price_for(model).price

    async def rate_limit_status(self, principal: Principal, model: str) -> RateLimitStatus | None:
        """Returns a caller's rate limit status without a reservation; None if no rate applies or unknown."""
        demand = self._plans.plan_for(principal, model, self._clock.wall_s()).demand
        if not demand.rates:
            return None
        try:
            readings = await self._counters.read(demand.rates)
        except StoreUnavailable:
            return None
        return rate_limit_status(demand.rates, readings)

    async def check_limits(self, principal: Principal, least_output: int) -> None:
        """Checks whether a caller's limits have room for a request of any model with one prompt token.

        It reserves nothing, and refuses nothing that `admit` would accept at the same time, unless its answer comes
        from a cache. While the counters cannot be read, it does nothing.

        Args:
            principal: The caller.
            least_output: Fewest output tokens of the request.

        Raises:
            RateLimited: A rate or concurrency limit has no room now.
            QuotaExceeded: A budget is used up.
        """
        demand = self._plans.plan_for(principal, None, self._clock.wall_s()).demand
        if not demand.claims or not self._counters.healthy:
            return
        try:
            readings = await self._counters.read(demand.claims)
        except StoreUnavailable:
            return
        size = RequestSize(prompt_tokens=1)
        if (denied := find_denial(demand, readings, size, least_output)) is not None:
            wanted = demand.claims_for(size)
            asked = RequestedTokens(least_output, least_output, is_least=True)
            raise make_refusal(wanted, self._with_retry_turn(wanted, denied, least_output), asked, self._jitter())

    async def budgets(self, subject: str) -> list[BudgetState]:
        """Returns the states of all budgets of one subject: ``tenant:acme``, ``key:5b1f``, ``*``.

        Raises:
            StoreUnavailable: The counters cannot be read.
        """
        return await budget_usage(subject, self._limits, self._counters, self._clock)

    async def uses(self, subjects: Sequence[str]) -> list[LimitUsage]:
        """Returns the usage of the limits of these subjects.

        Raises:
            StoreUnavailable: The counters cannot be read.
        """
        return await limit_usage(subjects, self._limits, self._counters, self._clock)

    async def _reserve(
        self, admission_request: AdmissionRequest, demand: LimitDemand, reservation: Reservation
    ) -> ReservationGranted:
        """Reserves the claims or raises the refusal."""
        lease = reservation.lease
        try:
            answer = await self._counters.reserve(reservation)
        except asyncio.CancelledError:
            # It is unknown whether the reservation was made. The background task releases it when the counters can be
            # reached.
            self.leases.settle_later(lease, {})
            raise
        if demand.soft:
            self._soft.check(demand, answer.readings, {})
        if isinstance(answer, ReservationGranted):
            self.leases.hold(lease)
            return answer
        if admission_request.cache and demand.claims[answer.claim].clamps:
            raise CachedAnswerTooLong  # a shorter answer may have room
        if admission_request.context is not None:
            admission_request.context.rate_limits = rate_limit_status(demand.claims, answer.readings)
        wanted = demand.claims_for(reservation.size)
        asked = RequestedTokens(
            reservation.output,
            reservation.least_output,
            admission_request.max_tokens is not None,
            admission_request.max_tokens_param,
        )
        raise make_refusal(wanted, self._with_retry_turn(wanted, answer, reservation.output), asked, self._jitter())

    def _with_retry_turn(self, demand: LimitDemand, denied: ReservationDenied, output: int) -> ReservationDenied:
        """Returns the denial; for a rate, with the time until the caller's turn."""
        claim, wait_s = demand.claims[denied.claim], denied.retry_after_s
        if claim.kind is not CounterKind.BUCKET or wait_s is None:
            return denied
        turn_s = self._retry_turns.take(claim, claim.amount(output), wait_s, self._clock.monotonic_s())
        return msgspec.structs.replace(denied, retry_after_s=turn_s)
