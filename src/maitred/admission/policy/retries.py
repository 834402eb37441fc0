"""Retries of refused requests: a retry budget per tenant, and turns after a rate refusal.

The budget bounds the number of retries of refused requests, so that retries cannot prolong an overload.

If a server refuses half of its requests and each client tries three times, the load nearly doubles. Therefore each
retry needs a grant. Each first attempt of a tenant adds a fraction of a retry to its account (a fifth by default), and
each granted retry takes one. Both sums decay with time, so only the recent past counts, and tenants with few requests
always have a small allowance. The response to a client over the budget says that the client must not retry
automatically.

This is the retry budget of Finagle's clients, but on the server, which sees all clients of a tenant together. Let `f`
be the first attempts and `r` the grants, each weighted by ``exp(-age / WINDOW_S)``. A retry is granted while ``r + 1/2
<= share * f + allowance``: at any time `r` is rounded to the nearest whole number, and in the long run each window has
that many grants.

This module is pure: time is an argument. The numbers of stored tenants and keys bound the memory; a dropped
tenant starts again with the allowance.

A counter knows when one request would have room if no other request arrived. If many requests are refused, all of them
would get the same time and return together, and all but one would be refused again, until the crowd is gone. So each
refused request gets a turn after all earlier turns. A turn is only advice and reserves nothing: if a client is late or
never returns, other requests use the room.
"""

import math
from collections import OrderedDict, deque

from maitred.core.counters import LimitClaim

WINDOW_S = 60.0
"""Decay time in seconds: an event of this age counts 37 %."""
_GRAIN_S = 0.5
"""Time step of the decay in seconds. Events inside a step count as at its start, with an error below 1 %, so most
requests need no decay computation."""
_MOST_TENANTS = 10_000
_MOST_KEYS = 65_536


class _Account:
    """Account of one tenant; both sums are valid at `at_s`."""

    __slots__ = ("at_s", "firsts", "grants")

    def __init__(self, now_s: float) -> None:
        self.at_s = now_s
        self.firsts = 0.0
        self.grants = 0.0

    def fade(self, now_s: float) -> None:
        """Decays the sums to the current time."""
        factor = math.exp((self.at_s - now_s) / WINDOW_S)
        self.firsts *= factor
        self.grants *= factor
        self.at_s = now_s


class RetryBudget:
    """Budget of retries: decides which refused clients may try again by themselves.

    Args:
        share: Number of retries granted for each first attempt.
        allowance: Number of additional retries granted in each window.
    """

    def __init__(
        self, share: float, allowance: int, *, most_tenants: int = _MOST_TENANTS, most_keys: int = _MOST_KEYS
    ) -> None:
        self._share = share
        self._allowance = allowance
        self._most_tenants = most_tenants
        self._most_keys = most_keys
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._refused: OrderedDict[int, int] = OrderedDict()
        """Hash of a tenant and a refused key -> number of refusals. A hash collision counts as one key,
        which costs the second request its fifth of a retry."""

    def reconfigure(self, share: float, allowance: int) -> None:
        """Applies new settings; earlier grants still count."""
        self._share = share
        self._allowance = allowance

    def on_request(self, tenant: str, now_s: float, *, retries: int = 0, key: str | None = None) -> int:
        """Counts a request and returns how often it was sent before.

        Args:
            tenant: Tenant that sent the request.
            now_s: Current monotonic time in seconds.
            retries: Number of earlier attempts according to the client.
            key: Key that is equal for all attempts of the request, if there is one.

        Returns:
            Number of earlier attempts, as far as known.
        """
        if key is not None:
            retries = max(retries, self._refused.get(hash((tenant, key)), 0))
        if not retries:
            self._account(tenant, now_s).firsts += 1
        return retries

    def on_refusal(self, tenant: str, now_s: float, *, key: str | None = None) -> bool:
        """Returns whether a refused request may retry; if so, takes one retry from the budget."""
        if key is not None:
            name = hash((tenant, key))
            self._refused[name] = self._refused.pop(name, 0) + 1
            if len(self._refused) > self._most_keys:
                self._refused.popitem(last=False)
        account = self._account(tenant, now_s)
        if account.grants + 0.5 > self._share * account.firsts + self._allowance:
            return False
        account.grants += 1
        return True

    def _account(self, tenant: str, now_s: float) -> _Account:
        """Returns the tenant's account, decayed to the current time."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(now_s)
            if len(self._accounts) > self._most_tenants:
                self._accounts.popitem(last=False)
        elif now_s - account.at_s >= _GRAIN_S:
            self._accounts.move_to_end(tenant)
            account.fade(now_s)
        return account


_LONGEST_S = 30.0
"""Maximum extra wait in seconds for earlier turns, because their clients may never return. Official clients follow
advice of up to a minute."""
_MANY = 1024
"""Number of counters from which on counters with past turns are dropped."""


class RetryTurns:
    """Stores the last given turn of each counter."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._last_s)

    def take(self, claim: LimitClaim, amount: int, alone_s: float, now_s: float) -> float:
        """Returns a turn after all earlier turns.

        Args:
            claim: Claim on a rate counter.
            amount: Denied amount.
            alone_s: Seconds until there is room if no other request arrives.
            now_s: Current monotonic time in seconds.

        Returns:
            Seconds until the turn.
        """
        available_s = now_s + alone_s
        last_s = self._last_s.get(claim.counter)
        turn_s = available_s if last_s is None else max(available_s, last_s + amount / claim.refill_per_s)
        turn_s = min(turn_s, available_s + _LONGEST_S)
        if len(self._last_s) >= _MANY:
            self._last_s = {counter: last_s for counter, last_s in self._last_s.items() if last_s > now_s}
        self._last_s[claim.counter] = turn_s
        return turn_s - now_s


_WINDOW_S = 10.0
_MOST = 256
"""Number of stored departures; more would not improve the mean."""
_UNKNOWN_S = 1.0
"""Default gap in seconds before the first departure. With this gap a client finds a slot soon."""


class SlotReleaseRate:
    """Mean time between the latest departures. The class is pure: monotonic times are arguments.

    The mean time between two releases is the time passed over the number of releases in it. It counts from the moment
    at which a request could leave, and over the last seconds only: a quiet hour says nothing of the rush after it.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._times: deque[float] = deque()

    def restart(self, now_s: float) -> None:
        """Starts the measurement anew: a request came while none was in flight, so earlier times do not count."""
        self._since_s = now_s
        self._times.clear()

    def on_release(self, now_s: float) -> None:
        """Records that a slot has become free."""
        if len(self._times) == _MOST:
            self._since_s = self._times.popleft()
        self._times.append(now_s)

    def gap_s(self, now_s: float) -> float:
        """Returns the mean seconds between two free slots, at least the time since the last one."""
        times = self._times
        while times and times[0] < now_s - _WINDOW_S:
            self._since_s = times.popleft()
        if not times:
            return max(_UNKNOWN_S, now_s - self._since_s)
        return (now_s - self._since_s) / len(times)
