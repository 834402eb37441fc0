"""Property: whether the shares of the slots in flight are checked or skipped changes no decision."""

from collections import Counter
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from maitred.api.in_flight import InFlightLimiter
from maitred.core.errors import Saturated
from maitred.core.flow import SHARE_OF_FREE
from maitred.core.tenancy import ANONYMOUS, Principal, Scope


def member(key, *tenants):
    return Principal(key=key, tenants=tenants, scopes=frozenset({Scope.INFERENCE}))


CALLERS = [
    None,
    ANONYMOUS,
    member("x", "acme"),
    member("y", "acme"),
    member("x", "red", "acme"),
    member("x", "deep", "red", "acme"),
    member("y", "deep", "red", "acme"),
    member("acme", "acme"),  # a key that is named as its organisation
    member("x", "blue"),
    member("anonymous", "anonymous"),  # an organisation that is named as the callers without one
]


def may_enter(caller, inside, capacity):
    """Whether a caller gets a slot, from nothing but who is inside, at every level."""
    free = capacity - len(inside)
    if free <= 0:
        return False
    if caller is None or caller is ANONYMOUS:
        return True
    levels = [("tenant", one) for one in reversed(caller.tenants)] + [("key", caller.tenants[0], caller.key)]
    for level in levels:
        held = 0
        for one in inside:
            if one is not None:
                mine = [("tenant", tenant) for tenant in one.tenants] + [("key", one.tenants[0], one.key)]
                held += level in mine
        free = SHARE_OF_FREE * free - held
        if free <= 0:
            return False
    return True


steps = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.sampled_from(CALLERS), st.integers(1, 12)),
        st.tuples(st.just("force"), st.sampled_from(CALLERS), st.integers(1, 3)),
        st.tuples(st.just("leave"), st.integers(0, 99), st.integers(1, 12)),
        st.tuples(st.just("resize"), st.integers(1, 60), st.just(1)),
    ),
    max_size=40,
)


@given(steps, st.integers(1, 60))
async def test_shares_are_decided_as_by_a_look_at_every_level_and_counts_return_to_zero(steps, capacity):
    limiter, slots = InFlightLimiter(capacity), []
    for step, what, times in steps:
        for _ in range(times):
            if step == "resize":
                capacity = what
                limiter.reconfigure(capacity)
            elif step == "leave":
                if slots:
                    slots.pop(what % len(slots))[1].__exit__(None, None, None)
            elif step == "force":
                slots.append((what, limiter.acquire(what, even_if_full=True).__enter__()))
            else:
                expected = may_enter(what, [caller for caller, _ in slots], capacity)
                with suppress(Saturated):
                    slots.append((what, limiter.acquire(what).__enter__()))
                    assert expected, "a slot was given where the share was taken"
                    expected = None
                assert not expected, "a slot was refused within the share"
        counts = Counter(owner for caller, _ in slots if caller is not None for owner in caller.owners)
        assert limiter._held == counts
        assert limiter.count == len(slots)
    for _, slot in slots:
        slot.__exit__(None, None, None)
    assert not limiter._held
    assert not limiter.count
