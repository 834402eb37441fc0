"""Whether a caller that was refused for want of room should try again by itself.

Official clients try twice more on every 429 and 503 unless ``x-should-retry`` says otherwise. While the server is
saturated, that multiplies what it has to refuse; so each tenant has a budget of retries.
"""

from maitred.admission.policy.retries import RetryBudget
from maitred.api.errors import Header
from maitred.api.exchange import HttpExchange
from maitred.core.clock import Clock
from maitred.core.errors import DeadlineUnmeetable, MaitredError, QueueFull, ReplicaUnavailable, Saturated

_SATURATION = (Saturated, QueueFull, DeadlineUnmeetable, ReplicaUnavailable)
"""Refusals that say nothing of the request, and that many get at once."""


class RetryAdvisor:
    """Keeps the budget of every tenant, from what calls come and how they end.

    Args:
        budget: The policy.
        clock: Its time.
    """

    def __init__(self, budget: RetryBudget, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock

    def arrived(self, call: HttpExchange) -> None:
        """Notes a call whose caller is known, and on it how often it came before."""
        call.retries = self._budget.arrived(
            call.principal.tenants[0],
            call.tally.started_s,
            retries=call.greeting.retries,
            key=call.greeting.repeat_key,
        )

    def headers(self, call: HttpExchange, failure: MaitredError) -> list[Header]:
        """What to say of coming back after this failure; nothing where clients do right by themselves."""
        if call.tally.principal is None or not isinstance(failure, _SATURATION):
            return []
        key = call.greeting.repeat_key
        if self._budget.refused(call.principal.tenants[0], self._clock.monotonic_s(), key=key):
            return []
        return [(b"x-should-retry", b"false")]
