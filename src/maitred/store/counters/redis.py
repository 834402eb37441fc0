"""Counters on Redis, for several gateways.

Every method is one script that Redis runs as one step, by its own clock. While Redis answers, limits and budgets are
exact: nothing is overspent, whoever races. What remains for one gateway is what nobody has reserved, less the *slices*
that the other gateways hold in advance (see `slices`).

While Redis is away, each gateway goes on with its slices. **The overshoot is bounded**: together the gateways pass a
pool or a budget by no more than the sum of their slices, which is ``gateways x slice_share`` of the capacity, or of
what remained of the budget; a bucket by as much, and by ``slice_share`` of its rate for as long as that gateway is cut
off. Only a request adds to this whose reservation others could not see, because its gateway was cut off for longer
than its lease, or for longer than `recovery_s` from a Redis that lost its data; it is charged all the same. Nothing is
ever given that neither Redis nor a slice has: that is `StoreUnavailable`.

What happens when it is back:

1. The gateway tells Redis which leases it holds and the last charged totals that it saw, and settles what it could not
   settle, in order. Budgets never go backwards: the larger of all that is known counts.
2. If Redis lost its data, it takes no reservations for `recovery_s`, so that all gateways can do this. They use their
   slices meanwhile.
3. Slices are renewed, and reservations go to Redis again.

A gateway that comes back to an empty Redis later than that finds that the database has been asked already, and what it
gave meanwhile is charged a second time. So no more is charged too much than its slices, and nothing too little.

Redis must not evict keys (``maxmemory-policy noeviction``). A settlement whose answer was lost is repeated; it counts
once if Redis is back within a quarter of an hour, and at most twice if later, never not at all.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self

from maitred.core.clock import Clock
from maitred.core.counters import CounterState, LimitClaim, Reservation, ReservationDenied, ReservationGranted
from maitred.core.errors import Bug, ConfigInvalid, StoreUnavailable
from maitred.store.counters import calls
from maitred.store.counters.calls import packed
from maitred.store.counters.config import CountersConfig
from maitred.store.counters.link import LinkLost, LuaScript
from maitred.store.counters.session import AT_ONCE, CounterMode, CountersState, RedisSession

Spent = Callable[[Sequence[str]], Awaitable[Mapping[str, int]]]
"""What these budgets have been charged so far; one that is missing: nothing."""

_ATTEMPTS = 4
"""How often a call may be sent anew because Redis meets a budget for the first time."""


class RedisCounters:
    """Implements `maitred.core.counters.Counters`. Enter it as a context: it renews its slices meanwhile.

    Args:
        config: Where Redis is; its `url` must be set.
        clock: For what happens here; Redis has its own.
        gateway_id: Unique among the gateways that run.
        spent: What was charged to budgets so far, according to the database.
        offset_s: Added to Redis' clock. For tests.

    Raises:
        ConfigInvalid: The URL is missing, or is none of a Redis.
    """

    def __init__(
        self,
        config: CountersConfig,
        clock: Clock,
        gateway_id: str,
        *,
        spent: Spent,
        offset_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if config.url is None:
            raise ConfigInvalid("counters.url is missing: say where Redis is, such as `redis://host:6379/0`.")
        try:
            self._session = RedisSession(config, config.url, clock, gateway_id, offset_s)
        except ValueError as error:
            raise ConfigInvalid(f"counters.url is not the URL of a Redis: {error}") from None
        self._clock = clock
        self._spent = spent

    async def __aenter__(self) -> Self:
        """Connects. Without Redis this gateway starts all the same, and refuses until it is there."""
        await self._session.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Delivers what is left and gives the slices back, as far as Redis answers."""
        await self._session.stop()

    @property
    def at_once(self) -> bool:
        """Never: Redis has to be told."""
        return False

    @property
    def healthy(self) -> bool:
        """Whether Redis decides."""
        return self._session.mode is CounterMode.SHARED

    def state(self) -> CountersState:
        """How it is now."""
        return self._session.state()

    async def reserve(self, reservation: Reservation) -> ReservationGranted | ReservationDenied:
        """See `core.counters.Counters.reserve`.

        Raises:
            StoreUnavailable: Redis is away and the slices do not cover this; or the database is, and a budget is new.
        """
        session, doubtful = self._session, False
        reservation = reservation.spelt_out()
        session.note_use(reservation.claims)
        if session.mode is CounterMode.SHARED:
            try:
                return await self._reserve_shared(reservation)
            except LinkLost as error:
                doubtful = True
                session.lose(error)
            except asyncio.CancelledError:
                session.settle_later(reservation.lease, {})
                raise
        try:
            return session.reserve_from_slices(reservation)
        except StoreUnavailable:
            if doubtful:  # Redis may have granted it, and answered too late.
                session.settle_later(reservation.lease, {})
            raise

    async def settle(self, lease: str, amounts: Mapping[str, int]) -> None:
        """See `core.counters.Counters.settle`. Never fails: what Redis does not take now it gets later."""
        session = self._session
        if session.mode is CounterMode.SHARED:
            try:
                await session.settle([(lease, amounts)])
                return
            except LinkLost as error:
                session.lose(error)
            except asyncio.CancelledError:
                session.settle_later(lease, amounts)
                raise
        session.settle_later(lease, amounts)

    async def renew(self, leases: Sequence[str], lease_s: float) -> None:
        """See `core.counters.Counters.renew`. Never fails: leases that Redis did not renew it is told about again."""
        session = self._session
        if session.mode is CounterMode.SHARED:
            try:
                for start in range(0, len(leases), AT_ONCE):
                    some = list(leases[start : start + AT_ONCE])
                    answer = await session.call(calls.RENEW, {"leases": some, "lease_s": lease_s})
                    session.holdings.renew(answer[1], lease_s, self._clock.monotonic_s())
                return
            except LinkLost as error:
                session.lose(error)
        session.holdings.renew(leases, lease_s, self._clock.monotonic_s())

    async def read(self, claims: Sequence[LimitClaim]) -> list[CounterState]:
        """See `core.counters.Counters.read`. While Redis is away: what this gateway could still give.

        Raises:
            StoreUnavailable: A budget is new, and the database is away.
        """
        session = self._session
        if session.mode is CounterMode.SHARED:
            try:
                answer = await self._ask(calls.READ, claims, {})
                return session.readings(claims, answer[1])
            except LinkLost as error:
                session.lose(error)
        return session.book.readings(claims, self._clock.monotonic_s())

    async def _reserve_shared(self, reservation: Reservation) -> ReservationGranted | ReservationDenied:
        session, lease = self._session, reservation.lease
        asked_s, losses = self._clock.monotonic_s(), session.losses
        arguments = {
            "lease": lease,
            "output": reservation.output,
            "least_output": reservation.least_output,
            "lease_s": reservation.lease_s,
        }
        answer = await self._ask(
            calls.RESERVE, reservation.claims, arguments, reservation.output, reservation.least_output
        )
        if answer[0] == "granted":
            # Between the answer and now another call may have found that Redis is away, or forgets.
            session.holdings.hold(reservation, answer[1], asked_s, told=losses == session.losses, local=False)
            return ReservationGranted(answer[1], session.readings(reservation.claims, answer[2]))
        if answer[0] == "denied":
            wait_s = answer[2] if answer[2] >= 0 else None
            return ReservationDenied(answer[1], session.readings(reservation.claims, answer[3]), wait_s)
        raise Bug(f"The lease {lease} was used before. Each reservation needs an id of its own.")

    async def _ask(
        self,
        script: LuaScript,
        claims: Sequence[LimitClaim],
        arguments: Mapping[str, object],
        output: int = 0,
        least: int = 0,
    ) -> list[Any]:
        """Calls a script with claims; asks the database about budgets that Redis does not know."""
        total = self._session.holdings.total
        spent: dict[str, int] = {}
        for _ in range(_ATTEMPTS):
            told = [
                packed(c, output=output, least=least, known=total(c.counter), spent=spent.get(c.counter, -1))
                for c in claims
            ]
            answer = await self._session.call(script, {**arguments, "claims": told})
            if answer[0] != "unknown":
                return answer
            found = await self._spent(answer[1])
            spent.update({counter: found.get(counter, 0) for counter in answer[1]})
        raise LinkLost("it forgets budgets as soon as it is told about them")
