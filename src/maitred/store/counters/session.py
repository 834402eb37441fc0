"""Session of one gateway with Redis: it holds slices in advance and reports missed settlements later.

One background task maintains the session. The task renews the slices about once a second while Redis answers; after a
failure only this task tries to reconnect.
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
from maitred.redis.link import LinkLost, RedisLink
from maitred.store.counters import calls
from maitred.store.counters.calls import LuaScript, pack_claim
from maitred.store.counters.config import CountersConfig
from maitred.store.counters.lease_records import LeaseRecords, Settlement
from maitred.store.counters.slices import SliceBook
from maitred.store.counters.spending import SpendingMeter, slice_share

_log = logging.getLogger(__name__)

_SLICE_USE_WINDOW_S = 60.0
"""Time after its last use for which a counter has a slice."""
_UPKEEP_INTERVAL_S = 1.0
_SLICE_MARGIN = 0.1
"""Part of the time for which Redis keeps slices in which they are not used any more.

The clocks of Redis and of this gateway may differ by this much in that time.
"""
MAX_PER_CALL = 100
"""Largest number of counters or leases in one call, so that no call blocks Redis for long."""


class CounterMode(Enum):
    """Whether Redis or the slices decide on reservations."""

    AWAY = "away"
    """Redis does not answer, so the slices decide."""
    RECOVERING = "recovering"
    """Redis answers but does not have all reports yet, so the slices decide."""
    SHARED = "shared"
    """Redis answers and decides on reservations."""


class CountersState(msgspec.Struct, frozen=True):
    """State of the shared counters, for health and metrics."""

    mode: CounterMode
    since_s: float
    """Wall time at which the current mode began."""
    slices: int
    """Number of counters for which this gateway holds a slice."""
    leases: int
    unsettled: int
    """Number of settlements that Redis does not have yet."""


class RedisSession:
    """Session of one gateway with Redis.

    Args:
        config: Settings of the counters.
        url: Address of Redis.
        clock: Clock of this gateway; Redis uses its own clock.
        gateway_id: Identifier of this gateway, unique among the running gateways.
        offset_s: Seconds that are added to the clock of Redis.
    """

    def __init__(
        self, config: CountersConfig, url: Secret, clock: Clock, gateway_id: str, offset_s: Callable[[], float]
    ) -> None:
        self.mode = CounterMode.AWAY
        self.loss_count = 0
        """Number of lost connections to Redis; a reply from before a loss may be invalid after it."""
        self.slices = SliceBook()
        self.lease_records = LeaseRecords()
        self._spending = SpendingMeter()
        self._config = config
        self._clock = clock
        self._gateway_id = gateway_id
        self._offset_s = offset_s
        self._link = RedisLink(url, timeout_s=config.answer_timeout_s)
        self._prefix = f"{{{config.namespace}}}"
        self._recent_claims: dict[str, tuple[LimitClaim, float]] = {}
        self._sliced_counters: set[str] = set()
        self._ended_gateways: list[tuple[str, Sequence[str]]] = []
        """Dead gateways, each with the leases that this one has taken over."""
        self._report_lock = asyncio.Lock()
        """This lock exists because two reports at one time would both send the oldest settlements and remove twice as
        many."""
        self._doubted_amounts: dict[str, int] = {}
        """By counter: what Redis may have taken out of a slice without an answer."""
        self._epoch = ""
        self._redis_ahead_s = 0.0
        """By how much the clock of Redis is ahead of the monotonic one, at the least: an answer takes its time."""
        self._is_registered = False
        """Whether Redis has all totals and slices of this gateway since it had no data last."""
        self._since_s = clock.wall_s()
        self._changed = asyncio.Event()
        self._upkeep_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects if Redis answers, and starts the upkeep task."""
        try:
            await self._recover()
        except LinkLost as error:
            _log.warning("The shared counters do not answer (%s). Until they do, limited requests are refused.", error)
            self.on_link_lost(error)
        self._upkeep_task = asyncio.create_task(self._run_upkeep(), name="redis counters")

    async def stop(self) -> None:
        """Reports pending settlements and returns the slices, if Redis answers."""
        await self._stop_upkeep()
        try:
            if self.mode is not CounterMode.AWAY:
                await self.report_pending()
                await self.call(calls.RELEASE, {"ended": [self._gateway_id]})
        except LinkLost as error:
            _log.warning("The shared counters do not answer (%s); what this gateway held there expires.", error)
        finally:
            self._set_mode(CounterMode.AWAY)
            await self._link.close()

    async def _stop_upkeep(self) -> None:
        if self._upkeep_task is not None:
            self._upkeep_task.cancel()
            await asyncio.gather(self._upkeep_task, return_exceptions=True)
            self._upkeep_task = None

    def state(self) -> CountersState:
        """Returns the state of the session for health and metrics."""
        return CountersState(
            self.mode,
            self._since_s,
            slices=len(self.slices),
            leases=len(self.lease_records.leases),
            unsettled=len(self.lease_records.unsettled),
        )

    # --- calls ----------------------------------------------------------------------------------------------------

    async def call(self, script: LuaScript, arguments: Mapping[str, object]) -> list[Any]:
        """Runs a script for this gateway.

        Raises:
            LinkLost: The script was not executed, or its result is unknown.
        """
        own = {
            "epoch": self._epoch,
            "gateway": self._gateway_id,
            "offset_s": self._offset_s(),
            "absence_s": self._config.absence_s,
            "sent_s": self._clock.monotonic_s() + self._redis_ahead_s,
            # Then Redis has all leases and settlements of this gateway.
            "told": self.mode is CounterMode.SHARED,
        }
        reply = await script.run(self._link, self._prefix, {**arguments, **own})
        if reply[0] == "lost":
            raise LinkLost("it lost its data")
        if reply[0] == "opening":
            raise LinkLost("it is recovering")
        return reply

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Settles leases in Redis now.

        Raises:
            LinkLost: As for `call`.
        """
        reply = await self.call(calls.SETTLE, {"settlements": settlements})
        for lease, *_ in settlements:
            self.lease_records.leases.pop(lease, None)
        if reply[1]:
            self.lease_records.update_totals({counter: int(charged) for counter, charged in reply[1].items()})

    def record_states(self, claims: Sequence[LimitClaim], rows: Sequence[Sequence[Any]]) -> list[CounterState]:
        """Parses the states in the reply of a script, and records the slices and charged totals in it."""
        now_s = self._clock.monotonic_s()
        states = []
        for claim, (remaining, reset_s, used, reserved, slice_amount) in zip(claims, rows, strict=True):
            states.append(
                CounterState(
                    claim.capacity, remaining=int(remaining), reset_s=reset_s, used=int(used), reserved=int(reserved)
                )
            )
            if self.mode is CounterMode.SHARED:
                # Only `renew_slices` raises a slice: its lower amount may not have reached Redis yet.
                self.slices.lower(claim.counter, int(slice_amount))
        self.lease_records.observe_states(claims, states, now_s)
        return states

    # --- without Redis --------------------------------------------------------------------------------------------

    def note_use(self, claims: Sequence[LimitClaim]) -> None:
        """Notes that the counters of these claims are in use, so that they get slices."""
        now_s = self._clock.monotonic_s()
        for claim in claims:
            if claim.hard:
                self._recent_claims.pop(claim.counter, None)
                self._recent_claims[claim.counter] = claim, now_s

    def note_spent(self, amounts: Mapping[str, int]) -> None:
        """Notes what a request of this gateway has spent, so that its slices are as large as it needs them."""
        now_s = self._clock.monotonic_s()
        for counter, amount in amounts.items():
            if counter in self._recent_claims:
                self._spending.observe(counter, amount, now_s)

    def _slice_share(self, claim: LimitClaim, now_s: float) -> float:
        """Returns the part of a counter that this gateway should hold in advance."""
        config = self._config
        return slice_share(
            claim,
            self._spending.per_s(claim.counter, now_s),
            claim.capacity - max(0, self.lease_records.last_total(claim.counter)),
            use_s=(1 - _SLICE_MARGIN) * config.slice_lease_s,
            least=config.slice_share,
            most=max(config.slice_share, config.busy_slice_share),
        )

    def doubt(self, reservation: Reservation) -> None:
        """Notes that Redis may have granted a reservation, and may have taken it out of the slices.

        Until Redis hears how the lease ended, it keeps what the slices have here beyond what they have there.
        """
        for claim in reservation.claims:
            amount = claim.amount(reservation.output)
            self._doubted_amounts[claim.counter] = self._doubted_amounts.get(claim.counter, 0) + amount

    def reserve_from_slices(self, reservation: Reservation, *, is_in_doubt: bool) -> ReservationGranted:
        """Takes the claimed amounts from the slices.

        Args:
            reservation: The reservation.
            is_in_doubt: Whether Redis may have granted it, too: then nothing of it returns to the slices.

        Raises:
            StoreUnavailable: The slices do not cover the claims.
        """
        now_s = self._clock.monotonic_s()
        granted = self.slices.reserve(reservation, now_s)
        self.lease_records.add(reservation, granted.output, now_s, reported=False, from_slice=not is_in_doubt)
        return granted

    def _set_mode(self, mode: CounterMode) -> None:
        if mode is not self.mode:
            self.mode = mode
            self._since_s = self._clock.wall_s()

    def on_link_lost(self, error: LinkLost) -> None:
        """Switches to the slices after a failure of Redis, until the upkeep task has reconnected."""
        if self.mode is CounterMode.SHARED:
            _log.warning("The shared counters are away (%s). This gateway goes on with its slices.", error)
        if self.mode is not CounterMode.AWAY:
            self._set_mode(CounterMode.AWAY)
            self.loss_count += 1
            self.lease_records.mark_unreported()
            self._link.fail(error)
            self._changed.set()

    def settle_later(self, lease: str, amounts: Mapping[str, int], gateway: str | None = None) -> None:
        """Queues a settlement until Redis answers; unused amounts of a slice return to it immediately.

        Args:
            lease: Id of the lease.
            amounts: Amounts that were used.
            gateway: Dead gateway that held the lease; None: this gateway.
        """
        record = self.lease_records.leases.get(lease)
        if record is not None:
            if record.settled:
                return
            record.settled = True
            if record.from_slice:
                record.from_slice = False
                self.slices.settle(record.claims, record.output, amounts, self._clock.monotonic_s())
        self.lease_records.unsettled.append((lease, dict(amounts), gateway))
        if self.mode is CounterMode.RECOVERING:
            # When Redis accepts reservations again, budgets are set to the totals of the database, which will soon
            # include this amount.
            self._changed.set()

    def take_over(self, reservation: Reservation) -> None:
        """Holds a lease that a dead gateway was granted; the upkeep tells Redis."""
        self.lease_records.add(
            reservation, reservation.output, self._clock.monotonic_s(), reported=False, from_slice=False
        )
        self._changed.set()

    async def release_gateway(self, gateway: str, surviving: Sequence[str]) -> None:
        """Gives the slices of a dead gateway back, when Redis has the settlements that are queued."""
        self._ended_gateways.append((gateway, surviving))
        if self.mode is CounterMode.SHARED:
            try:
                await self.report_pending()
            except LinkLost as error:
                self.on_link_lost(error)

    # --- upkeep ---------------------------------------------------------------------------------------------------

    async def _run_upkeep(self) -> None:
        while True:
            wait_s = _UPKEEP_INTERVAL_S
            try:
                if self.mode is CounterMode.SHARED:
                    await self.report_pending()
                    await self.renew_slices()
                else:
                    await self._recover()
            except LinkLost as error:
                self.on_link_lost(error)
                wait_s = self._config.probe_interval_s
            except Exception:
                _log.exception("The upkeep of the shared counters failed; it goes on.")
            self._expire()
            await self._wait(wait_s)

    async def _wait(self, wait_s: float) -> None:
        """Waits for the given time, or until another task wakes this task."""
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _expire(self) -> None:
        now_s = self._clock.monotonic_s()
        for record in self.lease_records.expire(now_s):
            self.slices.settle(record.claims, record.output, {}, now_s)
        self.lease_records.forget_totals(now_s)
        for counter, (_, used_s) in list(self._recent_claims.items()):
            if used_s + _SLICE_USE_WINDOW_S > now_s:
                break
            del self._recent_claims[counter]
            self._spending.forget(counter)

    async def _recover(self) -> None:
        """Connects and reports everything that Redis may not have, until the mode is `SHARED`."""
        await self._link.open()
        while True:
            hello = {"fresh": secrets.token_hex(8), "grace_s": self._config.recovery_s, "offset_s": self._offset_s()}
            epoch, opens_in_s, redis_s = await calls.HELLO.run(self._link, self._prefix, hello)
            self._redis_ahead_s = redis_s - self._clock.monotonic_s()
            if epoch != self._epoch:
                self.lease_records.mark_unreported()
                self._epoch, self._is_registered = epoch, False
            if not self._is_registered:
                await self._register_holdings()
            await self.report_pending()
            if opens_in_s <= 0:
                break
            self._set_mode(CounterMode.RECOVERING)
            await self._wait(min(opens_in_s, self._config.probe_interval_s))
        # There was no await since the last report, so Redis has every decision of this gateway.
        self._set_mode(CounterMode.SHARED)
        _log.info("The shared counters answer.")
        await self.renew_slices()

    async def _register_holdings(self) -> None:
        """Reports all charged totals and slices to a Redis that had no data."""
        now_s = self._clock.monotonic_s()
        self.slices.drop_expired(now_s)
        totals, rows = self.lease_records.totals(), self.slices.to_rows(now_s)
        self._sliced_counters.update(row[0] for row in rows)
        for start in range(0, max(len(totals), len(rows), 1), MAX_PER_CALL):
            end = start + MAX_PER_CALL
            await self._register(totals=totals[start:end], slices=rows[start:end])
        self._is_registered = True

    async def _register(
        self, *, totals: Sequence[object] = (), slices: Sequence[object] = (), leases: Sequence[object] = ()
    ) -> None:
        arguments = {"totals": totals, "slices": slices, "leases": leases}
        await self.call(calls.REGISTER, {**arguments, "slice_lease_s": self._config.slice_lease_s})

    async def report_pending(self) -> None:
        """Reports leases that Redis may not have, then sends the queued settlements, until none is left."""
        async with self._report_lock:
            await self._report_pending()

    async def _report_pending(self) -> None:
        lease_records = self.lease_records
        # Redis gives to others what these settlements free, and only `renew_slices` tells what it holds for this one.
        while self._doubted_amounts:
            self.slices.reduce(*self._doubted_amounts.popitem(), self._clock.monotonic_s())
        while True:
            unreported = lease_records.unreported_leases(MAX_PER_CALL)
            if unreported:
                now_s, loss_count = self._clock.monotonic_s(), self.loss_count
                to_report = [lease_records.leases[lease] for lease in unreported]
                leases = [
                    (lease, record.expires_s - now_s, record.to_entries())
                    for lease, record in zip(unreported, to_report, strict=True)
                ]
                await self._register(leases=leases)
                for record in to_report:
                    record.reported, record.from_slice = loss_count == self.loss_count, False
            elif lease_records.unsettled:
                settlements = [
                    lease_records.unsettled[n] for n in range(min(MAX_PER_CALL, len(lease_records.unsettled)))
                ]
                await self.settle(settlements)
                for _ in settlements:
                    lease_records.unsettled.popleft()
            elif self._ended_gateways:
                ended = self._ended_gateways[:MAX_PER_CALL]
                # While nobody holds a lease who is heard, it ends in time, even if this gateway is cut off now.
                surviving = [lease for _, leases in ended for lease in leases]
                for start in range(0, len(surviving), MAX_PER_CALL):
                    renewed = surviving[start : start + MAX_PER_CALL]
                    await self.call(calls.RENEW, {"leases": renewed, "lease_s": self._config.slice_lease_s})
                await self.call(calls.RELEASE, {"ended": [gateway for gateway, _ in ended]})
                del self._ended_gateways[: len(ended)]
            else:
                return

    async def renew_slices(self) -> None:
        """Takes a slice of every counter in use, and gives back the slices of other counters."""
        wanted = [claim for claim, _ in self._recent_claims.values()]
        unwanted = list(self._sliced_counters.difference(claim.counter for claim in wanted))
        for start in range(0, max(len(wanted), len(unwanted), 1), MAX_PER_CALL):
            claims, dropped = wanted[start : start + MAX_PER_CALL], unwanted[start : start + MAX_PER_CALL]
            sent_s = self._clock.monotonic_s()
            self.slices.drop_expired(sent_s)
            # The reply may be lost: then Redis gives those to others, and keeps these for this gateway.
            for counter in dropped:
                self.slices.drop(counter)
            self._sliced_counters.update(claim.counter for claim in claims)
            shares = [self._slice_share(claim, sent_s) for claim in claims]
            for claim, share in zip(claims, shares, strict=True):
                self.slices.lower_share(claim.counter, share, sent_s)
            reply = await self.call(
                calls.SLICE,
                {
                    "claims": [
                        pack_claim(claim, last_charged=self.lease_records.last_total(claim.counter)) for claim in claims
                    ],
                    "holding": [self.slices.amount_of(claim, sent_s) for claim in claims],
                    "unwanted": dropped,
                    "shares": shares,
                    "slice_lease_s": self._config.slice_lease_s,
                },
            )
            now_s = self._clock.monotonic_s()
            self._redis_ahead_s = reply[4] - now_s
            # Amounts that were granted from the slices in the meantime must not be added to them again
            if self.mode is not CounterMode.SHARED:
                return
            self._sliced_counters.difference_update(dropped)
            for claim, reading, amount, share in zip(claims, *reply[1:4], strict=True):
                self.slices.update(claim, min(int(reading[4]), int(amount)), now_s, share=share)
            kept_s = (1 - _SLICE_MARGIN) * self._config.slice_lease_s
            self.slices.keep_until(sent_s + kept_s, sent_s + kept_s / 2)
