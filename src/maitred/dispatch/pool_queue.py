"""Queue of a pool: one line for everybody, and one more for each reserved part of the replicas.

With a line of its own, a full pool never stands in the way of those who do not use it.

The timeline of a request notes how long it waited and why, and which replica it was given.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, cast

from maitred.core.balance import ReplicaCandidate
from maitred.core.errors import MaitredError
from maitred.core.flow import PriorityClass, QueuePosition
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

_LOCAL_TOKENS = 128
"""Prompts that begin with so many equal tokens count as having a common prefix."""


class QueuedRequest(QueueEntry[None]):
    """State of one request in dispatch; the element of the fair queue. Only `DispatchCore` and its queue write it.

    ::

        waiting --dispatched--> dispatched --left--> gone
           |  ^                     |
           |  `------ requeued -----'
           |  `--failed--> failed --left--> gone
           `--left--> gone

    What it holds, and thus what has to be released, follows from the state alone. It is requeued when its replica has
    failed it, which is bounded; every other arrow is passed at most once between two of these.
    """

    __slots__ = (
        "_costs",
        "allocation",
        "begun",
        "cached_tokens",
        "cached_tokens_at_s",
        "candidates",
        "cost",
        "costs",
        "dispatched_s",
        "expected_tokens",
        "failed_at",
        "failure",
        "first_token_by_s",
        "in_advance",
        "joined_s",
        "output_tokens",
        "owes_prompts",
        "predicted_position",
        "prefill_s",
        "queue",
        "raw_wait_s",
        "reported_prompt_tokens",
        "request",
        "requeues",
        "state",
        "tenant",
        "wait_mark",
        "waited_ms",
    )

    def __init__(
        self,
        dispatch_request: DispatchRequest,
        queue: PoolQueue,
        costs: list[Cost],
        expected_tokens: int,
        service: float,
        first_token_by_s: float | None,
    ) -> None:
        flow = dispatch_request.flow
        super().__init__(
            None,
            flow,
            arrived_s=dispatch_request.arrived_s,
            service=service,
            # The line takes off what the whole request needs; this deadline is for its first token.
            deadline_s=None if first_token_by_s is None else first_token_by_s + SECONDS_PER_SERVICE * service,
            locality=queue.locality(dispatch_request) if queue.local else None,
        )
        self.request = dispatch_request
        self.tenant = flow.path[0]
        """The organisation, with its weight."""
        self.queue = queue
        self._costs = costs
        self.costs = costs
        """Of the prompts that are to be submitted..."""
        self.cost = costs[0] if len(costs) == 1 else total_cost(costs)
        """...and all of them together."""
        self.expected_tokens = expected_tokens
        self.first_token_by_s = first_token_by_s
        self.state = QueueState.NEW
        self.failure: MaitredError | None = None
        self.allocation: Allocation | None = None
        self.candidates: Sequence[ReplicaCandidate] = ()
        """Among which its replica was chosen; empty where there was no choice."""
        self.cached_tokens: Mapping[str, int] | None = None
        """Of its prompts, by replica..."""
        self.cached_tokens_at_s = 0.0
        """...when that was looked up."""
        self.wait_mark: WaitMark | None = None
        self.waited_ms: dict[str, float] = {}
        self.joined_s = 0.0
        self.dispatched_s = 0.0
        self.predicted_position: QueuePosition | None = None
        self.raw_wait_s = 0.0
        self.prefill_s = 0.0
        self.in_advance = 0.0
        self.begun = False
        self.reported_prompt_tokens = 0
        self.output_tokens = 0
        self.owes_prompts = False
        """Whether all its prompts were charged, computed or not."""
        self.requeues = 0
        """How often it was put back."""
        self.failed_at: set[str] = set()
        """The replicas that have failed it though they seemed ready; they are avoided while there are others."""

    def keep_prompts(self, prompts: Sequence[int]) -> None:
        """Keeps only these prompts: the others need no slots any more."""
        self.costs = [self._costs[number] for number in prompts]
        self.cost = total_cost(self.costs)


class PoolQueue:
    """One line with its accounts.

    Args:
        quota: What its requests may use.
        config: How it orders them.
    """

    def __init__(self, quota: Quota, config: QueueOrderConfig) -> None:
        self.quota = quota
        self.fair_queue: FairQueue[None] = make_queue(config)
        self.wait_account = WaitAccount()
        self.tenants: dict[str, dict[QueuedRequest, None]] = {}
        """Whose requests wait here, each tenant's in the order in which they joined."""
        self.requeued: dict[QueuedRequest, None] = {}
        """Those of them whose replicas have failed them, in the order in which they came back."""
        self.waiting = 0
        """Requests."""
        self.local = config.policy == "fair" and config.quantum > 0
        """Whether the line wants to know which prompts have a common prefix."""

    def __len__(self) -> int:
        return self.waiting

    def enqueue(self, queued: QueuedRequest, now_s: float) -> None:
        """A request begins to wait."""
        self.fair_queue.add(queued, now_s)
        self._on_join(queued, now_s)

    def requeue(self, queued: QueuedRequest, now_s: float) -> None:
        """A request that was taken waits again."""
        self.fair_queue.requeue(queued, now_s)
        self.requeued[queued] = None
        self._on_join(queued, now_s)

    def head(self, now_s: float) -> QueuedRequest | None:
        """Whose turn it is. Who comes back goes first: it has had its turn, and somebody may be reading its answer."""
        for queued in self.requeued:
            return queued
        return cast("QueuedRequest | None", self.fair_queue.head(now_s))

    def take_over(self, queued: QueuedRequest, now_s: float) -> None:
        """One that waits, or runs, in another room is of this room from now on; those that run come first."""
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
        """Takes an entry out of the queue, to run."""
        self.fair_queue.take(queued, now_s)
        self._on_leave(queued, now_s)

    def remove(self, queued: QueuedRequest, now_s: float) -> None:
        """Removes an entry that has not run."""
        self.fair_queue.remove(queued)
        self._on_leave(queued, now_s)

    def _on_join(self, queued: QueuedRequest, now_s: float) -> None:
        tenant = queued.tenant
        self.tenants.setdefault(tenant.id, {})[queued] = None
        self.waiting += 1
        queued.wait_mark = self.wait_account.join(tenant, now_s)

    def _on_leave(self, queued: QueuedRequest, now_s: float) -> None:
        self.requeued.pop(queued, None)
        tenant = queued.tenant.id
        of_tenant = self.tenants[tenant]
        del of_tenant[queued]
        self.waiting -= 1
        if not of_tenant:
            del self.tenants[tenant]
        assert queued.wait_mark is not None
        before = queued.waited_ms
        queued.waited_ms = self.wait_account.leave(queued.wait_mark, now_s)
        for cause, waited_ms in before.items():
            queued.waited_ms[cause] = queued.waited_ms.get(cause, 0.0) + waited_ms

    def all(self) -> list[QueuedRequest]:
        """Returns all entries that wait in this queue."""
        return [queued for entries in self.tenants.values() for queued in entries]

    def waiting_in(self, priority: PriorityClass) -> int:
        """Requests of one class that wait here."""
        return self.fair_queue.waiting_in(priority)

    def locality(self, dispatch_request: DispatchRequest) -> Hashable | None:
        """Key that requests with a common prefix share, if the queue uses it."""
        return (
            hash(tuple(dispatch_request.prompts[0][:_LOCAL_TOKENS]))
            if self.local and dispatch_request.prompts
            else None
        )


class QueueState(Enum):
    """State of an entry."""

    NEW = auto()
    WAITING = auto()
    RELEASED = auto()
    FAILED = auto()
    GONE = auto()


class Allocation:
    """Credits and quota that a dispatched request holds at one endpoint."""

    __slots__ = ("begun", "endpoint_state", "hold", "quota", "since_s", "stalled_s")

    def __init__(
        self, endpoint_state: EndpointState, hold: CreditHold, quota: Quota, since_s: float, stalled_s: float
    ) -> None:
        self.endpoint_state = endpoint_state
        self.hold = hold
        self.quota = quota
        self.since_s = since_s
        self.stalled_s = stalled_s
        """Stall time of the dispatcher at that time."""
        self.begun = False
        """Whether something came of it from there."""


class WaitSpan:
    """One wait of a request, from joining the line, or being put back into it, to its end.

    Args:
        queued: The request's.
        now_s: Since when it waits.
    """

    __slots__ = ("_before_ms", "_queued", "_span")

    def __init__(self, queued: QueuedRequest, now_s: float) -> None:
        self._queued = queued
        self._before_ms = {**queued.waited_ms}
        self._span = queued.request.timeline.begin(
            SpanName.QUEUE, now_s, **{"class": queued.flow.priority, "tenant": queued.tenant.id}
        )

    def close(self, now_s: float) -> None:
        """Closes the span: the request was dispatched, or has failed."""
        queued, before_ms = self._queued, self._before_ms
        waited_ms = {
            str(cause): round(spent_ms - before_ms.get(cause, 0.0), 3) for cause, spent_ms in queued.waited_ms.items()
        }
        self._span.end(now_s, "" if queued.failure is None else queued.failure.code, waited_ms=waited_ms)
        _note_choice(queued, now_s)

    def on_leave(self, now_s: float, why: str) -> None:
        """Closes the span of a request that leaves without having been dispatched."""
        self._span.end(now_s, why)


def record_immediate_dispatch(queued: QueuedRequest, now_s: float) -> None:
    """Tells of one that was released in the moment in which it came."""
    facts = {"class": queued.flow.priority, "tenant": queued.tenant.id, "waited_ms": {}}
    queued.request.timeline.record(SpanName.QUEUE, now_s, now_s, facts)
    _note_choice(queued, now_s)


def _note_choice(queued: QueuedRequest, now_s: float) -> None:
    if queued.allocation is None:
        return
    candidates = [_facts_of(candidate) for candidate in queued.candidates] if queued.candidates else []
    facts = {"replica": queued.allocation.endpoint_state.endpoint.name, "candidates": candidates}
    queued.request.timeline.record(SpanName.ROUTING, now_s, now_s, facts)
    queued.candidates = ()


def _facts_of(candidate: ReplicaCandidate) -> dict[str, Any]:
    """Returns the facts that spoke for a replica and against it."""
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
