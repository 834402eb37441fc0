"""Accounts waiting time by cause for one queue.

A waiting request causes no work, even in a queue of ten thousand. For each tenant and cause, the account sums the time
during which its request was the blocked head of the queue. A request reads the sums when it joins and when it leaves.
The difference is its wait for capacity; during the rest of its wait other tenants had precedence.
"""

from maitred.core.flow import FlowLevel
from maitred.core.request import WaitCause

_BLOCKING_CAUSES = (WaitCause.SLOTS, WaitCause.KV_FULL, WaitCause.COLD_START)


class WaitAccount:
    """Wait account of one queue."""

    def __init__(self) -> None:
        self._blocked_s_by_tenant: dict[str, list[float]] = {}
        self._waiting_by_tenant: dict[str, int] = {}
        self.weight = 0.0
        """Sum of the weights of all waiting tenants."""
        self._cold_start_s = 0.0
        self._since_s = 0.0
        self._blocked_head: tuple[str, WaitCause] | None = None

    def __len__(self) -> int:
        """Number of waiting tenants."""
        return len(self._waiting_by_tenant)

    def set_blocked_head(self, now_s: float, blocked: tuple[str, WaitCause] | None) -> None:
        """Sets the blocked head's tenant and wait cause from now on; None: not blocked."""
        self._accrue(now_s)
        self._blocked_head = blocked

    def has_waiting(self, tenant: str) -> bool:
        """Whether a tenant has a waiting request."""
        return tenant in self._waiting_by_tenant

    def join(self, tenant: FlowLevel, now_s: float) -> "WaitMark":
        """Starts the wait of a request, and returns its mark."""
        self._accrue(now_s)
        if tenant.id not in self._waiting_by_tenant:
            self._waiting_by_tenant[tenant.id] = 0
            self._blocked_s_by_tenant[tenant.id] = [0.0, 0.0]
            self.weight += tenant.weight
        self._waiting_by_tenant[tenant.id] += 1
        return WaitMark(tenant, now_s, (*self._blocked_s_by_tenant[tenant.id], self._cold_start_s))

    def leave(self, waited: "WaitMark", now_s: float) -> dict[str, float]:
        """Ends a wait, and returns its milliseconds by cause."""
        causes = self._causes(waited, now_s)
        tenant = waited.tenant
        self._waiting_by_tenant[tenant.id] -= 1
        if not self._waiting_by_tenant[tenant.id]:
            del self._waiting_by_tenant[tenant.id], self._blocked_s_by_tenant[tenant.id]
            self.weight = self.weight - tenant.weight if self._waiting_by_tenant else 0.0
        return causes

    def _causes(self, waited: "WaitMark", now_s: float) -> dict[str, float]:
        """Returns the milliseconds of a wait until now, by cause."""
        self._accrue(now_s)
        ends = (*self._blocked_s_by_tenant[waited.tenant.id], self._cold_start_s)
        causes: dict[str, float] = {}
        rest_s = now_s - waited.since_s
        for cause, start, end in zip(_BLOCKING_CAUSES, waited.blocked_s, ends, strict=True):
            if end > start:
                causes[cause.value] = (end - start) * 1e3
                rest_s -= end - start
        if rest_s > 1e-9:
            causes[WaitCause.TENANT_SHARE.value] = rest_s * 1e3
        return causes

    def _accrue(self, now_s: float) -> None:
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self._blocked_head is None or passed_s <= 0:
            return
        tenant, cause = self._blocked_head
        if cause is WaitCause.COLD_START:
            self._cold_start_s += passed_s
        elif tenant in self._blocked_s_by_tenant:
            self._blocked_s_by_tenant[tenant][_BLOCKING_CAUSES.index(cause)] += passed_s


class WaitMark:
    """Values of the account at the start of one wait."""

    __slots__ = ("blocked_s", "since_s", "tenant")

    def __init__(self, tenant: FlowLevel, since_s: float, blocked_s: tuple[float, ...]) -> None:
        self.tenant = tenant
        self.since_s = since_s
        self.blocked_s = blocked_s
