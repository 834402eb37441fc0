"""Who leaves for another model, and until when somebody has to."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.dispatch.policy.overflow import OverflowCandidate, OverflowState, select_overflow, surplus

candidates = st.lists(
    st.builds(
        lambda prompt, share, service, arrived: OverflowCandidate(prompt, int(prompt * share), service, arrived),
        st.integers(1, 4000),
        st.floats(0, 1),
        st.floats(0.1, 100.0),
        st.floats(0, 1000),
    ),
    max_size=20,
)


@given(candidates, st.floats(0, 500))
def test_as_few_leave_as_are_enough_and_those_with_least_reuse(waiting, service):
    gone = select_overflow(waiting, service)
    assert len(set(gone)) == len(gone)
    taken = [waiting[number].service for number in gone]
    if not gone:
        assert sum(candidate.service for candidate in waiting) <= service or not waiting
        return
    assert sum(taken) >= service
    assert len(gone) == 1 or sum(taken[:-1]) < service, "the last of them was needed"
    staying = [candidate for number, candidate in enumerate(waiting) if number not in gone]
    most = max((waiting[number] for number in gone), key=lambda each: (each.reuse, -each.arrived_s))
    for candidate in staying:
        assert (candidate.reuse, -candidate.arrived_s) >= (most.reuse, -most.arrived_s)


@given(candidates, st.floats(0, 500), st.floats(0, 500))
def test_more_pressure_sends_no_other_ones_but_more_of_them(waiting, less, more):
    few, many = select_overflow(waiting, min(less, more)), select_overflow(waiting, max(less, more))
    assert not many or few == many[: len(few)]


@given(st.floats(0, 1e6), st.floats(0, 1e3), st.floats(-1e3, 1e3))
def test_no_more_is_too_much_than_there_is(service, wait_s, late_s):
    assert 0 <= surplus(service, wait_s, late_s) <= service
    assert surplus(service, wait_s, wait_s / 2) <= service / 2 + 1e-6


@given(
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 3)), max_size=40),
    st.floats(0.1, 1.0),
    st.floats(0, 10),
)
def test_pressure_begins_with_a_miss_and_ends_after_a_calm(seen, back_below, back_after_s):
    pressure, now_s, calm_s, was_on = OverflowState(back_below, back_after_s), 0.0, None, False
    for share, passed_s in seen:
        now_s += passed_s
        pressure.observe(share, now_s)
        if share > back_below:
            calm_s = None
        elif calm_s is None:
            calm_s = now_s
        if pressure.is_on and not was_on:
            assert share > 1.0
        if was_on and not pressure.is_on:
            assert calm_s is not None
            assert now_s - calm_s >= back_after_s
        if was_on and share > back_below:
            assert pressure.is_on
        assert pressure.allowed == (back_below if pressure.is_on else 1.0)
        was_on = pressure.is_on
