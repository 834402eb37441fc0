"""Queue of one quota: its waiting requests, what each dispatched one holds, wait spans and counters.

There is one common quota, and one for each reserved share or isolated pool. Each has its own queue, so requests of a
full pool never block requests of others.

The timeline of a request records how long it waited, why, and which replica it got (`WaitSpan`); `DispatchCounters`
counts the same for the metrics.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum, StrEnum, auto
from typing import Any, cast

from maitred.core.balance import ReplicaCandidate
from maitred.core.errors import MaitredError
from maitred.core.flow import FlowLevel, PriorityClass, QueuePosition
from maitred.core.timeline import SpanName
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.credits import Cost, CreditHold, total_cost
from maitred.dispatch.policy.quotas import Quota
from maitred.dispatch.policy.waits import WaitAccount, WaitMark
from maitred.dispatch.request import DispatchRequest
from maitred.fairness.config import QueueOrderConfig
from maitred.fairness.entry import QueueEntry
from maitred.fairness.fair_queue import FairQueue, make_queue
from maitred.fairness.vtc import SECONDS_PER_SERVICE

QUEUE_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)
NO_CAUSE = "none"
"""Cause label of requests that did not wait."""
_LOCALITY_PREFIX_TOKENS = 128
"""Number of leading tokens that must be equal for two prompts to share a prefix."""


class QueuedRequest(QueueEntry[None]):
    """State of one request in dispatch; the entry type of the fair queue.

    Only `DispatchCore` and `QuotaQueue` write it.

    ::

        waiting --dispatched--> dispatched --left--> gone
           |  ^                     |
           |  `------ requeued -----'
           |  `--failed--> failed --left--> gone
           `--left--> gone

    The state alone determines which resources the request holds. A request is requeued when its replica fails, a
    limited number of times; between two requeues it makes every other transition at most once.
    """

    __slots__ = (
        "_prompt_costs",
        "allocation",
        "cached_tokens",
        "cached_tokens_at_s",
        "candidates",
        "cost",
        "costs",
        "dispatched_s",
        "expected_tokens",
        "failed_at",
        "failure",
        "has_output",
        "joined_s",
        "output_tokens",
        "owes_prompts",
        "predicted_position",
        "prefill_s",
        "queue",
        "quota_cost",
        "raw_wait_s",
        "reported_prompt_tokens",
        "request",
        "requeues",
        "spill_reason",
        "state",
        "tenant",
        "wait_deadline_s",
        "wait_mark",
        "waited_ms",
    )

    def __init__(
        self,
        dispatch_request: DispatchRequest,
        queue: QuotaQueue,
        costs: list[Cost],
        expected_tokens: int,
        service: float,
        wait_deadline_s: float | None,
    ) -> None:
        flow = dispatch_request.flow
        super().__init__(
            None,
            flow,
            arrived_s=dispatch_request.arrived_s,
            service=service,
            # The fair queue subtracts the whole request's time; add it: the deadline is for the first token.
            deadline_s=None if wait_deadline_s is None else wait_deadline_s + SECONDS_PER_SERVICE * service,
            locality=queue.locality(dispatch_request) if queue.local else None,
        )
        self.request = dispatch_request
        self.tenant = flow.path[0]
        """Organisation of the request, with its weight."""
        self.queue = queue
        self._prompt_costs = costs
        self.costs = costs
        """Cost of each prompt that is to be submitted."""
        self.cost = costs[0] if len(costs) == 1 else total_cost(costs)
        """Cost of all prompts that are to be submitted."""
        self.quota_cost = self.cost
        """Cost that its quota was charged when it was dispatched."""
        self.expected_tokens = expected_tokens
        self.wait_deadline_s = wait_deadline_s
        """Deadline of the first token; of the whole answer, once the request was requeued after its first token."""
        self.state = QueueState.NEW
        self.failure: MaitredError | None = None
        self.allocation: Allocation | None = None
        self.candidates: Sequence[ReplicaCandidate] = ()
        """Replicas that were compared for this request; empty if there was no choice."""
        self.cached_tokens: Mapping[str, int] | None = None
        """Cached prompt tokens by replica, from the last lookup; None: not looked up yet."""
        self.cached_tokens_at_s = 0.0
        """Time of the last lookup of `cached_tokens`, in monotonic seconds."""
        self.wait_mark: WaitMark | None = None
        self.waited_ms: dict[str, float] = {}
        self.joined_s = 0.0
        self.dispatched_s = 0.0
        self.predicted_position: QueuePosition | None = None
        self.raw_wait_s = 0.0
        self.prefill_s = 0.0
        self.has_output = False
        self.reported_prompt_tokens = 0
        self.output_tokens = 0
        self.owes_prompts = False
        """Whether all prompt tokens were charged and a refund may be due."""
        self.requeues = 0
        """Number of times that the request was requeued."""
        self.failed_at: set[str] = set()
        """Names of replicas that failed this request while ready; they are avoided if others are ready."""
        self.spill_reason: SpillReason | None = None
        """Why it runs in another region than the gateway's; None: it does not."""

    def keep_prompts(self, prompts: Sequence[int]) -> None:
        """Keeps only the prompts with these indexes; the others need no slots any more."""
        self.costs = [self._prompt_costs[number] for number in prompts]
        self.cost = total_cost(self.costs)


class SpillReason(StrEnum):
    """Reason why a request runs in another region than its gateway's."""

    OBJECTIVE = "objective"
    """It would have missed its objective in the own region."""
    SESSION = "session"
    """Its session is there."""
    NO_REPLICA = "no_replica"
    """No replica in the own region was ready."""
    RESIDENCY = "residency"
    """It may not run in the own region."""
    CONTINUATION = "continuation"
    """Its replica was lost, and the own region had no room."""


class QuotaQueue:
    """Queue of one quota, with its fairness and wait accounting.

    The quota is the common one, a reserved share, or that of an isolated pool.

    Args:
        quota: Part of the replicas that its requests may use.
        config: Order of the queue.
    """

    def __init__(self, quota: Quota, config: QueueOrderConfig) -> None:
        self.quota = quota
        self.fair_queue: FairQueue[None] = make_queue(config)
        self.wait_account = WaitAccount()
        self.tenants: dict[str, dict[QueuedRequest, None]] = {}
        """Waiting requests by tenant id, each tenant's in joining order."""
        self.requeued: dict[QueuedRequest, None] = {}
        """Waiting requests that were requeued after a replica failure, in requeue order."""
        self.aside: dict[QueuedRequest, None] = {}
        """Waiting requests that are out of the order, so that they hold up nobody."""
        self.away: dict[QueuedRequest, None] = {}
        """Waiting requests that are out of the order because they wait for other regions than the gateway's own."""
        self.waiting = 0
        """Number of waiting requests."""
        self.waiting_by_flow: Counter[tuple[PriorityClass, tuple[FlowLevel, ...]]] = Counter()
        """Number of waiting requests by class, for each organisation, team and key, by its path."""
        self.keeps_lanes = False
        """Whether `lanes` is kept, because the model has replicas in several regions."""
        self.lanes: dict[frozenset[str] | None, dict[str, dict[QueuedRequest, None]]] = {}
        """Waiting requests by the regions that they allow and by tenant id, each tenant's in joining order."""
        self.local = config.policy == "fair" and config.quantum > 0
        """Whether the fair queue uses prompt prefixes to group requests."""

    def __len__(self) -> int:
        return self.waiting

    def enqueue(self, queued: QueuedRequest, now_s: float) -> None:
        """Adds a new request to the queue."""
        self.fair_queue.add(queued, now_s)
        self._on_join(queued, now_s)

    def requeue(self, queued: QueuedRequest, now_s: float) -> None:
        """Adds a request again after its replica failed."""
        self.fair_queue.requeue(queued, now_s)
        self.requeued[queued] = None
        self._on_join(queued, now_s)

    def head(self, now_s: float) -> QueuedRequest | None:
        """Returns the next request; None: the queue is empty.

        Requeued requests come first: they had their turn, and a client may be reading their output.
        """
        for queued in self.requeued:
            if queued not in self.aside and queued not in self.away:
                return queued
        return cast("QueuedRequest | None", self.fair_queue.head(now_s))

    def set_aside(self, queued: QueuedRequest) -> None:
        """Takes a waiting request out of the order until `call_back`."""
        self.fair_queue.remove(queued)
        self.aside[queued] = None

    def call_back(self, queued: QueuedRequest, now_s: float) -> None:
        """Returns a request that was set aside to the order, as of its arrival."""
        del self.aside[queued]
        self.fair_queue.add(queued, now_s)

    def set_away(self, queued: QueuedRequest) -> None:
        """Takes a waiting request out of the order while it waits for another region."""
        self.fair_queue.remove(queued)
        self.away[queued] = None

    def call_home(self, queued: QueuedRequest, now_s: float) -> None:
        """Returns a request that was set away to the order, as of its arrival."""
        del self.away[queued]
        self.fair_queue.add(queued, now_s)

    def take_over(self, queued: QueuedRequest, now_s: float) -> None:
        """Moves a request from another quota queue to this one; call it for running requests first."""
        before = queued.queue
        queued.queue, queued.locality = self, self.locality(queued.request)
        if queued in before.tenants.get(queued.tenant.id, ()):
            returned = queued in before.requeued
            before.remove(queued, now_s)
            self.enqueue(queued, now_s)
            if returned:
                self.requeued[queued] = None
        else:
            self.fair_queue.pass_through(queued, now_s)

    def dequeue(self, queued: QueuedRequest, now_s: float) -> None:
        """Removes an entry that is dispatched."""
        if queued in self.away:
            self.call_home(queued, now_s)
        elif queued in self.aside:
            self.call_back(queued, now_s)
        self.fair_queue.take(queued, now_s)
        self._on_leave(queued, now_s)

    def remove(self, queued: QueuedRequest, now_s: float) -> None:
        """Removes an entry that was not dispatched."""
        if self.aside.pop(queued, queued) is not None and self.away.pop(queued, queued) is not None:
            self.fair_queue.remove(queued)
        self._on_leave(queued, now_s)

    def _on_join(self, queued: QueuedRequest, now_s: float) -> None:
        tenant = queued.tenant
        self.tenants.setdefault(tenant.id, {})[queued] = None
        if self.keeps_lanes:
            self._join_lane(queued)
        self.waiting += 1
        path, priority = queued.flow.path, queued.flow.priority
        for depth in range(1, len(path) + 1):
            self.waiting_by_flow[priority, path[:depth]] += 1
        queued.wait_mark = self.wait_account.join(tenant, now_s)

    def _on_leave(self, queued: QueuedRequest, now_s: float) -> None:
        self.requeued.pop(queued, None)
        tenant = queued.tenant.id
        tenant_requests = self.tenants[tenant]
        del tenant_requests[queued]
        if self.keeps_lanes:
            self._leave_lane(queued)
        self.waiting -= 1
        path, priority = queued.flow.path, queued.flow.priority
        for depth in range(1, len(path) + 1):
            self.waiting_by_flow[priority, path[:depth]] -= 1
            if not self.waiting_by_flow[priority, path[:depth]]:
                del self.waiting_by_flow[priority, path[:depth]]
        if not tenant_requests:
            del self.tenants[tenant]
        assert queued.wait_mark is not None
        before = queued.waited_ms
        queued.waited_ms = self.wait_account.leave(queued.wait_mark, now_s)
        for cause, waited_ms in before.items():
            queued.waited_ms[cause] = queued.waited_ms.get(cause, 0.0) + waited_ms

    def keep_lanes(self, *, keeps: bool) -> None:
        """Sets whether waiting requests are also kept by the regions that they allow."""
        self.keeps_lanes, self.lanes = keeps, {}
        if keeps:
            for queued in self.all():
                self._join_lane(queued)

    def _join_lane(self, queued: QueuedRequest) -> None:
        lane = self.lanes.setdefault(queued.request.regions, {})
        lane.setdefault(queued.tenant.id, {})[queued] = None

    def _leave_lane(self, queued: QueuedRequest) -> None:
        lane = self.lanes[queued.request.regions]
        del lane[queued.tenant.id][queued]
        if not lane[queued.tenant.id]:
            del lane[queued.tenant.id]
            if not lane:
                del self.lanes[queued.request.regions]

    def all(self) -> list[QueuedRequest]:
        """Returns all entries that wait in this queue."""
        return [queued for entries in self.tenants.values() for queued in entries]

    def first(self, most: int) -> Iterator[QueuedRequest]:
        """Yields up to `most` entries that wait in this queue, those of one tenant after those of another."""
        return itertools.islice(itertools.chain.from_iterable(self.tenants.values()), most)

    def waiting_in(self, priority: PriorityClass) -> int:
        """Returns the number of waiting requests of one class."""
        waiting = self.fair_queue.waiting_in(priority)
        for out in (self.aside, self.away):
            if out:
                waiting += sum([queued.flow.priority is priority for queued in out])
        return waiting

    def locality(self, dispatch_request: DispatchRequest) -> Hashable | None:
        """Returns a key that requests with a common prompt prefix share; None: locality is not used."""
        return (
            hash(tuple(dispatch_request.prompts[0][:_LOCALITY_PREFIX_TOKENS]))
            if self.local and dispatch_request.prompts
            else None
        )


class QueueState(Enum):
    """Lifecycle state of a `QueuedRequest`."""

    NEW = auto()
    WAITING = auto()
    DISPATCHED = auto()
    FAILED = auto()
    GONE = auto()


class Allocation:
    """Credits and quota that a dispatched request holds at one endpoint."""

    __slots__ = ("endpoint_state", "has_output", "hold", "quota", "since_s", "stalled_s")

    def __init__(
        self, endpoint_state: EndpointState, hold: CreditHold, quota: Quota, since_s: float, stalled_s: float
    ) -> None:
        self.endpoint_state = endpoint_state
        self.hold = hold
        self.quota = quota
        self.since_s = since_s
        self.stalled_s = stalled_s
        """Value of `DispatchCore.stalled_s` when the request was dispatched."""
        self.has_output = False
        """Whether this endpoint has produced a token of the request."""


class WaitSpan:
    """Timeline span of one wait of a request, from enqueue or requeue to its end.

    Args:
        queued: Entry of the request.
        now_s: Start of the wait, in monotonic seconds.
    """

    __slots__ = ("_previous_wait_ms", "_queued", "_span")

    def __init__(self, queued: QueuedRequest, now_s: float) -> None:
        self._queued = queued
        self._previous_wait_ms = {**queued.waited_ms}
        self._span = queued.request.timeline.begin(
            SpanName.QUEUE, now_s, **{"class": queued.flow.priority, "tenant": queued.tenant.id}
        )

    def close(self, now_s: float) -> None:
        """Closes the span: the request was dispatched, or has failed."""
        queued, before_ms = self._queued, self._previous_wait_ms
        waited_ms = {
            str(cause): round(spent_ms - before_ms.get(cause, 0.0), 3) for cause, spent_ms in queued.waited_ms.items()
        }
        self._span.end(now_s, "" if queued.failure is None else queued.failure.code, waited_ms=waited_ms)
        _record_routing(queued, now_s)

    def on_leave(self, now_s: float, why: str) -> None:
        """Closes the span of a request that leaves without having been dispatched."""
        self._span.end(now_s, why)


def record_immediate_dispatch(queued: QueuedRequest, now_s: float) -> None:
    """Records in the timeline that a request was dispatched without a wait."""
    facts = {"class": queued.flow.priority, "tenant": queued.tenant.id, "waited_ms": {}}
    queued.request.timeline.record(SpanName.QUEUE, now_s, now_s, facts)
    _record_routing(queued, now_s)


def _record_routing(queued: QueuedRequest, now_s: float) -> None:
    if queued.allocation is None:
        return
    candidates = [_facts_of(candidate) for candidate in queued.candidates] if queued.candidates else []
    endpoint_state = queued.allocation.endpoint_state
    facts = {"replica": endpoint_state.endpoint.name, "candidates": candidates}
    if endpoint_state.region is not None:
        facts["region"] = endpoint_state.region
    if queued.spill_reason is not None:
        facts["spill"] = str(queued.spill_reason)
    queued.request.timeline.record(SpanName.ROUTING, now_s, now_s, facts)
    queued.candidates = ()


def _facts_of(candidate: ReplicaCandidate) -> dict[str, Any]:
    """Returns the values by which a candidate replica was judged, for the timeline."""
    wait_s, prefill_s = candidate.wait_s, candidate.prefill_s
    return {
        "replica": candidate.name,
        "predicted_ttft_s": None if wait_s is None or prefill_s is None else round(wait_s + prefill_s, 6),
        "wait_s": None if wait_s is None else round(wait_s, 6),
        "prefill_s": None if prefill_s is None else round(prefill_s, 6),
        "held_tokens": candidate.cached_tokens,
        "requests": candidate.requests,
        "prompt_tokens": round(candidate.prompt_tokens),
        "output_tokens": round(candidate.output_tokens),
        "weight": round(candidate.weight, 4),
    }


class WaitHistogram:
    """Histogram of wait times in seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(QUEUE_BUCKETS_S) + 1)
        """Counts per bucket, not cumulative; the last bucket has no upper bound."""
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Adds one wait, in seconds."""
        self.counts[bisect_left(QUEUE_BUCKETS_S, seconds)] += 1
        self.sum_s += seconds


class DispatchCounters:
    """Counters of one queue since the process started."""

    def __init__(self) -> None:
        self.queue_s: dict[tuple[str, str], WaitHistogram] = {}
        """(Class, cause) -> histogram of waits with that cause."""
        self._no_wait_histograms: dict[PriorityClass, WaitHistogram] = {}
        """Histograms of requests that did not wait, by class; also in `queue_s`."""
        self.rejections: dict[str, int] = {}
        """Rejected and failed requests by error code."""
        self.left_waiting = 0
        """Requests whose caller was cancelled while they waited."""
        self.moved = 0
        """Requests that moved to another model while they waited."""
        self.wasted_tokens = 0
        """Output tokens of requests that did not complete."""
        self.spills: dict[tuple[str, SpillReason], int] = {}
        """(Region, reason) -> requests that ran in another region than the gateway's."""

    def on_dispatch(self, priority: PriorityClass, waited_ms: Mapping[str, float]) -> None:
        """Records the waits of a dispatched request."""
        if not waited_ms:
            if (at_once := self._no_wait_histograms.get(priority)) is None:
                at_once = self._no_wait_histograms[priority] = self._histogram(priority, NO_CAUSE)
            at_once.counts[0] += 1
            return
        for cause, milliseconds in waited_ms.items():
            self._histogram(priority, cause).add(milliseconds / 1e3)

    def _histogram(self, priority: PriorityClass, cause: str) -> WaitHistogram:
        key = priority.value, cause
        histogram = self.queue_s.get(key)
        if histogram is None:
            histogram = self.queue_s[key] = WaitHistogram()
        return histogram

    def on_spill(self, region: str | None, reason: SpillReason) -> None:
        """Counts a request that runs in another region."""
        key = region or "", reason
        self.spills[key] = self.spills.get(key, 0) + 1

    def on_rejection(self, reason: str) -> None:
        """Counts a rejected or failed request."""
        self.rejections[reason] = self.rejections.get(reason, 0) + 1
