"""A room to wait in: one line for everybody, and one more for each part of the replicas that some have for themselves.

With a line of its own, a full pool never stands in the way of those who do not use it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, cast

from maitred.core.flow import PriorityClass
from maitred.dispatch.policy.quotas import Quota
from maitred.dispatch.policy.waits import WaitAccount
from maitred.dispatch.request import DispatchRequest
from maitred.fairness.config import QueueOrderConfig
from maitred.fairness.fair_queue import FairQueue, make_line

if TYPE_CHECKING:
    from maitred.dispatch.entry import QueuedRequest

_LOCAL_TOKENS = 128
"""Prompts that begin with so many equal tokens count as having a common prefix."""


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
