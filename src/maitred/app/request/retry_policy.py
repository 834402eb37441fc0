"""Retry policy for upstream servers: retries per request, and a retry budget per tenant."""

import math
import random
from collections.abc import Callable

from maitred.admission.policy.retries import RetryBudget
from maitred.core.backoff import BackoffCeiling, RetryState
from maitred.core.clock import Clock

_BACKOFF = BackoffCeiling(first_s=0.25, most_s=8.0)
_MAX_RETRY_AFTER_S = 5.0
"""Longest `Retry-After` that is waited for; a longer one is passed on to the client."""


class RetryPolicy:
    """Makes the retry state of each request.

    Args:
        retries: Most retries of one request.
        budget: Retry budget per tenant, shared with the client's own retries.
        clock: The clock.
        draw: Returns a random number from [0, 1).
    """

    def __init__(
        self, retries: int, budget: RetryBudget, clock: Clock, draw: Callable[[], float] = random.random
    ) -> None:
        self._retries = retries
        self._budget = budget
        self._clock = clock
        self._draw = draw

    def new_state(self, tenant: str, deadline_s: float | None, most_retries: int | None = None) -> RetryState:
        """Returns the retry state of one request.

        Args:
            tenant: The tenant of the request.
            deadline_s: Deadline of the answer on the monotonic clock; None: no deadline.
            most_retries: Most retries that the caller asks for; None: as configured.
        """
        return RetryState(
            (self._retries if most_retries is None else most_retries) + 1,
            _BACKOFF,
            draw=self._draw,
            take_retry=self._take_retry,
            tenant=tenant,
            deadline_s=math.inf if deadline_s is None else deadline_s,
            patience_s=_MAX_RETRY_AFTER_S,
        )

    def _take_retry(self, tenant: str) -> bool:
        return self._budget.on_refusal(tenant, self._clock.monotonic_s())
