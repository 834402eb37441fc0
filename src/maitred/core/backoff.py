"""Wait before a retry: exponential back-off with full jitter, within a deadline and a retry budget.

The wait before the next attempt is uniformly random between 0 and a ceiling, and the ceiling doubles with every
failure. Many requests can fail at the same moment, and jitter spreads their retries: *full jitter* causes the least
total work (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015). Three rules bound the wait:

- If the server sends `Retry-After`, the wait is that time plus the jitter: without the jitter, all clients with the
  same `Retry-After` would retry at the same moment.
- The caller retries only if an attempt can finish before the deadline. If only the jitter exceeds the deadline, the
  jitter is shortened.
- The retry budget is checked last, so it is charged only for attempts that happen.

This module is pure: the time and the random number are arguments.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class BackoffCeiling:
    """The longest wait after each of several failures in a row.

    Attributes:
        first_s: Longest wait after the first failure, in seconds.
        most_s: Upper bound of the ceiling, in seconds.
    """

    first_s: float = 0.2
    most_s: float = 30.0

    def after(self, failures: int) -> float:
        """Returns the longest wait in seconds after a number of failures (at least 1)."""
        doublings = min(failures - 1, 1_000)  # 2.0 ** 1024 is more than a float holds
        return min(self.first_s * 2.0**doublings, self.most_s)


class GiveUpReason(StrEnum):
    """Why there is no further attempt."""

    ATTEMPTS = "attempts"
    """The request has used all of its attempts."""
    TOLD = "told"
    """The server asks for a longer pause than `patience_s`."""
    DEADLINE = "deadline"
    """The next attempt would end after the deadline."""
    BUDGET = "budget"
    """The retry budget has no retry left for this caller."""


class RetryState:
    """Counts the attempts of one request and computes the wait before the next.

    Args:
        most: Maximum number of attempts, the first one included.
        ceiling: Upper bound of each wait.
        draw: Returns a uniform random number from [0, 1).
        take_retry: Takes one retry from the budget of a tenant and returns True; returns False if it is empty.
        tenant: Tenant whose budget pays for the retries.
        deadline_s: Time at which the last attempt must have ended, on the clock of `wait`.
        patience_s: Longest pause in seconds that the server may ask for; after a longer one the caller gives up.

    Attributes:
        failures: Number of failed attempts so far.
    """

    def __init__(
        self,
        most: int,
        ceiling: BackoffCeiling,
        *,
        draw: Callable[[], float],
        take_retry: Callable[[str], bool] = lambda tenant: True,
        tenant: str = "",
        deadline_s: float = math.inf,
        patience_s: float = 30.0,
    ) -> None:
        self.failures = 0
        self._most = most
        self._ceiling = ceiling
        self._draw = draw
        self._take_retry = take_retry
        self._tenant = tenant
        self._deadline_s = deadline_s
        self._patience_s = patience_s

    def wait(
        self, now_s: float, *, retry_after_s: float | None = None, takes_s: float = 0.0, is_free: bool = False
    ) -> float | GiveUpReason:
        """Counts a failed attempt and returns the wait in seconds, or the reason to give up.

        Args:
            now_s: Current time in seconds.
            retry_after_s: Shortest pause in seconds that the next replica asks for. A pause that another replica asks
                for does not count.
            takes_s: Shortest duration of one attempt, in seconds.
            is_free: Whether the retry is not taken from the budget, because it goes where it adds to no load.
        """
        self.failures += 1
        if self.failures >= self._most:
            return GiveUpReason.ATTEMPTS
        least_s = max(0.0, retry_after_s or 0.0)
        if least_s > self._patience_s:
            return GiveUpReason.TOLD
        left_s = self._deadline_s - now_s - takes_s - least_s
        if left_s < 0:
            return GiveUpReason.DEADLINE
        if not is_free and not self._take_retry(self._tenant):
            return GiveUpReason.BUDGET
        return least_s + self._draw() * min(self._ceiling.after(self.failures), left_s)
