"""Retry-After times of rejected requests.

A single rejected caller would be served after its predicted wait. If many callers are rejected with the same time, they
all retry together, and all but one are rejected again. So the retries of one tenant are spaced in order of rejection,
at the rate at which the tenant is served. A retry time is advice and reserves no capacity.
"""

from collections.abc import Hashable

_MAX_EXTRA_DELAY_S = 60.0
"""Maximum delay for the sake of earlier callers, because they may never retry."""
_PRUNE_ABOVE_TENANTS = 1024
"""Past retry times are dropped once this many tenants are stored."""
_JITTER = 0.1


class RetryAfterTurns:
    """Last retry time of each tenant."""

    def __init__(self) -> None:
        self._last_retry_s_by_tenant: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._last_retry_s_by_tenant)

    def take(self, tenant: Hashable, wait_s: float, service_time_s: float, now_s: float, draw: float) -> float:
        """Assigns the next retry time of a tenant and returns the seconds until then.

        Args:
            tenant: Tenant whose share will serve the request.
            wait_s: Predicted wait of the request without other rejected callers.
            service_time_s: Seconds that the tenant's share of the capacity needs to serve the request.
            now_s: Now, in monotonic seconds.
            draw: Jitter from 0 to 1.

        Returns:
            Seconds until the retry: at least 0.1, and up to 10 % longer with jitter.
        """
        first_s = now_s + wait_s
        last_s = self._last_retry_s_by_tenant.get(tenant)
        turn_s = first_s if last_s is None else max(first_s, last_s + service_time_s)
        turn_s = min(turn_s, first_s + _MAX_EXTRA_DELAY_S)
        if len(self._last_retry_s_by_tenant) >= _PRUNE_ABOVE_TENANTS:
            self._last_retry_s_by_tenant = {
                key: last_s for key, last_s in self._last_retry_s_by_tenant.items() if last_s > now_s
            }
        self._last_retry_s_by_tenant[tenant] = turn_s
        return max(0.1, turn_s - now_s) * (1.0 + _JITTER * draw)
