"""Whatever the limits, the prices and the requests: no hard budget is overspent, and in the end nothing is held.

Requests run as tasks whose steps interleave as hypothesis likes. Each can be cancelled at any step, also while its
reservation or its settlement is on the way to the counters or back; each can fail, or stop short of what it may use;
and the counters refuse to settle now and then. Hard budgets are looked at after every step.
"""

import asyncio
from collections import Counter, defaultdict

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.context import Outcome
from maitred.core.counters import CounterKind, LimitClaim
from maitred.core.errors import CachedAnswerTooLong, ContextLengthExceeded, Refused, StoreUnavailable
from maitred.core.limits import Limit, LimitKind
from maitred.core.request import Usage
from maitred.core.tenancy import Principal
from tests.support.admission_services import AdmissionSetup

PRINCIPALS = [
    Principal(key="a", tenants=("team", "acme"), scopes=frozenset()),
    Principal(key="b", tenants=("acme",), scopes=frozenset()),
    Principal(key="c", tenants=("other",), scopes=frozenset()),
]
SUBJECTS = ["*", "key:*", "tenant:*", "key:a", "tenant:acme", "tenant:team"]
MODELS = ["tiny", "large"]


class Failed(Exception):
    """The replica."""


class Plan(msgspec.Struct):
    """One request: what it asks, how it goes, and how long each of its steps takes."""

    principal: Principal
    model: str
    prompt_tokens: int
    max_tokens: int | None
    choices: int
    share: float
    """Of what it may generate."""
    ending: str
    pauses: list[int]
    cancelled_at: int | None
    """Tick at which its caller leaves."""
    cached_tokens: int | None
    """Output tokens of each choice of the answer that a cache has; None: it has none."""


class SlowSetup(AdmissionSetup):
    """A setup whose counters are slow, and fail to settle now and then."""

    def __init__(self, *limits, failures, **others):
        super().__init__(*limits, **others)
        self.produced = {}  # by the lease: the usage of the answer, whether it is computed or comes from a cache
        self.failures = iter(failures)
        self.reserve, self.settle = self.counters.reserve, self.counters.settle
        self.counters.reserve, self.counters.settle = self.slow_reserve, self.slow_settle

    async def slow_reserve(self, reservation):
        await asyncio.sleep(0)
        answer = await self.reserve(reservation)
        await asyncio.sleep(0)
        return answer

    async def slow_settle(self, lease, amounts):
        await asyncio.sleep(0)
        fails = next(self.failures, "")
        if fails == "before":
            raise StoreUnavailable
        await self.settle(lease, amounts)
        await asyncio.sleep(0)
        if fails == "after":
            raise StoreUnavailable

    async def serve(self, plan, admitted):
        """One request, from admission to its end."""
        pauses = iter(plan.pauses)

        async def step():
            for _ in range(next(pauses, 0)):
                await asyncio.sleep(0)

        await step()
        request = self.request(
            plan.prompt_tokens, plan.max_tokens, principal=plan.principal, model=plan.model, choices=plan.choices
        )
        hit = msgspec.structs.replace(request, cache="exact", cached_tokens=plan.cached_tokens or 0)
        try:
            grant = await self.admission.admit(request if plan.cached_tokens is None else hit)
        except CachedAnswerTooLong:
            grant = await self.admission.admit(request)
        async with grant:
            admitted.append(grant.lease)
            assert plan.max_tokens is None or grant.max_tokens <= plan.max_tokens
            assert grant.max_tokens >= 1 or plan.cached_tokens == 0
            await step()
            usage = Usage(
                plan.prompt_tokens, int(plan.share * plan.choices * grant.max_tokens), plan.prompt_tokens // 2
            )
            grant.record_usage(usage)
            self.produced[grant.lease] = usage
            await step()
            if plan.ending == "fails":
                raise Failed
            if plan.ending == "settles":
                await grant.settle(usage, Outcome.FINISHED)
                await step()


limits = st.builds(
    lambda id_, subject, kind, value, model, burst, hard: Limit(
        id=str(id_),
        subject=subject,
        kind=kind,
        value=value * 1000 if kind.spend else value,
        model=model,
        burst=burst if kind.per_minute else None,
        hard=hard,
    ),
    st.integers(),
    st.sampled_from(SUBJECTS),
    st.sampled_from(LimitKind),
    st.integers(1, 300),
    st.sampled_from([None, *MODELS]),
    st.none() | st.integers(1, 300),
    st.booleans(),
)
plans = st.builds(
    Plan,
    principal=st.sampled_from(PRINCIPALS),
    model=st.sampled_from(MODELS),
    prompt_tokens=st.integers(1, 60),
    max_tokens=st.none() | st.integers(1, 100),
    choices=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    ending=st.sampled_from(["settles", "settles", "leaves", "fails"]),
    pauses=st.lists(st.integers(0, 3), max_size=4),
    cancelled_at=st.none() | st.none() | st.integers(0, 15),
    cached_tokens=st.none() | st.none() | st.integers(0, 100),
)
usd = st.sampled_from([0.0, 0.001, 0.333, 1.0, 7.0])
failures = st.lists(st.sampled_from(["", "", "before", "after"]), max_size=12)


def hard_budgets(setup):
    """Counter, without its window -> the most that may be spent."""
    most = {}
    for limit in setup.admission._limits.limits:
        if limit.kind.spend and limit.hard:
            for subject in {subject for principal in PRINCIPALS for subject in principal.subjects}:
                if limit.subject in (subject, subject.partition(":")[0] + ":*"):
                    name = f"{limit.kind}|{subject}|{limit.model or '*'}"
                    most[name] = min(limit.value, most.get(name, limit.value))
    return most


async def states(setup, names, kind=CounterKind.BUDGET):
    return await setup.counters.read([LimitClaim(name, kind, 10**15, 0, refill_per_s=1.0) for name in names])


async def play(setup, plans):
    """Runs all plans to their ends, tick by tick."""
    most, admitted, seen = hard_budgets(setup), [], set()
    whole, inner = {}, setup.reserve

    async def noting(reservation):
        seen.update((claim.counter, claim.kind) for claim in reservation.claims)
        whole.update({claim.counter: claim.capacity for claim in reservation.claims})
        return await inner(reservation)

    setup.reserve = noting
    tasks = [asyncio.create_task(setup.serve(plan, admitted)) for plan in plans]
    tick = 0
    while not all(task.done() for task in tasks):
        for plan, task in zip(plans, tasks, strict=True):
            if plan.cancelled_at == tick:
                task.cancel()
        await asyncio.sleep(0)
        tick += 1
        names = sorted(name for name, kind in seen if kind is CounterKind.BUDGET)
        for name, reading in zip(names, await states(setup, names), strict=True):
            assert reading.used + reading.reserved <= most.get(name.rpartition("|")[0], 10**15)
        await setup.admission.leases.renew()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        assert ended is None or isinstance(ended, Refused | ContextLengthExceeded | Failed | asyncio.CancelledError)
    while setup.admission.leases.late:
        await setup.admission.leases.settle_late()
    return most, admitted, seen, whole


@settings(max_examples=75, deadline=None)
@given(
    st.lists(limits, max_size=8),
    st.lists(plans, min_size=1, max_size=10),
    st.tuples(usd, usd, usd, usd),
    failures,
    st.none() | st.integers(1, 50),
    st.integers(1, 20),
    st.sampled_from(["none", "requests", "all"]),
)
def test_nothing_is_overspent_and_nothing_stays_held(limits, plans, price, failures, default, least, counted):
    prices = dict(zip(("prompt", "cached", "output", "hit"), price, strict=True))
    setup = SlowSetup(
        *limits,
        failures=failures,
        price=prices,
        default_output_tokens=default,
        least_output_tokens=least,
        cached_answers=counted,
    )
    with asyncio.Runner() as runner:
        most, admitted, seen, whole = runner.run(play(setup, plans))
        budgets = sorted(name for name, kind in seen if kind is CounterKind.BUDGET)
        pools = sorted(name for name, kind in seen if kind is CounterKind.POOL)
        buckets = sorted(name for name, kind in seen if kind is CounterKind.BUCKET)
        spent = dict(zip(budgets, runner.run(states(setup, budgets)), strict=True))
        held = runner.run(states(setup, pools, CounterKind.POOL))
        rates = runner.run(states(setup, buckets, CounterKind.BUCKET))

    # Nothing stays held.
    assert setup.admission.leases.active == 0
    assert all(reading.reserved == 0 for reading in spent.values())
    assert all(reading.used == 0 for reading in held)
    assert setup.counters.size().leases == 0

    # Everybody who was let in is in the ledger once, under the id of the lease; nobody else is.
    ids = Counter(event.id for event in setup.ledger.events)
    assert set(ids) == {event.id for event in setup.ledger.begun} >= set(admitted)
    assert set(ids.values()) <= {1}

    # Each answer is a computed one or a saved one: together they are the tokens of all answers.
    for event in setup.ledger.events:
        answer = setup.produced.get(event.id, Usage(0, 0))
        counted_tokens = event.prompt_tokens, event.output_tokens, event.cached_tokens
        if event.cache:
            assert counted_tokens == (0, 0, 0)
            assert event.saved_tokens in (0, answer.total_tokens)
        else:
            assert event.saved_tokens == 0
            answered = answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens
            assert counted_tokens in (answered, (0, 0, 0))

    # What was charged is what the ledger says, within every hard budget.
    charged = defaultdict(int)
    for event in setup.ledger.events:
        for name, amount in event.charges.items():
            assert amount == event.cost_nusd
            charged[name] += amount
    assert {name: reading.used for name, reading in spent.items()} == {name: charged[name] for name in budgets}
    for name, amount in charged.items():
        assert amount <= most.get(name.rpartition("|")[0], 10**15)

    # Rates kept what was used, no more and no less; the clock stood still.
    for name, reading in zip(buckets, rates, strict=True):
        assert reading.used <= whole[name]
        assert reading.used == sum(_taken(name, event, counted) for event in setup.ledger.events)


def _taken(name, event, counted):
    """What an event took from a bucket."""
    if event.cache and counted != "all" and (counted == "none" or not name.startswith("requests")):
        return 0
    kind, subject, model = name.split("|")
    subjects = next(principal.subjects for principal in PRINCIPALS if principal.key == event.key)
    if subject not in subjects or model not in ("*", event.model):
        return 0
    if event.cache:
        return event.taken.get(name, 0)
    return {
        "requests_per_minute": int(event.outcome is not Outcome.REFUSED),
        "tokens_per_minute": event.prompt_tokens + event.output_tokens,
        "input_tokens_per_minute": event.prompt_tokens,
        "output_tokens_per_minute": event.output_tokens,
    }[kind]
