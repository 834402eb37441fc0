"""Tenants that hold few places come in beside those that hold all of them, and these take turns."""

from collections import Counter

import pytest

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.core.request import EngineRequest, SamplingParams
from maitred.engine.config import BatchLineConfig
from maitred.engine.kv.blocks import BlockPool
from tests.support.schedulers import make_scheduler

PLACES = 8


def make(step_tokens):
    return make_scheduler(
        BlockPool(256),
        block_tokens=4,
        max_sequences=PLACES,
        guests=2,
        step_tokens=step_tokens,
        context_tokens=256,
        eos_token_ids=(99,),
        line=BatchLineConfig(),
    )


@pytest.fixture
def scheduler():
    return make(step_tokens=64)


def add(scheduler, tenant, *, max_tokens=40, weight=1.0, priority=PriorityClass.STANDARD):
    request = EngineRequest(
        id=f"{tenant}-{scheduler.running + scheduler.waiting}",
        prompt=[1, 2, 3],
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
        flow=Flow((FlowLevel(tenant, weight), FlowLevel(f"{tenant}-key")), priority),
    )
    (sequence,) = scheduler.add(request, 0.0)
    return sequence


def step(scheduler):
    plan = scheduler.plan(0.0)
    scheduler.commit(plan, [[1] for chunk in plan.sampling])
    return {chunk.sequence.key for chunk in plan.chunks}


def flooded(scheduler, **fields):
    flood = [add(scheduler, "flood", **fields) for _ in range(PLACES)]
    step(scheduler)
    assert scheduler.running == PLACES
    assert scheduler.free_sequences == 0
    return flood


def test_a_light_tenant_runs_in_the_next_step_and_the_flood_takes_turns(scheduler):
    flood = flooded(scheduler)
    light = add(scheduler, "light", max_tokens=9)
    assert light.key in step(scheduler)
    assert (scheduler.running, scheduler.overcommitted, scheduler.overcommit_slots) == (PLACES + 1, 1, 1)
    advanced = Counter()
    for _ in range(8):
        keys = step(scheduler)
        assert light.key in keys
        assert len(keys) == PLACES
        advanced.update(keys)
    assert [advanced[sequence.key] for sequence in flood] == [7] * PLACES
    assert light.output_tokens == 9
    assert (scheduler.running, scheduler.overcommitted, scheduler.overcommit_slots) == (PLACES, 0, 2)
    assert scheduler.counters.preemptions == 0


def test_no_sequence_takes_turns_with_its_own_tenant(scheduler):
    flooded(scheduler)
    more = add(scheduler, "flood")
    step(scheduler)
    assert more.table.blocks == []
    assert (scheduler.waiting, scheduler.overcommitted) == (1, 0)


def test_overcommitted_sequences_are_limited(scheduler):
    flooded(scheduler)
    lights = [add(scheduler, f"light-{number}") for number in range(3)]
    step(scheduler)
    assert [bool(light.table.blocks) for light in lights] == [True, True, False]
    assert scheduler.overcommit_slots == 0


def test_an_overcommitted_sequence_takes_a_slot_as_soon_as_one_is_free(scheduler):
    flood = flooded(scheduler)
    add(scheduler, "light")
    step(scheduler)
    scheduler.cancel(flood[0])
    assert len(step(scheduler)) == PLACES
    assert (scheduler.running, scheduler.overcommitted, scheduler.free_sequences) == (PLACES, 0, 0)


def test_a_tenant_that_holds_as_much_per_weight_gets_no_overcommit_slot(scheduler):
    """Three places of weight 3 are as much as one of weight 1."""
    for _ in range(3):
        add(scheduler, "heavy", weight=3.0)
    for number in range(5):
        add(scheduler, f"one-{number}")
    step(scheduler)
    other = add(scheduler, "other")
    step(scheduler)
    assert other.table.blocks == []


def test_an_urgent_class_does_not_take_turns_with_a_patient_one(scheduler):
    flooded(scheduler, priority=PriorityClass.INTERACTIVE)
    patient = add(scheduler, "light", priority=PriorityClass.BACKGROUND)
    urgent = add(scheduler, "light", priority=PriorityClass.INTERACTIVE)
    step(scheduler)
    assert urgent.table.blocks
    assert patient.table.blocks == []


def test_the_least_urgent_are_left_out_first_and_in_turn(scheduler):
    urgent = [add(scheduler, "flood", priority=PriorityClass.INTERACTIVE) for _ in range(PLACES - 3)]
    patient = [add(scheduler, "flood", priority=PriorityClass.BACKGROUND) for _ in range(3)]
    step(scheduler)
    add(scheduler, "light", priority=PriorityClass.BACKGROUND)
    step(scheduler)
    assert scheduler.overcommitted == 1
    advanced = Counter(key for _ in range(6) for key in step(scheduler))
    assert [advanced[sequence.key] for sequence in urgent] == [6] * len(urgent)
    assert [advanced[sequence.key] for sequence in patient] == [4] * len(patient)


def test_the_only_patient_one_is_not_left_out_all_the_time(scheduler):
    for _ in range(PLACES - 1):
        add(scheduler, "flood", priority=PriorityClass.INTERACTIVE)
    patient = add(scheduler, "flood", priority=PriorityClass.BACKGROUND)
    step(scheduler)
    add(scheduler, "light", priority=PriorityClass.INTERACTIVE)
    step(scheduler)
    assert [patient.key in step(scheduler) for _ in range(6)] in ([True, False] * 3, [False, True] * 3)


@pytest.mark.parametrize("beyond", [0, 1, 2])
def test_a_sequence_is_overcommitted_only_where_a_step_has_tokens_for_its_prompt(beyond):
    scheduler = make(step_tokens=PLACES + beyond)
    flood = [add(scheduler, "flood", max_tokens=100) for _ in range(PLACES)]
    while not all(sequence.output_tokens for sequence in flood):
        step(scheduler)
    lights = [add(scheduler, f"light-{number}") for number in range(2)]
    for _ in range(2 * len(lights[0].tokens) + 1):
        step(scheduler)
    assert [light.output_tokens > 0 for light in lights] == [number < beyond for number in range(2)]


def test_sequences_that_wait_for_their_turns_take_nothing_from_others(scheduler):
    flooded(scheduler)
    before = scheduler.promised_blocks, scheduler.waiting_prompt_tokens, scheduler.overcommit_slots
    for _ in range(40):
        add(scheduler, "flood")  # as the prompts of one request, whose ids differ in their last part
    assert scheduler.waiting == 40
    assert (scheduler.promised_blocks, scheduler.waiting_prompt_tokens, scheduler.overcommit_slots) == before
    # A quarter of the slots is reported as free: whoever comes for it waits here, in the fair order.
    assert scheduler.free_sequences == PLACES // 4
    newcomer = add(scheduler, "light")
    assert (scheduler.overcommit_slots, scheduler.free_sequences) == (before[2] - 1, PLACES // 4 - 1)
    assert scheduler.promised_blocks > before[0]
    step(scheduler)  # the flood is charged for what it gets, and then the newcomer is next
    assert newcomer.key in step(scheduler)


def test_so_do_those_of_several_requests(scheduler):
    flooded(scheduler)
    before = scheduler.promised_blocks, scheduler.waiting_prompt_tokens, scheduler.overcommit_slots
    for _ in range(40):
        add(scheduler, "flood")
        add(scheduler, "torrent")
    assert (scheduler.promised_blocks, scheduler.waiting_prompt_tokens, scheduler.overcommit_slots) == before
    assert scheduler.free_sequences == PLACES // 4


def test_a_few_waiting_sequences_are_no_reason_to_report_slots(scheduler):
    flooded(scheduler)
    for _ in range(2):
        add(scheduler, "flood")
    assert (scheduler.waiting, scheduler.free_sequences) == (2, 0)


def test_sequences_that_find_a_slot_at_once_count_in_full(scheduler):
    for _ in range(PLACES // 2):
        add(scheduler, "flood")
    assert scheduler.waiting_prompt_tokens == 3 * PLACES // 2
    assert scheduler.promised_blocks == PLACES // 2 * -(-(3 + 40) // 4)


def test_teams_of_one_organisation_come_in_beside_each_other_but_not_into_the_last_half():
    scheduler = make(step_tokens=64)

    def add_of(team, number):
        path = (FlowLevel("org"), FlowLevel(team), FlowLevel(f"{team}-key"))
        request = EngineRequest(
            id=f"{team}-{number}", prompt=[1, 2, 3], sampling=SamplingParams(max_tokens=40, seed=0), flow=Flow(path)
        )
        return scheduler.add(request, 0.0)[0]

    for number in range(PLACES + 4):
        add_of("flood", number)
    step(scheduler)
    light = [add_of("light", number) for number in range(2)]
    assert light[0].key in step(scheduler)
    step(scheduler)
    assert (scheduler.running, scheduler.overcommitted) == (PLACES + 1, 1), "one of two is left to organisations"
    other = add(scheduler, "other")
    step(scheduler)
    assert other.key in step(scheduler)
