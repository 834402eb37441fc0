"""Grant of an admitted request: its output tokens and its settlement at the end.

The order of a settlement protects the ledger: first the usage is journaled, which survives a crash, then the counters
are charged. After a crash in between, the lease expires and the journal has the correct usage.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from maitred.admission.bill_book import BillBook
from maitred.admission.budgets import SoftBudgets
from maitred.admission.leases import Leases
from maitred.admission.limit_plans import LimitPlan
from maitred.admission.policy.claims import rate_amounts, reserved_amounts
from maitred.admission.request import AdmissionRequest
from maitred.core.clock import Clock
from maitred.core.context import Outcome, RateLimitStatus
from maitred.core.counters import CounterState, RequestSize
from maitred.core.errors import (
    CallerError,
    DeadlineExceeded,
    MaitredError,
    Refused,
    ReplicaLost,
    Unauthenticated,
    Unavailable,
)
from maitred.core.request import Usage
from maitred.core.timeline import SpanName
from maitred.core.usage import Ledger, Settle, UsageEvent, to_usd

log = logging.getLogger(__name__)

_BILLED = (Outcome.FINISHED, Outcome.CANCELLED)
_NOTHING = Usage(0, 0)


@dataclass(frozen=True, slots=True)
class GrantServices:
    """Services that settle grants.

    Attributes:
        ledger: Records the usage.
        leases: Settles with the counters.
        clock: Clock for the times in the ledger.
        soft: Monitor of the soft budgets.
        bills: Bills that several requests share.
    """

    ledger: Ledger
    leases: Leases
    clock: Clock
    soft: SoftBudgets
    bills: BillBook


class Grant:
    """Grant of one request that may run.

    Attributes:
        lease: Id of its lease and of its ledger entry.
        max_tokens: Output tokens of each choice; fewer than the caller asked for if `clamped`.
        clamped: Whether a limit lowered `max_tokens`.
        rate_limits: Rate limit status of the caller, this request included; None without rates.
        replica: Name of the replica that serves the request, once it is chosen; several names with commas if the
            request moved.
    """

    def __init__(
        self,
        lease: str,
        admission_request: AdmissionRequest,
        plan: LimitPlan,
        size: RequestSize,
        books: GrantServices,
        *,
        max_tokens: int,
        clamped: bool,
        rate_limits: RateLimitStatus | None,
        readings: Sequence[CounterState],
        resumed: bool = False,
    ) -> None:
        self.lease = lease
        self.max_tokens = max_tokens
        self.clamped = clamped
        self.rate_limits = rate_limits
        self._work = admission_request
        self._plan = plan
        self._size = size
        self._books = books
        self._readings = readings
        self._used: Usage | None = None
        self.replica = ""
        self._started_s = (
            books.clock.monotonic_s() if admission_request.context is None else admission_request.context.started_s
        )
        self._recorded = False
        self._share = _NOTHING
        """Share of the bill of an answer that is computed for another request."""
        self._unpaid: Settle | None = None
        """Charges the counters with this share, which is in the ledger already."""
        if not resumed:  # else the ledger already has this request
            # If this process dies, this ledger entry is the only record of the request. The used part of its
            # reservation is then unknown, so the whole reservation counts: a restored rate never has more room than
            # before.
            begun = Usage(admission_request.prompt_tokens, 0)
            taken = reserved_amounts(plan.demand, size, max_tokens)
            if admission_request.cache:
                event = self._event(_NOTHING, Outcome.FAILED, 0, {}, taken, begun.total_tokens)
            else:
                event = self._event(begun, Outcome.FAILED, 0, {}, taken)
            books.ledger.begin(event)
        if admission_request.bill and admission_request.cache:
            books.bills.add(admission_request.bill, self.take_share)  # only where the request has begun

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.end(error)

    def set_replica(self, replica: str) -> None:
        """Adds the replica that now works on the request."""
        if replica == self.replica:
            return
        if not self.replica:
            self.replica = replica
        elif replica not in self.replica.split(","):
            self.replica += f",{replica}"

    def record_usage(self, usage: Usage) -> None:
        """Records the usage so far, for callers without a request context."""
        self._used = usage

    async def settle(self, usage: Usage, outcome: Outcome) -> None:
        """Writes the usage to the ledger and charges it. Only the first call counts.

        Complete answers and answers that the caller cancelled are billed. Failed requests are free: no budget is
        charged, but token rates keep the processed tokens. Requests that were refused before a replica was asked do not
        count in the rates. A budget is never charged more than was reserved in it: what a server counts beyond that is
        an error of its count, or of the estimate of its prompt.

        An answer from a cache costs its own price, and its tokens are in the ledger as saved ones. Of an answer whose
        bill is shared, a request pays its share, and the first one what is left.

        Args:
            usage: Usage that the replica counted; of an answer from a cache, that of the request that was computed.
            outcome: How the request ended.

        Raises:
            StoreUnavailable: The ledger cannot store the usage, so the answer must not end as if it were billed.
                Nothing is settled yet.
        """
        if self._recorded:
            unpaid, self._unpaid = self._unpaid, None
            if unpaid is not None:
                await unpaid()
            return
        bill, is_first = self._work.bill, not self._work.cache
        paid = usage
        if bill and is_first and outcome is Outcome.FINISHED:
            paid = self._books.bills.rest_of(bill, usage)
        charge = self._record(usage, self._share if bill and not is_first else paid, outcome)
        if bill and is_first and outcome is Outcome.FINISHED:
            self._books.bills.divide(bill, usage)
        if charge is not None:
            await charge()

    def take_share(self, share: Usage, whole: Usage) -> None:
        """Takes the share of the bill of an answer that was computed for another request.

        It is in the ledger at once, where no response has to be stored with it, and is charged when this request ends.
        """
        self._share = share
        context = self._work.context
        if context is None or not context.stored_as:
            try:
                self._unpaid = self._record(whole, share, Outcome.FINISHED)
            except MaitredError:
                log.warning("The share of request %s is not in the ledger yet.", self._work.request_id)

    def _record(self, usage: Usage, paid: Usage, outcome: Outcome) -> Settle | None:
        """Writes the line into the ledger; returns what charges the counters, if that is left to the caller.

        Args:
            usage: Usage of the whole answer.
            paid: The part of it that this request pays.
            outcome: How the request ended.
        """
        work, demand, price, size = self._work, self._plan.demand, self._plan.tag.price, self._size
        is_hit = bool(work.cache) and not work.bill
        cost_nusd = 0
        if outcome in _BILLED:
            cost_nusd = price.cost_nusd(paid)
            if demand.budgets:
                most_nusd = price.max_cost_nusd(size.prompt_tokens, size.choices * self.max_tokens) + work.units_nusd
                cost_nusd = min(cost_nusd, most_nusd)
        counted_nusd, saved_tokens = cost_nusd, 0
        if work.cache:
            # What the caller has read can be less than its share: it left when the answer was complete.
            saved_tokens = max(0, usage.total_tokens - (0 if is_hit else paid.total_tokens))
            if work.context is not None and not is_hit:
                work.context.paid_tokens = paid.total_tokens
        elif outcome is Outcome.FINISHED and (saved_tokens := work.saved_tokens):
            counted_nusd += self._plan.saved_cost_nusd(saved_tokens)
            cost_nusd += price.of_hits.cost_nusd(Usage(saved_tokens, 0))
        spent = dict.fromkeys(demand.budgets, counted_nusd)
        taken = rate_amounts(demand, paid, outcome, was_dispatched=bool(self.replica))
        context = work.context
        response = context.stored_as if context is not None and outcome is Outcome.FINISHED else ""
        event = self._event(_NOTHING if is_hit else paid, outcome, cost_nusd, spent, taken, saved_tokens)
        charge = partial(self._charge, {**spent, **taken}) if demand.claims else None
        waits = self._books.ledger.record(event, response, charge)
        self._recorded = True
        if work.bill:
            self._leave_bill()
        self._record_span(event)
        return None if waits else charge

    def _leave_bill(self) -> None:
        if self._work.cache:
            self._books.bills.remove(self._work.bill, self.take_share)

    async def end(self, error: BaseException | None) -> None:
        """Settles with the known usage if still unsettled; never raises in place of `error`."""
        if self._recorded:
            if self._unpaid is not None:
                await self.settle(_NOTHING, Outcome.FINISHED)
            return
        usage = self._used or self._work.usage_so_far()
        processed = usage.completion_tokens > 0 or self._work.work_has_begun
        outcome = _usage_outcome(error, processed=processed)
        if not processed and (outcome not in _BILLED or not self.replica):
            usage = _NOTHING  # a caller that leaves while it waits has no usage
        try:
            await self.settle(usage, outcome)
        except Exception:
            log.exception("The usage of request %s could not be journaled; it is not billed.", self._work.request_id)
            self._recorded = True
            if self._work.bill:
                self._leave_bill()
            if self._plan.demand.claims:
                await self._charge(rate_amounts(self._plan.demand, usage, Outcome.FAILED))
            if error is None:
                raise

    def _record_span(self, event: UsageEvent) -> None:
        """Records the settlement span with the cost."""
        if self._work.context is not None:
            now_s = self._books.clock.monotonic_s()
            facts = {
                "outcome": str(event.outcome),
                "replica": event.replica,
                "prompt_tokens": event.prompt_tokens,
                "cached_tokens": event.cached_tokens,
                "output_tokens": event.output_tokens,
                "cost_usd": to_usd(event.cost_nusd),
                "price": event.price,
            }
            if event.cache:
                facts |= {"cache": event.cache, "saved_tokens": event.saved_tokens}
            self._work.context.timeline.record(SpanName.SETTLEMENT, now_s, now_s, facts)

    async def _charge(self, charges: Mapping[str, int]) -> None:
        """Charges the counters of the reservation; a request without claims has none."""
        demand = self._plan.demand
        await self._books.leases.settle(self.lease, charges)
        if demand.soft:
            self._books.soft.check(demand, self._readings, charges)

    def _event(
        self,
        usage: Usage,
        outcome: Outcome,
        cost_nusd: int,
        charges: Mapping[str, int],
        taken: Mapping[str, int],
        saved_tokens: int = 0,
    ) -> UsageEvent:
        admission_request, principal, clock = self._work, self._work.principal, self._books.clock
        first_s = None if admission_request.context is None else admission_request.context.first_token_s
        price, cache = ", ".join(filter(None, (self._plan.tag.text, usage.units))), admission_request.cache
        if saved_tokens and not cache:
            cache = "partial"
            if hits := self._plan.tag.of_hits.text:
                price += f", hits {hits}"
        return UsageEvent(
            id=self.lease,
            request_id=admission_request.request_id,
            time_s=clock.wall_s(),
            key=principal.key,
            tenant=principal.tenants[0],
            organisation=principal.tenants[-1],
            model=admission_request.model,
            replica=self.replica,
            route=admission_request.route,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            cache_write_tokens=usage.cache_write_tokens,
            price=price,
            cost_nusd=cost_nusd,
            ttft_s=None if first_s is None else first_s - self._started_s,
            duration_s=clock.monotonic_s() - self._started_s,
            outcome=outcome,
            charges=charges,
            taken=taken,
            rollout=""
            if admission_request.context is None or admission_request.context.arm is None
            else str(admission_request.context.arm),
            cache=cache,
            saved_tokens=saved_tokens,
        )


def _usage_outcome(error: BaseException | None, *, processed: bool) -> Outcome:
    """Returns the outcome of a request whose grant ended with this error."""
    if error is None:
        return Outcome.FINISHED
    if isinstance(error, asyncio.CancelledError) and error.args:
        # A cancellation may carry its reason: a server shutdown differs from a caller that left.
        error = error.args[0] if isinstance(error.args[0], MaitredError) else error
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return Outcome.CANCELLED
    if isinstance(error, DeadlineExceeded | Unauthenticated) and processed:
        # The caller chose the deadline, and the expiry of the key is also on the caller's side. The tokens up to that
        # time are billed as if the caller had left.
        return Outcome.CANCELLED
    turned_away = isinstance(error, CallerError | Refused | Unavailable) and not isinstance(error, ReplicaLost)
    return Outcome.REFUSED if turned_away and not processed else Outcome.FAILED
