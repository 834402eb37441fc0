"""Quotas of tenants: common quota, reserved shares, isolated pools, and fair shares.

A *quota* is a share of all slots and KV blocks for some tenants. Tenants with a reserved share may also use the common
quota while no request waits for it; tenants of an isolated pool may not. Unused capacity of a quota stays idle, so that
it is available at once. In the common quota some headroom is kept for tenants that hold less than their fair share.
"""

import math
from collections.abc import Iterable, Mapping
from math import inf

from maitred.core.flow import FlowLevel, PriorityClass
from maitred.dispatch.policy.credits import Cost, CostSum
from maitred.fairness.vtc import yields_to

_ACTIVE_TENANT_S = 60.0
"""A tenant without requests for this long no longer counts in fair shares."""
_OBSERVE_INTERVAL_S = 0.5
"""Minimum interval between two updates of a tenant's last activity."""


class Quota:
    """A share of the replicas' capacity, with its current use.

    Args:
        name: Id of the tenant with the reserved share, or name of the pool; `COMMON` for the common quota.
        share: Share of the total capacity; for the common quota, the rest.
        borrows_common: Whether its tenants may use idle capacity of the common quota.
    """

    __slots__ = ("_used", "borrows_common", "name", "share")

    def __init__(self, name: str, share: float, *, borrows_common: bool = False) -> None:
        self.name = name
        self.share = share
        self.borrows_common = borrows_common
        self._used = CostSum()

    @property
    def used(self) -> Cost:
        """Cost of the running requests of this quota."""
        return self._used.cost

    def allocate(self, cost: Cost) -> None:
        """Adds the cost of a dispatched request."""
        used = self._used
        used.slots += cost.slots
        used.blocks += cost.blocks
        used.prompt_tokens += cost.prompt_tokens

    def release(self, cost: Cost) -> None:
        """Subtracts the cost of a request that has ended."""
        used = self._used
        used.slots -= cost.slots
        used.blocks -= cost.blocks
        used.prompt_tokens -= cost.prompt_tokens


COMMON = "common"


class Quotas:
    """All quotas of a model's replicas, by tenant.

    Args:
        reserved: Tenant id -> reserved share.
        pools: Pool name -> its tenant ids and its share.
    """

    def __init__(self, reserved: Mapping[str, float], pools: Mapping[str, tuple[Iterable[str], float]]) -> None:
        self._quota_by_tenant: dict[str, Quota] = {}
        own = [Quota(tenant, share, borrows_common=True) for tenant, share in reserved.items()]
        self._quota_by_tenant.update({quota.name: quota for quota in own})
        for name, (tenants, share) in pools.items():
            pool = Quota(name, share)
            own.append(pool)
            self._quota_by_tenant.update(dict.fromkeys(tenants, pool))
        self.common = Quota(COMMON, max(0.0, 1.0 - sum(quota.share for quota in own)))
        self.all = [*own, self.common]
        """All quotas; the common quota is last."""
        self.has_dedicated = bool(own)
        """Whether there are quotas besides the common one."""

    def quota_for(self, path: tuple[FlowLevel, ...]) -> Quota:
        """Returns the quota of a flow: of its key, team or organisation, else the common quota."""
        if self._quota_by_tenant:
            for level in reversed(path):
                quota = self._quota_by_tenant.get(level.id)
                if quota is not None:
                    return quota
        return self.common

    def usable_share(self, loads: Mapping[Quota, float]) -> float:
        """Returns the share of the capacity that loads can use of what they would need if each could use all of it.

        Where one of them fills its quota, it waits though capacity of the others is idle. So a load in one quota alone
        can use the share of that quota, and loads in proportion to the shares can use all of it.

        Args:
            loads: Running and waiting requests of each quota, in slots.
        """
        total = sum(loads.values())
        if not self.has_dedicated or not total:
            return 1.0
        needed = [load / quota.share for quota, load in loads.items() if load and not quota.borrows_common]
        # Who borrows from the common quota has what is left of it, too.
        open_quotas = [quota for quota in self.all if quota.borrows_common or quota is self.common]
        needed.append(sum(loads.get(quota, 0.0) for quota in open_quotas) / sum(quota.share for quota in open_quotas))
        return min(1.0, total / max(needed))

    def remaining(self, quota: Quota, total: Cost) -> Cost:
        """Returns the unused capacity of a quota.

        Args:
            quota: The quota.
            total: Total capacity of all replicas.
        """
        return self.limit(quota, total).minus(quota.used)

    def limit(self, quota: Quota, total: Cost) -> Cost:
        """Returns the size of a quota; a dedicated quota has at least one slot and one block."""
        if quota is not self.common:
            return _share_rounded_up(total, quota.share)
        rest = total
        for own in self.all[:-1]:
            rest = rest.minus(_share_rounded_up(total, own.share))
        return rest


def _share_rounded_up(total: Cost, share: float) -> Cost:
    return Cost(math.ceil(total.slots * share - 1e-9), math.ceil(total.blocks * share - 1e-9))


_CLASSES = len(PriorityClass)


class _TenantSlots:
    """Slots that one tenant holds, and its weight."""

    __slots__ = ("by_rank", "slots", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.slots = 0
        self.by_rank = [0] * _CLASSES
        """Slots by rank of the priority class."""


class TenantHoldings:
    """Slots that each tenant holds, compared with its fair share.

    A tenant's fair share is its weight relative to all tenants that were active in the last minute, so that slots are
    kept for tenants that will return.
    """

    def __init__(self) -> None:
        self._held: dict[str, _TenantSlots] = {}
        self._seen: dict[str, tuple[float, float]] = {}
        """Tenant id -> time of its last request and its weight, oldest first."""
        self._active_weight = 0.0
        self._next_expiry_s = inf
        """Earliest time at which a tenant can expire."""

    def __len__(self) -> int:
        """Number of active tenants."""
        return len(self._seen)

    @property
    def slots(self) -> int:
        """Slots that all tenants hold together."""
        return sum(held.slots for held in self._held.values())

    def observe(self, tenant: FlowLevel, now_s: float) -> None:
        """Records that a tenant has sent a request."""
        id_, weight = tenant.id, tenant.weight
        if id_ in self._seen:
            seen_s, known = self._seen[id_]
            if now_s - seen_s < _OBSERVE_INTERVAL_S and known == weight:
                return
            del self._seen[id_]
            self._active_weight -= known
        self._active_weight += weight
        self._seen[id_] = (now_s, weight)
        if self._next_expiry_s == inf:
            self._next_expiry_s = now_s + _ACTIVE_TENANT_S
        elif self._next_expiry_s <= now_s:
            self._expire_tenants(now_s)

    def allocate(self, tenant: FlowLevel, slots: int, priority: PriorityClass) -> None:
        """Adds slots to a tenant's holdings."""
        if tenant.id in self._held:
            held = self._held[tenant.id]
        else:
            held = self._held[tenant.id] = _TenantSlots(tenant.weight)
        held.by_rank[priority.rank] += slots
        held.slots += slots

    def release(self, tenant: FlowLevel, slots: int, priority: PriorityClass) -> None:
        """Takes slots off a tenant's holdings."""
        held = self._held[tenant.id]
        held.by_rank[priority.rank] -= slots
        held.slots -= slots
        if not held.slots:
            del self._held[tenant.id]

    def held_by(self, tenant: FlowLevel) -> int:
        """Slots of one tenant."""
        held = self._held.get(tenant.id)
        return 0 if held is None else held.slots

    def may_overcommit(self, tenant: FlowLevel, slots: int, priority: PriorityClass) -> bool:
        """Whether another tenant holds so many slots that its requests would yield to this tenant."""
        own = self.held_by(tenant)
        return any(
            yields_to(sum(held.by_rank[priority.rank :]), held.weight, own, tenant.weight, slots)
            for other, held in self._held.items()
            if other != tenant.id
        )

    def above_share(self, tenant: FlowLevel, slots: int, total_slots: int, now_s: float) -> bool:
        """Whether a tenant would exceed its fair share with this many more slots.

        False if it is the only active tenant or holds no slot, because a fair share can be less than one slot.
        """
        held = self.held_by(tenant)
        return held > 0 and held + slots > self.share_of(tenant, total_slots, now_s)

    def share_of(self, tenant: FlowLevel, total_slots: int, now_s: float) -> float:
        """Returns a tenant's fair share of the slots; infinite if it is the only active tenant."""
        self._expire_tenants(now_s)
        return total_slots * tenant.weight / self._active_weight if len(self._seen) > 1 else inf

    def _expire_tenants(self, now_s: float) -> None:
        if now_s < self._next_expiry_s:
            return
        while self._seen:
            tenant, (seen_s, weight) = next(iter(self._seen.items()))
            if now_s - seen_s < _ACTIVE_TENANT_S:
                self._next_expiry_s = seen_s + _ACTIVE_TENANT_S
                return
            if tenant in self._held:
                # A tenant with running requests stays active.
                del self._seen[tenant]
                self._seen[tenant] = (now_s, weight)
                continue
            del self._seen[tenant]
            self._active_weight -= weight
        self._active_weight, self._next_expiry_s = 0.0, inf
