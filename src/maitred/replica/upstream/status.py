"""Whether a server gets requests, and how many beside its peers: what the probe saw last, and what requests met since.

    the last look found it there -> health lets requests through -> less of them while it comes back

Whoever sends asks here, and tells every outcome here.
"""

import random
import time
from collections.abc import Callable

from maitred.core.admin_state import AdminState
from maitred.core.errors import ReplicaUnavailable
from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt, BreakerState
from maitred.replica.health.config import HealthConfig
from maitred.replica.health.health import ReplicaHealth, slow_start
from maitred.replica.health.peers import PoolHealth


class UpstreamStatus:
    """Of one server. Down until the first look.

    Args:
        server: Its name.
        retry_after_s: When the next look comes.
        health: When it gets fewer requests or none.
        peers: Those that serve the same model, which it joins; None: there are none.
        clock: Monotonic seconds.
        draw: Evenly from [0, 1).

    Attributes:
        up: Whether the last look found it.
        reason: Why not.
        admin_state: What an operator has said of it.
        health: What its requests have met.
    """

    def __init__(
        self,
        server: str,
        retry_after_s: float,
        health: HealthConfig | None = None,
        peers: PoolHealth | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.up = False
        self.reason = "nobody has looked yet"
        self._config = health or HealthConfig()
        self.admin_state = AdminState()
        self.health = ReplicaHealth(server, self._config, draw, lambda: not (self.up and self.admin_state.serving))
        self._peers = peers or PoolHealth(self._config.outliers, [])
        self._peers.join(self.health)
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._back_s = float("-inf")
        self._seen = False
        self._listeners: list[Callable[[], None]] = []

    def reconfigure(self, retry_after_s: float, health: HealthConfig) -> None:
        """Goes by these settings from now on, and by what it knows of the server."""
        self._retry_after_s = retry_after_s
        self._config = health
        self.health.reconfigure(health)
        self._peers.reconfigure(health.outliers)

    def join(self, peers: PoolHealth) -> None:
        """The server is one of these from now on."""
        if peers is not self._peers:
            self._peers.leave(self.health.name)
            self._peers = peers
            peers.join(self.health)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever it changes by news, not by time alone. For good."""
        self._listeners.append(listener)

    # --- may it be sent to? ---

    def check(self) -> None:
        """Raises ReplicaUnavailable while the server gets no requests."""
        if not self.up:
            raise ReplicaUnavailable(retry_after_s=self._retry_after_s)
        now_s = self._clock()
        if not self._peers.verdict(self.health.name, now_s).may:
            raise ReplicaUnavailable(retry_after_s=self.health.breaker.remaining_s(now_s) or self._retry_after_s)

    @property
    def weight(self) -> float:
        """The part of its load that it should have, above 0."""
        now_s, config = self._clock(), self._config
        back_s = max(self._back_s, self.admin_state.serving_since_s)
        back = slow_start(now_s - back_s, config.slow_start_s, config.slow_start_least)
        return min(back, self._peers.verdict(self.health.name, now_s).weight) or config.slow_start_least

    @property
    def breaker(self) -> BreakerState:
        """The state of its circuit breaker."""
        return self.health.breaker.state(self._clock())

    # --- what looks find ---

    def on_probe_success(self) -> None:
        """A look found it ready."""
        if not self.up and self._seen:
            self._back_s = self._clock()
        self._seen = True
        self._set(up=True, reason="")

    def on_unreachable(self, reason: str) -> None:
        """A look did not find it ready, or a request could not even connect."""
        self._set(up=False, reason=reason)

    # --- what requests meet ---

    def start_attempt(self) -> BreakerAttempt:
        """A request on its way there, which must be given to `ended`.

        Raises:
            ReplicaUnavailable: It gets none now.
        """
        attempt = self._peers.start_attempt(self.health.name, self._clock()) if self.up else None
        if attempt is None:
            raise ReplicaUnavailable(retry_after_s=self._retry_after_s)
        if attempt.probe:
            self._notify()
        return attempt

    def on_first_part(self, attempt: BreakerAttempt) -> None:
        """The first part of its answer came."""
        self.health.answered(attempt, self._clock())
        if attempt.probe:
            self._notify()

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome) -> None:
        """It is over."""
        now_s = self._clock()
        self.health.on_end(attempt, outcome, now_s)
        ejected = self._peers.sweep(now_s)
        if attempt.probe or ejected or not self.health.breaker.closed:
            self._notify()

    def _set(self, *, up: bool, reason: str) -> None:
        changed = up != self.up
        self.up, self.reason = up, reason
        if changed:
            self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
