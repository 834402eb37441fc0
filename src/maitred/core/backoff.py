"""When to try again: exponential back-off with full jitter, within what is asked for and what is left.

The wait before a further attempt is drawn evenly between nothing and a ceiling that doubles with every failure. Of the
ways to spread those who were turned away together, this *full jitter* gives the least work in all (M. Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015). Three things bound it here:

- Where the other side names a time to come back (`Retry-After`), nobody comes earlier, and the jitter is added to it:
  all who were told the same time would else come at that time.
- An attempt that could not be over by the deadline is not made. Where only the jitter would not fit, it is cut.
- A budget is asked last, so that nothing is taken from it for an attempt that is not made.

Pure: time and chance are arguments.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class BackoffCeiling:
    """The longest wait after each of several failures in a row.

    Attributes:
        first_s: After the first.
        most_s: It stops growing here.
    """

    first_s: float = 0.2
    most_s: float = 30.0

    def after(self, failures: int) -> float:
        """Seconds, after so many failures (at least 1)."""
        doublings = min(failures - 1, 1_000)  # 2.0 ** 1024 is more than a float holds
        return min(self.first_s * 2.0**doublings, self.most_s)


class GiveUpReason(StrEnum):
    """Why there is no further attempt."""

    ATTEMPTS = "attempts"
    """As many were made as one request may have."""
    TOLD = "told"
    """The other side asks for a longer pause than anybody waits for."""
    DEADLINE = "deadline"
    """A further one could not be over in time."""
    BUDGET = "budget"
    """The caller's requests have been tried again too often lately."""


class RetryState:
    """The attempts of one request, as many as it may have.

    Args:
        most: Attempts in all, with the first.
        ceiling: Of the waits.
        draw: Evenly from [0, 1).
        granted: Takes one attempt from a budget; False: nothing is left there. `RetryBudget.on_refusal` is one.
        deadline_s: When the last must be over, on the clock of `wait`.
        patience_s: A longer pause that the other side asks for is not waited for.

    Attributes:
        failures: So far.
    """

    def __init__(
        self,
        most: int,
        ceiling: BackoffCeiling,
        *,
        draw: Callable[[], float],
        granted: Callable[[], bool] = lambda: True,
        deadline_s: float = math.inf,
        patience_s: float = 30.0,
    ) -> None:
        self.failures = 0
        self._most = most
        self._ceiling = ceiling
        self._draw = draw
        self._granted = granted
        self._deadline_s = deadline_s
        self._patience_s = patience_s

    def wait(self, now_s: float, *, told_s: float | None = None, takes_s: float = 0.0) -> float | GiveUpReason:
        """An attempt has failed: how long to wait before the next, or why there is none.

        Args:
            now_s: Now.
            told_s: Least pause that was asked for by whoever is tried next. What another replica asks for does not
                count.
            takes_s: Least that an attempt takes.
        """
        self.failures += 1
        if self.failures >= self._most:
            return GiveUpReason.ATTEMPTS
        least_s = max(0.0, told_s or 0.0)
        if least_s > self._patience_s:
            return GiveUpReason.TOLD
        left_s = self._deadline_s - now_s - takes_s - least_s
        if left_s < 0:
            return GiveUpReason.DEADLINE
        if not self._granted():
            return GiveUpReason.BUDGET
        return least_s + self._draw() * min(self._ceiling.after(self.failures), left_s)
