"""When a request is released, and when its first token comes."""

from heapq import heapreplace

import pytest
from msgspec.structs import replace

from maitred.core.flow import Flow, FlowLevel, ServiceWeights
from maitred.core.replica import LoadReport, StepTimes
from maitred.dispatch.forecasts import ArrivalRates
from maitred.dispatch.policy.credits import Cost
from maitred.dispatch.policy.prediction import QueueAhead, UnreportedPrompts, predict_prefill_s, predict_wait
from maitred.dispatch.policy.rate import ServiceRate, TypicalRequest, computed_rate, step_parts
from maitred.dispatch.policy.simulation import PredictedTurn, SimulatedTenant, simulate_dispatch
from maitred.dispatch.policy.turnover import steps_until_place

ONE = Cost(1, 5)


def queue(entries=0, free=(0, 100), **fields):
    known = {
        "service": entries * 100.0,
        "left": [[10.0, 20.0, 30.0, 40.0]],
        "seconds_until_turn": None,
        "service_per_place": 100.0,
        "blocks_per_place": 5.0,
        "blocks_held": 5.0,
        "steps_per_entry": 50.0,
        "per_s": 200.0,
        "steps_per_s": 10.0,
    }
    return QueueAhead(entries=entries, free=Cost(*free), **(known | fields))


def test_a_free_slot_means_no_wait():
    assert predict_wait(queue(free=(1, 5)), ONE).at_once
    assert predict_wait(queue(entries=2, free=(3, 15)), ONE).at_once
    assert not predict_wait(queue(entries=3, free=(3, 100)), ONE).at_once


def test_slots_come_free_in_the_order_in_which_answers_end():
    assert predict_wait(queue(), ONE).seconds == 1.0
    assert predict_wait(queue(entries=2), ONE).seconds == 3.0
    assert predict_wait(queue(entries=2, free=(2, 100)), ONE).seconds == 1.0


def test_a_simulated_turn_replaces_the_estimate():
    assert predict_wait(queue(entries=2, seconds_until_turn=7.0), ONE).seconds == 7.0


def test_blocks_come_free_with_the_answers_that_hold_them():
    assert predict_wait(queue(free=(4, 0)), ONE).seconds == 1.0
    assert predict_wait(queue(free=(4, 0), entries=2), ONE).seconds == 3.0
    long = Cost(1, 100)
    assert predict_wait(queue(free=(4, 0), blocks_held=100.0), long).seconds == 1.0, (
        "an answer as long as it ends first"
    )
    assert predict_wait(queue(free=(4, 0), blocks_held=50.0), long).seconds == 2.0


def test_without_known_ends_blocks_come_free_at_the_rate_of_service():
    assert predict_wait(queue(free=(4, 0), left=[[]]), ONE).seconds == pytest.approx(0.25)
    assert predict_wait(queue(entries=4, free=(8, 0), left=[[]]), ONE).seconds == pytest.approx(400 / 200 * 1 + 0.25)


def test_without_measurements_nothing_is_predicted():
    wait = predict_wait(queue(steps_per_s=None, per_s=None), ONE)
    assert not wait.at_once
    assert wait.seconds == 0.0


def test_requests_ahead_occupy_slots_first():
    assert steps_until_place([10, 20], 0, 0, 5, 1) == 10
    assert steps_until_place([10, 20], 0, 1, 5, 1) == 15
    assert steps_until_place([10, 20], 0, 1, 50, 1) == 20
    assert steps_until_place([10, 20], 1, 0, 50, 3) == 20
    assert steps_until_place([10, 20], -1, 0, 50, 1) == 20
    assert steps_until_place([], 0, 3, 50, 1) == 0
    assert steps_until_place([10.0] * 4, 0, 1000, 20.0, 1) == pytest.approx(1000 / 4 * 20, rel=0.1)


@pytest.mark.parametrize("left", [[float(k) for k in range(1, 33)], [3.0, 3.0, 40.0], [7.0]])
@pytest.mark.parametrize("ahead", [150, 4_000])
def test_the_estimate_for_a_long_queue_equals_following_each_slot(left, ahead):
    ends = sorted(left)
    for _ in range(ahead):
        heapreplace(ends, ends[0] + 50.0)
    assert steps_until_place(left, 0, ahead, 50.0, 1) == pytest.approx(ends[0], rel=0.03)


def runner(counter=0.0, waiting=0, *, weight=1.0, joins=0.0):
    return SimulatedTenant(counter, weight, waiting, 10.0, 100.0, joins)


def test_the_least_served_goes_first():
    places = [(10.0, 0), (20.0, 0), (30.0, 1)]
    assert simulate_dispatch([runner(), runner(500.0, 3)], 0, 0, places, 0, 2.0).steps == 10
    assert simulate_dispatch([runner(500.0), runner(0.0, 2)], 0, 0, places, 0, 2.0).steps == 30
    assert simulate_dispatch([runner(), runner(500.0, 3)], 0, 2, places, 0, 2.0).steps == 30


def test_counters_rise_with_the_answers_that_run():
    # Both begin level; the one with three running answers is behind by the time that a place comes free.
    assert simulate_dispatch([runner(), runner(5.0, 9)], 0, 0, [(10.0, 0)] * 3 + [(20.0, 1)], 0, 2.0).steps == 20
    assert simulate_dispatch([runner(), runner(5.0, 9)], 0, 0, [(10.0, 1)] * 3 + [(20.0, 0)], 0, 2.0).steps == 10


def test_a_long_prompt_that_is_charged_puts_its_tenant_behind():
    places = [(10.0, -1), (20.0, -1), (30.0, -1)]
    other = runner(0.0, 2)
    assert simulate_dispatch([runner(15.0), other], 0, 0, places, 0, 0.0).steps == 30, (
        "two typical ones of 10 go before"
    )
    other.prompts = (20.0, 10.0)
    assert simulate_dispatch([runner(15.0), other], 0, 0, places, 0, 0.0).steps == 20


def test_expected_arrivals_of_other_tenants_count():
    places = [(10.0, -1), (20.0, -1), (30.0, -1)]
    others = [runner(0.0, 0, joins=0.1) for _ in range(2)]
    alone = simulate_dispatch([runner(50.0)], 0, 2, places, 0, 2.0).steps
    assert simulate_dispatch([runner(50.0), *others], 0, 2, places, 0, 2.0).steps >= alone


def test_a_tenant_that_may_use_an_overcommit_slot_needs_no_free_slot():
    # They hold equally many; the light tenant comes in beyond the places when one of its own answers ends.
    places = [(10.0, 1), (20.0, 1), (30.0, 1), (40.0, 0), (50.0, 0), (60.0, 0)]
    flood = SimulatedTenant(0.0, 1.0, 9, 10.0, 100.0, 0.0, held=3)
    light = SimulatedTenant(900.0, 1.0, 0, 10.0, 100.0, 0.0, held=3)
    assert simulate_dispatch([flood, light], 1, 0, places, 0, 2.0).steps > 50, "others were served less"
    light.counter = 100.0
    assert simulate_dispatch([flood, light], 1, 0, places, 0, 2.0).steps == 30, "no overcommit there"
    assert simulate_dispatch([flood, light], 1, 0, places, 0, 2.0, overcommit=4).steps == 10, (
        "overcommitted beside the flood"
    )


def test_a_tenant_that_may_use_an_overcommit_slot_now_does_not_wait():
    places = [(10.0, 0), (20.0, 0), (30.0, 0)]
    flood = SimulatedTenant(0.0, 1.0, 2, 10.0, 100.0, 0.0, held=3)
    assert simulate_dispatch([flood, runner()], 1, 0, places, 0, 2.0, overcommit=1) == PredictedTurn(0, 0)
    assert simulate_dispatch([flood, runner()], 1, 0, places, 0, 2.0).steps == 10
    assert simulate_dispatch([flood, runner()], 1, 1, places, 0, 2.0, overcommit=1).steps > 0, "its own go first"


def test_a_running_overcommitted_sequence_takes_the_next_free_slot():
    places = [(10.0, 0), (20.0, 0), (30.0, 0)]
    assert simulate_dispatch([runner()], 0, 0, places, -1, 2.0) == PredictedTurn(20, 0)


def test_releases_before_a_turn_are_counted():
    places = [(10.0, -1), (20.0, -1), (20.0, -1)]
    assert simulate_dispatch([runner()], 0, 0, places, 0, 2.0) == PredictedTurn(10, 0)
    assert simulate_dispatch([runner()], 0, 1, places, 0, 2.0) == PredictedTurn(20, 1)
    assert simulate_dispatch([runner()], 0, 2, places, 0, 2.0) == PredictedTurn(20, 1), "not those of the same moment"


def test_a_long_wait_is_estimated_in_proportion():
    near = simulate_dispatch([runner()], 0, 60, [(5.0, 0)] * 4, 0, 2.0).steps
    far = simulate_dispatch([runner()], 0, 120, [(5.0, 0)] * 4, 0, 2.0).steps
    assert far > 1.5 * near


def test_joins_fade():
    joins = ArrivalRates()
    flow = Flow((FlowLevel("acme"),))
    for second in range(100):
        joins.observe(flow, float(second))
    assert joins.per_s("acme", 100.0) == pytest.approx(1.0, rel=0.1)
    assert joins.per_s("acme", 130.0) < 0.06
    assert joins.per_s("other", 100.0) == 0.0
    for number in range(500):
        joins.observe(Flow((FlowLevel(f"t{number}"),)), 100.0)
    assert len(joins) < 100


TIMES = StepTimes(fixed_s=0.01, token_s=0.001, context_token_s=0.0)


NONE = UnreportedPrompts(0, 0)


def test_cached_tokens_of_a_prompt_add_attention_time():
    idle = LoadReport(step_tokens=100, times=StepTimes(0.01, 0.001, pair_s=1e-6))
    alone_s = 0.01 + 0.05 + 1e-6 * 50 * 50 / 2
    assert predict_prefill_s(idle, 50, NONE, NONE, 16, 9.0) == pytest.approx(alone_s)
    assert predict_prefill_s(idle, 50, NONE, NONE, 16, 9.0, held_tokens=2_000) == pytest.approx(
        alone_s + 1e-6 * 50 * 2_000
    )


def test_a_prompt_takes_the_steps_that_it_needs():
    idle = LoadReport(step_tokens=100, times=TIMES)
    assert predict_prefill_s(idle, 50, NONE, NONE, 16, 9.0) == pytest.approx(0.01 + 0.05)
    assert predict_prefill_s(idle, 250, NONE, NONE, 16, 9.0) == pytest.approx(3 * 0.01 + 0.25)
    assert predict_prefill_s(idle, 50, NONE, UnreportedPrompts(1, 60), 16, 9.0) == pytest.approx(2 * 0.01 + 0.11)
    assert predict_prefill_s(LoadReport(), 50, NONE, NONE, 16, 0.0) == 0.0


def test_the_running_step_ends_first():
    busy = LoadReport(running=10, step_tokens=110, times=TIMES, waiting_prompt_tokens=150)
    step_s = 0.01 + 0.01
    assert predict_prefill_s(busy, 50, NONE, NONE, 16, 0.0) == pytest.approx((step_s + 0.1) + (step_s + 0.1))
    assert predict_prefill_s(busy, 50, NONE, NONE, 16, 0.05) == pytest.approx((step_s + 0.1) + (step_s + 0.1) - 0.05)
    assert predict_prefill_s(busy, 50, NONE, NONE, 16, 9.0) == pytest.approx(step_s + 0.1)


def test_prompts_sent_before_the_step_began_are_part_of_it():
    times = replace(TIMES, chunk_s=0.002)
    busy = LoadReport(running=10, step_tokens=110, times=times)
    step_s = 0.01 + 0.01
    sent = UnreportedPrompts(2, 60)
    in_it = predict_prefill_s(busy, 50, sent, NONE, 16, 0.0)
    assert in_it == pytest.approx((step_s + 0.06 + 2 * 0.002) + (step_s + 2 * 0.001 + 0.05 + 0.002))
    after_it = predict_prefill_s(busy, 50, NONE, sent, 16, 0.0)
    assert after_it == pytest.approx(step_s + 2 * step_s + 0.11 + 3 * 0.002), "more than one step takes"
    assert predict_prefill_s(busy, 50, sent, NONE, 16, 0.08) == pytest.approx(in_it - 0.08), "most of it is over"


def test_the_pace_is_measured_while_it_is_full():
    pace = ServiceRate()
    assert pace.per_s(None) is None
    assert pace.per_s(7.0) == 7.0
    pace.on_saturated(0.0, 0.0)
    pace.on_saturated(100.0, 1.0)
    assert pace.per_s(None) == 100.0
    assert pace.per_s(50.0) == 75.0, "half believed after a second"
    pace.on_unsaturated()
    pace.on_saturated(1000.0, 50.0)
    assert pace.per_s(None) == 100.0, "what was done in between says nothing"
    pace.on_saturated(3.0, 51.0)
    assert pace.per_s(None) == 100.0, "another beginning"
    for second in range(60):
        pace.on_saturated(3.0 + 40.0 * second, 52.0 + second)
    assert pace.per_s(None) == pytest.approx(40.0, rel=0.05)


def test_the_rate_of_a_full_batch():
    typical, weights = TypicalRequest(100.0, 50.0), ServiceWeights()
    assert computed_rate(StepTimes(), typical, 8, weights) is None
    seconds = 0.001 * 100 + 50 * (0.001 + 0.01 / 8)
    assert computed_rate(TIMES, typical, 8, weights) == pytest.approx(200 / seconds)
    assert computed_rate(TIMES, typical, 16, weights) > computed_rate(TIMES, typical, 8, weights)
    assert step_parts(StepTimes(), typical, 8) is None
    parts = step_parts(TIMES, typical, 8)
    assert (parts.decodes_s, parts.prompt_s) == pytest.approx((0.018, 0.1))
    assert parts.whole_s == pytest.approx(0.01 + 0.008 + 0.1 * 8 / 50)
