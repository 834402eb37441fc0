"""One replica as dispatch sees it: whether it is ready, and what it has left."""

from collections.abc import Sequence

from maitred.core.backoff import BackoffCeiling
from maitred.core.errors import ModelLoading, ReplicaUnavailable
from maitred.core.replica import AdminStatus, LoadReport
from maitred.dispatch.policy.credits import NOTHING, Cost, CreditHold, Credits
from maitred.dispatch.policy.window import ConcurrencyWindow
from maitred.dispatch.request import AnyEndpoint

_UNKNOWN_BLOCK_TOKENS = 16
_REST = BackoffCeiling(first_s=0.05, most_s=2.0)
"""After failures that follow one another."""
_OFF_DUTY = "The replica is out of service for maintenance. Try again after the time in Retry-After."
_OFF_DUTY_RETRY_S = 10.0
"""What callers are told while an operator keeps a replica out of service: nobody knows for how long."""


class EndpointState:
    """A post with its account.

    Attributes:
        ready: Whether it takes requests, as of the last `refresh`.
        retry_after_s: When it will, as far as it says so.
        outage: Why it does not, by its own word; None while it does.
        load: Its last report.
        step_began_s: When that came, and with it the step began that is under way; or when something came to an idle
            replica.
        in_flight: What was sent before then, is in no report, and so is in that step.
        block_tokens: Of one KV block there.
    """

    def __init__(self, endpoint: AnyEndpoint) -> None:
        self.endpoint = endpoint
        self.ready = False
        self.retry_after_s: float | None = None
        self.outage: ReplicaUnavailable | None = None
        self.load = LoadReport()
        self.step_began_s = 0.0
        self.in_flight = NOTHING
        self.block_tokens = _UNKNOWN_BLOCK_TOKENS
        self.credits = Credits()
        self._window = None if endpoint.exact else ConcurrencyWindow()
        self.learns_window = not endpoint.exact
        """Whether its times to first token say how much it can take, because it does not."""
        self._suspensions = 0
        self._suspended_until_s = 0.0

    def refresh(self, now_s: float) -> None:
        """Looks at the replica. Cheap: it asks nobody, the last report is here."""
        replica = self.endpoint.replica
        try:
            card = replica.card()
        except ReplicaUnavailable as unavailable:
            self.ready, self.retry_after_s, self.outage = False, unavailable.retry_after_s, unavailable
            return
        self.outage = None
        rests_s = self._suspended_until_s - now_s
        self.ready, self.retry_after_s = rests_s <= 0.0, rests_s if rests_s > 0.0 else 0.0
        if self.endpoint.admin_state.state is not AdminStatus.SERVING:
            self.outage = ReplicaUnavailable(_OFF_DUTY, retry_after_s=_OFF_DUTY_RETRY_S)
            self.ready, self.retry_after_s = False, _OFF_DUTY_RETRY_S
        load = replica.load()
        new = load is not self.load
        self.load = load
        if self._window is not None:
            self.credits.estimate(self._window.size)
        elif load.total_blocks:
            self.block_tokens = max(1, card.kv_capacity_tokens // load.total_blocks)
            self.credits.on_report(load, replica.count_unreported(), card.max_sequences)
        else:
            self.credits.estimate(card.max_sequences)
        if new:
            self.step_began_s, self.in_flight = now_s, self.credits.uncounted

    @property
    def weight(self) -> float:
        """How much of the load it should have beside the others."""
        weight: float = self.endpoint.replica.weight
        return weight

    @property
    def comes_in_s(self) -> float | None:
        """When it will be ready, where it is one that comes when requests wait for it; None: it is not."""
        return self.retry_after_s if isinstance(self.outage, ModelLoading) else None

    @property
    def free(self) -> Cost:
        """Credits that can be dispatched to the endpoint now."""
        return self.credits.free if self.ready else NOTHING

    @property
    def overcommit_slots(self) -> int:
        """Slots beyond the free ones, for tenants that hold few (see `LoadReport.guests`)."""
        return self.credits.overcommit_slots if self.ready else 0

    @property
    def total(self) -> Cost:
        """Capacity of the endpoint, free or not."""
        return self.credits.total if self.ready else NOTHING

    def acquire(self, costs: Sequence[Cost], now_s: float) -> CreditHold:
        """A request is released to it; see `Credits.acquire`. `release` gives back what it holds."""
        self.endpoint.admin_state.on_begin()
        idle, hold = self.credits.idle, self.credits.acquire(costs)
        if idle:
            self.step_began_s, self.in_flight = now_s, hold.cost
        return hold

    def release(self, hold: CreditHold) -> None:
        """The request has left it."""
        self.credits.release(hold)
        self.endpoint.admin_state.on_end()

    def on_first_token(self, after_s: float) -> None:
        """A request that it got so long ago begins to be answered."""
        self._suspensions = 0
        if self._window is not None:
            self._window.on_first_token(after_s, self.credits.held)

    def widened_in_s(self, more: int) -> float | None:
        """When it will take so many more than now; None: nobody expects that it will (see `ConcurrencyWindow`)."""
        return None if self._window is None else self._window.widened_in_s(more)

    def on_failure(self) -> None:
        """Notes that the endpoint refused a request, or lost it."""
        if self._window is not None:
            self._window.on_rejection()

    def suspend(self, now_s: float, draw: float, asked_s: float | None = None) -> None:
        """Suspends an endpoint that failed a request though it seems ready: others serve meanwhile.

        The while grows with every failure after a rest until it serves again: exponential back-off with full jitter.

        Args:
            now_s: Now.
            draw: From 0 to 1, which part of the longest while.
            asked_s: The while, where somebody knows better.
        """
        self._suspensions += 1
        rest_s = draw * _REST.after(self._suspensions) if asked_s is None else asked_s
        self._suspended_until_s = max(self._suspended_until_s, now_s + rest_s)
