"""Circuit breaker of one replica: while requests fail there, none is sent but for one probe at a time.

::

    closed --failures--> open --time--> half-open --the probe succeeds--> closed
                          ^                |
                          `--it fails------'

A closed breaker lets every request through. Consecutive failures open it, and so does a high error rate among enough
requests. An open breaker lets none through. When its time is over, one request is let through as a probe; while the
probe runs, there is no other. The time is drawn with full jitter (see `core.backoff`) below a ceiling that doubles with
every opening, so that several gateways do not all come back at one moment. The count of openings is reset only after
the breaker has stayed closed for a whole window: a replica that answers its probe and fails again is left alone for
longer each time.

An attempt belongs to the epoch in which it was started. An attempt that was sent before the breaker opened, and ends
after, says nothing of the replica's present state and changes nothing.
"""

from collections.abc import Callable
from enum import StrEnum

from maitred.core.backoff import BackoffCeiling
from maitred.replica.health.config import BreakerConfig
from maitred.replica.health.window import OutcomeWindow


class BreakerState(StrEnum):
    """State of a circuit breaker, as the module describes it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class AttemptOutcome(StrEnum):
    """Outcome of an attempt, as far as it says something of the replica."""

    SUCCESS = "success"
    FAILURE = "failure"
    """A failure of the replica: no connection, a time-out, a 5xx, a broken stream."""
    NEUTRAL = "neither"
    """The caller left, or asked for what no replica would do."""


class BreakerAttempt:
    """One request on its way to a replica. Made by `CircuitBreaker.start_attempt`; ends exactly once.

    Attributes:
        is_probe: Whether a half-open breaker has let it through as its probe.
        started_s: Start of the attempt.
        has_ended: Whether it has ended.
    """

    __slots__ = ("_epoch", "has_ended", "is_probe", "started_s")

    def __init__(self, epoch: int, *, is_probe: bool, started_s: float) -> None:
        self.is_probe = is_probe
        self.started_s = started_s
        self.has_ended = False
        self._epoch = epoch


class CircuitBreaker:
    """Circuit breaker of one replica; it opens by failures and closes by a successful probe.

    Args:
        config: The settings.
        window: Recent outcomes; only the breaker writes outcomes into it.
        draw: Draws a number evenly from [0, 1).

    Attributes:
        is_closed: Whether it lets every request through.
        consecutive_openings: Openings without a whole window of being closed between them.
        closed_since_s: When it was closed; before the first opening, minus infinity.
        cause: Reason for the last opening.
    """

    def __init__(self, config: BreakerConfig, window: OutcomeWindow, draw: Callable[[], float]) -> None:
        self.consecutive_openings = 0
        self.closed_since_s = float("-inf")
        self.cause = ""
        self._window = window
        self._draw = draw
        self.reconfigure(config)
        self._epoch = 0
        self._consecutive_failures = 0
        self.is_closed = True
        self._open_until_s = 0.0
        self._probe: BreakerAttempt | None = None

    def reconfigure(self, config: BreakerConfig) -> None:
        """Applies new settings. An open breaker stays open for as long as it was to."""
        self._config = config
        self._ceiling = BackoffCeiling(config.first_open_s, config.most_open_s)
        self._window.reconfigure(config.window_s)

    def state(self, now_s: float) -> BreakerState:
        """Returns the state at this time."""
        if self.is_closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    @property
    def is_probing(self) -> bool:
        """Whether a probe is under way."""
        return self._probe is not None

    def remaining_s(self, now_s: float) -> float:
        """Returns for how many seconds the breaker certainly lets no request through."""
        return 0.0 if self.is_closed else max(0.0, self._open_until_s - now_s)

    def allows_request(self, now_s: float) -> bool:
        """Returns whether `start_attempt` would return an attempt."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._probe is None)

    def start_attempt(self, now_s: float) -> BreakerAttempt | None:
        """Returns a new attempt, which must be given to `on_end`; None: no request is let through now."""
        if self.is_closed:
            return BreakerAttempt(self._epoch, is_probe=False, started_s=now_s)
        if not self.allows_request(now_s):
            return None
        self._probe = BreakerAttempt(self._epoch, is_probe=True, started_s=now_s)
        return self._probe

    def on_first_token(self, attempt: BreakerAttempt, now_s: float) -> None:
        """Notes the first token of an attempt. It proves a probe: an answer may take minutes, and others wait.

        If the request fails after that, it counts as any other failure.
        """
        if not attempt.has_ended and attempt is self._probe:
            self._close(now_s)
            attempt._epoch = self._epoch

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome, now_s: float) -> bool:
        """Ends an attempt with its outcome. A second call changes nothing.

        Returns:
            Whether this outcome has opened the breaker.
        """
        if attempt.has_ended:
            return False
        attempt.has_ended = True
        if outcome is not AttemptOutcome.NEUTRAL:
            self._window.record_outcome(now_s, failed=outcome is AttemptOutcome.FAILURE)
        if attempt is self._probe:
            self._probe = None
            if outcome is AttemptOutcome.SUCCESS:
                self._close(now_s)
            elif outcome is AttemptOutcome.FAILURE:
                self._open(now_s, "its probe failed")
                return True
        elif attempt._epoch == self._epoch and self.is_closed:
            return self._count_outcome(outcome, now_s)
        return False

    def _count_outcome(self, outcome: AttemptOutcome, now_s: float) -> bool:
        """Counts an outcome while the breaker is closed; returns whether the breaker has opened."""
        if outcome is AttemptOutcome.SUCCESS:
            self._consecutive_failures = 0
        if outcome is not AttemptOutcome.FAILURE:
            return False
        self._consecutive_failures += 1
        if self._consecutive_failures >= self._config.max_fails:
            self._open(now_s, f"{self._consecutive_failures} requests failed in a row")
            return True
        recent = self._window.sums(now_s)
        if recent.ended >= self._config.least_requests and recent.error_rate >= self._config.error_rate:
            self._open(now_s, f"{recent.failed} of {recent.ended} requests failed")
            return True
        return False

    def _open(self, now_s: float, cause: str) -> None:
        if self.is_closed and now_s - self.closed_since_s >= self._config.window_s:
            self.consecutive_openings = 0
        self.consecutive_openings += 1
        self.cause = cause
        self.is_closed = False
        self._epoch += 1
        self._open_until_s = now_s + self._draw() * self._ceiling.after(self.consecutive_openings)

    def _close(self, now_s: float) -> None:
        self._probe = None
        self.is_closed = True
        self._epoch += 1
        self._consecutive_failures = 0
        self.closed_since_s = now_s
        self._window.clear()  # what failed before it was opened must not open it again
