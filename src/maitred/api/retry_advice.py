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

    def on_request(self, exchange: HttpExchange) -> None:
        """Notes a call whose caller is known, and on it how often it came before."""
        exchange.retries = self._budget.on_request(
            exchange.principal.tenants[0],
            exchange.context.started_s,
            retries=exchange.parsed_head.retries,
            key=exchange.parsed_head.repeat_key,
        )

    def headers(self, exchange: HttpExchange, failure: MaitredError) -> list[Header]:
        """What to say of coming back after this failure; nothing where clients do right by themselves."""
        if exchange.context.principal is None or not isinstance(failure, _SATURATION):
            return []
        key = exchange.parsed_head.repeat_key
        if self._budget.refused(exchange.principal.tenants[0], self._clock.monotonic_s(), key=key):
            return []
        return [(b"x-should-retry", b"false")]
