"""Who may have which place: the parts of the replicas, the headroom, and what is free now."""

from collections.abc import Sequence

from maitred.core.request import WaitCause
from maitred.dispatch.config import DispatchConfig
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.credits import NOTHING, Cost, sum_of
from maitred.dispatch.policy.quotas import Quota, Quotas, TenantHoldings
from maitred.dispatch.pool_queue import PoolQueue, QueuedRequest
from maitred.dispatch.selector import ReplicaSelector

_ONE = Cost(1, 1)


class CapacityAllocator:
    """What is held, and who may hold more.

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
        self._choice = choice
        self.holdings = TenantHoldings()
        self.adopt(config)
        self.part(config)

    def adopt(self, config: DispatchConfig) -> None:
        """Goes by these settings from now on, but for the parts."""
        self.shared = config.line.policy == "fair"
        self.headroom = config.headroom if self.shared else 0.0

    def part(self, config: DispatchConfig) -> None:
        """Divides everything anew; who holds something must take it again, of the `quotas` that there are now."""
        self.quotas = Quotas(config.reserved, {name: (pool.tenants, pool.share) for name, pool in config.pools.items()})

    def take(self, ticket: QueuedRequest, quota: Quota) -> None:
        """It has got its places."""
        quota.take(ticket.cost)
        self.holdings.take(ticket.tenant, ticket.cost.slots, ticket.flow.priority)

    def give(self, ticket: QueuedRequest, quota: Quota) -> None:
        """It gives them back."""
        quota.give(ticket.cost)
        self.holdings.give(ticket.tenant, ticket.cost.slots, ticket.flow.priority)

    def station_for(
        self, ticket: QueuedRequest, quota: Quota, ready: Sequence[EndpointState], now_s: float, *, above_share: bool
    ) -> EndpointState | WaitCause:
        """The replica for it, of those that have room; else what is lacking."""
        headroom = self.headroom if above_share else 0.0
        guest = self._may_be_guest(ticket)
        if self.quotas.parted:
            whole = self.quotas.limit(quota, total_of(ready))
            limit = whole.minus(_kept(whole, headroom, ready))
            need = ticket.cost.at_most(limit).at_least(_ONE)
            room = limit.minus(quota.used)
            if guest and quota is self.quotas.common:
                room = room.plus(Cost(sum(station.guest_places for station in ready), 0))
            if not need.within(room) and quota.used != NOTHING:
                return WaitCause.SLOTS if need.slots > room.slots else WaitCause.KV_FULL
        open_ones: list[EndpointState] = []
        slots = False
        if ticket.failed_at:
            ready = untried(ticket, ready) or ready
        for station in ready:
            kept = _kept(station.total, headroom, [station])
            need = ticket.cost.at_most(station.total.minus(kept)).at_least(_ONE)
            free = station.free.minus(kept)
            if guest:
                free = free.plus(Cost(station.guest_places, 0))
            if need.within(free) or station.credits.idle:
                open_ones.append(station)
            elif need.slots > free.slots:
                slots = True
        if open_ones:
            return self._choice.of(ticket, open_ones, now_s)
        return WaitCause.SLOTS if slots else WaitCause.KV_FULL

    def ample(self, cost: Cost, ready: Sequence[EndpointState]) -> bool:
        """Whether there is surely room at a single replica, whoever asks: beside all headroom, and not as a guest."""
        return len(ready) == 1 and not self.quotas.parted and ready[0].credits.has(cost, self.headroom)

    def spare_for(self, ticket: QueuedRequest, others: Sequence[EndpointState], now_s: float) -> EndpointState | None:
        """A further replica for a request that has one, of what is free beyond the headroom; None: none has room."""
        if self.quotas.parted and not ticket.cost.within(self.quotas.room(ticket.room.quota, total_of(others))):
            return None
        roomy = [
            station
            for station in untried(ticket, others)
            if ticket.cost.within(station.free.minus(_kept(station.total, self.headroom, [station])))
        ]
        return self._choice.of(ticket, roomy, now_s) if roomy else None

    def before_turn(
        self, room: PoolQueue, quota: Quota, ready: Sequence[EndpointState], now_s: float
    ) -> tuple[QueuedRequest, EndpointState] | None:
        """Who goes before a head that has to wait: the most urgent of those who hold least, and a replica for it.

        The head may not use the headroom, and nobody gives way to it as a guest. Whoever may is not taken more than one
        request before its turn, so that the bound of the fair line grows by that and no more.
        """
        if not any(station.free.slots + station.guest_places > 0 for station in ready):
            return None
        best: QueuedRequest | None = None
        best_key = (0, 0.0, 0.0)
        for tickets in room.tenants.values():
            ticket = next(iter(tickets))
            tenant = ticket.tenant
            key = (
                ticket.errand.flow.priority.rank,
                self.holdings.held_by(tenant) / tenant.weight,
                ticket.errand.arrived_s,
            )
            if (best is None or key < best_key) and self.may_lead(ticket):
                best, best_key = ticket, key
        if best is None:
            return None
        above = self.above_share(best, quota, ready, now_s)
        station = self.station_for(best, quota, ready, now_s, above_share=above)
        return None if isinstance(station, WaitCause) else (best, station)

    def free(self, ticket: QueuedRequest, ready: Sequence[EndpointState], *, above_share: bool) -> Cost:
        """What of all replicas' credits it may use now."""
        quota = ticket.room.quota
        total = total_of(ready)
        free = sum_of([station.free for station in ready])
        if above_share:
            free = free.minus(_kept(total, self.headroom, ready))
        if self._may_be_guest(ticket):
            free = free.plus(Cost(sum(station.guest_places for station in ready), 0))
        if self.quotas.parted:
            free = free.at_most(self.quotas.room(quota, total))
        return free

    def without_guests(self, free: Cost, ready: Sequence[EndpointState]) -> Cost:
        """Of what a request could use, what anybody could: of the places that come free, guests have the first."""
        seats = sum(station.free.slots - station.load.guests for station in ready)
        return Cost(min(free.slots, seats), free.blocks)

    def guests_of(self, quota: Quota, ready: Sequence[EndpointState]) -> int:
        """How many more may come beyond the places into this part."""
        if not self.shared or quota is not self.quotas.common:
            return 0
        return sum(station.guest_places for station in ready)

    def may_lead(self, ticket: QueuedRequest) -> bool:
        """Whether it may be taken before its turn, into the headroom or as a guest."""
        if ticket.room.quota is not self.quotas.common:
            return False
        lead = ticket.room.line.lead(ticket.errand.flow)
        return lead * ticket.tenant.weight <= ticket.service

    def above_share(self, ticket: QueuedRequest, quota: Quota, ready: Sequence[EndpointState], now_s: float) -> bool:
        """Whether it is not for its tenant that the headroom is kept."""
        if not self.headroom or quota is not self.quotas.common:
            return False
        slots = self.quotas.limit(quota, total_of(ready)).slots
        return self.holdings.above_share(ticket.tenant, ticket.cost.slots, slots, now_s)

    def _may_be_guest(self, ticket: QueuedRequest) -> bool:
        return self.shared and self.holdings.may_be_guest(ticket.tenant, ticket.cost.slots, ticket.flow.priority)


def untried(ticket: QueuedRequest, ready: Sequence[EndpointState]) -> list[EndpointState]:
    """Of these replicas, those that have not failed the request."""
    return [station for station in ready if station.post.name not in ticket.failed_at]


def total_of(stations: Sequence[EndpointState]) -> Cost:
    """What several replicas have together."""
    return sum_of([station.total for station in stations])


def _kept(whole: Cost, headroom: float, stations: Sequence[EndpointState]) -> Cost:
    """What is kept for those below their share: no places where these can come as guests, only blocks."""
    kept = whole.part(headroom)
    return Cost(0, kept.blocks) if all(station.credits.takes_guests for station in stations) else kept
