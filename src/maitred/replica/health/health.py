"""Whether one replica is sent to: its breaker, how it compares, since when it is back.

    why not        absent, as others know -> breaker -> ejection
    how much       what slow start allows after the later of the two

Whoever sends asks for a `verdict`, begins an attempt, says when its first token came, and ends it with its outcome.
"""

from collections.abc import Callable

from msgspec import Struct

from maitred.replica.health.breaker import AttemptOutcome, Breaker, BreakerAttempt, BreakerState
from maitred.replica.health.config import HealthConfig
from maitred.replica.health.window import OutcomeWindow, WindowSums

_NEVER_S = float("-inf")


class HealthVerdict(Struct, frozen=True):
    """Whether a replica may be sent to now."""

    may: bool
    weight: float
    """In [0, 1]; 0 exactly where it may not."""
    probe: bool = False
    """Whether the next request is the one that finds out if it works again."""
    why: str = ""
    """Why not, as the end of a sentence that begins with the replica's name."""


_FIT = HealthVerdict(True, 1.0)


class ReplicaHealth:
    """One replica's.

    Args:
        name: The replica.
        config: The settings.
        draw: Evenly from [0, 1).
        absent: Whether it is away for a reason that is none of its requests', so that its peers must do without it.

    Attributes:
        name: The replica.
        breaker: See `Breaker`.
        ejections: How often it was left out, less what time has forgiven.
    """

    def __init__(
        self, name: str, config: HealthConfig, draw: Callable[[], float], absent: Callable[[], bool] = lambda: False
    ) -> None:
        self.name = name
        self.ejections = 0
        self._absent = absent
        self._config = config
        self._window = OutcomeWindow(config.breaker.window_s)
        self.breaker = Breaker(config.breaker, self._window, draw)
        self._ejected_until_s = _NEVER_S
        self._ejected_for = ""

    def reconfigure(self, config: HealthConfig) -> None:
        """Goes by these settings from now on, and by what has happened."""
        self._config = config
        self.breaker.reconfigure(config.breaker)

    # --- may it be sent to? ---

    def verdict(self, now_s: float, *, ejected_too: bool = False) -> HealthVerdict:
        """Whether, and with which weight.

        Args:
            now_s: Now.
            ejected_too: It is not left out for being worse than its peers: there is no other.
        """
        config, breaker = self._config, self.breaker
        rises_s = config.slow_start_s
        if breaker.closed and now_s - max(breaker.closed_since_s, self._ejected_until_s) >= rises_s and not self.absent:
            return _FIT  # as nearly always
        why = "is away." if self.absent else self._why_not(now_s, ejected_too)
        if why:
            return HealthVerdict(False, 0.0, why=why)
        if breaker.state(now_s) is BreakerState.HALF_OPEN:
            return HealthVerdict(True, config.slow_start_least, probe=True)
        back_s = max(breaker.closed_since_s, min(self._ejected_until_s, now_s))
        return HealthVerdict(True, slow_start(now_s - back_s, rises_s, config.slow_start_least))

    @property
    def absent(self) -> bool:
        """Whether it is away for a reason that is none of its requests'."""
        return self._absent()

    def _why_not(self, now_s: float, ejected_too: bool) -> str:
        if not self.breaker.allows(now_s):
            if left_s := self.breaker.remaining_s(now_s):
                return f"is left alone for {left_s:.1f} s more, because {self.breaker.cause}."
            return f"is being tried with one request, because {self.breaker.cause}."
        if self.ejected(now_s) and not ejected_too:
            return f"is left out for {self._ejected_until_s - now_s:.1f} s more, because {self._ejected_for}."
        return ""

    def ejected(self, now_s: float) -> bool:
        """Whether it is left out for being worse than its peers."""
        return now_s < self._ejected_until_s

    # --- what is sent ---

    def start_attempt(self, now_s: float, *, ejected_too: bool = False) -> BreakerAttempt | None:
        """A request on its way there, which must be given to `ended`; None: it may not be sent.

        Being absent is no reason: what has been released to it before is sent, and finds out.
        """
        if self.ejected(now_s) and not ejected_too:
            return None
        return self.breaker.start_attempt(now_s)

    def answered(self, attempt: BreakerAttempt, now_s: float, *, expected_s: float = 1.0) -> None:
        """Its first token came.

        Args:
            attempt: The request.
            now_s: Now.
            expected_s: What was predicted for it. Peers are compared by the ratio, because whoever gets the long
                prompts is not the slow one.
        """
        if not attempt.over:
            self._window.record_latency(now_s, (now_s - attempt.begun_s) / expected_s)
            self.breaker.answered(attempt, now_s)

    def on_end(self, attempt: BreakerAttempt, outcome: AttemptOutcome, now_s: float) -> None:
        """It is over. A second call changes nothing."""
        self.breaker.on_end(attempt, outcome, now_s)

    # --- how it compares; see `Peers` ---

    def recent(self, now_s: float) -> WindowSums:
        """What happened there lately."""
        return self._window.recent(now_s)

    def eject(self, now_s: float, cause: str) -> None:
        """It is left out, for longer each time."""
        outliers = self._config.outliers
        self.ejections += 1
        self._ejected_until_s = now_s + min(outliers.base_s * self.ejections, outliers.most_s)
        self._ejected_for = cause
        self._window.clear()  # it comes back to be judged by what it does then

    def forgive(self) -> None:
        """It was found no worse than the others once more."""
        self.ejections = max(0, self.ejections - 1)


def slow_start(since_s: float, rises_s: float, least: float) -> float:
    """The part of its weight that a replica has, in [least, 1].

    It rises in a straight line. A step to the whole would send it, at once, what it had failed under; and as the one
    with nothing to do it would look best to every policy that goes by load.

    Args:
        since_s: Since it came back.
        rises_s: Until it has the whole; 0: at once.
        least: What it begins with.
    """
    if since_s >= rises_s or not rises_s:
        return 1.0
    return least + (1.0 - least) * max(0.0, since_s) / rises_s
