"""Whatever is called, and however long loads take: within the budget, no thrashing, nobody starves."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.policy.load_eta import ready_in_s
from maitred.fleet.policy.model_residency import ResidencyPhase
from tests.support.model_machine import TICK_S, UNLOAD_S, machine

MODELS = 4
calls = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, MODELS - 1), st.sampled_from([0.1, 1.0, 4.0])), min_size=1, max_size=60
)
times = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=MODELS, max_size=MODELS)
memories = st.lists(st.integers(1, 6), min_size=MODELS, max_size=MODELS)


@st.composite
def machines(draw, pins=True):
    takes = draw(memories)
    pinned = {"a"} if pins and draw(st.booleans()) else set()
    least = max(takes[1:]) + takes[0] if pinned else max(takes)
    return machine(
        takes,
        draw(st.integers(least, least + 6)),
        loads_s=draw(times),
        turn_loads=draw(st.sampled_from([0.0, 1.0, 4.0])),
        pinned=pinned,
        keep_alive_s=draw(st.sampled_from([None, 5.0])),
        guess_s=draw(st.sampled_from([0.2, 2.0])),
    )


def play(one, plan):
    for ticks, model, runs_s in plan:
        for _ in range(ticks):
            one.tick()
        one.call(chr(97 + model), runs_s)


@given(machines(), calls)
def test_memory_stays_within_the_budget_and_everything_is_served_in_bounded_time(one, plan):
    play(one, plan)  # the machine itself checks the budget after every decision
    longest_s = max(call.runs_s for call in one.calls)
    load_s = max(*one.loads_s.values(), 2.0)  # a guess may be longer than any load
    turn_s = max(4.0, 1.0) * load_s
    round_s = turn_s + longest_s + UNLOAD_S + load_s + 4 * TICK_S
    one.until(one.now_s + 2 * MODELS * round_s)
    assert all(call.began_s is not None for call in one.calls)
    # Each of the others can be before it once, and it may just have been ordered to unload.
    assert max(call.waited_s for call in one.calls) <= (MODELS + 1) * round_s


@given(machines(), calls)
def test_a_model_with_work_goes_only_after_its_turn_and_never_with_answers_unfinished(one, plan):
    play(one, plan)
    one.until(one.now_s + 60)
    for name, _, turn_over, idle_s, demand in one.left:
        assert demand.running == 0
        assert not one.residents[name].is_pinned
        if demand.waiting:
            assert turn_over
        if not turn_over:
            assert idle_s >= min(one.loads_s[name], 0.2) / 2


@given(machines(), calls)
def test_a_pinned_model_comes_first_and_stays(one, plan):
    play(one, plan)
    one.until(one.now_s + 30)
    pinned = [name for name, resident in one.residents.models.items() if resident.is_pinned]
    assert one.loads[: len(pinned)] == pinned
    assert all(one.residents[name].phase is ResidencyPhase.LOADED for name in pinned)
    assert not {name for name, *_ in one.left} & set(pinned)


@given(machines(), calls)
def test_a_second_decision_in_the_same_moment_orders_nothing_more(one, plan):
    play(one, plan)
    one.decide()
    loads, left, closed = list(one.loads), list(one.left), one.closed
    one.decide()
    assert (one.loads, one.left, one.closed) == (loads, left, closed)


@given(machines(pins=False), calls)
def test_predictions_are_finite_and_zero_only_for_what_is_there(one, plan):
    play(one, plan)
    for name, resident in one.residents.models.items():
        in_s = ready_in_s(one.residents, name, one.now_s, one.demands())
        assert 0 <= in_s < 1e4
        if resident.phase is not ResidencyPhase.LOADED:
            assert in_s > 0


@given(
    st.integers(2, 4),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.lists(st.integers(0, 3), min_size=4, max_size=30),
)
def test_under_alternating_load_at_most_a_fixed_part_of_the_time_goes_into_loading(models, turn_loads, load_s, pattern):
    places = models - 1
    one = machine([1] * models, places, loads_s=load_s, turn_loads=turn_loads)
    for _ in range(12):
        for model in pattern:
            one.call(chr(97 + model % models), 0.1)
            one.tick()
    elapsed_s = one.now_s - 100.0
    busy_turn_s = load_s * (1 + turn_loads)
    early = sum(not turn_over for _, _, turn_over, _, _ in one.left)
    assert len(one.loads) - early <= places * (elapsed_s / busy_turn_s + 1)
