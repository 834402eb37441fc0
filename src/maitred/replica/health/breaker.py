"""The circuit breaker of one replica: while requests fail there, none is sent, but for one at a time that finds out.

::

    closed --failures--> open --time--> half-open --the probe succeeds--> closed
                          ^                |
                          `--it fails------'

Closed, everything is sent. It is opened by so many failures in a row, or by a rate of them among enough requests. Open,
nothing is. When its time is over, one request is let through as a probe; while it runs, there is no other. The time is
drawn with full jitter (see `core.backoff`) below a ceiling that doubles with every opening, so that several gateways do
not all come back at one moment. A replica has to stay closed for a whole window to be forgiven its openings: one that
answers its probe and fails again is away for longer each time.

An attempt belongs to the era in which it was begun. What was sent before the breaker opened, and fails or succeeds
after, is news of an earlier time and moves nothing.
"""

from collections.abc import Callable
from enum import StrEnum

from maitred.core.backoff import BackoffCeiling
from maitred.replica.health.config import BreakerConfig
from maitred.replica.health.window import OutcomeWindow


class BreakerState(StrEnum):
    """See the module."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class AttemptOutcome(StrEnum):
    """How an attempt ended, as far as it says something of the replica."""

    SUCCESS = "success"
    FAILURE = "failure"
    """The replica's: no connection, a time-out, a 5xx, a broken stream."""
    NEITHER = "neither"
    """The caller left, or asked for what no replica would do."""


class BreakerAttempt:
    """One request on its way to a replica. Made by `Breaker.start_attempt`; ends exactly once.

    Attributes:
        probe: Whether it is the one that a half-open breaker lets through.
        begun_s: When.
        over: Whether it has ended.
    """

    __slots__ = ("_era", "begun_s", "over", "probe")

    def __init__(self, era: int, *, probe: bool, begun_s: float) -> None:
        self.probe = probe
        self.begun_s = begun_s
        self.over = False
        self._era = era


class Breaker:
    """Opens and closes.

    Args:
        config: The settings.
        window: What happened lately; the breaker alone writes its outcomes.
        draw: Evenly from [0, 1).

    Attributes:
        closed: Whether it lets everything through.
        openings: In a row, without a whole window of peace between them.
        closed_since_s: When it was closed; before the first opening, minus infinity.
        cause: Why it was opened last.
    """

    def __init__(self, config: BreakerConfig, window: OutcomeWindow, draw: Callable[[], float]) -> None:
        self.openings = 0
        self.closed_since_s = float("-inf")
        self.cause = ""
        self._window = window
        self._draw = draw
        self.reconfigure(config)
        self._era = 0
        self._fails = 0
        self.closed = True
        self._until_s = 0.0
        self._probe: BreakerAttempt | None = None

    def reconfigure(self, config: BreakerConfig) -> None:
        """Goes by these settings from now on. An open one stays open for as long as it was to."""
        self._config = config
        self._ceiling = BackoffCeiling(config.first_open_s, config.most_open_s)
        self._window.reconfigure(config.window_s)

    def state(self, now_s: float) -> BreakerState:
        """What it is now."""
        if self.closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < self._until_s else BreakerState.HALF_OPEN

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return self._probe is not None

    def remaining_s(self, now_s: float) -> float:
        """For how long it lets nothing through, whatever happens."""
        return 0.0 if self.closed else max(0.0, self._until_s - now_s)

    def allows(self, now_s: float) -> bool:
        """Whether `begin` would make an attempt."""
        state = self.state(now_s)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._probe is None)

    def start_attempt(self, now_s: float) -> BreakerAttempt | None:
        """An attempt, which must be given to `ended`; None: nothing is let through now."""
        if self.closed:
            return BreakerAttempt(self._era, probe=False, begun_s=now_s)
        if not self.allows(now_s):
            return None
        self._probe = BreakerAttempt(self._era, probe=True, begun_s=now_s)
        return self._probe

    def answered(self, attempt: BreakerAttempt, now_s: float) -> None:
        """Its first token came. For a probe that is enough: an answer may take minutes, and others wait.

        If it fails after that, it counts as any other.
        """
        if not attempt.over and attempt is self._probe:
            self._close(now_s)
            attempt._era = self._era

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome, now_s: float) -> bool:
        """It is over.

        Returns:
            Whether the breaker has opened by it. A second call changes nothing.
        """
        if attempt.over:
            return False
        attempt.over = True
        if outcome is not AttemptOutcome.NEITHER:
            self._window.on_end(now_s, failed=outcome is AttemptOutcome.FAILURE)
        if attempt is self._probe:
            self._probe = None
            if outcome is AttemptOutcome.SUCCESS:
                self._close(now_s)
            elif outcome is AttemptOutcome.FAILURE:
                self._open(now_s, "its probe failed")
                return True
        elif attempt._era == self._era and self.closed:
            return self._count(outcome, now_s)
        return False

    def _count(self, outcome: AttemptOutcome, now_s: float) -> bool:
        """An outcome while it is closed."""
        if outcome is AttemptOutcome.SUCCESS:
            self._fails = 0
        if outcome is not AttemptOutcome.FAILURE:
            return False
        self._fails += 1
        if self._fails >= self._config.max_fails:
            self._open(now_s, f"{self._fails} requests failed in a row")
            return True
        recent = self._window.recent(now_s)
        if recent.ended >= self._config.least_requests and recent.error_rate >= self._config.error_rate:
            self._open(now_s, f"{recent.failed} of {recent.ended} requests failed")
            return True
        return False

    def _open(self, now_s: float, cause: str) -> None:
        if self.closed and now_s - self.closed_since_s >= self._config.window_s:
            self.openings = 0
        self.openings += 1
        self.cause = cause
        self.closed = False
        self._era += 1
        self._until_s = now_s + self._draw() * self._ceiling.after(self.openings)

    def _close(self, now_s: float) -> None:
        self._probe = None
        self.closed = True
        self._era += 1
        self._fails = 0
        self.closed_since_s = now_s
        self._window.clear()  # what failed before it was opened must not open it again
