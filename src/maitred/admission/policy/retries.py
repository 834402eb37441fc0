"""Retries of refused requests: a budget for each tenant, and turns for those whom a rate has refused.

The budget says how many refused requests may come back, so that retries cannot keep an overload alive.

A server that refuses half of what comes, to clients that each try three times, gets twice as much. So coming back is a
grant. Every request that a tenant sends for the first time adds a share of one to its account (a fifth, by default);
every refusal after which it may come back takes one. Both fade with time, so what counts is the recent past, and a
small allowance is always there for those who send little. Who is over the budget is told not to try again by itself.

This is the retry budget of Finagle's clients, kept by the server, which sees all of a tenant's clients together. With
`f` first attempts and `r` grants, each weighted by ``exp(-age / WINDOW_S)``, there is a grant while
``r + 1/2 <= share * f + allowance``: at any moment the nearest whole number, and in the long run that many in each
window.

Pure: time is an argument. Memory is bounded by the number of tenants and of keys that are remembered; who is forgotten
starts anew, with the allowance.

**Turns.** A counter knows when one request would find room if nobody else came. Where a crowd waits, all of it would
hear the same time, come back together, and all but one would be refused again, for as long as the crowd lasts. So each
one who is refused gets a turn behind the turns that were given before. A turn is advice and holds nothing: who comes
late, or never, leaves room for whoever comes then.
"""

import math
from collections import OrderedDict, deque

from maitred.core.counters import LimitClaim

WINDOW_S = 60.0
"""What happened so long ago counts for 37 %."""
_GRAIN_S = 0.5
"""What happened within it counts as of its beginning, which is off by less than 1 %; so most requests need no look at
the time that has passed."""
_MOST_TENANTS = 10_000
_MOST_KEYS = 65_536


class _Account:
    """One tenant's; both sums as of `at_s`."""

    __slots__ = ("at_s", "firsts", "grants")

    def __init__(self, now_s: float) -> None:
        self.at_s = now_s
        self.firsts = 0.0
        self.grants = 0.0

    def fade(self, now_s: float) -> None:
        """Brings the sums to now."""
        factor = math.exp((self.at_s - now_s) / WINDOW_S)
        self.firsts *= factor
        self.grants *= factor
        self.at_s = now_s


class RetryBudget:
    """Budget of retries: decides which refused clients may try again by themselves.

    Args:
        share: Retries granted for each first attempt.
        allowance: Retries granted in a window beside these.
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
        """Hash of a tenant and a key that was refused -> how often. Two with one hash count as one, which costs the
        second its fifth of a retry."""

    def reconfigure(self, share: float, allowance: int) -> None:
        """Grants by these from now on; what was granted counts."""
        self._share = share
        self._allowance = allowance

    def on_request(self, tenant: str, now_s: float, *, retries: int = 0, key: str | None = None) -> int:
        """Counts a request, and returns how often it was sent before.

        Args:
            tenant: Whose it is.
            now_s: Monotonic.
            retries: How often its client says that it has sent it before.
            key: The name that the request has for its repeats, if it has one.

        Returns:
            How often it came before, as far as is known.
        """
        if key is not None:
            retries = max(retries, self._refused.get(hash((tenant, key)), 0))
        if not retries:
            self._account(tenant, now_s).firsts += 1
        return retries

    def on_refusal(self, tenant: str, now_s: float, *, key: str | None = None) -> bool:
        """Whether a request that was refused for want of room may come back; if so, that is taken from the budget."""
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
        """The tenant's account, as of now."""
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
"""Nobody is put off by more than this for others, because they may never come. Official clients follow advice of up to
a minute."""
_MANY = 1024
"""From so many counters on, those whose turns have passed are forgotten."""


class RetryTurns:
    """The last turn that was given, for each counter."""

    def __init__(self) -> None:
        self._last_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._last_s)

    def take(self, claim: LimitClaim, amount: int, alone_s: float, now_s: float) -> float:
        """Gives a turn behind all others.

        Args:
            claim: On a rate.
            amount: What was denied.
            alone_s: Time until there is room for it if nobody else comes.
            now_s: Monotonic.

        Returns:
            Time until the turn.
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
"""Departures that are remembered: more would not make the mean better."""
_UNKNOWN_S = 1.0
"""Before anybody has left. At this pace a client finds a place soon without hammering."""


class SlotReleaseRate:
    """The last departures. Pure: times are arguments, monotonic.

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
        """A place has come free."""
        if len(self._times) == _MOST:
            self._since_s = self._times.popleft()
        self._times.append(now_s)

    def gap_s(self, now_s: float) -> float:
        """Seconds from one place that comes free to the next; while none does, at least as long as that has lasted."""
        times = self._times
        while times and times[0] < now_s - _WINDOW_S:
            self._since_s = times.popleft()
        if not times:
            return max(_UNKNOWN_S, now_s - self._since_s)
        return (now_s - self._since_s) / len(times)
