"""Counters on Redis, for several gateways.

Each method is one script, which Redis runs as one atomic step by its own clock. While Redis answers, limits and budgets
are exact: concurrent requests cannot exceed them. The amount that remains for one gateway is the unreserved amount,
minus the *slices* that the other gateways hold in advance (see `slices`).

While Redis cannot be reached, each gateway continues with its slices. **They overspend nothing**: a slice counts as
taken in Redis while a gateway holds it. What a gateway holds that Redis does not hear (its slices, and what its running
requests have reserved) is kept from the others for `slice_lease_s`; the gateway uses its slices for a tenth less, by
its own clock. What it held of budgets counts as spent for `absence_s` longer, because it may have spent it and cannot
tell yet. A claim that neither Redis nor a slice covers raises `StoreUnavailable`.

What remains:

- Of a pool, requests of a gateway that is cut off for longer than `slice_lease_s` and that still run then (or half of
  it, if they began without Redis) are not seen by the others.
- If Redis loses its data, a gateway that cannot report to it within `recovery_s` may spend what others get again: its
  slices and its running requests.
- A gateway that is cut off for longer than `absence_s` may have spent what others get then: its slices, and what its
  requests had reserved. All this is charged when it comes back.
- A limit that is lowered during a cut is lower for the gateways that hear of it.

When Redis answers again:

1. The gateway reports its leases and the charged totals that it saw last to Redis, and then sends its pending
   settlements in their order. The charged total of a budget never decreases: Redis keeps the largest known total.
2. If Redis lost its data, it takes no reservations for `recovery_s`, so that all gateways can do this. The gateways use
   their slices during that time.
3. The gateway renews its slices, and sends reservations to Redis again.

If a gateway reconnects to an empty Redis after `recovery_s`, Redis has already read the totals from the database, and
usage that the gateway granted in the meantime is charged a second time. The overcharge is therefore at most the slices
of that gateway, and nothing is undercharged.

Redis must not evict keys (``maxmemory-policy noeviction``). A settlement whose reply was lost is sent again; it counts
exactly once if Redis answers within a quarter of an hour, and once or twice if Redis answers later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from maitred.core.clock import Clock
from maitred.core.counters import CounterState, LimitClaim, Reservation, ReservationDenied, ReservationGranted
from maitred.core.errors import Bug, ConfigInvalid, StoreUnavailable
from maitred.redis.link import LinkLost
from maitred.store.counters import calls
from maitred.store.counters.calls import LuaScript, pack_claim
from maitred.store.counters.config import CountersConfig
from maitred.store.counters.session import MAX_PER_CALL, CounterMode, CountersState, RedisSession

ReadSpent = Callable[[Sequence[str]], Awaitable[Mapping[str, int]]]
"""Function that reads the charged totals of budgets; a budget that is missing has a total of 0."""

_MAX_ATTEMPTS = 4
"""Attempts of one call, because Redis may need the charged totals of budgets that are new to it."""


class RedisCounters:
    """Counters shared by several gateways. Implements `maitred.core.counters.Counters`.

    The object is a context manager, which renews the slices while it is entered.

    Args:
        config: Settings; the `url` must be set.
        clock: Clock of this gateway; Redis uses its own clock.
        gateway_id: Identifier of this gateway, unique among the running gateways.
        read_spent: Reads the charged totals of budgets from the database.
        offset_s: Seconds that are added to the clock of Redis, for tests.

    Raises:
        ConfigInvalid: The URL is missing, or it is not a Redis URL.
    """

    def __init__(
        self,
        config: CountersConfig,
        clock: Clock,
        gateway_id: str,
        *,
        read_spent: ReadSpent,
        offset_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if config.url is None:
            raise ConfigInvalid("counters.url is missing: say where Redis is, such as `redis://host:6379/0`.")
        try:
            self._session = RedisSession(config, config.url, clock, gateway_id, offset_s=offset_s)
        except ValueError as error:
            raise ConfigInvalid(f"counters.url is not the URL of a Redis: {error}") from None
        self._clock = clock
        self._read_spent = read_spent

    async def __aenter__(self) -> Self:
        """Connects to Redis; if Redis does not answer, this gateway starts and rejects requests until it does."""
        await self._session.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Reports pending settlements and returns the slices, if Redis answers."""
        await self._session.stop()

    @property
    def settles_immediately(self) -> bool:
        """Returns False always, because settling is a call to Redis."""
        return False

    @property
    def healthy(self) -> bool:
        """Whether Redis decides on reservations."""
        return self._session.mode is CounterMode.SHARED

    def state(self) -> CountersState:
        """Returns the state of the counters for health and metrics."""
        return self._session.state()

    async def reserve(self, reservation: Reservation) -> ReservationGranted | ReservationDenied:
        """Reserves all claims or none. Implements `Counters.reserve`.

        Raises:
            StoreUnavailable: Redis cannot be reached and the slices do not cover the claims; or a budget is new and the
                database cannot be reached.
        """
        session, is_in_doubt = self._session, False
        reservation = reservation.spelt_out()
        session.note_use(reservation.claims)
        if session.mode is CounterMode.SHARED:
            try:
                return await self._reserve_shared(reservation)
            except LinkLost as error:
                is_in_doubt = True  # Redis may have granted the lease and sent its reply too late.
                session.on_link_lost(error)
                session.doubt(reservation)
            except asyncio.CancelledError:
                session.doubt(reservation)
                session.settle_later(reservation.lease, {})
                raise
        try:
            return session.reserve_from_slices(reservation, is_in_doubt=is_in_doubt)
        except StoreUnavailable:
            if is_in_doubt:
                session.settle_later(reservation.lease, {})
            raise

    async def resume(self, reservation: Reservation) -> Sequence[CounterState]:
        """Takes over a lease of a dead gateway. Implements `Counters.resume`."""
        self._session.take_over(reservation.spelt_out())
        return ()

    async def settle(self, lease: str, amounts: Mapping[str, int]) -> None:
        """Ends a lease and charges what was used. Implements `Counters.settle`.

        The method never raises: a settlement that Redis does not accept now is repeated later.
        """
        self._session.note_spent(amounts)
        await self._settle(lease, amounts)

    async def settle_orphan(self, lease: str, amounts: Mapping[str, int], gateway: str) -> None:
        """Ends a lease of a dead gateway, as `settle`; one that Redis never saw is charged to that gateway's slices."""
        await self._settle(lease, amounts, gateway)

    async def release_gateway(self, gateway: str, surviving: Sequence[str] = ()) -> None:
        """Gives the slices of a dead gateway back, after all its leases were settled; if Redis is away, later.

        Args:
            gateway: The dead gateway.
            surviving: Its leases whose requests still run: they are those of this gateway from now on.
        """
        await self._session.release_gateway(gateway, surviving)

    async def _settle(self, lease: str, amounts: Mapping[str, int], gateway: str | None = None) -> None:
        session = self._session
        if session.mode is CounterMode.SHARED:
            try:
                await session.settle([(lease, amounts, gateway)])
                return
            except LinkLost as error:
                session.on_link_lost(error)
            except asyncio.CancelledError:
                session.settle_later(lease, amounts, gateway)
                raise
        session.settle_later(lease, amounts, gateway)

    async def renew(self, leases: Sequence[str], lease_s: float) -> None:
        """Extends the leases. Implements `Counters.renew`.

        The method never raises: leases that Redis did not renew are reported to it again later.
        """
        session = self._session
        if session.mode is CounterMode.SHARED:
            try:
                for start in range(0, len(leases), MAX_PER_CALL):
                    batch = list(leases[start : start + MAX_PER_CALL])
                    reply = await session.call(calls.RENEW, {"leases": batch, "lease_s": lease_s})
                    session.lease_records.renew(reply[1], lease_s, self._clock.monotonic_s())
                return
            except LinkLost as error:
                session.on_link_lost(error)
        session.lease_records.renew(leases, lease_s, self._clock.monotonic_s())

    async def read(self, claims: Sequence[LimitClaim]) -> list[CounterState]:
        """Returns the state of counters. Implements `Counters.read`.

        While Redis cannot be reached, the state is the amount that this gateway can still grant from its slices.

        Raises:
            StoreUnavailable: A budget is new, and the database cannot be reached.
        """
        session = self._session
        if session.mode is CounterMode.SHARED:
            try:
                reply = await self._call_with_claims(calls.READ, claims, {})
                return session.record_states(claims, reply[1])
            except LinkLost as error:
                session.on_link_lost(error)
        return session.slices.states(claims, self._clock.monotonic_s())

    async def _reserve_shared(self, reservation: Reservation) -> ReservationGranted | ReservationDenied:
        session, lease = self._session, reservation.lease
        started_s, loss_count = self._clock.monotonic_s(), session.loss_count
        arguments = {
            "lease": lease,
            "output": reservation.output,
            "least_output": reservation.least_output,
            "lease_s": reservation.lease_s,
        }
        reply = await self._call_with_claims(
            calls.RESERVE, reservation.claims, arguments, reservation.output, reservation.least_output
        )
        if reply[0] == "granted":
            # Since the reply arrived, another call may have found that Redis cannot be reached or has lost its data.
            session.lease_records.add(
                reservation, reply[1], started_s, reported=loss_count == session.loss_count, from_slice=False
            )
            return ReservationGranted(reply[1], session.record_states(reservation.claims, reply[2]))
        if reply[0] == "denied":
            wait_s = reply[2] if reply[2] >= 0 else None
            return ReservationDenied(reply[1], session.record_states(reservation.claims, reply[3]), wait_s)
        raise Bug(f"The lease {lease} was used before. Each reservation needs an id of its own.")

    async def _call_with_claims(
        self,
        script: LuaScript,
        claims: Sequence[LimitClaim],
        arguments: Mapping[str, object],
        output: int = 0,
        least_output: int = 0,
    ) -> list[Any]:
        """Calls a script with claims, and reads the database for budgets that Redis does not have."""
        last_total = self._session.lease_records.last_total
        spent: dict[str, int] = {}
        for _ in range(_MAX_ATTEMPTS):
            packed_claims = [
                pack_claim(
                    c,
                    output=output,
                    least_output=least_output,
                    last_charged=last_total(c.counter),
                    spent=spent.get(c.counter, -1),
                )
                for c in claims
            ]
            reply = await self._session.call(script, {**arguments, "claims": packed_claims})
            if reply[0] != "unknown":
                return reply
            found = await self._read_spent(reply[1])
            spent.update({counter: found.get(counter, 0) for counter in reply[1]})
        raise LinkLost("it forgets budgets as soon as it is told about them")
