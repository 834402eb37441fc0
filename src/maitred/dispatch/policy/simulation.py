"""Simulates a fair queue to predict when a tenant's request is dispatched.

In a fair queue the current work ahead is not enough for a prediction: during the wait the counters rise with running
requests, slots become free as these end, and more tenants send requests. All of this is known or has a rate, so the
simulation assigns up to a few dozen slots to the tenant with the least counter, until it is the request's turn. It
ignores classes and the levels below a tenant; if several classes wait, the estimate of the fair queue is used instead.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import msgspec

MAX_TENANTS = 16
"""Maximum number of simulated tenants; with more, a simulation costs more and helps less."""
MAX_AHEAD = 48
"""Maximum number of requests ahead; beyond this, averages are accurate enough."""
_MAX_SIMULATED_ENDS = 64
"""Maximum number of simulated completions; longer waits are extrapolated."""


class SimulatedTenant(msgspec.Struct):
    """State of one tenant in the simulation."""

    counter: float
    """Service per weight by which the tenant is ahead of the least served tenant."""
    weight: float
    waiting: int
    prompt_service: float
    """Service that a typical request is charged at dispatch."""
    steps: float
    """Steps for which a request holds its slot."""
    joins_per_step: float
    """Expected new requests per step."""
    held: int = 0
    """Slots that the tenant holds."""
    prompts: Sequence[float] = ()
    """Prompt service of its waiting requests, next one first; later requests use `prompt_service`."""

    def prompt(self, number: int) -> float:
        """Returns the service that its request with this index is charged at dispatch."""
        return self.prompts[number] if number < len(self.prompts) else self.prompt_service


class PredictedTurn(NamedTuple):
    """Predicted time of a request's dispatch."""

    steps: float
    dispatched_before: float
    """Number of requests dispatched before it; their prefills lengthen some of these steps."""


def simulate_dispatch(
    tenants: Sequence[SimulatedTenant],
    tenant_index: int,
    own_ahead: int,
    running: Sequence[tuple[float, int]],
    free: int,
    output: float,
    overcommit: int = 0,
) -> PredictedTurn:
    """Simulates the queue until a request of one tenant is dispatched.

    Args:
        tenants: All tenants that wait or may send something.
        tenant_index: Index of the tenant whose request is predicted.
        own_ahead: Number of requests of the same tenant ahead of it.
        running: Remaining steps and tenant index of each used slot (-1: another tenant).
        free: Free slots; if negative, that many freed slots go to others first.
        output: Service of one output token.
        overcommit: Number of requests that may run beyond the slots (see `maitred.engine.scheduler.overcommit`).
    """
    return _Simulation(tenants, tenant_index, own_ahead, running, free=free, output=output, overcommit=overcommit).run()


class _Simulation:
    """One simulation run; see `simulate_dispatch`."""

    def __init__(
        self,
        tenants: Sequence[SimulatedTenant],
        tenant_index: int,
        own_ahead: int,
        running: Sequence[tuple[float, int]],
        free: int,
        output: float,
        overcommit: int,
    ) -> None:
        self._tenants = tenants
        self._weights = [tenant.weight for tenant in tenants]
        self._services = [tenant.prompt_service + output * tenant.steps for tenant in tenants]
        """Service of a typical request of each tenant."""
        self._tenant_index = tenant_index
        self._own_ahead = own_ahead
        self._free = free
        self._min_free = min(0, free) - overcommit
        self._output = output
        self._now = 0.0
        self._dispatched_count = self._dispatched_before = 0
        self._dispatched_by_tenant = [0] * len(tenants)
        self._ends = list(running)
        heapify(self._ends)
        self._counters = [tenant.counter for tenant in tenants]
        # The next arrival time is unknown; on average half an interval has passed.
        self._waiting = [tenant.waiting + (0.5 if tenant.joins_per_step else 0.0) for tenant in tenants]
        self._waiting[tenant_index] = own_ahead + 1.0
        self._sending = [k for k, tenant in enumerate(tenants) if tenant.joins_per_step and k != tenant_index]
        self._held = [tenant.held for tenant in tenants]
        self._share_with_one_more = [(tenant.held + 1) / tenant.weight for tenant in tenants]
        """Slots per weight that each tenant would hold with one more."""
        self._share_with_one_less = [(tenant.held - 1) / tenant.weight for tenant in tenants]
        """Slots per weight that each tenant would hold with one less."""
        self._counter_rates = [0.0] * len(tenants)
        for _, index in running:
            if index >= 0:
                self._counter_rates[index] += output / tenants[index].weight

    def run(self) -> PredictedTurn:
        """Runs the simulation to its end."""
        first = self._next()
        if self._free <= 0 and first != self._tenant_index:
            first = None  # the scheduler has already considered the waiting requests
        for _ in range(_MAX_SIMULATED_ENDS):
            while first is not None:
                if first == self._tenant_index:
                    if not self._own_ahead:
                        return PredictedTurn(self._now, self._dispatched_before)
                    self._own_ahead -= 1
                self._dispatch(first)
                first = self._next()
            if not self._ends:
                break
            self._advance(*heappop(self._ends))
            first = self._next()
        # The limit was reached: extrapolate.
        extrapolation = 1.0 + self._own_ahead / 8
        return PredictedTurn(self._now * extrapolation, self._dispatched_before * extrapolation)

    def _advance(self, then: float, ended: int) -> None:
        """Advances the time to the next completion and updates counters and arrivals."""
        tenants, waiting = self._tenants, self._waiting
        passed, self._now = then - self._now, then
        if passed > 0:
            self._dispatched_before = self._dispatched_count
            self._counters = [
                counter + passed * rise for counter, rise in zip(self._counters, self._counter_rates, strict=True)
            ]
            for k in self._sending:
                before_it = waiting[k]
                waiting[k] = before_it + passed * tenants[k].joins_per_step
                if before_it < 1.0 <= waiting[k]:
                    self._counters[k] = max(self._counters[k], self._min_waiting_counter(k))
        self._free += 1
        if ended >= 0:
            self._change_held(ended, -1)

    def _next(self) -> int | None:
        """Returns the tenant whose request is dispatched now, or None if no slot is free."""
        if self._free > 0:
            return self._head()
        return None if self._free <= self._min_free else self._overcommit_candidate(self._head())

    def _overcommit_candidate(self, head: int) -> int | None:
        """Returns the tenant to dispatch beyond the slots: the head, or the one with fewest slots.

        See `maitred.fairness.vtc.yields_to`: the tenant with most slots per weight yields first, never to itself.
        """
        more, counters = self._share_with_one_more, self._counters
        given = max(self._share_with_one_less)
        if more[head] <= given:
            return head
        level = counters[head]
        lightest, least = None, given
        for k, count in enumerate(self._waiting):
            if count >= 1.0 and more[k] <= least and (counters[k] - level) * self._weights[k] <= self._services[k]:
                lightest, least = k, more[k]
        return lightest

    def _dispatch(self, index: int) -> None:
        tenant = self._tenants[index]
        self._free -= 1
        self._dispatched_count += 1
        self._waiting[index] -= 1.0
        self._change_held(index, 1)
        self._counters[index] += tenant.prompt(self._dispatched_by_tenant[index]) / tenant.weight
        self._dispatched_by_tenant[index] += 1
        heappush(self._ends, (self._now + tenant.steps, index))

    def _change_held(self, index: int, places: int) -> None:
        """Changes the number of slots that a tenant holds; negative values subtract."""
        weight = self._weights[index]
        held = self._held[index] = self._held[index] + places
        self._share_with_one_more[index], self._share_with_one_less[index] = (held + 1) / weight, (held - 1) / weight
        self._counter_rates[index] += places * self._output / weight

    def _head(self) -> int:
        """Returns the waiting tenant with the least counter."""
        counters = self._counters
        first, least = self._tenant_index, counters[self._tenant_index]
        for k, count in enumerate(self._waiting):
            if count >= 1.0 and counters[k] < least:
                first, least = k, counters[k]
        return first

    def _min_waiting_counter(self, newcomer: int) -> float:
        """Returns the least counter of the other waiting tenants, to which a new waiting tenant is raised."""
        return min(counter for k, counter in enumerate(self._counters) if self._waiting[k] >= 1.0 and k != newcomer)
