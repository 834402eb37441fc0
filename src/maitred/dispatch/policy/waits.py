"""Why requests wait, in one account for all of them.

A request that waits in a line of ten thousand costs nothing while it waits. Each tenant has an account of the time
during which the head of the line was its own and lacked a place, by cause; a request reads it when it joins and when it
is released. The difference is what it waited for places; the rest of its wait others were owed service first.
"""

from maitred.core.flow import FlowLevel
from maitred.core.request import WaitCause

_BLOCKED = (WaitCause.SLOTS, WaitCause.KV_FULL, WaitCause.COLD_START)


class WaitAccount:
    """The account of one line."""

    def __init__(self) -> None:
        self._tenants: dict[str, list[float]] = {}
        self._members: dict[str, int] = {}
        self.weight = 0.0
        """Of all tenants that wait."""
        self._cold_s = 0.0
        self._since_s = 0.0
        self._state: tuple[str, WaitCause] | None = None

    def __len__(self) -> int:
        """Number of tenants that wait."""
        return len(self._members)

    def advance(self, now_s: float, blocked: tuple[str, WaitCause] | None) -> None:
        """From now on the head of the line is a request of this tenant and lacks this; None: nothing is blocked."""
        self._accrue(now_s)
        self._state = blocked

    def waits(self, tenant: str) -> bool:
        """Whether it has a request here."""
        return tenant in self._members

    def join(self, tenant: FlowLevel, now_s: float) -> "WaitMark":
        """A request begins to wait."""
        self._accrue(now_s)
        if tenant.id not in self._members:
            self._members[tenant.id] = 0
            self._tenants[tenant.id] = [0.0, 0.0]
            self.weight += tenant.weight
        self._members[tenant.id] += 1
        return WaitMark(tenant, now_s, (*self._tenants[tenant.id], self._cold_s))

    def leave(self, waited: "WaitMark", now_s: float) -> dict[str, float]:
        """Ends a wait, and returns its milliseconds by cause."""
        causes = self.so_far(waited, now_s)
        tenant = waited.tenant
        self._members[tenant.id] -= 1
        if not self._members[tenant.id]:
            del self._members[tenant.id], self._tenants[tenant.id]
            self.weight = self.weight - tenant.weight if self._members else 0.0
        return causes

    def so_far(self, waited: "WaitMark", now_s: float) -> dict[str, float]:
        """Milliseconds by cause until now."""
        self._accrue(now_s)
        ends = (*self._tenants[waited.tenant.id], self._cold_s)
        causes: dict[str, float] = {}
        rest_s = now_s - waited.since_s
        for cause, start, end in zip(_BLOCKED, waited.at, ends, strict=True):
            if end > start:
                causes[cause.value] = (end - start) * 1e3
                rest_s -= end - start
        if rest_s > 1e-9:
            causes[WaitCause.TENANT_SHARE.value] = rest_s * 1e3
        return causes

    def _accrue(self, now_s: float) -> None:
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self._state is None or passed_s <= 0:
            return
        tenant, cause = self._state
        if cause is WaitCause.COLD_START:
            self._cold_s += passed_s
        elif tenant in self._tenants:
            self._tenants[tenant][_BLOCKED.index(cause)] += passed_s


class WaitMark:
    """State of the account when a request joined."""

    __slots__ = ("at", "since_s", "tenant")

    def __init__(self, tenant: FlowLevel, since_s: float, at: tuple[float, ...]) -> None:
        self.tenant = tenant
        self.since_s = since_s
        self.at = at
