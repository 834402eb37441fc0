"""Status of an upstream: whether it may receive requests, and with which weight.

    the last probe succeeded -> the health allows requests -> slow start reduces the weight

The sender of a request calls `start_attempt`, `on_first_token` and `on_end`.
"""

import random
import time
from collections.abc import Callable

from maitred.core.backoff import BackoffCeiling
from maitred.core.errors import ReplicaUnavailable
from maitred.core.replica import AdminState
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt, BreakerState
from maitred.replica.health.config import HealthConfig
from maitred.replica.health.pool import PoolHealth
from maitred.replica.health.replica import ReplicaHealth, slow_start_weight


class UpstreamStatus:
    """Status of one upstream. The upstream is down until the first successful probe.

    Args:
        server: Name of the server.
        probe_interval_s: Interval of the probes, used as `retry_after_s` of the errors.
        health: Settings of the health; None: the defaults.
        clock: Returns the monotonic time in seconds.
        draw: Returns a uniformly distributed random number from [0, 1).

    Attributes:
        is_up: Whether the last probe succeeded and no request failed to connect since.
        reason: Reason why the server is down; empty while it is up.
        admin_state: State set by an operator, such as draining.
        health: Health of the server, from the outcomes of its requests.
        account_refused: Whether the server has refused the account or the credential of this gateway since its last
            answer.
    """

    def __init__(
        self,
        server: str,
        probe_interval_s: float,
        health: HealthConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.is_up = False
        self.reason = "nobody has looked yet"
        self._config = health or HealthConfig()
        self.admin_state = AdminState()
        self.account_refused = False
        self.health = ReplicaHealth(server, self._config, draw, lambda: not (self.is_up and self.admin_state.serving))
        self._pool_health = PoolHealth(self._config.outliers)
        self._pool_health.add(self.health)
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self._recovered_s = float("-inf")
        self._draw = draw
        self._refusals = 0
        """Refusals in a row for want of room."""
        self._refuses_until_s = float("-inf")
        self._has_been_up = False
        self._listeners: list[Callable[[], None]] = []

    def reconfigure(self, probe_interval_s: float, health: HealthConfig) -> None:
        """Applies new settings; the state of the server is kept."""
        self._probe_interval_s = probe_interval_s
        self._config = health
        self.health.reconfigure(health)
        self._pool_health.reconfigure(health.outliers)

    def join_pool(self, pool_health: PoolHealth) -> None:
        """Moves the server into another pool; until the first call it is alone in its own."""
        if pool_health is not self._pool_health:
            self._pool_health.remove(self.health.name)
            self._pool_health = pool_health
            pool_health.add(self.health)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every event that changes the status, but not when a time limit has passed.

        The subscription cannot be cancelled.
        """
        self._listeners.append(listener)

    # --- availability ---

    def raise_if_unavailable(self) -> None:
        """Raises ReplicaUnavailable if the server may not receive requests now."""
        if not self.is_up:
            raise ReplicaUnavailable(retry_after_s=self._probe_interval_s)
        health = self.health
        if health.breaker.is_closed and not health.was_ejected and self.admin_state.serving:
            return  # the common case
        now_s = self._clock()
        if not self._pool_health.availability(self.health.name, now_s).is_available:
            raise ReplicaUnavailable(retry_after_s=self.health.breaker.remaining_s(now_s) or self._probe_interval_s)

    @property
    def weight(self) -> float:
        """Weight of the server for load balancing, above 0."""
        now_s, config = self._clock(), self._config
        returned_s = max(self._recovered_s, self.admin_state.serving_since_s)
        ramp_weight = slow_start_weight(now_s - returned_s, config.slow_start_s, config.slow_start_least)
        return (
            min(ramp_weight, self._pool_health.availability(self.health.name, now_s).weight) or config.slow_start_least
        )

    @property
    def breaker_state(self) -> BreakerState:
        """State of the server's circuit breaker."""
        return self.health.breaker.state(self._clock())

    def is_refusing(self) -> bool:
        """Returns whether the server has refused several requests in a row for want of room, and lately.

        A request that can begin elsewhere then does. When the time is over, one request is let through to find out; the
        others follow once it was answered.
        """
        if self._refusals < self._config.most_refusals:
            return False
        now_s = self._clock()
        if now_s < self._refuses_until_s:
            return True
        self._refuses_until_s = now_s + self._config.breaker.first_open_s
        return False

    # --- up or down ---

    def mark_up(self) -> None:
        """Marks the server as up, after a successful probe."""
        if not self.is_up and self._has_been_up:
            self._recovered_s = self._clock()
        self._has_been_up = True
        self._set_up(up=True, reason="")

    def mark_down(self, reason: str) -> None:
        """Marks the server as down, after a failed probe or a request that could not connect."""
        self._set_up(up=False, reason=reason)

    # --- request outcomes ---

    def start_attempt(self) -> BreakerAttempt:
        """Starts an attempt for a request; the attempt must be passed to `on_end`.

        Raises:
            ReplicaUnavailable: The server may not receive requests now.
        """
        attempt = self._pool_health.start_attempt(self.health.name, self._clock()) if self.is_up else None
        if attempt is None:
            raise ReplicaUnavailable(retry_after_s=self._probe_interval_s)
        if attempt.is_trial:
            self._notify()
        return attempt

    def on_first_token(self, attempt: BreakerAttempt) -> None:
        """Records the first token of an attempt."""
        self._count_refusal(AttemptOutcome.SUCCESS, None)
        self.health.on_first_token(attempt, self._clock())
        if attempt.is_trial:
            self._notify()

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome, *, retry_after_s: float | None = None) -> None:
        """Records the outcome of an attempt, and runs outlier detection if its interval has passed.

        Args:
            attempt: The attempt.
            outcome: Its outcome.
            retry_after_s: Time that a busy server asks to wait; None: it names none, or it is not known.
        """
        self._count_refusal(outcome, retry_after_s)
        now_s = self._clock()
        if outcome in (AttemptOutcome.SUCCESS, AttemptOutcome.ACCOUNT_REFUSED):
            self.account_refused = outcome is AttemptOutcome.ACCOUNT_REFUSED
        self.health.on_end(attempt, outcome, now_s)
        ejected = self._pool_health.eject_outliers(now_s)
        if attempt.is_trial or ejected or not self.health.breaker.is_closed:
            self._notify()

    def _count_refusal(self, outcome: AttemptOutcome, retry_after_s: float | None) -> None:
        """Counts refusals in a row. After enough of them, requests begin elsewhere for a time that grows."""
        if outcome is AttemptOutcome.SUCCESS:
            if self._refusals:
                self._refusals, self._refuses_until_s = 0, float("-inf")
        elif outcome is AttemptOutcome.BUSY:
            self._refusals += 1
            breaker = self._config.breaker
            excess = self._refusals - self._config.most_refusals + 1
            if excess > 0:
                ceiling_s = BackoffCeiling(breaker.first_open_s, breaker.most_open_s).after(excess)
                wait_s = max((1.0 + self._draw()) / 2.0 * ceiling_s, min(retry_after_s or 0.0, breaker.most_open_s))
                self._refuses_until_s = self._clock() + wait_s

    def _set_up(self, *, up: bool, reason: str) -> None:
        changed = up != self.is_up
        self.is_up, self.reason = up, reason
        if changed:
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
