"""A room to wait in: one line for everybody, and one more for each part of the replicas that some have for themselves.

With a line of its own, a full pool never stands in the way of those who do not use it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from enum import Enum, auto
from typing import cast

from maitred.core.balance import ReplicaCandidate
from maitred.core.errors import MaitredError
from maitred.core.flow import PriorityClass, QueuePosition
from maitred.dispatch.endpoint import EndpointState
from maitred.dispatch.policy.credits import Cost, CreditHold, sum_of
from maitred.dispatch.policy.quotas import Quota
from maitred.dispatch.policy.waits import WaitAccount, WaitMark
from maitred.dispatch.request import DispatchRequest
from maitred.fairness.config import QueueOrderConfig
from maitred.fairness.entry import QueueEntry
from maitred.fairness.fair_queue import FairQueue, make_line
from maitred.fairness.vtc import SECONDS_PER_SERVICE

_LOCAL_TOKENS = 128
"""Prompts that begin with so many equal tokens count as having a common prefix."""


class QueuedRequest(QueueEntry[None]):
    """See the module. It is itself what waits in the line. Its fields are written by `Floor` and its room alone."""

    __slots__ = (
        "_costs",
        "begun",
        "candidates",
        "cost",
        "costs",
        "errand",
        "expected_tokens",
        "failed_at",
        "failure",
        "first_token_by_s",
        "grip",
        "held",
        "held_at_s",
        "in_advance",
        "joined_s",
        "output_tokens",
        "owes_prompts",
        "predicted",
        "prefill_s",
        "raw_wait_s",
        "released_s",
        "returns",
        "room",
        "state",
        "tenant",
        "told_prompt_tokens",
        "waited",
        "waited_ms",
    )

    def __init__(
        self,
        errand: DispatchRequest,
        room: PoolQueue,
        costs: list[Cost],
        expected_tokens: int,
        service: float,
        first_token_by_s: float | None,
    ) -> None:
        flow = errand.flow
        super().__init__(
            None,
            flow,
            arrived_s=errand.arrived_s,
            service=service,
            # The line takes off what the whole request needs; this deadline is for its first token.
            deadline_s=None if first_token_by_s is None else first_token_by_s + SECONDS_PER_SERVICE * service,
            locality=room.locality(errand) if room.local else None,
        )
        self.errand = errand
        self.tenant = flow.path[0]
        """The organisation, with its weight."""
        self.room = room
        self._costs = costs
        self.costs = costs
        """Of the prompts that are to be submitted..."""
        self.cost = costs[0] if len(costs) == 1 else sum_of(costs)
        """...and all of them together."""
        self.expected_tokens = expected_tokens
        self.first_token_by_s = first_token_by_s
        self.state = QueueState.NEW
        self.failure: MaitredError | None = None
        self.grip: Allocation | None = None
        self.candidates: Sequence[ReplicaCandidate] = ()
        """Among which its replica was chosen; empty where there was no choice."""
        self.held: Mapping[str, int] | None = None
        """Of its prompts, by replica..."""
        self.held_at_s = 0.0
        """...when that was looked up."""
        self.waited: WaitMark | None = None
        self.waited_ms: dict[str, float] = {}
        self.joined_s = 0.0
        self.released_s = 0.0
        self.predicted: QueuePosition | None = None
        self.raw_wait_s = 0.0
        self.prefill_s = 0.0
        self.in_advance = 0.0
        self.begun = False
        self.told_prompt_tokens = 0
        self.output_tokens = 0
        self.owes_prompts = False
        """Whether all its prompts were charged, computed or not."""
        self.returns = 0
        """How often it was put back."""
        self.failed_at: set[str] = set()
        """The replicas that have failed it though they seemed ready; they are avoided while there are others."""

    def keep(self, prompts: Sequence[int]) -> None:
        """It needs places for these of its prompts only."""
        self.costs = [self._costs[number] for number in prompts]
        self.cost = sum_of(self.costs)


class PoolQueue:
    """One line with its accounts.

    Args:
        quota: What its requests may use.
        config: How it orders them.
    """

    def __init__(self, quota: Quota, config: QueueOrderConfig) -> None:
        self.quota = quota
        self.line: FairQueue[None] = make_line(config)
        self.waits = WaitAccount()
        self.tenants: dict[str, dict[QueuedRequest, None]] = {}
        """Whose requests wait here, each tenant's in the order in which they joined."""
        self.returned: dict[QueuedRequest, None] = {}
        """Those of them whose replicas have failed them, in the order in which they came back."""
        self.waiting = 0
        """Requests."""
        self.local = config.policy == "fair" and config.quantum > 0
        """Whether the line wants to know which prompts have a common prefix."""

    def __len__(self) -> int:
        return self.waiting

    def join(self, ticket: QueuedRequest, now_s: float) -> None:
        """A request begins to wait."""
        self.line.add(ticket, now_s)
        self._joined(ticket, now_s)

    def put_back(self, ticket: QueuedRequest, now_s: float) -> None:
        """A request that was taken waits again."""
        self.line.put_back(ticket, now_s)
        self.returned[ticket] = None
        self._joined(ticket, now_s)

    def head(self, now_s: float) -> QueuedRequest | None:
        """Whose turn it is. Who comes back goes first: it has had its turn, and somebody may be reading its answer."""
        for ticket in self.returned:
            return ticket
        return cast("QueuedRequest | None", self.line.head(now_s))

    def take_over(self, ticket: QueuedRequest, now_s: float) -> None:
        """One that waits, or runs, in another room is of this room from now on; those that run come first."""
        before = ticket.room
        ticket.room, ticket.locality = self, self.locality(ticket.errand)
        if ticket in before.tenants.get(ticket.tenant.id, ()):
            returned = ticket in before.returned
            before.remove(ticket, now_s)
            self.join(ticket, now_s)
            if returned:
                self.returned[ticket] = None
        else:
            self.line.pass_through(ticket, now_s)

    def take(self, ticket: QueuedRequest, now_s: float) -> None:
        """It waits no more, and runs."""
        self.line.take(ticket, now_s)
        self._left(ticket, now_s)

    def remove(self, ticket: QueuedRequest, now_s: float) -> None:
        """It waits no more, and has not run."""
        self.line.remove(ticket)
        self._left(ticket, now_s)

    def _joined(self, ticket: QueuedRequest, now_s: float) -> None:
        tenant = ticket.tenant
        self.tenants.setdefault(tenant.id, {})[ticket] = None
        self.waiting += 1
        ticket.waited = self.waits.join(tenant, now_s)

    def _left(self, ticket: QueuedRequest, now_s: float) -> None:
        self.returned.pop(ticket, None)
        tenant = ticket.tenant.id
        of_tenant = self.tenants[tenant]
        del of_tenant[ticket]
        self.waiting -= 1
        if not of_tenant:
            del self.tenants[tenant]
        assert ticket.waited is not None
        before = ticket.waited_ms
        ticket.waited_ms = self.waits.leave(ticket.waited, now_s)
        for cause, waited_ms in before.items():
            ticket.waited_ms[cause] = ticket.waited_ms.get(cause, 0.0) + waited_ms

    def all(self) -> list[QueuedRequest]:
        """All that wait here."""
        return [ticket for tickets in self.tenants.values() for ticket in tickets]

    def waiting_in(self, priority: PriorityClass) -> int:
        """Requests of one class that wait here."""
        return self.line.waiting_in(priority)

    def locality(self, errand: DispatchRequest) -> Hashable | None:
        """Equal for errands with a common prefix, if the line wants to know."""
        return hash(tuple(errand.prompts[0][:_LOCAL_TOKENS])) if self.local and errand.prompts else None


class QueueState(Enum):
    """Where a ticket is."""

    NEW = auto()
    WAITING = auto()
    RELEASED = auto()
    FAILED = auto()
    GONE = auto()


class Allocation:
    """What a released request holds."""

    __slots__ = ("begun", "hold", "quota", "since_s", "stalled_s", "station")

    def __init__(
        self, station: EndpointState, hold: CreditHold, quota: Quota, since_s: float, stalled_s: float
    ) -> None:
        self.station = station
        self.hold = hold
        self.quota = quota
        self.since_s = since_s
        self.stalled_s = stalled_s
        """Of the floor, at that time."""
        self.begun = False
        """Whether something came of it from there."""
