"""Quotas of tenants: the common part, reserved shares, isolated pools, and the headroom.

A *quota* is a part of all slots and KV blocks that some tenants have for themselves. A reserved share may overflow into
the common part when nobody there wants it; an isolated pool may not. What a quota does not use stays unused: it is what
makes it there at once. Within each part a little headroom is kept for tenants that hold less than their fair share.
"""

import math
from collections.abc import Iterable, Mapping
from math import inf

from maitred.core.flow import FlowLevel, PriorityClass
from maitred.dispatch.policy.credits import Cost, CostSum
from maitred.fairness.vtc import yields_to

_REMEMBER_S = 60.0
"""A tenant that has sent nothing for so long is not expected any more."""
_LOOK_S = 0.5
"""It is not noted more often that one is here."""


class Quota:
    """One part of the replicas, with what is used of it.

    Args:
        name: For people and metrics.
        share: Of everything; for the common part, what the others leave.
        overflows: Whether its tenants may use what the common part has idle.
    """

    __slots__ = ("_used", "name", "overflows", "share")

    def __init__(self, name: str, share: float, *, overflows: bool = False) -> None:
        self.name = name
        self.share = share
        self.overflows = overflows
        self._used = CostSum()

    @property
    def used(self) -> Cost:
        """Cost that running requests use of this part."""
        return self._used.cost

    def allocate(self, cost: Cost) -> None:
        """Something of it runs."""
        used = self._used
        used.slots += cost.slots
        used.blocks += cost.blocks
        used.prompt_tokens += cost.prompt_tokens

    def release(self, cost: Cost) -> None:
        """Releases the cost of a request that has ended."""
        used = self._used
        used.slots -= cost.slots
        used.blocks -= cost.blocks
        used.prompt_tokens -= cost.prompt_tokens


COMMON = "common"


class Quotas:
    """All parts of a model's replicas, by tenant.

    Args:
        reserved: Tenant -> share.
        pools: Name -> its tenants and its share.
    """

    def __init__(self, reserved: Mapping[str, float], pools: Mapping[str, tuple[Iterable[str], float]]) -> None:
        self._of: dict[str, Quota] = {}
        own = [Quota(tenant, share, overflows=True) for tenant, share in reserved.items()]
        self._of.update({quota.name: quota for quota in own})
        for name, (tenants, share) in pools.items():
            pool = Quota(name, share)
            own.append(pool)
            self._of.update(dict.fromkeys(tenants, pool))
        self.common = Quota(COMMON, max(0.0, 1.0 - sum(quota.share for quota in own)))
        self.all = [*own, self.common]
        """Those with a share of their own first."""
        self.parted = bool(own)
        """Whether there are any."""

    def quota_for(self, path: tuple[FlowLevel, ...]) -> Quota:
        """Whose part a flow uses: of its key, else of its team, else of its organisation, else the common one."""
        if self._of:
            for level in reversed(path):
                quota = self._of.get(level.id)
                if quota is not None:
                    return quota
        return self.common

    def remaining(self, quota: Quota, total: Cost) -> Cost:
        """Returns what is left of a part.

        Args:
            quota: The part.
            total: What all replicas have together.
        """
        return self.limit(quota, total).minus(quota.used)

    def limit(self, quota: Quota, total: Cost) -> Cost:
        """How large a part is: of a part with a share, at least one of everything."""
        if quota is not self.common:
            return _ceil(total, quota.share)
        rest = total
        for own in self.all[:-1]:
            rest = rest.minus(_ceil(total, own.share))
        return rest


def _ceil(total: Cost, share: float) -> Cost:
    return Cost(math.ceil(total.slots * share - 1e-9), math.ceil(total.blocks * share - 1e-9))


_CLASSES = len(PriorityClass)


class _Held:
    """Slots that one tenant holds, with its weight."""

    __slots__ = ("by_rank", "slots", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.slots = 0
        self.by_rank = [0] * _CLASSES
        """Of these, by the rank of the class."""


class TenantHoldings:
    """Slots that each tenant holds, to tell who is above its fair share.

    The fair share of a tenant is its weight among all that were here within the last minute, so that in a flood places
    are kept for those who will come back.
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._seen: dict[str, tuple[float, float]] = {}
        """Tenant -> when it was seen last, and its weight; in order of time."""
        self._weight = 0.0
        self._forget_s = inf
        """Nobody is to be forgotten before."""

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._seen)

    @property
    def slots(self) -> int:
        """Slots that all tenants hold together."""
        return sum(held.slots for held in self._held.values())

    def observe(self, tenant: FlowLevel, now_s: float) -> None:
        """Notes that a tenant has sent a request."""
        id_, weight = tenant.id, tenant.weight
        if id_ in self._seen:
            seen_s, known = self._seen[id_]
            if now_s - seen_s < _LOOK_S and known == weight:
                return
            del self._seen[id_]
            self._weight -= known
        self._weight += weight
        self._seen[id_] = (now_s, weight)
        if self._forget_s == inf:
            self._forget_s = now_s + _REMEMBER_S
        elif self._forget_s <= now_s:
            self._forget(now_s)

    def allocate(self, tenant: FlowLevel, slots: int, priority: PriorityClass) -> None:
        """Adds slots to a tenant's holdings."""
        if tenant.id in self._held:
            held = self._held[tenant.id]
        else:
            held = self._held[tenant.id] = _Held(tenant.weight)
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
        """Whether, with all places taken, another tenant has so many that some of its requests give way."""
        own = self.held_by(tenant)
        return any(
            yields_to(sum(held.by_rank[priority.rank :]), held.weight, own, tenant.weight, slots)
            for other, held in self._held.items()
            if other != tenant.id
        )

    def above_share(self, tenant: FlowLevel, slots: int, total_slots: int, now_s: float) -> bool:
        """Whether, with so many further slots, it would hold more than its fair share.

        Never while it is alone, and never while it holds nothing: where there are more tenants than slots, everybody's
        share is less than one.
        """
        held = self.held_by(tenant)
        return held > 0 and held + slots > self.share_of(tenant, total_slots, now_s)

    def share_of(self, tenant: FlowLevel, total_slots: int, now_s: float) -> float:
        """Returns a tenant's fair share of the slots; infinite while it is alone."""
        self._forget(now_s)
        return total_slots * tenant.weight / self._weight if len(self._seen) > 1 else inf

    def _forget(self, now_s: float) -> None:
        if now_s < self._forget_s:
            return
        while self._seen:
            tenant, (seen_s, weight) = next(iter(self._seen.items()))
            if now_s - seen_s < _REMEMBER_S:
                self._forget_s = seen_s + _REMEMBER_S
                return
            if tenant in self._held:
                # It is here as long as something of it runs.
                del self._seen[tenant]
                self._seen[tenant] = (now_s, weight)
                continue
            del self._seen[tenant]
            self._weight -= weight
        self._weight, self._forget_s = 0.0, inf
