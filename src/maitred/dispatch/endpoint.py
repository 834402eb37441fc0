"""State of one endpoint as dispatch sees it: readiness, load report and credits."""

import logging
from collections.abc import Sequence

from maitred.core.backoff import BackoffCeiling
from maitred.core.errors import ModelLoading, ReplicaUnavailable
from maitred.core.replica import AdminStatus, LoadReport
from maitred.dispatch.policy.credits import NOTHING, Cost, CreditHold, Credits
from maitred.dispatch.policy.window import ConcurrencyWindow
from maitred.dispatch.request import AnyEndpoint

_UNKNOWN_BLOCK_TOKENS = 16
_SUSPENSION_BACKOFF = BackoffCeiling(first_s=0.05, most_s=2.0)
"""Backoff after consecutive failures."""
_MAINTENANCE_MESSAGE = "The replica is out of service for maintenance. Try again after the time in Retry-After."
_MAINTENANCE_RETRY_S = 10.0
"""Retry-After while an operator keeps a replica out of service, because its end is unknown."""
_FAULT_MESSAGE = "The state of the replica cannot be read, because the server has a fault. Report it with the log."
_log = logging.getLogger(__name__)
_UNKNOWN_RETRY_S = 1.0
"""Retry-After while nothing is known of the replicas."""


def outage_of(endpoint_states: Sequence["EndpointState"]) -> ReplicaUnavailable | None:
    """Returns the error of the first of these replicas that is not ready; None: none reports one."""
    return next((state.outage for state in endpoint_states if state.outage is not None), None)


def retry_after_s(endpoint_states: Sequence["EndpointState"]) -> float:
    """Returns the seconds until one of these replicas is expected to be ready, while none is."""
    known = [state.retry_after_s for state in endpoint_states if state.retry_after_s is not None and not state.ready]
    return min(known, default=_UNKNOWN_RETRY_S)


class EndpointState:
    """State and credits of one endpoint.

    Attributes:
        ready: Whether it takes requests, as of the last `refresh`.
        retry_after_s: Seconds until it is expected to be ready; None: unknown.
        outage: Error that the replica reports while it is not ready; None otherwise.
        load: Its last report.
        step_began_s: Start of the current engine step: when the last report came, or when an idle replica got a
            request.
        in_flight: Cost of requests sent before the current step that no report includes; they run in that step.
        block_tokens: Tokens of one KV block.
        region: Region of the replica; while it has told none, that of its endpoint.
        is_far: Whether that is another one than the gateway's, as of the last `DispatchCore.refresh`.
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
        self._told_region: str | None = None
        self.region = endpoint.region
        self.is_far = False
        self.credits = Credits()
        self._window = None if endpoint.reports_capacity else ConcurrencyWindow()
        self._suspensions = 0
        self._suspended_until_s = 0.0

    def refresh(self, now_s: float) -> None:
        """Reads the last state and load report of the replica. This is cheap, because it makes no remote call."""
        replica = self.endpoint.replica
        try:
            card = replica.card()
        except ReplicaUnavailable as unavailable:
            self.ready, self.retry_after_s, self.outage = False, unavailable.retry_after_s, unavailable
            return
        self.outage = None
        if card.region is not self._told_region:
            self._told_region = card.region
            self.update_region()
        suspended_for_s = self._suspended_until_s - now_s
        self.ready, self.retry_after_s = suspended_for_s <= 0.0, suspended_for_s if suspended_for_s > 0.0 else 0.0
        if self.endpoint.admin_state.state is not AdminStatus.SERVING:
            self.outage = ReplicaUnavailable(_MAINTENANCE_MESSAGE, retry_after_s=_MAINTENANCE_RETRY_S)
            self.ready, self.retry_after_s = False, _MAINTENANCE_RETRY_S
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
            self.step_began_s, self.in_flight = now_s, self.credits.unreported

    def on_fault(self, fault: Exception) -> None:
        """Takes the replica as not ready because its state could not be read; the next `refresh` tries it again."""
        if self.outage is None or self.outage.message != _FAULT_MESSAGE:
            _log.error("The state of replica %s cannot be read.", self.endpoint.name, exc_info=fault)
        self.outage = ReplicaUnavailable(_FAULT_MESSAGE, retry_after_s=_UNKNOWN_RETRY_S)
        self.ready, self.retry_after_s = False, _UNKNOWN_RETRY_S

    def update_region(self) -> None:
        """Sets the region after the endpoint or the replica's card has changed."""
        self.region = self.endpoint.region if self._told_region is None else self._told_region

    @property
    def round_trip_s(self) -> float:
        """Measured round-trip time to a replica of another region; 0 if it is not measured, or in the own one."""
        if not self.is_far:
            return 0.0
        measured = self.endpoint.round_trip_s
        return 0.0 if measured is None else measured() or 0.0

    @property
    def weight(self) -> float:
        """Relative share of the load that the replica should get."""
        weight: float = self.endpoint.replica.weight
        return weight

    @property
    def ready_in_s(self) -> float | None:
        """Seconds until the replica is ready if a request waits for it; None: it does not start on demand now."""
        return self.retry_after_s if isinstance(self.outage, ModelLoading) else None

    @property
    def free(self) -> Cost:
        """Free credits of the endpoint; none while it is not ready."""
        return self.credits.free if self.ready else NOTHING

    @property
    def overcommit_slots(self) -> int:
        """Slots beyond the free ones for tenants that hold few slots (see `LoadReport.guest_places`)."""
        return self.credits.overcommit_slots if self.ready else 0

    @property
    def total(self) -> Cost:
        """Capacity of the endpoint, free or not."""
        return self.credits.total if self.ready else NOTHING

    def acquire(self, costs: Sequence[Cost], now_s: float) -> CreditHold:
        """Acquires credits for a request; see `Credits.acquire`. Call `release` to return them."""
        self.endpoint.admin_state.on_begin()
        idle, hold = self.credits.idle, self.credits.acquire(costs)
        if idle:
            self.step_began_s, self.in_flight = now_s, hold.cost
        return hold

    def release(self, hold: CreditHold) -> None:
        """Releases the credits of a request that has left."""
        self.credits.release(hold)
        self.endpoint.admin_state.on_end()

    def on_first_token(self, after_s: float) -> None:
        """Records a first token that came this many seconds after dispatch."""
        self._suspensions = 0
        if self._window is not None:
            self._window.on_first_token(after_s, self.credits.request_count)

    def widened_in_s(self, more: int) -> float | None:
        """Returns the seconds until the window grows by `more`; None: no growth is expected."""
        return None if self._window is None else self._window.widened_in_s(more)

    def on_failure(self) -> None:
        """Shrinks the window after the endpoint rejected or lost a request."""
        if self._window is not None:
            self._window.on_rejection()

    def suspend(self, now_s: float, draw: float, suspend_s: float | None = None) -> None:
        """Suspends an endpoint that failed a request while ready, so that it gets no requests.

        The suspension grows with every consecutive failure (exponential backoff with full jitter), until the endpoint
        gives a first token again.

        Args:
            now_s: Now.
            draw: Jitter from 0 to 1, as a share of the longest suspension.
            suspend_s: Fixed length of the suspension; None: exponential backoff.
        """
        self._suspensions += 1
        if suspend_s is None:
            suspend_s = draw * _SUSPENSION_BACKOFF.after(self._suspensions)
        self._suspended_until_s = max(self._suspended_until_s, now_s + suspend_s)
