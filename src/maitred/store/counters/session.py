"""What a gateway does so that Redis may go away: it holds slices in advance, and tells Redis afterwards what it missed.

One task keeps this up. It renews the slices about once a second while Redis answers; from the first failure on it looks
for Redis, and nobody else does.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from maitred.core.clock import Clock
from maitred.core.counters import CounterState, LimitClaim, Reservation, ReservationGranted
from maitred.core.secret import Secret
from maitred.store.counters import calls
from maitred.store.counters.calls import packed
from maitred.store.counters.config import CountersConfig
from maitred.store.counters.lease_records import LeaseRecords
from maitred.store.counters.link import LinkLost, LuaScript, RedisLink
from maitred.store.counters.slices import SliceBook

_log = logging.getLogger(__name__)

_USED_WITHIN_S = 60.0
"""Counters that were used so lately have slices."""
_TICK_S = 1.0
AT_ONCE = 100
"""Counters or leases in one call, so that no call holds up Redis for long."""


class CounterMode(Enum):
    """Who decides."""

    AWAY = "away"
    """Redis does not answer: slices."""
    RECOVERING = "recovering"
    """Redis answers, but does not know everything yet: slices."""
    SHARED = "shared"
    """Redis."""


class CountersState(msgspec.Struct, frozen=True):
    """For health and metrics."""

    mode: CounterMode
    since_s: float
    """Wall time since when it is so."""
    slices: int
    """Counters of which this gateway holds a slice."""
    leases: int
    unsettled: int
    """Settlements that Redis does not know yet."""


class RedisSession:
    """One gateway's dealings with Redis.

    Args:
        config: Of the counters.
        url: Where Redis is.
        clock: For what happens here; Redis has its own.
        gateway_id: Unique among the gateways that run.
        offset_s: Added to Redis' clock.
    """

    def __init__(
        self, config: CountersConfig, url: Secret, clock: Clock, gateway_id: str, offset_s: Callable[[], float]
    ) -> None:
        self.mode = CounterMode.AWAY
        self.losses = 0
        """How often Redis was lost: what it said before a loss may be forgotten after it."""
        self.book = SliceBook(config.slice_share)
        self.holdings = LeaseRecords()
        self._config = config
        self._clock = clock
        self._gateway_id = gateway_id
        self._offset_s = offset_s
        self._link = RedisLink(url, config.namespace, timeout_s=config.answer_timeout_s)
        self._recent: dict[str, tuple[LimitClaim, float]] = {}
        self._sliced: set[str] = set()
        self._epoch = ""
        self._since_s = clock.wall_s()
        self._changed = asyncio.Event()
        self._upkeep: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects, if there is anyone, and begins the upkeep."""
        try:
            await self._recover()
        except LinkLost as error:
            _log.warning("The shared counters do not answer (%s). Until they do, limited requests are refused.", error)
            self.lose(error)
        self._upkeep = asyncio.create_task(self._run_upkeep(), name="redis counters")

    async def stop(self) -> None:
        """Delivers what is left and gives the slices back, as far as Redis answers."""
        await self._end_upkeep()
        try:
            if self.mode is not CounterMode.AWAY:
                await self.deliver()
                await self.call(calls.RELEASE, {})
        except LinkLost as error:
            _log.warning("The shared counters do not answer (%s); what this gateway held there expires.", error)
        finally:
            self._enter(CounterMode.AWAY)
            await self._link.close()

    async def _end_upkeep(self) -> None:
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
            self._upkeep = None

    def state(self) -> CountersState:
        """How it is now."""
        return CountersState(
            self.mode, self._since_s, len(self.book), len(self.holdings.leases), len(self.holdings.unsettled)
        )

    # --- calls ----------------------------------------------------------------------------------------------------

    async def call(self, script: LuaScript, arguments: Mapping[str, object]) -> list[Any]:
        """Runs a script for this gateway.

        Raises:
            LinkLost: It did not run, or nobody knows.
        """
        answer = await self._link.call(
            script, {**arguments, "epoch": self._epoch, "gateway": self._gateway_id, "offset_s": self._offset_s()}
        )
        if answer[0] == "lost":
            raise LinkLost("it lost its data")
        if answer[0] == "opening":
            raise LinkLost("it is recovering")
        return answer

    async def settle(self, settlements: Sequence[tuple[str, Mapping[str, int]]]) -> None:
        """Settles leases.

        Raises:
            LinkLost: See `call`.
        """
        answer = await self.call(calls.SETTLE, {"settlements": settlements})
        for lease, _ in settlements:
            self.holdings.leases.pop(lease, None)
        if answer[1]:
            self.holdings.charged({counter: int(charged) for counter, charged in answer[1].items()})

    def readings(self, claims: Sequence[LimitClaim], said: Sequence[Sequence[Any]]) -> list[CounterState]:
        """What a script said of claims; also keeps what this gateway must remember of it."""
        now_s = self._clock.monotonic_s()
        found = []
        for claim, (remaining, reset_s, used, reserved, slice_amount) in zip(claims, said, strict=True):
            found.append(CounterState(claim.capacity, int(remaining), reset_s, int(used), int(reserved)))
            if self.mode is CounterMode.SHARED and claim.counter in self.book:
                self.book.put(claim, int(slice_amount), now_s)
        self.holdings.observe(claims, found, now_s)
        return found

    # --- without Redis --------------------------------------------------------------------------------------------

    def note_use(self, claims: Sequence[LimitClaim]) -> None:
        """These counters are in use, so they should have slices."""
        now_s = self._clock.monotonic_s()
        for claim in claims:
            if claim.hard:
                self._recent.pop(claim.counter, None)
                self._recent[claim.counter] = claim, now_s

    def reserve_from_slices(self, reservation: Reservation) -> ReservationGranted:
        """Takes claims out of the slices.

        Raises:
            StoreUnavailable: They do not cover them.
        """
        now_s = self._clock.monotonic_s()
        granted = self.book.reserve(reservation, now_s)
        self.holdings.hold(reservation, granted.output, now_s, told=False, local=True)
        return granted

    def _enter(self, mode: CounterMode) -> None:
        if mode is not self.mode:
            self.mode = mode
            self._since_s = self._clock.wall_s()

    def lose(self, error: LinkLost) -> None:
        """Redis failed: from now on nobody waits for it, until the upkeep finds it again."""
        if self.mode is CounterMode.SHARED:
            _log.warning("The shared counters are away (%s). This gateway goes on with its slices.", error)
        if self.mode is not CounterMode.AWAY:
            self._enter(CounterMode.AWAY)
            self.losses += 1
            self.holdings.distrust()
            self._link.fail(error)
            self._changed.set()

    def settle_later(self, lease: str, amounts: Mapping[str, int]) -> None:
        """Redis is told of this settlement when it is there; what a slice lent returns at once."""
        held = self.holdings.leases.get(lease)
        if held is not None:
            if held.settled:
                return
            held.settled = True
            if held.local:
                held.local = False
                self.book.settle(held.claims, held.output, amounts, self._clock.monotonic_s())
        self.holdings.unsettled.append((lease, dict(amounts)))
        if self.mode is CounterMode.RECOVERING:
            # Once it opens, budgets are set to what the database says, which knows of this soon.
            self._changed.set()

    # --- upkeep ---------------------------------------------------------------------------------------------------

    async def _run_upkeep(self) -> None:
        while True:
            wait_s = _TICK_S
            try:
                if self.mode is CounterMode.SHARED:
                    await self.deliver()
                    await self.renew_slices()
                else:
                    await self._recover()
            except LinkLost as error:
                self.lose(error)
                wait_s = self._config.probe_interval_s
            except Exception:
                _log.exception("The upkeep of the shared counters failed; it goes on.")
            self._tidy()
            await self._pause(wait_s)

    async def _pause(self, wait_s: float) -> None:
        """Waits, though no longer than until there is news."""
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _tidy(self) -> None:
        now_s = self._clock.monotonic_s()
        for held in self.holdings.expire(now_s):
            self.book.settle(held.claims, held.output, {}, now_s)
        self.holdings.forget_totals(now_s)
        for counter, (_, used_s) in list(self._recent.items()):
            if used_s + _USED_WITHIN_S > now_s:
                break
            del self._recent[counter]

    async def _recover(self) -> None:
        """From any other mode to `SHARED`."""
        await self._link.open()
        while True:
            hello = {"fresh": secrets.token_hex(8), "grace_s": self._config.recovery_s, "offset_s": self._offset_s()}
            epoch, opens_in_s = await self._link.call(calls.HELLO, hello)
            if epoch != self._epoch:
                self.holdings.distrust()
                self._epoch = epoch
                totals = self.holdings.totals()
                for start in range(0, len(totals), AT_ONCE):
                    await self.call(calls.REGISTER, {"totals": totals[start : start + AT_ONCE], "leases": []})
            await self.deliver()
            if opens_in_s <= 0:
                break
            self._enter(CounterMode.RECOVERING)
            await self._pause(min(opens_in_s, self._config.probe_interval_s))
        # Nothing is awaited since the last delivery, so that all that was decided here is known there.
        self._enter(CounterMode.SHARED)
        _log.info("The shared counters answer.")
        await self.renew_slices()

    async def deliver(self) -> None:
        """Tells Redis about leases that it may not know, then settles what was not settled, until nothing is left."""
        holdings = self.holdings
        while True:
            untold = holdings.untold(AT_ONCE)
            if untold:
                now_s, losses = self._clock.monotonic_s(), self.losses
                told = [holdings.leases[lease] for lease in untold]
                leases = [
                    (lease, held.expires_s - now_s, held.entries()) for lease, held in zip(untold, told, strict=True)
                ]
                await self.call(calls.REGISTER, {"totals": [], "leases": leases})
                for held in told:
                    held.told, held.local = losses == self.losses, False
            elif holdings.unsettled:
                settlements = [holdings.unsettled[n] for n in range(min(AT_ONCE, len(holdings.unsettled)))]
                await self.settle(settlements)
                for _ in settlements:
                    holdings.unsettled.popleft()
            else:
                return

    async def renew_slices(self) -> None:
        """As much of every counter in use as its share, and nothing of others."""
        wanted = [claim for claim, _ in self._recent.values()]
        unwanted = list(self._sliced.difference(claim.counter for claim in wanted))
        for start in range(0, max(len(wanted), len(unwanted), 1), AT_ONCE):
            claims, dropped = wanted[start : start + AT_ONCE], unwanted[start : start + AT_ONCE]
            answer = await self.call(
                calls.SLICE,
                {
                    "claims": [packed(claim, known=self.holdings.total(claim.counter)) for claim in claims],
                    "unwanted": dropped,
                    "share": self._config.slice_share,
                    "slice_lease_s": self._config.slice_lease_s,
                },
            )
            now_s = self._clock.monotonic_s()
            if self.mode is not CounterMode.SHARED:  # What the slices gave meanwhile must not come back.
                return
            for counter in dropped:
                self.book.drop(counter)
                self._sliced.discard(counter)
            for claim, reading in zip(claims, answer[1], strict=True):
                self.book.put(claim, int(reading[4]), now_s)
                self._sliced.add(claim.counter)
