"""How often a request may be sent to servers of others, all requests of a tenant taken together."""

import math
import random
from collections.abc import Callable
from functools import partial

from maitred.admission.policy.retries import RetryBudget
from maitred.core.backoff import BackoffCeiling, RetryState
from maitred.core.clock import Clock

_CEILING = BackoffCeiling(first_s=0.25, most_s=8.0)
_PATIENCE_S = 5.0
"""A server that asks for a longer pause is not waited for: the caller can be told, and knows better what to do."""


class RetryPolicy:
    """Makes the attempts of requests.

    Args:
        retries: Of one request, at most.
        budget: Of each tenant; the same that its own retries are taken from.
        clock: Monotonic.
        draw: Evenly from [0, 1).
    """

    def __init__(
        self, retries: int, budget: RetryBudget, clock: Clock, draw: Callable[[], float] = random.random
    ) -> None:
        self._retries = retries
        self._budget = budget
        self._clock = clock
        self._draw = draw

    def attempts(self, tenant: str, deadline_s: float | None) -> RetryState:
        """Returns the retry state of one request.

        Args:
            tenant: Whose it is.
            deadline_s: When its answer must be there, monotonic; None: whenever.
        """
        return RetryState(
            self._retries + 1,
            _CEILING,
            draw=self._draw,
            granted=partial(self._is_granted, tenant),
            deadline_s=math.inf if deadline_s is None else deadline_s,
            patience_s=_PATIENCE_S,
        )

    def _is_granted(self, tenant: str) -> bool:
        return self._budget.on_refusal(tenant, self._clock.monotonic_s())
