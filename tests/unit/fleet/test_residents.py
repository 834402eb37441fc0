from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.policy.load_eta import ready_in_s
from maitred.fleet.policy.model_residency import MEASURED_FOR_S, ModelResidency, ResidencyPhase
from tests.support.model_machine import TICK_S, UNLOAD_S, WAKE_S, machine


def test_what_fits_is_loaded_on_demand_and_stays():
    one = machine([1, 1], 2)
    one.until(110.0)
    assert one.loads == []
    one.call("a")
    one.call("b")
    one.until(300.0)
    assert one.loads == ["a", "b"]
    assert one.left == []


def test_the_least_recently_used_goes_first():
    one = machine([1, 1, 1], 2)
    for name in "ab":
        one.call(name)
        one.until(one.now_s + 10)
    one.call("a")
    one.until(one.now_s + 10)
    one.call("c")
    one.until(one.now_s + 5)
    assert [name for name, *_ in one.left] == ["b"]
    assert one.residents["c"].phase is ResidencyPhase.LOADED


def test_an_idle_model_goes_at_once_if_it_is_not_expected_back_before_it_could_be_loaded_again():
    one = machine([1, 1], 1)
    one.call("a")
    one.until(one.now_s + 3)
    one.until(one.now_s + 3)
    call = one.call("b")
    one.until(one.now_s + 4)
    assert call.waited_s <= 2.0 + UNLOAD_S + 3 * TICK_S


def test_a_model_with_work_keeps_its_turn_and_others_are_served_together_afterwards():
    one = machine([1, 1], 1, turn_loads=4.0)
    calls = []
    for number in range(200):
        calls.append(one.call("ab"[number % 2]))
        one.tick()
    one.until(one.now_s + 30)
    assert all(call.began_s is not None for call in calls)
    assert len(one.loads) <= (one.now_s - 100.0) / (2.0 * 5) + 1  # one request at a time would be 200 loads


def test_a_model_whose_turn_is_over_gets_nothing_new_and_ends_what_it_has():
    one = machine([1, 1], 1, turn_loads=1.0)
    one.call("a", 30.0)
    one.until(104.0)
    other = one.call("b")
    one.until(107.0)
    late = one.call("a")
    one.until(120.0)
    assert one.closed == {"a"}
    assert late.began_s is None
    one.until(160.0)
    name, left_s, turn_over, _, demand = one.left[0]
    assert (name, turn_over, demand.running) == ("a", True, 0)
    assert left_s >= 132.0
    assert other.began_s < late.began_s


def test_who_leaves_while_another_drains_lets_it_open_again():
    one = machine([1, 1], 1, turn_loads=1.0)
    one.call("a", 30.0)
    one.until(104.0)
    one.call("b")
    one.until(107.0)
    assert one.closed == {"a"}
    one.waiting["b"].clear()
    one.tick()
    assert one.closed == frozenset()


def test_enough_of_the_others_go_or_none():
    one = machine([2, 2, 4], 4, turn_loads=4.0)
    one.call("a")
    one.until(110.0)
    one.call("b", 5.0)
    one.until(113.0)
    one.call("c")
    one.until(115.0)
    assert one.left == []  # a could go, but b may stay, and a alone is not enough
    one.until(140.0)
    assert {name for name, *_ in one.left} == {"a", "b"}
    assert one.residents["c"].phase is ResidencyPhase.LOADED


def test_no_model_overtakes_one_that_waits_for_memory():
    one = machine([2, 4, 2], 4, turn_loads=4.0)
    one.call("a", 60.0)
    one.until(105.0)
    big = one.call("b")
    one.until(106.0)
    small = one.call("c")
    one.until(200.0)
    assert big.began_s < small.began_s


def test_the_memory_of_an_idle_model_is_given_back_after_a_while():
    one = machine([1, 1], 2, pinned={"a"}, keep_alive_s=20.0)
    one.call("b")
    one.until(115.0)
    assert one.left == []
    one.until(140.0)
    assert [name for name, *_ in one.left] == ["b"]
    assert one.residents["a"].phase is ResidencyPhase.LOADED


def test_a_model_larger_than_estimated_causes_an_unload_at_once():
    one = machine([1, 1], 2)
    for name in "ab":
        one.call(name)
        one.until(one.now_s + 4)
    one.residents["b"].on_measured(2, one.now_s)
    desired = one.residents.decide(one.now_s, one.demands())
    assert {name: numbers.serving for name, numbers in desired.items()} == {"a": 0, "b": 1}
    assert one.residents.used_bytes == 3  # until the process is gone
    one.residents.on_unloaded("a", one.now_s)
    assert one.residents.used_bytes == 2


def test_a_load_that_failed_is_not_tried_again_before_its_time_and_stops_nobody():
    one = machine([1, 1], 2)
    one.call("a")
    one.decide()
    assert one.loads == ["a"]
    del one.ends_s["a"]
    one.residents.on_load_failed("a", one.now_s, 20.0)
    other = one.call("b")
    one.until(115.0)
    assert one.loads == ["a", "b"]
    assert other.began_s is not None
    one.until(125.0)
    assert one.loads == ["a", "b", "a"]


def test_who_could_not_wait_finds_the_model_when_it_comes_back():
    one = machine([1, 1], 2)
    one.residents.mark_wanted("a", one.now_s)
    one.until(104.0)
    assert one.residents["a"].phase is ResidencyPhase.LOADED
    one.until(110.0)
    assert one.loads == ["a"]


def test_what_one_load_took_is_believed_of_those_that_were_never_loaded():
    one = machine([1, 1], 2, loads_s=6.0, guess_s=2.0)
    assert one.call("a").predicted_s == 2.0
    one.until(110.0)
    assert abs(one.call("b").predicted_s - 6.0) <= TICK_S


def test_predictions_come_true():
    one = machine([1, 1, 1], 2, turn_loads=2.0)
    for name in "ab":
        one.call(name)
    one.until(110.0)
    calls = []
    for number in range(400):
        if number % 3 == 0:
            calls.append(one.call("abc"[number // 3 % 3]))
        one.tick()
    one.until(one.now_s + 30)
    waits = [(call.predicted_s, call.waited_s) for call in calls if call.predicted_s > 0]
    assert len(waits) > 20
    errors = sorted(abs(predicted_s - waited_s) for predicted_s, waited_s in waits)
    assert errors[len(errors) // 2] <= 1.0
    assert errors[len(errors) * 9 // 10] <= 3.0


def test_a_load_that_takes_longer_than_usual_is_never_predicted_to_be_over():
    one = machine([1], 1, loads_s=10.0, guess_s=2.0)
    one.call("a")
    one.until(108.0)
    assert ready_in_s(one.residents, "a", one.now_s, one.demands()) > 0


def test_a_sleeping_model_leaves_its_memory_to_others_and_is_back_sooner():
    one = machine([4, 4], 5)
    one.asleep_bytes = 1
    one.call("a", 6.0)
    one.until(104.0)
    one.residents.order_sleep("a")
    one.tick()
    assert one.closed == {"a"}, "its answer ends first"
    one.until(112.0)
    assert (one.residents["a"].phase, one.residents["a"].is_asleep, one.residents.used_bytes) == (
        ResidencyPhase.UNLOADED,
        True,
        1,
    )
    one.call("b")
    one.until(120.0)
    assert one.residents.used_bytes == 5
    one.residents.order_sleep("b")
    one.until(125.0)
    call = one.call("a")
    assert call.predicted_s <= WAKE_S + TICK_S
    one.until(130.0)
    assert call.waited_s <= WAKE_S + 2 * TICK_S
    assert not one.residents["a"].is_asleep


def test_sleeping_models_are_ended_where_memory_for_processes_is_short():
    one = machine([4, 4], 4)
    one.asleep_bytes = 1
    one.call("a")
    one.until(105.0)
    one.residents.order_sleep("a")
    one.until(110.0)
    one.call("b")
    one.until(120.0)
    assert [name for name, *_ in one.left] == ["a"]
    assert (one.residents["b"].phase, one.residents.used_bytes) == (ResidencyPhase.LOADED, 4)


def test_one_that_sleeps_can_be_unloaded_and_its_process_is_gone():
    one = machine([4], 4)
    one.asleep_bytes = 1
    one.call("a")
    one.until(105.0)
    one.residents.order_sleep("a")
    one.until(110.0)
    one.residents.order_unload("a", hold=True)
    one.until(115.0)
    assert (one.residents.used_bytes, one.residents["a"].is_asleep) == (0, False)


def test_a_model_that_was_found_too_large_keeps_no_other_from_its_load():
    one = machine([1, 1], 2)
    one.residents["a"].on_measured(3, one.now_s)
    one.call("a")
    one.residents.mark_wanted("a", one.now_s)
    one.tick()
    assert ready_in_s(one.residents, "b", one.now_s, one.demands()) <= 2.0
    one.call("b")
    one.until(110.0)
    assert one.loads == ["b"]
    assert not one.residents["a"].is_wanted


def test_a_measured_memory_counts_for_a_while_and_falls_to_what_is_measured_then():
    one = machine([1, 1], 3)
    one.call("a")
    one.until(110.0)
    for measured in (2, 3, 2):
        one.residents["a"].on_measured(measured, one.now_s)
        one.tick()
    assert one.residents.used_bytes == 3
    peak_s = one.now_s
    one.until(peak_s + MEASURED_FOR_S - 10.0)
    one.residents["a"].on_measured(2, one.now_s)
    assert one.residents.used_bytes == 3
    one.until(peak_s + MEASURED_FOR_S + 10.0)
    assert one.residents.used_bytes == 2
    one.until(peak_s + 2 * MEASURED_FOR_S + 10.0)
    assert one.residents.used_bytes == 1  # as estimated: its KV cache may fill


def test_an_unloaded_model_that_was_found_too_large_is_tried_again_after_a_while():
    one = machine([1, 1], 2)
    one.residents["a"].on_measured(3, one.now_s)
    found_s = one.now_s
    one.call("a")
    one.until(found_s + MEASURED_FOR_S - 10.0)
    assert one.loads == []
    one.call("a")
    one.until(found_s + MEASURED_FOR_S + 10.0)
    assert one.loads == ["a"]


@given(
    st.lists(st.tuples(st.floats(0.0, 400.0), st.integers(0, 9)), max_size=30),
    st.integers(0, 5),
    st.floats(0.0, 2 * MEASURED_FOR_S),
)
def test_what_counts_is_the_most_of_the_last_while(measured, estimated, later_s):
    model, now_s, known = ModelResidency("a", estimated, load_s=1.0), 0.0, []
    for passed_s, amount in measured:
        now_s += passed_s
        model.on_measured(amount, now_s)
        known.append((now_s, amount))
    now_s += later_s
    model.forget_measured(now_s)
    recent = [amount for at_s, amount in known if now_s - at_s <= MEASURED_FOR_S]
    assert model.memory_bytes == max([estimated, *recent])


def test_a_pinned_model_is_loaded_as_soon_as_it_fits():
    one = machine([1, 1], 2)
    one.residents.pin("b", one.now_s)
    one.until(110.0)
    one.residents.pin("a", one.now_s)
    one.residents["a"].on_measured(2, one.now_s)
    one.until(120.0)
    assert one.loads == ["b"]
    one.residents.unpin("b")
    one.until(130.0)
    assert one.loads == ["b", "a"]
