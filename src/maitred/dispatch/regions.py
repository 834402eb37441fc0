"""Replicas of one model in several regions: where a request may run, and when it leaves the gateway's own region.

A request runs in the gateway's own region as long as the prediction there meets its objective. If it does not, the
request goes to the region with the least predicted time to first token, plus the round trip there, plus what the
difference in price is worth, if that gains more than a margin. Whether the requests of a tenant and class may leave has
hysteresis (`policy.overflow.OverflowState`); a session stays where its prefix is cached as long as it is no slower
there. A request whose own region has no replica that serves goes elsewhere at once.

A request never gets a replica outside of the regions that it allows.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set

from maitred.core.errors import ModelHeld, ModelLoadFailed, ModelLoading, ReplicaUnavailable
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.dispatch.config import RegionsConfig
from maitred.dispatch.endpoint import EndpointState, outage_of, retry_after_s
from maitred.dispatch.policy.overflow import OverflowState
from maitred.dispatch.predictor import LatencyPredictor
from maitred.dispatch.queue import QueuedRequest, QueueState, QuotaQueue, SpillReason
from maitred.dispatch.request import DispatchRequest
from maitred.dispatch.selector import ReplicaSelector

_CHECK_INTERVAL_S = 0.1
"""Time between two predictions for the waiting requests of a group that stays in its own region."""
_MOST_FUTILE = 64
"""Requests that may leave the own region and find no room, after which no others are looked at in a pass."""
_AGEING_S = 10.0
"""Time after which a request that waits for another region counts as of the next class."""
_MOST_SESSIONS = 4096
_MOST_GROUPS = 1024
"""Groups beyond this number are forgotten if none of their requests has come for a while."""
_TOKENS_PER_PRICE = 1e6

Group = tuple[str, PriorityClass]


def permitted_endpoints(
    dispatch_request: DispatchRequest, endpoint_states: Sequence[EndpointState]
) -> Sequence[EndpointState]:
    """Returns those of these replicas where a request may run."""
    regions = dispatch_request.regions
    if regions is None:
        return endpoint_states
    return [endpoint_state for endpoint_state in endpoint_states if endpoint_state.region in regions]


def _is_open(open_regions: Set[str | None], regions: frozenset[str] | None) -> bool:
    """Whether a request that is bound to regions, or to none, may run in one of the open regions."""
    return bool(open_regions) if regions is None else not open_regions.isdisjoint(regions)


def out_of_region(dispatch_request: DispatchRequest, endpoint_states: Sequence[EndpointState]) -> ReplicaUnavailable:
    """Returns the error of a request while none of the replicas where it may run is ready."""
    states = permitted_endpoints(dispatch_request, endpoint_states)
    retry_s = retry_after_s(states)
    outage = outage_of(states)
    if isinstance(outage, ModelLoading | ModelLoadFailed | ModelHeld):
        return type(outage)(outage.message, retry_after_s=retry_s)
    names = ", ".join(sorted(dispatch_request.regions or ())) or "none"
    return ReplicaUnavailable(
        f"No replica of the model serves in the regions where the request may be computed ({names}), and it may not "
        "leave them. Try again after the time in Retry-After.",
        retry_after_s=retry_s,
    )


class _GroupSpill(OverflowState):
    """Whether the requests of one tenant and class leave the own region.

    Attributes:
        checked_s: Time of the last prediction, in monotonic seconds.
    """

    __slots__ = ("checked_s",)

    def __init__(self, config: RegionsConfig) -> None:
        super().__init__(config.back_below, config.back_after_s)
        self.checked_s = float("-inf")


class RegionPlanner:
    """Decides in which region a request runs.

    It exists only while a model has replicas in other regions, or requests that may not run in the own one.

    Args:
        region: The gateway's own region; None: it has no name.
        endpoint_states: All replicas.
        config: The settings.
        predict: Predicts wait and time to first token of a request at some of the replicas.
        predictor: Predictor of times to first token.
        selector: Selector that knows the cached prompt tokens of each replica.

    Attributes:
        considered: Waiting request whose chances are predicted now; None: none.
    """

    def __init__(
        self,
        region: str | None,
        endpoint_states: Sequence[EndpointState],
        config: RegionsConfig,
        *,
        predict: Callable[[QueuedRequest, Sequence[EndpointState], float], QueuePosition],
        predictor: LatencyPredictor,
        selector: ReplicaSelector,
    ) -> None:
        self.region = region
        self.config = config
        self.considered: QueuedRequest | None = None
        self._endpoint_states = endpoint_states
        self._predict = predict
        self._predictor = predictor
        self._selector = selector
        self._spills: dict[Group, _GroupSpill] = {}
        self._sessions: dict[str, str | None] = {}
        """Session -> region of its last request outside of the own region, the one used last at the end."""

    # --- choice of a region ---

    def narrow(
        self,
        queued: QueuedRequest,
        with_capacity: Sequence[EndpointState],
        ready: Sequence[EndpointState],
        now_s: float,
    ) -> Sequence[EndpointState]:
        """Returns those of the replicas with room where the request should go now, all in one region.

        Args:
            queued: The request.
            with_capacity: Replicas that have room for it.
            ready: All replicas that are ready.
            now_s: Now.

        Returns:
            Empty: it waits.
        """
        queued.spill_reason = None
        with_capacity = permitted_endpoints(queued.request, with_capacity)
        if not with_capacity:
            return with_capacity
        home = [state for state in permitted_endpoints(queued.request, ready) if state.region == self.region]
        if not home:
            return self._leave(queued, with_capacity, now_s, self._reason_away(queued.request))
        at_home = [state for state in with_capacity if state.region == self.region]
        elsewhere = [state for state in with_capacity if state.region != self.region]
        if not elsewhere:
            return at_home
        if queued.requeues:  # a client may be reading its output
            return at_home or self._leave(queued, elsewhere, now_s, SpillReason.CONTINUATION)
        return self._compare(queued, at_home, elsewhere, home, now_s)

    def _compare(
        self,
        queued: QueuedRequest,
        at_home: list[EndpointState],
        elsewhere: list[EndpointState],
        home: list[EndpointState],
        now_s: float,
    ) -> Sequence[EndpointState]:
        """Compares the own region with the others, where both may take the request."""
        elsewhere = [state for state in elsewhere if not self._is_too_far(queued, state, now_s)]
        if not elsewhere:
            return at_home
        if (kept := self._at_session(queued, elsewhere)) and self._stays(queued, kept, at_home, home, now_s):
            queued.spill_reason = SpillReason.SESSION
            return kept
        spill = self._spills.get(_group_of(queued))
        waits = queued.state is QueueState.WAITING  # then `overtaking` finds out whether its group may leave
        if (spill is None or not spill.is_on) and (at_home or waits):
            return at_home
        home_s = self._home_s(queued, at_home, home, now_s)
        if not waits:
            spill = self._observe(queued, home_s, now_s)
        if spill is None or not spill.is_on:
            return at_home
        chosen, there_s = self._least(queued, elsewhere, now_s)
        if there_s + self.config.margin_s > home_s:
            return at_home
        queued.spill_reason = SpillReason.OBJECTIVE
        return chosen

    def on_dispatch(self, queued: QueuedRequest, endpoint_state: EndpointState) -> None:
        """Notes the region of a session."""
        session = queued.request.session
        if session is None:
            return
        self._sessions.pop(session, None)
        if endpoint_state.region != self.region:
            self._sessions[session] = endpoint_state.region
            if len(self._sessions) > _MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def waits_for(self, queued: QueuedRequest, ready: Sequence[EndpointState]) -> set[str | None]:
        """Returns the regions for whose replicas a request waits that found no room; others may not overtake it there.

        That is its own region, or all that it allows if it has no replica there.
        """
        regions = {state.region for state in permitted_endpoints(queued.request, ready)}
        return {self.region} if self.region in regions and not queued.requeues else regions

    # --- requests beside the order of the queue ---

    def returning(self, queue: QuotaQueue, ready: Sequence[EndpointState]) -> list[QueuedRequest]:
        """Returns requests that were set away and that a replica of the own region can serve again."""
        if all(state.region != self.region for state in ready):
            return []
        return [
            queued for queued in queue.away if queued.request.regions is None or self.region in queued.request.regions
        ]

    def away_candidates(
        self,
        queue: QuotaQueue,
        ready: Sequence[EndpointState],
        now_s: float,
        *,
        late: bool,
        blocked: Set[str | None],
    ) -> Iterator[QueuedRequest]:
        """Yields requests that may go to other regions: most urgent class first, then least served tenant.

        Of a tenant's requests with the same regions it is the first. Of those that wait for the own region it is the
        first that is predicted to miss its objective there, and only if `late` is set. Those whose regions are all
        blocked are left out, so however many they are, they are in nobody's way.

        Args:
            queue: The queue.
            ready: The replicas that are ready.
            now_s: Now.
            late: Whether late requests may leave the own region.
            blocked: Regions for which others wait; the caller adds to them between two candidates.
        """
        of_ready = {state.region for state in ready}
        for queued in list(queue.requeued):
            if queued in queue.away and _is_open(of_ready - blocked, queued.request.regions):
                yield queued
        groups = [
            (regions, entries)
            for regions, lane in queue.lanes.items()
            if _is_open(of_ready - blocked, regions)
            for entries in lane.values()
        ]
        groups.sort(key=lambda group: self._urgency(queue, next(iter(group[1])), now_s))
        futile = 0
        while groups:
            successful = []
            for regions, entries in groups:
                if not entries or not _is_open(of_ready - blocked, regions):
                    continue
                in_order = [queued for queued in entries if queued not in queue.aside] if queue.aside else entries
                candidate = self._candidate(in_order, ready, now_s, late=late)
                if candidate is None:
                    continue
                yield candidate
                if candidate.state is QueueState.WAITING:
                    futile += 1
                    late = late and futile < _MOST_FUTILE
                else:
                    successful.append((regions, entries))
            groups = successful  # those that found room may have more, after one of each other

    def _candidate(
        self, entries: Collection[QueuedRequest], ready: Sequence[EndpointState], now_s: float, *, late: bool
    ) -> QueuedRequest | None:
        """Returns the request of a tenant that may go to another region now; see `away_candidates`."""
        first = next(iter(entries), None)
        if first is None:
            return None
        permitted = permitted_endpoints(first.request, ready)
        home = [state for state in permitted if state.region == self.region]
        if not home:
            return first
        if len(home) == len(permitted):
            return None  # it may not leave
        if not late:
            return None
        in_order = list(entries)
        self.considered = in_order[-1]
        candidate = self._first_late(in_order, home, now_s)
        self.considered = None
        return candidate

    def _urgency(self, queue: QuotaQueue, queued: QueuedRequest, now_s: float) -> tuple[float, float, float]:
        """Returns the sort key of a request beside the order: classes age as they do in the queue."""
        arrived_s = queued.request.arrived_s
        rank = max(0.0, queued.flow.priority.rank - (now_s - arrived_s) // _AGEING_S)
        return rank, queue.fair_queue.lead(queued.flow), arrived_s

    def _first_late(
        self, entries: Sequence[QueuedRequest], home: list[EndpointState], now_s: float
    ) -> QueuedRequest | None:
        """Returns the first of a tenant's waiting requests that would miss its objective here, or None.

        The waits of a tenant's requests grow about evenly from the first to the last, so the place of the first late
        one is estimated from the wait of the last.
        """
        last = entries[-1]
        spill = self._spills.get(_group_of(last))
        if self._objective_s(last) == float("inf"):
            return None
        if spill is not None and not spill.is_on and now_s - spill.checked_s < _CHECK_INTERVAL_S:
            return None
        home_s = self._home_s(last, [], home, now_s)
        spill = self._observe(last, home_s, now_s)
        if spill is None or not spill.is_on:
            return None
        objective_s = self._objective_s(last)
        left_s = objective_s * spill.allowed - (now_s - last.request.arrived_s)
        share = 0.0 if home_s == float("inf") else max(0.0, left_s) / max(home_s, 1e-9)
        return entries[min(len(entries) - 1, int(share * len(entries)))]

    # --- predictions ---

    def _home_s(
        self, queued: QueuedRequest, at_home: Sequence[EndpointState], home: list[EndpointState], now_s: float
    ) -> float:
        """Returns the predicted time to first token in the own region; infinite if it cannot be predicted."""
        if at_home:
            return min(self._ttft_s(queued, state, now_s) for state in at_home)
        if not self._predictor.is_rate_known(home):
            return float("inf")
        return self._predictor.cautious_s(self._predict(queued, home, now_s))

    def _ttft_s(self, queued: QueuedRequest, state: EndpointState, now_s: float) -> float:
        """Returns the predicted time from dispatch to a replica until the first token is here."""
        prefill_s = self._predictor.corrected_prefill_s(self._selector.prefill_s(queued, state, 0, now_s), now_s)
        return prefill_s + state.round_trip_s

    def _is_too_far(self, queued: QueuedRequest, state: EndpointState, now_s: float) -> bool:
        """Whether the first token of a replica would come after the deadline, so that only the own region can do it."""
        deadline_s = queued.wait_deadline_s
        return deadline_s is not None and now_s + self._ttft_s(queued, state, now_s) > deadline_s

    def _least(
        self, queued: QueuedRequest, elsewhere: Sequence[EndpointState], now_s: float
    ) -> tuple[list[EndpointState], float]:
        """Returns the replicas with room in the region that costs least, and what it costs, in seconds."""
        by_region: dict[str | None, list[EndpointState]] = {}
        for state in elsewhere:
            by_region.setdefault(state.region, []).append(state)
        costs = {
            region: min(self._ttft_s(queued, state, now_s) for state in states) + self._price_s(queued, region)
            for region, states in by_region.items()
        }
        region = min(costs, key=lambda name: costs[name])
        return by_region[region], costs[region]

    def _price_s(self, queued: QueuedRequest, region: str | None) -> float:
        """Returns the difference in price to the own region, in seconds of time to first token."""
        prices: Mapping[str, float] = self.config.usd_per_mtok
        if not prices:
            return 0.0
        more = prices.get(region or "", 0.0) - prices.get(self.region or "", 0.0)
        request = queued.request
        tokens = request.prompt_tokens + queued.expected_tokens * request.choices
        return more * tokens / _TOKENS_PER_PRICE / self.config.usd_per_s

    def _leave(
        self, queued: QueuedRequest, with_capacity: Sequence[EndpointState], now_s: float, reason: SpillReason
    ) -> list[EndpointState]:
        chosen, _ = self._least(queued, with_capacity, now_s)
        queued.spill_reason = reason
        return chosen

    def _reason_away(self, dispatch_request: DispatchRequest) -> SpillReason:
        regions = dispatch_request.regions
        return SpillReason.RESIDENCY if regions is not None and self.region not in regions else SpillReason.NO_REPLICA

    def _at_session(self, queued: QueuedRequest, elsewhere: Iterable[EndpointState]) -> list[EndpointState]:
        """Returns the replicas with room in the region of the request's session; empty: it has none elsewhere."""
        session = queued.request.session
        if session is None or session not in self._sessions:
            return []
        region = self._sessions[session]
        return [state for state in elsewhere if state.region == region]

    def _stays(
        self,
        queued: QueuedRequest,
        kept: Sequence[EndpointState],
        at_home: Sequence[EndpointState],
        home: list[EndpointState],
        now_s: float,
    ) -> bool:
        """Whether a session stays in another region: it meets its objective there, and is no slower than here."""
        _, there_s = self._least(queued, kept, now_s)
        if now_s - queued.request.arrived_s + there_s > self._objective_s(queued):
            return False
        spill = self._spills.get(_group_of(queued))
        if spill is not None and spill.is_on:
            return True
        return there_s <= self._home_s(queued, at_home, home, now_s)

    # --- hysteresis ---

    def _observe(self, queued: QueuedRequest, home_s: float, now_s: float) -> _GroupSpill | None:
        """Takes a prediction for the own region into account; returns the state of the group, None: it may not leave.

        A prediction that is not possible counts as 0 seconds: then what a request has waited decides.
        """
        objective_s = self._objective_s(queued)
        if objective_s == float("inf"):
            return None
        group = _group_of(queued)
        spill = self._spills.get(group)
        if spill is None:
            if len(self._spills) >= _MOST_GROUPS:
                self._forget(now_s)
            spill = self._spills[group] = _GroupSpill(self.config)
        elif now_s - spill.checked_s > self.config.back_after_s:
            spill.is_on = False  # nothing was too late for so long
        spill.checked_s = now_s
        expected_s = 0.0 if home_s == float("inf") else home_s
        whole_s = max(0.0, now_s - queued.request.arrived_s) + expected_s
        spill.observe(whole_s / objective_s if objective_s > 0 else float("inf"), now_s)
        return spill

    def _forget(self, now_s: float) -> None:
        after_s = max(self.config.back_after_s, 1.0)
        self._spills = {group: spill for group, spill in self._spills.items() if now_s - spill.checked_s <= after_s}

    def _objective_s(self, queued: QueuedRequest) -> float:
        """Returns the time to first token that a request should have; infinite: it never leaves for being late."""
        if queued.wait_deadline_s is not None:
            return queued.wait_deadline_s - queued.request.arrived_s
        return self.config.ttft_s.get(queued.flow.priority, float("inf"))

    @property
    def spilling(self) -> Collection[Group]:
        """Tenants and classes whose requests may leave the own region now."""
        return [group for group, spill in self._spills.items() if spill.is_on]


def _group_of(queued: QueuedRequest) -> Group:
    return queued.tenant.id, queued.flow.priority
