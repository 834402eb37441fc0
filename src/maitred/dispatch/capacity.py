"""Capacity of a model's replicas: quotas, headroom, and what is free now."""

from collections.abc import Sequence

from maitred.core.request import WaitCause
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.credits import NOTHING, Cost, total_cost
from maitred.dispatch.policy.quotas import Quota, Quotas, TenantHoldings
from maitred.dispatch.pool_queue import PoolQueue, QueuedRequest
from maitred.dispatch.selector import ReplicaSelector

_ONE = Cost(1, 1)


class CapacityAllocator:
    """Allocator of slots and KV blocks: what is held, and who may hold more.

    Args:
        config: The settings.
        choice: Which of several replicas takes a request.

    Attributes:
        quotas: The parts.
        holdings: What each tenant holds.
        headroom: The part of everything that is kept for those below their share.
        shared: Whether tenants have shares at all.
    """

    def __init__(self, config: DispatchConfig, choice: ReplicaSelector) -> None:
        self._selector = choice
        self.holdings = TenantHoldings()
        self.reconfigure(config)
        self.part(config)

    def reconfigure(self, config: DispatchConfig) -> None:
        """Goes by these settings from now on, but for the parts."""
        self.shared = config.line.policy == "fair"
        self.headroom = config.headroom if self.shared else 0.0

    def part(self, config: DispatchConfig) -> None:
        """Divides everything anew; who holds something must take it again, of the `quotas` that there are now."""
        self.quotas = Quotas(config.reserved, {name: (pool.tenants, pool.share) for name, pool in config.pools.items()})

    def allocate(self, queued: QueuedRequest, quota: Quota) -> None:
        """Charges the cost of a dispatched entry to its quota and its tenant."""
        quota.allocate(queued.cost)
        self.holdings.allocate(queued.tenant, queued.cost.slots, queued.flow.priority)

    def release(self, queued: QueuedRequest, quota: Quota) -> None:
        """Releases the cost of an entry from its quota and its tenant."""
        quota.release(queued.cost)
        self.holdings.release(queued.tenant, queued.cost.slots, queued.flow.priority)

    def endpoint_for(
        self, queued: QueuedRequest, quota: Quota, ready: Sequence[EndpointState], now_s: float, *, above_share: bool
    ) -> EndpointState | WaitCause:
        """The replica for it, of those that have room; else what is lacking."""
        headroom = self.headroom if above_share else 0.0
        overcommits = self._may_overcommit(queued)
        if self.quotas.parted:
            whole = self.quotas.limit(quota, total_of(ready))
            limit = whole.minus(_reserve_for(whole, headroom, ready))
            need = queued.cost.at_most(limit).at_least(_ONE)
            free = limit.minus(quota.used)
            if overcommits and quota is self.quotas.common:
                free = free.plus(Cost(sum(endpoint_state.overcommit_slots for endpoint_state in ready), 0))
            if not need.within(free) and quota.used != NOTHING:
                return WaitCause.SLOTS if need.slots > free.slots else WaitCause.KV_FULL
        open_ones: list[EndpointState] = []
        slots = False
        if queued.failed_at:
            ready = untried_endpoints(queued, ready) or ready
        for endpoint_state in ready:
            kept = _reserve_for(endpoint_state.total, headroom, [endpoint_state])
            need = queued.cost.at_most(endpoint_state.total.minus(kept)).at_least(_ONE)
            free = endpoint_state.free.minus(kept)
            if overcommits:
                free = free.plus(Cost(endpoint_state.overcommit_slots, 0))
            if need.within(free) or endpoint_state.credits.idle:
                open_ones.append(endpoint_state)
            elif need.slots > free.slots:
                slots = True
        if open_ones:
            return self._selector.select(queued, open_ones, now_s)
        return WaitCause.SLOTS if slots else WaitCause.KV_FULL

    def is_ample(self, cost: Cost, ready: Sequence[EndpointState]) -> bool:
        """Whether there is surely room at a single replica, whoever asks: beside all headroom, and not as a guest."""
        return len(ready) == 1 and not self.quotas.parted and ready[0].credits.has(cost, self.headroom)

    def hedge_endpoint(
        self, queued: QueuedRequest, others: Sequence[EndpointState], now_s: float
    ) -> EndpointState | None:
        """A further replica for a request that has one, of what is free beyond the headroom; None: none has room."""
        if self.quotas.parted and not queued.cost.within(self.quotas.remaining(queued.queue.quota, total_of(others))):
            return None
        roomy = [
            endpoint_state
            for endpoint_state in untried_endpoints(queued, others)
            if queued.cost.within(
                endpoint_state.free.minus(_reserve_for(endpoint_state.total, self.headroom, [endpoint_state]))
            )
        ]
        return self._selector.select(queued, roomy, now_s) if roomy else None

    def dispatch_early(
        self, queue: PoolQueue, quota: Quota, ready: Sequence[EndpointState], now_s: float
    ) -> tuple[QueuedRequest, EndpointState] | None:
        """Chooses who goes before a head that has to wait: the most urgent of those who hold least.

        The head may not use the headroom, and nobody gives way to it as a guest. Whoever may is not taken more than one
        request before its turn, so that the bound of the fair line grows by that and no more.
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
        if best is None:
            return None
        above = self.above_share(best, quota, ready, now_s)
        endpoint_state = self.endpoint_for(best, quota, ready, now_s, above_share=above)
        return None if isinstance(endpoint_state, WaitCause) else (best, endpoint_state)

    def free_capacity(self, queued: QueuedRequest, ready: Sequence[EndpointState], *, above_share: bool) -> Cost:
        """Returns the part of all replicas' credits that an entry may use now."""
        quota = queued.queue.quota
        total = total_of(ready)
        free = total_cost([endpoint_state.free for endpoint_state in ready])
        if above_share:
            free = free.minus(_reserve_for(total, self.headroom, ready))
        if self._may_overcommit(queued):
            free = free.plus(Cost(sum(endpoint_state.overcommit_slots for endpoint_state in ready), 0))
        if self.quotas.parted:
            free = free.at_most(self.quotas.remaining(quota, total))
        return free

    def without_overcommit(self, free: Cost, ready: Sequence[EndpointState]) -> Cost:
        """Returns the free capacity that anybody may use: overcommitted requests come first."""
        entries = sum(endpoint_state.free.slots - endpoint_state.load.guests for endpoint_state in ready)
        return Cost(min(free.slots, entries), free.blocks)

    def overcommit_slots(self, quota: Quota, ready: Sequence[EndpointState]) -> int:
        """How many more may come beyond the places into this part."""
        if not self.shared or quota is not self.quotas.common:
            return 0
        return sum(endpoint_state.overcommit_slots for endpoint_state in ready)

    def may_lead(self, queued: QueuedRequest) -> bool:
        """Whether it may be taken before its turn, into the headroom or as a guest."""
        if queued.queue.quota is not self.quotas.common:
            return False
        lead = queued.queue.fair_queue.lead(queued.request.flow)
        return lead * queued.tenant.weight <= queued.service

    def above_share(self, queued: QueuedRequest, quota: Quota, ready: Sequence[EndpointState], now_s: float) -> bool:
        """Whether it is not for its tenant that the headroom is kept."""
        if not self.headroom or quota is not self.quotas.common:
            return False
        slots = self.quotas.limit(quota, total_of(ready)).slots
        return self.holdings.above_share(queued.tenant, queued.cost.slots, slots, now_s)

    def _may_overcommit(self, queued: QueuedRequest) -> bool:
        return self.shared and self.holdings.may_overcommit(queued.tenant, queued.cost.slots, queued.flow.priority)


def untried_endpoints(queued: QueuedRequest, ready: Sequence[EndpointState]) -> list[EndpointState]:
    """Returns the replicas that have not failed the request."""
    return [endpoint_state for endpoint_state in ready if endpoint_state.endpoint.name not in queued.failed_at]


def total_of(endpoint_states: Sequence[EndpointState]) -> Cost:
    """Returns the capacity of several replicas together."""
    return total_cost([endpoint_state.total for endpoint_state in endpoint_states])


def _reserve_for(whole: Cost, headroom: float, endpoint_states: Sequence[EndpointState]) -> Cost:
    """Returns what is kept for tenants below their share: only blocks where they can be overcommitted."""
    kept = whole.part(headroom)
    return (
        Cost(0, kept.blocks) if all(endpoint_state.credits.overcommits for endpoint_state in endpoint_states) else kept
    )
