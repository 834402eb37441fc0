"""Health of one replica: its circuit breaker, its ejection as an outlier, and its slow start.

    availability: in service, and allowed by the circuit breaker, and not ejected
    weight: slow start since the breaker closed or the ejection ended, whichever is later

The sender of a request checks `availability`, calls `start_attempt`, then `on_first_token`, then `on_end`.
"""

from collections.abc import Callable

from msgspec import Struct

from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt, BreakerState, CircuitBreaker
from maitred.replica.health.config import HealthConfig
from maitred.replica.health.window import OutcomeWindow, WindowStats

_NEVER_S = float("-inf")


class ReplicaAvailability(Struct, frozen=True):
    """Availability of a replica at one time: whether it may receive a request, and with which weight."""

    is_available: bool
    weight: float
    """Weight in [0, 1]; it is 0 if and only if the replica is not available."""
    is_trial: bool = False
    """Whether the next request is the trial of the half-open circuit breaker."""


_FULLY_AVAILABLE = ReplicaAvailability(True, 1.0)
_UNAVAILABLE = ReplicaAvailability(False, 0.0)


class ReplicaHealth:
    """Health of one replica.

    Args:
        name: Name of the replica.
        config: The settings.
        draw: Returns a uniformly distributed random number from [0, 1).
        is_out_of_service: Returns whether the replica is out of service for a reason other than failed requests: it
            is down, or drained by an operator.

    Attributes:
        name: Name of the replica.
        breaker: Its circuit breaker.
        ejections: Number of ejections, less one for each later comparison in which it was no outlier.
        was_ejected: Whether it has ever been ejected.
    """

    def __init__(
        self,
        name: str,
        config: HealthConfig,
        draw: Callable[[], float],
        is_out_of_service: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.ejections = 0
        self.was_ejected = False
        self._is_out_of_service = is_out_of_service
        self._config = config
        self._outcomes = OutcomeWindow(config.breaker.window_s)
        self.breaker = CircuitBreaker(config.breaker, self._outcomes, draw)
        self._ejected_until_s = _NEVER_S

    def reconfigure(self, config: HealthConfig) -> None:
        """Applies new settings; the recorded outcomes are kept."""
        self._config = config
        self.breaker.reconfigure(config.breaker)

    # --- availability ---

    def availability(self, now_s: float, *, ignore_ejection: bool = False) -> ReplicaAvailability:
        """Returns whether the replica may receive a request, and with which weight.

        Args:
            now_s: Now.
            ignore_ejection: Whether to ignore an ejection, because no other replica is available (panic mode).
        """
        config, breaker = self._config, self.breaker
        slow_start_s = config.slow_start_s
        if (
            breaker.is_closed
            and now_s - max(breaker.closed_since_s, self._ejected_until_s) >= slow_start_s
            and not self.is_out_of_service
        ):
            return _FULLY_AVAILABLE  # the common case
        if self.is_out_of_service or not breaker.allows_request(now_s):
            return _UNAVAILABLE
        if self.is_ejected(now_s) and not ignore_ejection:
            return _UNAVAILABLE
        if breaker.state(now_s) is BreakerState.HALF_OPEN:
            return ReplicaAvailability(True, config.slow_start_least, is_trial=True)
        recovered_s = max(breaker.closed_since_s, min(self._ejected_until_s, now_s))
        return ReplicaAvailability(True, slow_start_weight(now_s - recovered_s, slow_start_s, config.slow_start_least))

    @property
    def is_out_of_service(self) -> bool:
        """Whether the replica is out of service for a reason other than failed requests."""
        return self._is_out_of_service()

    def is_ejected(self, now_s: float) -> bool:
        """Returns whether the replica is ejected as an outlier."""
        return now_s < self._ejected_until_s

    # --- attempts ---

    def start_attempt(self, now_s: float, *, ignore_ejection: bool = False) -> BreakerAttempt | None:
        """Starts an attempt, which must be passed to `on_end`; returns None if the request may not be sent.

        It ignores `is_out_of_service`: a request that was already dispatched is sent, and fails if the replica is down.
        """
        if self.is_ejected(now_s) and not ignore_ejection:
            return None
        return self.breaker.start_attempt(now_s)

    def on_first_token(self, attempt: BreakerAttempt, now_s: float) -> None:
        """Records the first token of an attempt, and its latency."""
        if not attempt.has_ended:
            self._outcomes.record_latency(now_s, now_s - attempt.started_s)
            self.breaker.on_first_token(attempt, now_s)

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome, now_s: float) -> None:
        """Records the outcome of an attempt. A second call changes nothing."""
        self.breaker.on_end(attempt, outcome, now_s)

    # --- outlier detection; see `PoolHealth` ---

    def recent_stats(self, now_s: float) -> WindowStats:
        """Returns the statistics of the outcome window."""
        return self._outcomes.stats(now_s)

    def eject(self, now_s: float) -> None:
        """Ejects the replica; each further ejection lasts longer, up to a limit."""
        outliers = self._config.outliers
        self.ejections += 1
        self.was_ejected = True
        self._ejected_until_s = now_s + min(outliers.base_s * self.ejections, outliers.most_s)
        self._outcomes.clear()  # after the ejection, only new outcomes count

    def forgive_ejection(self) -> None:
        """Decrements the ejection count after a comparison in which the replica was no outlier."""
        self.ejections = max(0, self.ejections - 1)


def slow_start_weight(elapsed_s: float, ramp_s: float, min_weight: float) -> float:
    """Returns the weight of a replica during slow start, in [min_weight, 1].

    The weight rises linearly. With its full weight at once, the replica would immediately get the load under which it
    failed, because load-based policies prefer an idle replica.

    Args:
        elapsed_s: Time since the replica recovered.
        ramp_s: Duration of the slow start; 0: there is none.
        min_weight: Weight at the start.
    """
    if elapsed_s >= ramp_s or not ramp_s:
        return 1.0
    return min_weight + (1.0 - min_weight) * max(0.0, elapsed_s) / ramp_s
