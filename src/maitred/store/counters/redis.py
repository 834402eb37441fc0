"""Counters on Redis, for several gateways.

Every method is one script that Redis runs as one step, by its own clock. While Redis answers, limits and budgets are
exact: nothing is overspent, whoever races. What remains for one gateway is what nobody has reserved, less the *slices*
that the other gateways hold in advance (see `slices`).

While Redis is away, each gateway goes on with its slices. **The overshoot is bounded**: together the gateways pass a
pool or a budget by no more than the sum of their slices, which is ``gateways x slice_share`` of the capacity, or of
what remained of the budget; a bucket by as much, and by ``slice_share`` of its rate for as long as that gateway is cut
off. Only a request that outlives its lease while it is cut off adds to this, since others were free to take its room;
it is charged all the same. Nothing is ever given that neither Redis nor a slice has: that is `StoreUnavailable`.

What happens when it is back:

1. The gateway tells Redis which leases it holds and the last charged totals that it saw, and settles what it could not
   settle, in order. Budgets never go backwards: the larger of all that is known counts.
2. If Redis lost its data, it takes no reservations for `recovery_s`, so that all gateways can do this. They use their
   slices meanwhile.
3. Slices are renewed, and reservations go to Redis again.

Redis must not evict keys (``maxmemory-policy noeviction``). A settlement whose answer was lost is repeated; it counts
once if Redis is back within a quarter of an hour, and at most twice if later, never not at all.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Self

import msgspec

from maitred.core.clock import Clock
from maitred.core.counters import Claim, CounterKind, Denied, Granted, Reading, Reservation
from maitred.core.errors import Bug, StoreUnavailable
from maitred.store.counters.config import CountersConfig
from maitred.store.counters.held import Holdings
from maitred.store.counters.link import LinkLost, RedisLink, Script
from maitred.store.counters.slices import SliceBook

_log = logging.getLogger(__name__)

Spent = Callable[[Sequence[str]], Awaitable[Mapping[str, int]]]

_HELLO, _RESERVE, _SETTLE, _RENEW, _READ, _SLICE, _REGISTER, _RELEASE = map(
    Script, ("hello", "reserve", "settle", "renew", "read", "slice", "register", "release")
)
_USED_WITHIN_S = 60.0
"""Counters that were used so lately have slices."""
_TICK_S = 1.0
_AT_ONCE = 100
"""Counters or leases in one call, so that no call holds up Redis for long."""
_ANSWERS = 4
"""How often a call may be sent anew because Redis meets a budget for the first time."""


class Mode(Enum):
    """Who decides."""

    AWAY = "away"
    """Redis does not answer: slices."""
    RECOVERING = "recovering"
    """Redis answers, but does not know everything yet: slices."""
    SHARED = "shared"
    """Redis."""


class CountersState(msgspec.Struct, frozen=True):
    """For health and metrics."""

    mode: Mode
    since_s: float
    """Wall time since when it is so."""
    slices: int
    """Counters of which this gateway holds a slice."""
    leases: int
    unsettled: int
    """Settlements that Redis does not know yet."""


class RedisCounters:
    """Implements `maitred.core.counters.Counters`. Enter it as a context: it renews its slices meanwhile.

    Args:
        config: Where Redis is; its `url` must be set.
        clock: For what happens here; Redis has its own.
        gateway_id: Unique among the gateways that run.
        spent: What was charged to budgets so far, according to the database.
        offset_s: Added to Redis' clock. For tests.
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
            raise ValueError("counters.url is needed: where Redis is.")
        self._config = config
        self._clock = clock
        self._gateway_id = gateway_id
        self._spent = spent
        self._offset_s = offset_s
        self._link = RedisLink(config.url, config.namespace, timeout_s=config.answer_timeout_s)
        self._book = SliceBook(config.slice_share)
        self._holdings = Holdings()
        self._recent: dict[str, tuple[Claim, float]] = {}
        self._sliced: set[str] = set()
        self._epoch = ""
        self._mode = Mode.AWAY
        self._losses = 0
        self._since_s = clock.wall_s()
        self._news = asyncio.Event()
        self._upkeep: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connects. Without Redis this gateway starts all the same, and refuses until it is there."""
        try:
            await self._recover()
        except LinkLost as error:
            _log.warning("The shared counters do not answer (%s). Until they do, limited requests are refused.", error)
            self._lose(error)
        self._upkeep = asyncio.create_task(self._keep_up(), name="redis counters")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Delivers what is left and gives the slices back, as far as Redis answers."""
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
            self._upkeep = None
        try:
            if self._mode is not Mode.AWAY:
                await self._deliver()
                await self._call(_RELEASE, {})
        except LinkLost as error:
            _log.warning("The shared counters do not answer (%s); what this gateway held there expires.", error)
        finally:
            self._mode = Mode.AWAY
            await self._link.close()

    @property
    def healthy(self) -> bool:
        """Whether Redis decides."""
        return self._mode is Mode.SHARED

    def state(self) -> CountersState:
        """How it is now."""
        return CountersState(
            self._mode,
            self._since_s,
            len(self._book),
            len(self._holdings.leases),
            len(self._holdings.unsettled),
        )

    # --- counting -------------------------------------------------------------------------------------------------

    async def reserve(self, reservation: Reservation) -> Granted | Denied:
        """See `Counters`."""
        now_s = self._clock.monotonic_s()
        for claim in reservation.claims:
            if claim.hard:
                self._recent.pop(claim.counter, None)
                self._recent[claim.counter] = claim, now_s
        doubtful = False
        if self._mode is Mode.SHARED:
            try:
                return await self._reserve_shared(reservation)
            except LinkLost as error:
                doubtful = True
                self._lose(error)
            except asyncio.CancelledError:
                self._settle_later(reservation.lease, {})
                raise
        try:
            granted = self._book.reserve(reservation, self._clock.monotonic_s())
        except StoreUnavailable:
            if doubtful:  # Redis may have granted it, and answered too late.
                self._settle_later(reservation.lease, {})
            raise
        self._holdings.hold(reservation, granted.output, self._clock.monotonic_s(), told=False, local=True)
        return granted

    async def settle(self, lease: str, amounts: Mapping[str, int]) -> None:
        """See `Counters`. Never fails: what Redis does not take now it gets later."""
        if self._mode is Mode.SHARED:
            try:
                await self._settle_shared([(lease, amounts)])
                return
            except LinkLost as error:
                self._lose(error)
            except asyncio.CancelledError:
                self._settle_later(lease, amounts)
                raise
        self._settle_later(lease, amounts)

    async def renew(self, leases: Sequence[str], lease_s: float) -> None:
        """See `Counters`. Never fails: leases that Redis could not renew it is told about again."""
        if self._mode is Mode.SHARED:
            try:
                for start in range(0, len(leases), _AT_ONCE):
                    some = list(leases[start : start + _AT_ONCE])
                    answer = await self._call(_RENEW, {"leases": some, "lease_s": lease_s})
                    self._holdings.renew(answer[1], lease_s, self._clock.monotonic_s())
                return
            except LinkLost as error:
                self._lose(error)
        self._holdings.renew(leases, lease_s, self._clock.monotonic_s())

    async def read(self, claims: Sequence[Claim]) -> list[Reading]:
        """See `Counters`. While Redis is away: what this gateway could still give."""
        if self._mode is Mode.SHARED:
            try:
                answer = await self._ask(_READ, claims, {})
                return self._readings(claims, answer[1])
            except LinkLost as error:
                self._lose(error)
        return self._book.readings(claims, self._clock.monotonic_s())

    # --- with Redis -----------------------------------------------------------------------------------------------

    async def _reserve_shared(self, reservation: Reservation) -> Granted | Denied:
        arguments = {
            "lease": reservation.lease,
            "output": reservation.output,
            "least_output": reservation.least_output,
            "lease_s": reservation.lease_s,
        }
        asked_s, losses = self._clock.monotonic_s(), self._losses
        answer = await self._ask(_RESERVE, reservation.claims, arguments, reservation.output, reservation.least_output)
        if answer[0] == "granted":
            self._holdings.hold(reservation, answer[1], asked_s, told=losses == self._losses, local=False)
            return Granted(answer[1], self._readings(reservation.claims, answer[2]))
        if answer[0] == "denied":
            wait_s = answer[2] if answer[2] >= 0 else None
            return Denied(answer[1], self._readings(reservation.claims, answer[3]), wait_s)
        raise Bug(f"The lease {reservation.lease} was used before. Each reservation needs an id of its own.")

    async def _settle_shared(self, settlements: Sequence[tuple[str, Mapping[str, int]]]) -> None:
        answer = await self._call(_SETTLE, {"settlements": settlements})
        for lease, _ in settlements:
            self._holdings.leases.pop(lease, None)
        if answer[1]:
            self._holdings.charged({counter: int(charged) for counter, charged in answer[1].items()})

    async def _ask(
        self, script: Script, claims: Sequence[Claim], arguments: Mapping[str, object], output: int = 0, least: int = 0
    ) -> list[Any]:
        """Calls a script with claims; asks the database about budgets that Redis does not know."""
        spent: dict[str, int] = {}
        for _ in range(_ANSWERS):
            packed = [self._packed(claim, output, least, spent.get(claim.counter, -1)) for claim in claims]
            answer = await self._call(script, {**arguments, "claims": packed})
            if answer[0] != "unknown":
                return answer
            found = await self._spent(answer[1])
            spent.update({counter: found.get(counter, 0) for counter in answer[1]})
        raise LinkLost("it forgets budgets as soon as it is told about them")

    def _packed(self, claim: Claim, output: int, least: int, spent: int) -> tuple[object, ...]:
        return (
            claim.counter,
            claim.kind.value,
            claim.capacity,
            claim.fixed,
            claim.per_output,
            claim.divisor,
            claim.refill_per_s,
            claim.ends_s or 0.0,
            claim.hard,
            claim.clamps,
            claim.amount(output),
            claim.amount(least),
            self._holdings.total(claim.counter) if claim.kind is CounterKind.BUDGET else -1,
            spent,
        )

    def _readings(self, claims: Sequence[Claim], packed: Sequence[Sequence[Any]]) -> list[Reading]:
        """What a script says of claims; also keeps what this gateway must remember of it."""
        now_s = self._clock.monotonic_s()
        readings = []
        for claim, (remaining, reset_s, used, reserved, slice_amount) in zip(claims, packed, strict=True):
            readings.append(Reading(claim.capacity, int(remaining), reset_s, int(used), int(reserved)))
            if self._mode is Mode.SHARED and claim.counter in self._book:
                self._book.put(claim, int(slice_amount), now_s)
        self._holdings.saw(claims, readings, now_s)
        return readings

    async def _call(self, script: Script, arguments: Mapping[str, object]) -> list[Any]:
        answer = await self._link.call(
            script,
            {**arguments, "epoch": self._epoch, "gateway": self._gateway_id, "offset_s": self._offset_s()},
        )
        if answer[0] == "lost":
            raise LinkLost("it lost its data")
        if answer[0] == "opening":
            raise LinkLost("it is recovering")
        return answer

    # --- without Redis --------------------------------------------------------------------------------------------

    def _enter(self, mode: Mode) -> None:
        if mode is not self._mode:
            self._mode = mode
            self._since_s = self._clock.wall_s()

    def _lose(self, error: LinkLost) -> None:
        """Redis failed: from now on nobody waits for it, until the upkeep finds it again."""
        if self._mode is Mode.SHARED:
            _log.warning("The shared counters are away (%s). This gateway goes on with its slices.", error)
        if self._mode is not Mode.AWAY:
            self._enter(Mode.AWAY)
            self._losses += 1
            self._holdings.distrust()
            self._link.fail(error)
            self._news.set()

    def _settle_later(self, lease: str, amounts: Mapping[str, int]) -> None:
        held = self._holdings.leases.get(lease)
        if held is not None:
            if held.settled:
                return
            held.settled = True
            if held.local:
                held.local = False
                self._book.settle(held.claims, held.output, amounts, self._clock.monotonic_s())
        self._holdings.unsettled.append((lease, dict(amounts)))

    # --- upkeep ---------------------------------------------------------------------------------------------------

    async def _keep_up(self) -> None:
        while True:
            wait_s = _TICK_S
            try:
                if self._mode is Mode.SHARED:
                    await self._deliver()
                    await self._renew_slices()
                else:
                    await self._recover()
            except LinkLost as error:
                self._lose(error)
                wait_s = self._config.probe_interval_s
            except Exception:
                _log.exception("The upkeep of the shared counters failed; it goes on.")
            self._tidy()
            try:
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    def _tidy(self) -> None:
        now_s = self._clock.monotonic_s()
        for held in self._holdings.expire(now_s):
            self._book.settle(held.claims, held.output, {}, now_s)
        self._holdings.forget_totals(now_s)
        for counter, (_, used_s) in list(self._recent.items()):
            if used_s + _USED_WITHIN_S > now_s:
                break
            del self._recent[counter]

    async def _recover(self) -> None:
        """From any other mode to `SHARED`."""
        await self._link.open()
        while True:
            hello = {"fresh": secrets.token_hex(8), "grace_s": self._config.recovery_s, "offset_s": self._offset_s()}
            epoch, opens_in_s = await self._link.call(_HELLO, hello)
            if epoch != self._epoch:
                self._holdings.distrust()
                self._epoch = epoch
                totals = self._holdings.totals()
                for start in range(0, len(totals), _AT_ONCE):
                    await self._call(_REGISTER, {"totals": totals[start : start + _AT_ONCE], "leases": []})
            await self._deliver()
            if opens_in_s <= 0:
                break
            self._enter(Mode.RECOVERING)
            await asyncio.sleep(min(opens_in_s, self._config.probe_interval_s))
        # Nothing is awaited since the last delivery, so that all that was decided here is known there.
        self._enter(Mode.SHARED)
        _log.info("The shared counters answer.")
        await self._renew_slices()

    async def _deliver(self) -> None:
        """Tells Redis about leases that it may not know, then settles what was not settled, until nothing is left."""
        holdings = self._holdings
        while True:
            untold = holdings.untold(_AT_ONCE)
            if untold:
                now_s, losses = self._clock.monotonic_s(), self._losses
                told = [holdings.leases[lease] for lease in untold]
                leases = [
                    (lease, held.expires_s - now_s, held.entries()) for lease, held in zip(untold, told, strict=True)
                ]
                await self._call(_REGISTER, {"totals": [], "leases": leases})
                for held in told:
                    held.told, held.local = losses == self._losses, False
            elif holdings.unsettled:
                settlements = [holdings.unsettled[n] for n in range(min(_AT_ONCE, len(holdings.unsettled)))]
                await self._settle_shared(settlements)
                for _ in settlements:
                    holdings.unsettled.popleft()
            else:
                return

    async def _renew_slices(self) -> None:
        """As much of every counter in use as its share, and nothing of others."""
        wanted = [claim for claim, _ in self._recent.values()]
        unwanted = list(self._sliced.difference(claim.counter for claim in wanted))
        for start in range(0, max(len(wanted), len(unwanted), 1), _AT_ONCE):
            claims, dropped = wanted[start : start + _AT_ONCE], unwanted[start : start + _AT_ONCE]
            answer = await self._call(
                _SLICE,
                {
                    "claims": [self._packed(claim, 0, 0, -1) for claim in claims],
                    "unwanted": dropped,
                    "share": self._config.slice_share,
                    "slice_lease_s": self._config.slice_lease_s,
                },
            )
            now_s = self._clock.monotonic_s()
            if self._mode is not Mode.SHARED:  # What the slices gave meanwhile must not come back.
                return
            for counter in dropped:
                self._book.drop(counter)
                self._sliced.discard(counter)
            for claim, reading in zip(claims, answer[1], strict=True):
                self._book.put(claim, int(reading[4]), now_s)
                self._sliced.add(claim.counter)
