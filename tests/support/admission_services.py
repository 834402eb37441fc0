"""What the tests of admission stand on: limits in a dictionary, a ledger in a list, a clock that stands still."""

from contextlib import asynccontextmanager

from maitred.admission.admission import Admission
from maitred.admission.config import AdmissionConfig, PriceConfig
from maitred.admission.request import AdmissionRequest
from maitred.core.errors import StoreUnavailable
from maitred.core.limits import Limit, LimitKind
from maitred.core.tenancy import Principal, Scope
from maitred.store.counters.memory import MemoryCounters

SATURDAY_S = 1_795_273_200.0
"""2026-11-21T15:00:00Z."""

ALICE = Principal(key="alice", tenants=("team", "acme"), scopes=frozenset({Scope.INFERENCE}))
BOB = Principal(key="bob", tenants=("team", "acme"), scopes=frozenset({Scope.INFERENCE}))


class StillClock:
    """Moves only when a test sets it."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic_s(self):
        return 1000.0 + self.now_s

    def wall_s(self):
        return SATURDAY_S + self.now_s


class Limits:
    """A limit book."""

    def __init__(self, *limits):
        self.limits, self.edition = limits, 0

    def limits_of(self, subject):
        return [limit for limit in self.limits if limit.subject == subject]


class PaperLedger:
    """Keeps events; refuses them while it is `away`."""

    def __init__(self):
        self.begun, self.events, self.away = [], [], False

    def begin(self, event):
        if self.away:
            raise StoreUnavailable
        self.begun.append(event)

    def record(self, event, response="", settle=None):
        if self.away:
            raise StoreUnavailable
        self.events.append(event)


class FlakyCounters(MemoryCounters):
    """Counters whose settlements and renewals can fail, or hang, for a while."""

    settles_immediately = False

    def __init__(self, clock, spent=None):
        super().__init__(clock, spent)
        self.trouble = None
        self.settled, self.renewed = [], []

    async def settle(self, lease, amounts):
        await self._trouble()
        self.settled.append((lease, dict(amounts)))
        await super().settle(lease, amounts)

    async def renew(self, leases, lease_s):
        await self._trouble()
        self.renewed.append((set(leases), lease_s))
        await super().renew(leases, lease_s)

    async def _trouble(self):
        if callable(self.trouble):
            await self.trouble()
        elif self.trouble is not None:
            raise self.trouble


def limit(subject, kind, value, **others):
    """A limit; its id is made of what it says."""
    return Limit(id=f"{subject}/{kind}/{value}", subject=subject, kind=LimitKind(kind), value=value, **others)


class AdmissionSetup:
    """An `Admission` with all that it needs."""

    def __init__(self, *limits, price=None, spent=None, **config):
        self.clock = StillClock()
        self.counters = FlakyCounters(self.clock, spent)
        self.ledger = PaperLedger()
        self.alarms = []
        self.admission = Admission(
            Limits(*limits),
            self.counters,
            self.ledger,
            AdmissionConfig(
                prices={"*": PriceConfig(**(price or {"prompt": 1.0, "cached": 0.1, "output": 2.0}))}, **config
            ),
            self.clock,
            jitter=lambda: 0.5,
            on_soft_budget=lambda passed, reading: self.alarms.append((passed.id, reading)),
        )

    def request(self, prompt_tokens=10, max_tokens=100, *, principal=ALICE, model="tiny", window_left=1000, **others):
        return AdmissionRequest(
            principal=principal,
            request_id="req-1",
            route="/v1/chat/completions",
            model=model,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            window_left=window_left,
            **others,
        )

    @asynccontextmanager
    async def admit(self, *sizes, **others):
        """A request that is let in, or not."""
        async with await self.admission.admit(self.request(*sizes, **others)) as grant:
            yield grant
