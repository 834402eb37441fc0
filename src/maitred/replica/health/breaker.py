"""Circuit breaker of one replica: stops requests while they fail, and tries again with one at a time.

::

    closed --failures--> open --time--> half-open --the trial succeeds--> closed
                          ^                |
                          `--it fails------'

A closed breaker allows every request. It opens after `max_fails` consecutive failures, or when the error rate of at
least `least_requests` requests reaches `error_rate`. An open breaker allows no request. After its open time it is
half-open and allows one request, the trial, at a time. The open time is random (full jitter, see `core.backoff`) below
a ceiling that doubles with every opening, so that several gateways do not retry at the same moment. The ceiling is
reset only after the breaker was closed for `window_s`: if a replica passes its trial and then fails again, its next
open time may be longer.

Every opening and closing starts a new epoch, and an attempt belongs to the epoch in which it started. An attempt of an
earlier epoch does not change the state, because it tells nothing about the replica's present condition.
"""

from collections.abc import Callable
from enum import StrEnum

from maitred.core.backoff import BackoffCeiling
from maitred.replica.health.config import BreakerConfig
from maitred.replica.health.window import OutcomeWindow


class BreakerState(StrEnum):
    """State of a circuit breaker; see the module docstring."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class AttemptOutcome(StrEnum):
    """Outcome of a request, as evidence of the replica's health."""

    SUCCESS = "success"
    FAILURE = "failure"
    """The replica failed: no connection, a time-out, a 5xx status, or an incomplete stream."""
    BUSY = "busy"
    """The replica had no room for the request; it counts for neither health nor failure."""
    ACCOUNT_REFUSED = "account"
    """The replica refused the account or the credential of this gateway: a failure that time does not mend."""
    NEUTRAL = "neither"
    """The outcome is no evidence: the caller cancelled the request, or the request was invalid."""


class BreakerAttempt:
    """One request to a replica, from its start to its outcome.

    `CircuitBreaker.start_attempt` creates it, and `CircuitBreaker.on_end` ends it.

    Attributes:
        is_trial: Whether it is the trial of a half-open breaker.
        started_s: Start time of the attempt.
        has_ended: Whether it has ended.
    """

    __slots__ = ("_epoch", "has_ended", "is_trial", "started_s")

    def __init__(self, epoch: int, *, is_trial: bool, started_s: float) -> None:
        self.is_trial = is_trial
        self.started_s = started_s
        self.has_ended = False
        self._epoch = epoch


class CircuitBreaker:
    """Circuit breaker of one replica: failures open it, and a successful trial closes it.

    Args:
        config: The settings.
        window: Window of recent outcomes, in which the breaker records the outcomes of attempts.
        draw: Returns a uniformly distributed random number from [0, 1).

    Attributes:
        is_closed: Whether its state is CLOSED.
        consecutive_openings: Number of openings since the breaker was last closed for `window_s`.
        closed_since_s: Time of the last closing; minus infinity if there was none.
    """

    def __init__(self, config: BreakerConfig, window: OutcomeWindow, draw: Callable[[], float]) -> None:
        self.consecutive_openings = 0
        self.closed_since_s = float("-inf")
        self._window = window
        self._draw = draw
        self.reconfigure(config)
        self._epoch = 0
        self._consecutive_failures = 0
        self.is_closed = True
        self._open_until_s = 0.0
        self._trial: BreakerAttempt | None = None

    def reconfigure(self, config: BreakerConfig) -> None:
        """Applies new settings. The open time of an open breaker does not change."""
        self._config = config
        self._backoff = BackoffCeiling(config.first_open_s, config.most_open_s)
        self._window.reconfigure(config.window_s)

    def state(self, now_s: float) -> BreakerState:
        """Returns the state at this time."""
        if self.is_closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._open_until_s else BreakerState.HALF_OPEN

    @property
    def has_trial(self) -> bool:
        """Whether a trial is under way."""
        return self._trial is not None

    def remaining_s(self, now_s: float) -> float:
        """Returns the remaining open time in seconds; 0 if the breaker is not open."""
        return 0.0 if self.is_closed else max(0.0, self._open_until_s - now_s)

    def allows_request(self, now_s: float) -> bool:
        """Returns whether a request is allowed now, so that `start_attempt` returns an attempt."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._trial is None)

    def start_attempt(self, now_s: float) -> BreakerAttempt | None:
        """Starts an attempt, which must be passed to `on_end`; returns None if no request is allowed now."""
        if self.is_closed:
            return BreakerAttempt(self._epoch, is_trial=False, started_s=now_s)
        if not self.allows_request(now_s):
            return None
        self._trial = BreakerAttempt(self._epoch, is_trial=True, started_s=now_s)
        return self._trial

    def on_first_token(self, attempt: BreakerAttempt, now_s: float) -> None:
        """Records the first token of an attempt.

        The first token of a trial closes the breaker: the whole response may take minutes while other requests wait.
        If the trial fails after its first token, that counts like any other failure.
        """
        if not attempt.has_ended and attempt is self._trial:
            self._close(now_s)
            attempt._epoch = self._epoch

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome, now_s: float) -> bool:
        """Records the outcome of an attempt. A second call changes nothing.

        Returns:
            True if this outcome has opened the breaker.
        """
        if attempt.has_ended:
            return False
        attempt.has_ended = True
        if outcome is AttemptOutcome.BUSY:
            outcome = AttemptOutcome.NEUTRAL
        elif outcome is AttemptOutcome.ACCOUNT_REFUSED:
            outcome = AttemptOutcome.FAILURE
        if outcome is not AttemptOutcome.NEUTRAL:
            self._window.record_outcome(now_s, failed=outcome is AttemptOutcome.FAILURE)
        if attempt is self._trial:
            self._trial = None
            if outcome is AttemptOutcome.SUCCESS:
                self._close(now_s)
            elif outcome is AttemptOutcome.FAILURE:
                self._open(now_s)
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
            self._open(now_s)
            return True
        stats = self._window.stats(now_s)
        if stats.ended >= self._config.least_requests and stats.error_rate >= self._config.error_rate:
            self._open(now_s)
            return True
        return False

    def _open(self, now_s: float) -> None:
        if self.is_closed and now_s - self.closed_since_s >= self._config.window_s:
            self.consecutive_openings = 0
        self.consecutive_openings += 1
        self.is_closed = False
        self._epoch += 1
        self._open_until_s = now_s + self._draw() * self._backoff.after(self.consecutive_openings)

    def _close(self, now_s: float) -> None:
        self._trial = None
        self.is_closed = True
        self._epoch += 1
        self._consecutive_failures = 0
        self.closed_since_s = now_s
        self._window.clear()  # failures from before the opening must not open it again
