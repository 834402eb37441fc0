"""Health of one replica: its circuit breaker, its ejection as an outlier, and its slow start.

    may it be sent to?  absent, as others know -> breaker -> ejection
    with which weight?  what slow start allows after the later of the two

The sender of a request asks for `availability`, starts an attempt, reports its first token, and ends it with its
outcome.
"""

from collections.abc import Callable

from msgspec import Struct

from maitred.replica.health.breaker import AttemptOutcome, BreakerAttempt, BreakerState, CircuitBreaker
from maitred.replica.health.config import HealthConfig
from maitred.replica.health.window import OutcomeWindow, WindowSums

_NEVER_S = float("-inf")


class ReplicaAvailability(Struct, frozen=True):
    """Availability of a replica at one time: whether it may be sent a request, and with which weight."""

    is_available: bool
    weight: float
    """Weight in [0, 1]; 0 exactly where the replica is not available."""
    is_probe: bool = False
    """Whether the next request is the probe that finds out if the replica works again."""
    reason: str = ""
    """Reason why it is not available, as the end of a sentence that begins with the replica's name."""


_FULLY_AVAILABLE = ReplicaAvailability(True, 1.0)


class ReplicaHealth:
    """Health of one replica.

    Args:
        name: Name of the replica.
        config: The settings.
        draw: Draws a number evenly from [0, 1).
        is_absent: Returns whether the replica is away for a reason that is none of its requests', so that its peers
            must do without it.

    Attributes:
        name: Name of the replica.
        breaker: Its circuit breaker.
        ejections: Ejections so far, less those that were forgiven since.
    """

    def __init__(
        self, name: str, config: HealthConfig, draw: Callable[[], float], is_absent: Callable[[], bool] = lambda: False
    ) -> None:
        self.name = name
        self.ejections = 0
        self._is_absent = is_absent
        self._config = config
        self._window = OutcomeWindow(config.breaker.window_s)
        self.breaker = CircuitBreaker(config.breaker, self._window, draw)
        self._ejected_until_s = _NEVER_S
        self._ejection_cause = ""

    def reconfigure(self, config: HealthConfig) -> None:
        """Applies new settings and keeps what has happened."""
        self._config = config
        self.breaker.reconfigure(config.breaker)

    # --- availability ---

    def availability(self, now_s: float, *, ignore_ejection: bool = False) -> ReplicaAvailability:
        """Returns whether the replica may be sent a request, and with which weight.

        Args:
            now_s: Now.
            ignore_ejection: Whether an ejection does not count, because no other replica is available.
        """
        config, breaker = self._config, self.breaker
        ramp_s = config.slow_start_s
        if (
            breaker.is_closed
            and now_s - max(breaker.closed_since_s, self._ejected_until_s) >= ramp_s
            and not self.is_absent
        ):
            return _FULLY_AVAILABLE  # the common case
        reason = "is away." if self.is_absent else self._unavailable_reason(now_s, ignore_ejection)
        if reason:
            return ReplicaAvailability(False, 0.0, reason=reason)
        if breaker.state(now_s) is BreakerState.HALF_OPEN:
            return ReplicaAvailability(True, config.slow_start_least, is_probe=True)
        returned_s = max(breaker.closed_since_s, min(self._ejected_until_s, now_s))
        return ReplicaAvailability(True, slow_start_weight(now_s - returned_s, ramp_s, config.slow_start_least))

    @property
    def is_absent(self) -> bool:
        """Whether the replica is away for a reason that is none of its requests'."""
        return self._is_absent()

    def _unavailable_reason(self, now_s: float, ignore_ejection: bool) -> str:
        if not self.breaker.allows_request(now_s):
            if remaining_s := self.breaker.remaining_s(now_s):
                return f"is left alone for {remaining_s:.1f} s more, because {self.breaker.cause}."
            return f"is being tried with one request, because {self.breaker.cause}."
        if self.is_ejected(now_s) and not ignore_ejection:
            return f"is left out for {self._ejected_until_s - now_s:.1f} s more, because {self._ejection_cause}."
        return ""

    def is_ejected(self, now_s: float) -> bool:
        """Returns whether the replica is ejected for being worse than its peers."""
        return now_s < self._ejected_until_s

    # --- attempts ---

    def start_attempt(self, now_s: float, *, ignore_ejection: bool = False) -> BreakerAttempt | None:
        """Returns an attempt for a request to this replica, which must be given to `on_end`; None: it may not be sent.

        Absence is no reason for None: a request that was dispatched to the replica before is sent, and finds out.
        """
        if self.is_ejected(now_s) and not ignore_ejection:
            return None
        return self.breaker.start_attempt(now_s)

    def on_first_token(self, attempt: BreakerAttempt, now_s: float, *, expected_s: float = 1.0) -> None:
        """Notes the first token of an attempt and records its latency.

        Args:
            attempt: The attempt.
            now_s: Now.
            expected_s: Predicted time to the first token. Peers are compared by the ratio, because a replica that gets
                the long prompts is not the slow one.
        """
        if not attempt.has_ended:
            self._window.record_latency(now_s, (now_s - attempt.started_s) / expected_s)
            self.breaker.on_first_token(attempt, now_s)

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome, now_s: float) -> None:
        """Ends an attempt with its outcome. A second call changes nothing."""
        self.breaker.on_end(attempt, outcome, now_s)

    # --- outlier detection; see `PoolHealth` ---

    def recent_sums(self, now_s: float) -> WindowSums:
        """Returns the sums of the recent window."""
        return self._window.sums(now_s)

    def eject(self, now_s: float, cause: str) -> None:
        """Ejects the replica, for longer each time."""
        outliers = self._config.outliers
        self.ejections += 1
        self._ejected_until_s = now_s + min(outliers.base_s * self.ejections, outliers.most_s)
        self._ejection_cause = cause
        self._window.clear()  # after its return, only new outcomes count

    def forgive_ejection(self) -> None:
        """Takes back one ejection, after a comparison in which the replica was no outlier."""
        self.ejections = max(0, self.ejections - 1)


def slow_start_weight(elapsed_s: float, ramp_s: float, min_weight: float) -> float:
    """Returns the part of its weight that a returning replica has, in [min_weight, 1].

    The weight rises in a straight line. A step to the whole weight would send the replica, at once, the load under
    which it had failed; and as an idle replica it would look best to every policy that goes by load.

    Args:
        elapsed_s: Time since the replica came back.
        ramp_s: Time until it has its whole weight; 0: at once.
        min_weight: Weight with which it begins.
    """
    if elapsed_s >= ramp_s or not ramp_s:
        return 1.0
    return min_weight + (1.0 - min_weight) * max(0.0, elapsed_s) / ramp_s
