"""Allocates the capacity of a model's replicas: quotas, headroom and free capacity."""

import math
from collections.abc import Sequence, Set

from maitred.core.request import WaitCause
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.credits import NOTHING, Cost, total_cost
from maitred.dispatch.policy.quotas import Quota, Quotas, TenantHoldings
from maitred.dispatch.queue import QueuedRequest, QuotaQueue
from maitred.dispatch.regions import RegionPlanner, permitted_endpoints
from maitred.dispatch.selector import ReplicaSelector

_MIN_COST = Cost(1, 1)
_TURN = 0.25
"""Share of the slots that is free when a request with more sequences than slots is dispatched."""


class CapacityAllocator:
    """Allocates slots and KV blocks of the replicas to quotas and tenants.

    Args:
        config: The settings.
        selector: Selector of the replica among those with capacity.

    Attributes:
        quotas: Quotas into which the capacity is divided.
        holdings: Slots that each tenant holds.
        headroom: Share of the capacity that is kept for tenants below their fair share.
        shared: Whether the queue order is fair between tenants.
        regions: Decides in which region a request runs; None: each may run at all replicas.
    """

    def __init__(self, config: DispatchConfig, selector: ReplicaSelector) -> None:
        self._selector = selector
        self.regions: RegionPlanner | None = None
        self.holdings = TenantHoldings()
        self.reconfigure(config)
        self.rebuild_quotas(config)

    def reconfigure(self, config: DispatchConfig) -> None:
        """Applies new settings except the quotas."""
        self.shared = config.line.policy == "fair"
        self.headroom = config.headroom if self.shared else 0.0

    def rebuild_quotas(self, config: DispatchConfig) -> None:
        """Rebuilds the quotas; the caller must allocate running requests to the new quotas again."""
        self.quotas = Quotas(config.reserved, {name: (pool.tenants, pool.share) for name, pool in config.pools.items()})

    def allocate(self, queued: QueuedRequest, quota: Quota, ready: Sequence[EndpointState]) -> None:
        """Charges the cost of a dispatched entry to its quota and its tenant.

        The quota is never charged for more than its size less the headroom: the rest of a larger request waits for its
        turns at the replica, and is not in the way of others.
        """
        queued.quota_cost = queued.cost
        if self.quotas.has_dedicated:
            limit = self.quotas.limit(quota, total_of(ready))
            queued.quota_cost = queued.cost.at_most(_beside_headroom(limit, self.headroom))
        self.holdings.allocate(queued.tenant, queued.cost.slots, queued.flow.priority)
        quota.allocate(queued.quota_cost)

    def release(self, queued: QueuedRequest, quota: Quota) -> None:
        """Releases the cost of an entry from its quota and its tenant."""
        quota.release(queued.quota_cost)
        self.holdings.release(queued.tenant, queued.cost.slots, queued.flow.priority)

    def held_costs(self, queued: QueuedRequest, endpoint_state: EndpointState) -> Sequence[Cost]:
        """Returns the costs for which an entry holds credits at a replica, one for each prompt.

        A replica that does not report its capacity is held for to the end, so a request that is larger than the learnt
        window holds the window less the headroom. An engine reports how many of the sequences run; until then, such a
        request holds all there is and one slot more, so that others wait for that report and not for its end.
        """
        total = endpoint_state.total
        if queued.cost.slots <= total.slots:
            return queued.costs
        if not endpoint_state.endpoint.reports_capacity:
            return [queued.cost.at_most(_beside_headroom(total, self.headroom))]
        left = Cost(total.slots + 1, total.blocks)
        costs = []
        for cost in queued.costs:
            costs.append(cost.at_most(left))
            left = left.minus(costs[-1])
        return costs

    def endpoint_for(
        self,
        queued: QueuedRequest,
        quota: Quota,
        ready: Sequence[EndpointState],
        now_s: float,
        *,
        above_share: bool,
        except_in: Set[str | None] = frozenset(),
    ) -> EndpointState | WaitCause:
        """Returns the endpoint for an entry, or the wait cause if none has capacity.

        Args:
            queued: The entry.
            quota: The quota that is charged.
            ready: The replicas that are ready.
            now_s: Now.
            above_share: Whether its tenant may not use the headroom.
            except_in: Regions whose replicas it may not use.
        """
        headroom = self.headroom if above_share else 0.0
        overcommits = self._may_overcommit(queued)
        if self.quotas.has_dedicated:
            quota_total = self.quotas.limit(quota, total_of(ready))
            limit = quota_total.minus(_headroom_cost(quota_total, headroom, ready))
            capped_cost = queued.cost.at_most(limit).at_least(_MIN_COST)
            if queued.cost.slots > total_of(ready).slots:
                capped_cost = _first_turn(queued, quota_total, quota_total.minus(limit), ready[0].block_tokens)
            free = limit.minus(quota.used)
            if overcommits and quota is self.quotas.common:
                free = free.plus(Cost(sum(endpoint_state.overcommit_slots for endpoint_state in ready), 0))
            if not capped_cost.within(free) and quota.used != NOTHING:
                return WaitCause.SLOTS if capped_cost.slots > free.slots else WaitCause.KV_FULL
        candidates: list[EndpointState] = []
        lacks_slots = False
        regions = self.regions
        if regions is not None:
            ready = permitted_endpoints(queued.request, ready)
            if not ready:
                return WaitCause.COLD_START
        tried = ready
        if queued.failed_at:
            tried = untried_endpoints(queued, ready) or ready
        for endpoint_state in tried:
            if endpoint_state.region in except_in:
                lacks_slots = True
                continue
            reserve = _headroom_cost(endpoint_state.total, headroom, [endpoint_state])
            capped_cost = _first_turn(queued, endpoint_state.total, reserve, endpoint_state.block_tokens)
            free = endpoint_state.free.minus(reserve)
            if overcommits:
                free = free.plus(Cost(endpoint_state.overcommit_slots, 0))
            if queued.cost.slots > endpoint_state.total.slots and _has_turns_left(endpoint_state):
                lacks_slots = True
            elif capped_cost.within(free) or endpoint_state.credits.idle:
                candidates.append(endpoint_state)
            elif capped_cost.slots > free.slots:
                lacks_slots = True
        if candidates and regions is not None:
            narrowed = regions.narrow(queued, candidates, ready, now_s)
            if not narrowed:
                return WaitCause.SLOTS  # it waits for its own region
            candidates = [*narrowed]
        if candidates:
            return self._selector.select(queued, candidates, now_s)
        return WaitCause.SLOTS if lacks_slots else WaitCause.KV_FULL

    def awaits_turns(self, queued: QueuedRequest, ready: Sequence[EndpointState]) -> bool:
        """Whether an entry has more sequences than any replica has slots, and others like it take turns at all of them.

        It may hold up nobody meanwhile: smaller requests come in beside those that take turns.
        """
        if self.regions is not None:
            ready = permitted_endpoints(queued.request, ready)
            if not ready:
                return False
        return all(
            queued.cost.slots > endpoint_state.total.slots and _has_turns_left(endpoint_state)
            for endpoint_state in ready
        )

    def is_ample(self, cost: Cost, ready: Sequence[EndpointState]) -> bool:
        """Whether the only replica certainly has capacity, without headroom or overcommit."""
        return (
            len(ready) == 1
            and self.regions is None
            and not self.quotas.has_dedicated
            and ready[0].credits.certainly_fits(cost, self.headroom)
        )

    def hedge_endpoint(
        self, queued: QueuedRequest, others: Sequence[EndpointState], now_s: float
    ) -> EndpointState | None:
        """Returns an endpoint for a hedge, with free capacity beyond the headroom; None: none has it."""
        if self.regions is not None:
            others = permitted_endpoints(queued.request, others)
        if self.quotas.has_dedicated and not queued.cost.within(
            self.quotas.remaining(queued.queue.quota, total_of(others))
        ):
            return None
        candidates = [
            endpoint_state
            for endpoint_state in untried_endpoints(queued, others)
            if queued.cost.within(
                endpoint_state.free.minus(_headroom_cost(endpoint_state.total, self.headroom, [endpoint_state]))
            )
        ]
        if self.regions is not None:
            candidates = [s for s in candidates if s.region == self.regions.region] or candidates
        return self._selector.select(queued, candidates, now_s) if candidates else None

    def overtaking_candidate(self, queue: QuotaQueue, ready: Sequence[EndpointState]) -> QueuedRequest | None:
        """Returns the request that may overtake a blocked head: by class, then by slots per weight.

        The head may neither use the headroom nor be overcommitted. A tenant may overtake by at most one request, so the
        fairness bound grows by one request only.
        """
        if not any(endpoint_state.free.slots + endpoint_state.overcommit_slots > 0 for endpoint_state in ready):
            return None
        best: QueuedRequest | None = None
        best_key = (0, 0.0, 0.0)
        for entries in queue.tenants.values():
            queued = next(iter(entries))
            tenant = queued.tenant
            key = (
                queued.request.flow.priority.rank,
                self.holdings.held_by(tenant) / tenant.weight,
                queued.request.arrived_s,
            )
            if (best is None or key < best_key) and self.may_lead(queued):
                best, best_key = queued, key
        return best

    def free_capacity(self, queued: QueuedRequest, ready: Sequence[EndpointState], *, above_share: bool) -> Cost:
        """Returns the part of all replicas' credits that an entry may use now."""
        quota = queued.queue.quota
        total = total_of(ready)
        free = total_cost([endpoint_state.free for endpoint_state in ready])
        if above_share:
            free = free.minus(_headroom_cost(total, self.headroom, ready))
        if self._may_overcommit(queued):
            free = free.plus(Cost(sum(endpoint_state.overcommit_slots for endpoint_state in ready), 0))
        if self.quotas.has_dedicated:
            free = free.at_most(self.quotas.remaining(quota, total))
        return free

    def without_overcommit(self, free: Cost, ready: Sequence[EndpointState]) -> Cost:
        """Returns the free capacity less the slots that overcommitted requests will take first."""
        entries = sum(endpoint_state.free.slots - endpoint_state.load.guests for endpoint_state in ready)
        return Cost(min(free.slots, entries), free.blocks)

    def overcommit_slots(self, quota: Quota, ready: Sequence[EndpointState]) -> int:
        """Returns the number of requests that a quota may overcommit."""
        if not self.shared or quota is not self.quotas.common:
            return 0
        return sum(endpoint_state.overcommit_slots for endpoint_state in ready)

    def may_lead(self, queued: QueuedRequest) -> bool:
        """Whether an entry may overtake the head, into the headroom or by overcommit."""
        if queued.queue.quota is not self.quotas.common:
            return False
        service_lead = queued.queue.fair_queue.lead(queued.request.flow)
        return service_lead * queued.tenant.weight <= queued.service

    def above_share(self, queued: QueuedRequest, quota: Quota, ready: Sequence[EndpointState], now_s: float) -> bool:
        """Whether the tenant of an entry is above its fair share and may not use the headroom."""
        if not self.headroom or quota is not self.quotas.common:
            return False
        slots = self.quotas.limit(quota, total_of(ready)).slots
        return self.holdings.above_share(queued.tenant, queued.cost.slots, slots, now_s)

    def _may_overcommit(self, queued: QueuedRequest) -> bool:
        return self.shared and self.holdings.may_overcommit(queued.tenant, queued.cost.slots, queued.flow.priority)


def _first_turn(queued: QueuedRequest, total: Cost, reserve: Cost, block_tokens: int) -> Cost:
    """Returns the part of a request's cost that must be free beside the reserve when it is dispatched.

    It is all of the cost, or all that there is beside the reserve.

    Of a request with more sequences than there are slots, the replica runs some after others. It is dispatched when a
    part of the slots is free: to wait for all of them would leave the replica idle, and hold up others meanwhile. One
    such request takes turns at a time: what a replica reports as free beside it is kept for smaller ones.
    """
    cost, capacity = queued.cost, total.minus(reserve)
    if cost.slots > total.slots > 0:
        slots = math.ceil(total.slots * _TURN)
        longest_prompt = max(map(len, queued.request.prompts), default=0) // block_tokens
        cost = Cost(slots, longest_prompt + math.ceil(cost.blocks * slots / cost.slots), cost.prompt_tokens)
    return cost.at_most(capacity).at_least(_MIN_COST)


def _has_turns_left(endpoint_state: EndpointState) -> bool:
    """Whether a request with more sequences than slots was dispatched to a replica, and sequences of it still wait."""
    slots = endpoint_state.total.slots
    waiting = endpoint_state.load.waiting
    return waiting > math.ceil(slots * _TURN) or endpoint_state.credits.unreported.slots > slots


def _beside_headroom(whole: Cost, headroom: float) -> Cost:
    """Returns a capacity less its headroom: at least one slot less, if it has two, and at least one slot."""
    kept = max(1, math.ceil(whole.slots * headroom)) if headroom else 0
    return Cost(max(1, whole.slots - kept), max(1, whole.blocks - math.ceil(whole.blocks * headroom)))


def untried_endpoints(queued: QueuedRequest, ready: Sequence[EndpointState]) -> list[EndpointState]:
    """Returns the endpoints that have not failed the request."""
    return [endpoint_state for endpoint_state in ready if endpoint_state.endpoint.name not in queued.failed_at]


def total_of(endpoint_states: Sequence[EndpointState]) -> Cost:
    """Returns the capacity of several replicas together."""
    return total_cost([endpoint_state.total for endpoint_state in endpoint_states])


def _headroom_cost(whole: Cost, headroom: float, endpoint_states: Sequence[EndpointState]) -> Cost:
    """Returns the capacity kept for tenants below their share; no slots if all replicas overcommit."""
    kept = whole.part(headroom)
    return (
        Cost(0, kept.blocks) if all(endpoint_state.credits.overcommits for endpoint_state in endpoint_states) else kept
    )
