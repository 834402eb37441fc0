"""Who is admitted, who gets the prefill budget, who is preempted, and what each is charged."""

import pytest

from maitred.core.flow import Flow, FlowLevel, PriorityClass
from maitred.core.replica import pairs_of
from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.config import BatchLineConfig, EngineConfig, KVShareConfig
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.scheduler import Scheduler
from maitred.engine.scheduler.sequence import MAX_PREEMPTIONS
from maitred.engine.scheduler.step_times import StepWork
from tests.support.charges import listen


def make_scheduler(*, blocks=64, block_tokens=4, max_sequences=8, step_tokens=16, policy="fair", **options):
    config = EngineConfig(
        block_tokens=block_tokens,
        max_sequences=max_sequences,
        step_tokens=step_tokens,
        guests=0,
        line=BatchLineConfig(policy=policy),
        **options,
    )
    return Scheduler(BlockPool(blocks), config, context_tokens=blocks * block_tokens, eos_token_ids=(99,))


class Charges:
    """What the line hears."""

    def __init__(self, scheduler):
        self.heard = []
        listen(scheduler._state.line, lambda flow, service: self.heard.append((flow.path[-1].id, service)))

    def of(self, tenant):
        return sum(service for name, service in self.heard if name == tenant)


_prompts = iter(range(1000, 1_000_000, 1000))


def add(
    scheduler, tenant="a", *, prompt=4, output=4, priority=PriorityClass.STANDARD, now_s=0.0, n=1, flow_id="", **fields
):
    """One request; no two share a prefix."""
    first = next(_prompts)
    flow = Flow((FlowLevel(flow_id or tenant),), priority)
    sampling = SamplingParams(max_tokens=output, seed=0, n=n)
    request = EngineRequest(tenant, list(range(first, first + prompt)), sampling, flow=flow, **fields)
    return scheduler.add(request, now_s)[0]


def step(scheduler, now_s=0.0):
    plan = scheduler.plan(now_s)
    return plan, scheduler.commit(plan, [[1] for chunk in plan.sampling])


def running_or_waiting(scheduler):
    state = scheduler._state
    return [*state.batch.prefilling.values(), *state.batch.decoding.values(), *(entry.value for entry in state.line)]


def learn(scheduler, *, fixed_s, token_s):
    """Steps of all sizes, which take this time."""
    for tokens in (1, 2, 4, 8, 16, 32, 64) * 8:
        work = StepWork(chunks=1, prefill_tokens=tokens, pairs=pairs_of(0, tokens))
        scheduler.on_step_time(work, fixed_s + token_s * tokens)
        scheduler.on_step_time(StepWork(decodes=tokens, context_tokens=tokens), fixed_s + token_s * tokens)


def run_until_idle(scheduler):
    finished = []
    while scheduler.busy:
        _, advances = step(scheduler)
        finished += [advance.sequence for advance in advances if advance.finish]
    return finished


def learn_times(scheduler):
    """A millisecond a step and one a token."""
    for tokens in (1, 20, 60, 64, 40, 10) * 4:
        scheduler.on_step_time(StepWork(1, 10, 1, tokens, pairs_of(0, tokens)), 0.001 * (2 + tokens))


def learn_places(scheduler, *, fixed_s):
    """Steps at all places of a prompt: a millisecond a token, and a microsecond for each that it attends to."""
    for start in (0, 1000, 4000):
        for tokens in (8, 64, 512):
            pairs = pairs_of(start, tokens)
            for _ in range(4):
                work = StepWork(chunks=1, prefill_tokens=tokens, pairs=pairs)
                scheduler.on_step_time(work, fixed_s + 0.001 * tokens + 1e-6 * pairs)


def computed(plan):
    return {chunk.sequence.request.id: chunk.length for chunk in plan.chunks}


# --- admission ---


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fair", ["a", "b", "a", "a"]), ("fifo", ["a", "a", "a", "b"]), ("priority", ["a", "a", "a", "b"])],
)
def test_a_flood_does_not_go_before_a_tenant_that_is_owed_service(policy, expected):
    scheduler = make_scheduler(max_sequences=1, policy=policy)
    for _ in range(3):
        add(scheduler, "a")
    add(scheduler, "b")
    assert [sequence.request.id for sequence in run_until_idle(scheduler)] == expected


def test_within_one_step_admissions_alternate_between_tenants():
    scheduler = make_scheduler(step_tokens=16)
    for _ in range(4):
        add(scheduler, "a")
    for _ in range(2):
        add(scheduler, "b")
    plan, _ = step(scheduler)
    assert sorted(chunk.sequence.request.id for chunk in plan.prefills) == ["a", "a", "b", "b"]


def test_what_a_key_asks_later_does_not_wait_behind_all_sequences_of_its_large_request():
    scheduler = make_scheduler(blocks=4096, max_sequences=8, step_tokens=64)
    add(scheduler, "large-0", n=500, output=8, flow_id="a")
    now_s, later = 0.0, None
    for number in range(400):
        now_s += 0.05
        if number == 100:
            later = add(scheduler, "small-0", flow_id="a", now_s=now_s)
            others = scheduler.counters.finished
        step(scheduler, now_s)
        if later is not None and later.output_tokens:
            break
    assert later is not None
    assert scheduler.counters.finished - others <= 8, "it gets the next slot that becomes free"


def test_sequences_of_one_request_keep_their_order():
    scheduler = make_scheduler(blocks=4096, max_sequences=2)
    add(scheduler, "large-0", n=10, flow_id="a")
    assert [sequence.index for sequence in run_until_idle(scheduler)] == list(range(10))


def test_a_more_urgent_class_goes_first_under_the_priority_policy():
    scheduler = make_scheduler(max_sequences=1, policy="priority")
    add(scheduler, "slow", priority=PriorityClass.BATCH)
    add(scheduler, "quick", priority=PriorityClass.INTERACTIVE)
    assert [sequence.request.id for sequence in run_until_idle(scheduler)] == ["quick", "slow"]


# --- the prefill budget ---


def test_a_newcomer_that_is_owed_service_does_not_wait_for_a_long_prompt():
    scheduler = make_scheduler(step_tokens=16, max_sequences=4)
    add(scheduler, "long", prompt=100)
    step(scheduler)
    short = add(scheduler, "short", prompt=6)
    plans = [step(scheduler)[0] for _ in range(2)]  # it is owed as much when it comes, and more after the next step
    assert short.output_tokens >= 1
    assert all(plan.tokens == 16 for plan in plans[:1])
    assert computed(plans[0])["long"] >= 10


def test_in_order_of_arrival_it_does():
    scheduler = make_scheduler(step_tokens=16, max_sequences=4, policy="fifo")
    add(scheduler, "long", prompt=100)
    step(scheduler)
    add(scheduler, "short", prompt=6)
    plan, _ = step(scheduler)
    assert computed(plan) == {"long": 16}


def test_the_oldest_prompt_advances_whoever_else_is_owed():
    scheduler = make_scheduler(step_tokens=16, max_sequences=8, blocks=400)
    add(scheduler, "old", prompt=500)
    step(scheduler)
    of_the_oldest = []
    for number in range(24):
        add(scheduler, f"new{number}", prompt=16, output=1)
        plan, _ = step(scheduler)
        of_the_oldest.append(computed(plan).get("old", 0))
        assert plan.tokens == 16
    assert of_the_oldest == ([0] * 7 + [16]) * 3, "one step of eight is for it alone"


def test_of_two_that_are_owed_the_same_the_shorter_prompt_goes_first():
    scheduler = make_scheduler(step_tokens=16, max_sequences=4)
    add(scheduler, "long", prompt=200)
    step(scheduler)
    short = add(scheduler, "short", prompt=40)
    assert [computed(step(scheduler)[0]) for _ in range(3)] == [{"short": 16}, {"short": 16}, {"short": 8, "long": 8}]
    assert short.output_tokens == 1


def test_what_is_cached_of_a_prompt_does_not_make_it_long():
    scheduler = make_scheduler(step_tokens=16, max_sequences=4, blocks=200)
    again = add(scheduler, "chat", prompt=160, output=1)
    run_until_idle(scheduler)
    add(scheduler, "long", prompt=100)
    step(scheduler)
    flow = Flow((FlowLevel("chat"),), PriorityClass.STANDARD)
    (turn,) = scheduler.add(
        EngineRequest("chat", [*again.request.prompt, 7, 8], SamplingParams(max_tokens=1, seed=0), flow=flow), 0.0
    )
    step(scheduler)
    assert turn.output_tokens == 1


@pytest.mark.parametrize(("short", "count"), [(20, 6), (100, 3), (900, 2)])
def test_short_prompts_get_ahead_of_long_ones_by_a_bounded_service(short, count):
    scheduler = make_scheduler(step_tokens=64, max_sequences=8, blocks=4000)
    charges = Charges(scheduler)
    for _ in range(2):
        add(scheduler, "long", prompt=6000)
    most = 0
    for _ in range(150):
        while sum(s.account.flow.path[0].id == "short" for s in running_or_waiting(scheduler)) < count:
            add(scheduler, "short", prompt=short, output=1)
        step(scheduler)
        most = max(most, abs(charges.of("short") - charges.of("long")))
    # The cap, and a step that is under way, with the token of output of each of its prompts.
    assert most <= 1024 + 64 + 2 * count


@pytest.mark.parametrize(("fixed_s", "tokens"), [(0.001, 12), (0.5, 64)])
def test_a_step_that_ends_a_prompt_is_filled_only_where_that_is_cheap(fixed_s, tokens):
    scheduler = make_scheduler(step_tokens=64, max_sequences=4, blocks=400)
    learn(scheduler, fixed_s=fixed_s, token_s=0.001)
    add(scheduler, "long", prompt=1000)
    step(scheduler)
    short = add(scheduler, "short", prompt=12)
    plan, _ = step(scheduler)
    assert plan.tokens == tokens
    assert short.output_tokens == 1


def test_a_step_that_ends_a_prompt_is_filled_with_prompts_that_end_in_it_and_with_its_own_flow():
    scheduler = make_scheduler(step_tokens=64, max_sequences=4, blocks=400)
    learn(scheduler, fixed_s=0.001, token_s=0.0001)
    first = add(scheduler, "one", prompt=12)
    add(scheduler, "one", prompt=1000)
    second = add(scheduler, "two", prompt=20)
    plan, _ = step(scheduler)
    assert plan.tokens == 64
    assert (first.output_tokens, second.output_tokens) == (1, 1)


def test_a_prompt_that_takes_much_longer_than_a_step_costs_ends_in_a_step_of_its_own():
    scheduler = make_scheduler(step_tokens=64, max_sequences=4, blocks=400)
    learn(scheduler, fixed_s=0.001, token_s=0.001)
    add(scheduler, "one", prompt=12)
    add(scheduler, "two", prompt=20)
    assert [computed(step(scheduler)[0]) for _ in range(2)] == [{"one": 12}, {"one": 1, "two": 20}]


def test_a_step_far_into_a_prompt_takes_as_long_as_one_of_a_new_prompt():
    scheduler = make_scheduler(step_tokens=64, max_sequences=4, blocks=4000)
    learn_places(scheduler, fixed_s=0.001)
    add(scheduler, "long", prompt=4000)
    plans = [step(scheduler)[0] for _ in range(100)]
    lengths = [plan.tokens for plan in plans]
    assert lengths[0] == 64
    assert lengths == sorted(lengths, reverse=True)
    longest_s = 0.064 + 1e-6 * pairs_of(0, 64)
    for plan in plans:
        (chunk,) = plan.prefills
        seconds = 0.001 * chunk.length + 1e-6 * pairs_of(chunk.start, chunk.length)
        next_token_s = 0.001 + 1e-6 * chunk.end
        assert longest_s - next_token_s < seconds < longest_s * 1.01


def test_where_a_step_costs_much_in_any_case_it_stays_large():
    scheduler = make_scheduler(step_tokens=64, max_sequences=4, blocks=4000)
    learn_places(scheduler, fixed_s=0.05)
    add(scheduler, "long", prompt=4000)
    assert [step(scheduler)[0].tokens for _ in range(50)] == [64] * 50


def test_who_asks_one_thing_at_a_time_goes_before_the_end_of_a_longer_prompt_of_others():
    scheduler = make_scheduler(step_tokens=64, max_sequences=4, blocks=4000)
    for _ in range(3):
        add(scheduler, "many", prompt=640)
    for _ in range(5):
        step(scheduler)
    one = add(scheduler, "one", prompt=384)
    plans = [step(scheduler)[0] for _ in range(6)]
    assert [computed(plan) for plan in plans] == [{"one": 64}] * 6
    assert one.output_tokens == 1


def test_what_a_prompt_still_needs_counts_in_time():
    scheduler = make_scheduler(step_tokens=512, max_sequences=4, blocks=4000)
    learn_places(scheduler, fixed_s=0.001)
    deep = add(scheduler, "deep", prompt=4400)
    while deep.pending > 300:
        step(scheduler)
    new = add(scheduler, "new", prompt=deep.pending + 200)
    step(scheduler)
    assert (new.computed > 0, deep.output_tokens) == (True, 0), "the rest of the other takes longer"


def test_decodes_come_before_any_prompt():
    scheduler = make_scheduler(step_tokens=8, max_sequences=8)
    for number in range(4):
        add(scheduler, f"t{number}", prompt=1, output=40)
    step(scheduler)
    add(scheduler, "long", prompt=60)
    plan, _ = step(scheduler)
    assert len(plan.decodes) == 4
    assert computed(plan)["long"] == 4


def test_the_budget_is_what_fits_into_the_tightest_objective():
    scheduler = make_scheduler(step_tokens=512, max_sequences=8, blocks=2000, itl_objective_s=0.1)
    learn_times(scheduler)
    add(scheduler, "quick", prompt=1, output=50, itl_objective_s=0.031)
    step(scheduler)
    add(scheduler, "long", prompt=1000)
    plan, _ = step(scheduler)
    assert 20 <= computed(plan)["long"] <= 30
    assert scheduler.step_tokens == pytest.approx(30, abs=3)


def test_without_anybody_who_waits_for_tokens_a_prompt_has_the_whole_step():
    scheduler = make_scheduler(step_tokens=512, max_sequences=8, blocks=2000, itl_objective_s=0.01)
    add(scheduler, "long", prompt=1000)
    plan, _ = step(scheduler)
    assert computed(plan) == {"long": 512}


# --- preemption ---


def test_a_prompt_of_which_little_is_computed_is_preempted_for_an_answer():
    scheduler = make_scheduler(blocks=17, block_tokens=4, step_tokens=6, max_sequences=4, policy="fifo")
    grown = add(scheduler, "grown", prompt=4, output=40)
    step(scheduler)
    fresh = add(scheduler, "fresh", prompt=56, output=2)
    while not (plan := step(scheduler)[0]).preempted:
        assert grown.output_tokens < 40
    assert plan.preempted == [fresh]
    assert 0 < fresh.once_computed < 56
    assert grown.preemptions == 0


def test_nobody_is_preempted_a_fourth_time():
    scheduler = make_scheduler(blocks=24, block_tokens=2, max_sequences=12, step_tokens=64)
    sequences = [add(scheduler, f"t{number}", prompt=3, output=40) for number in range(12)]
    most = 0
    while scheduler.busy:
        step(scheduler)
        for sequence in sequences:
            most = max(most, sequence.preemptions)
            if sequence.preemptions == MAX_PREEMPTIONS and sequence.table.blocks:
                assert sequence.table.capacity_tokens >= 43, "its last admission takes all it can need"
    assert most == MAX_PREEMPTIONS
    assert all(sequence.output_tokens == 40 for sequence in sequences)
    assert scheduler.pool.idle == scheduler.pool.total


# --- charges ---


def test_real_tokens_are_charged_as_they_are_computed():
    scheduler = make_scheduler(step_tokens=8)
    charges = Charges(scheduler)
    add(scheduler, "a", prompt=12, output=2)
    step(scheduler)
    assert charges.of("a") == 8
    step(scheduler)
    assert charges.of("a") == 8 + 4 + 2


def test_what_the_cache_had_is_charged_less():
    scheduler = make_scheduler(step_tokens=64)
    request = EngineRequest("x", list(range(17)), SamplingParams(max_tokens=1, seed=0), flow=Flow((FlowLevel("a"),)))
    scheduler.add(request, 0.0)
    run_until_idle(scheduler)
    charges = Charges(scheduler)
    scheduler.add(request, 0.0)
    run_until_idle(scheduler)
    assert charges.of("a") == pytest.approx(16 * 0.1 + 1 + 2)


def test_answers_of_one_tenant_are_charged_together():
    scheduler = make_scheduler(step_tokens=64)
    for _ in range(5):
        add(scheduler, "a", prompt=1)
    charges = Charges(scheduler)
    step(scheduler)
    charges.heard.clear()
    step(scheduler)
    assert charges.heard == [("a", 10.0)]


def test_recomputation_is_never_charged():
    scheduler = make_scheduler(blocks=6, block_tokens=2, max_sequences=3, step_tokens=32)
    charges = Charges(scheduler)
    sequences = [add(scheduler, name, prompt=3, output=8) for name in "ab"]
    run_until_idle(scheduler)
    assert sum(sequence.preemptions for sequence in sequences) > 0
    assert scheduler.counters.recomputed_tokens > 0
    assert charges.of("a") == charges.of("b") == 3 + 2 * 8


def test_an_aborted_request_was_charged_for_what_was_done_and_no_more():
    scheduler = make_scheduler(step_tokens=8)
    charges = Charges(scheduler)
    sequence = add(scheduler, "a", prompt=20)
    step(scheduler)
    scheduler.cancel(sequence)
    assert charges.of("a") == 8


# --- pause and cancel ---


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_paused_sequence_leaves_its_place_to_others_and_comes_back(steps):
    scheduler = make_scheduler(max_sequences=1, blocks=8)
    paused = add(scheduler, "a", prompt=20, output=5)
    for _ in range(steps):
        step(scheduler)
    scheduler.pause(paused)
    assert scheduler.pool.idle == scheduler.pool.total
    assert (scheduler.paused, scheduler.free_sequences, scheduler.promised_blocks) == (1, 1, 0)
    assert scheduler.max_idle_s(0.0) is None
    other = add(scheduler, "b", prompt=20, output=5)
    assert run_until_idle(scheduler) == [other]
    scheduler.resume(paused, 1.0)
    assert run_until_idle(scheduler) == [paused]
    assert paused.output_tokens == 5
    assert paused.preemptions == 0


def test_going_on_after_a_pause_finds_its_blocks_in_the_cache():
    scheduler = make_scheduler(step_tokens=64)
    sequence = add(scheduler, "a", prompt=33, output=9)
    step(scheduler)
    scheduler.pause(sequence)
    scheduler.resume(sequence, 0.0)
    plan, _ = step(scheduler)
    assert computed(plan) == {"a": 2}, "the last token of the prompt and the first of the answer"


def test_cancelling_frees_everything_at_once_in_every_state():
    scheduler = make_scheduler(max_sequences=2, step_tokens=8)
    decoding = add(scheduler, "a", prompt=2)
    step(scheduler)
    prefilling = add(scheduler, "a", prompt=30)
    step(scheduler)
    waiting, paused = add(scheduler, "a"), add(scheduler, "a")
    scheduler.pause(paused)
    for sequence in (decoding, prefilling, waiting, paused):
        scheduler.cancel(sequence)
    assert scheduler.pool.idle == scheduler.pool.total
    assert not scheduler.busy
    assert scheduler.paused == 0
    assert scheduler.waiting_prompt_tokens == scheduler.promised_blocks == 0
    assert scheduler.counters.wasted_tokens == 2


def test_an_answer_that_was_cut_because_it_is_complete_is_not_wasted():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a")
    step(scheduler)
    scheduler.cancel(sequence, wasted=False)
    assert scheduler.counters.wasted_tokens == 0


# --- deadlines ---


def test_a_deadline_ends_a_sequence_wherever_it_is():
    scheduler = make_scheduler(max_sequences=1)
    running = add(scheduler, "a", output=50, deadline_in_s=5.0)
    waiting = add(scheduler, "b", deadline_in_s=5.0)
    paused = add(scheduler, "c", deadline_in_s=5.0, partial=False)
    scheduler.pause(paused)
    plan, _ = step(scheduler, 4.9)
    assert plan.expired == []
    plan, _ = step(scheduler, 5.0)
    assert plan.expired == [running, waiting, paused]
    assert not plan
    assert scheduler.pool.idle == scheduler.pool.total
    assert scheduler.counters.finished == 3
    assert scheduler.counters.wasted_tokens == 0


def test_output_that_nobody_wants_in_part_is_wasted():
    scheduler = make_scheduler()
    add(scheduler, "a", output=50, deadline_in_s=5.0, partial=False)
    step(scheduler)
    step(scheduler, 6.0)
    assert scheduler.counters.wasted_tokens == 1


def test_a_prompt_that_cannot_be_computed_in_time_is_not_begun():
    scheduler = make_scheduler(step_tokens=512, blocks=2000)
    learn_times(scheduler)
    hopeless = add(scheduler, "a", prompt=1000, deadline_in_s=0.3)
    possible = add(scheduler, "b", prompt=1000, deadline_in_s=2.0)
    plan, _ = step(scheduler)
    assert plan.expired == [hopeless]
    assert [chunk.sequence for chunk in plan.chunks] == [possible]


def test_patience_lasts_until_a_deadline_when_nothing_else_is_to_do():
    scheduler = make_scheduler()
    sequence = add(scheduler, "a", deadline_in_s=5.0)
    assert scheduler.max_idle_s(1.0) == 0
    scheduler.pause(sequence)
    assert scheduler.max_idle_s(1.0) == 4.0
    assert scheduler.max_idle_s(9.0) == 0


# --- the account of waiting ---


def test_the_causes_of_a_wait_are_reported_apart():
    scheduler = make_scheduler(max_sequences=1, step_tokens=8)
    add(scheduler, "a", output=3)
    step(scheduler, 0.0)
    add(scheduler, "a", output=1)
    late = add(scheduler, "a", output=1)
    step(scheduler, 1.0)
    step(scheduler, 2.0)
    add(scheduler, "b", output=1, now_s=2.5)
    step(scheduler, 3.0)
    step(scheduler, 4.0)  # b, which came later, goes first
    step(scheduler, 6.0)
    assert late.output_tokens == 1
    # Until the first plan it waited for the step under way, then for the slot, then for its turn.
    assert late.waited_s == pytest.approx({"prefill_budget": 1.0, "slots": 3.0, "tenant_share": 2.0})


def test_waiting_for_blocks():
    scheduler = make_scheduler(blocks=4, block_tokens=4)
    add(scheduler, "a", prompt=12, output=3)
    step(scheduler, 0.0)
    late = add(scheduler, "b", prompt=12, output=1)
    for second in range(1, 4):
        step(scheduler, float(second))
    assert late.waited_s == pytest.approx({"prefill_budget": 1.0, "kv_full": 2.0})


def test_a_prompt_that_is_passed_over_waits_for_the_budget():
    scheduler = make_scheduler(step_tokens=8, max_sequences=8, policy="fifo")
    add(scheduler, "a", prompt=9, output=1)
    add(scheduler, "b", prompt=20, output=1)
    step(scheduler, 0.0)
    late = add(scheduler, "c", prompt=8, output=1)
    for second in range(1, 6):
        step(scheduler, float(second))
    assert late.output_tokens == 1
    assert set(late.waited_s) == {"prefill_budget"}


# --- shares of the cache, windows, gauges ---


def test_a_tenant_at_its_ceiling_does_not_hold_others_up():
    shares = {"capped": KVShareConfig(ceiling=0.25)}
    scheduler = make_scheduler(blocks=16, block_tokens=4, step_tokens=64, kv_shares=shares)
    for _ in range(3):
        add(scheduler, "capped", prompt=12, output=4)
    other = add(scheduler, "other", prompt=24, output=4)
    plan, _ = step(scheduler)
    assert computed(plan) == {"capped": 12, "other": 24}
    finished = run_until_idle(scheduler)
    assert len(finished) == 4
    assert other in finished[:2]


def test_a_guaranteed_share_is_left_free_for_a_tenant_that_waits():
    shares = {"sure": KVShareConfig(floor=0.5)}
    scheduler = make_scheduler(blocks=16, block_tokens=4, step_tokens=64, max_sequences=2, kv_shares=shares)
    first = add(scheduler, "greedy", prompt=20, output=9)
    step(scheduler)
    add(scheduler, "greedy", prompt=28, output=4)
    sure = add(scheduler, "sure", prompt=30, output=2)
    plan, _ = step(scheduler)
    assert {chunk.sequence for chunk in plan.chunks} == {first, sure}
    assert len(run_until_idle(scheduler)) == 3


def test_what_a_ceiling_can_never_hold_is_refused():
    scheduler = make_scheduler(blocks=16, block_tokens=4, kv_shares={"capped": KVShareConfig(ceiling=0.25)})
    with pytest.raises(ValueError, match="exceed the 16 tokens of the KV cache that the tenant may hold"):
        add(scheduler, "capped", prompt=14, output=4)


def test_a_window_holds_a_first_step_back_until_enough_wait():
    scheduler = make_scheduler(batching_window_s={PriorityClass.BATCH: 2.0}, batching_window_requests=3)
    first = add(scheduler, "a", priority=PriorityClass.BATCH)
    assert scheduler.max_idle_s(0.5) == 1.5
    plan, _ = step(scheduler, 0.5)
    assert not plan
    add(scheduler, "b", priority=PriorityClass.BATCH, now_s=0.6)
    add(scheduler, "c", priority=PriorityClass.BATCH, now_s=0.7)
    assert scheduler.max_idle_s(0.7) == 0
    plan, _ = step(scheduler, 0.7)
    assert len(plan.chunks) == 3
    assert first.waited_s["batching_window"] == pytest.approx(0.2)


def test_gauges_say_what_is_free_and_what_is_promised():
    scheduler = make_scheduler(blocks=20, block_tokens=4, max_sequences=4, step_tokens=8)
    add(scheduler, "a", prompt=8, output=8, expected_tokens=4)
    add(scheduler, "b", prompt=6, output=8)
    assert scheduler.free_sequences == 2
    assert scheduler.promised_blocks == 3 + 4
    assert scheduler.waiting_prompt_tokens == 14
    step(scheduler)
    assert scheduler.running == 1
    assert scheduler.free_sequences == 2
    assert scheduler.promised_blocks == 1 + 4
    assert scheduler.waiting_prompt_tokens == 6
    run_until_idle(scheduler)
    assert scheduler.free_sequences == 4
    assert scheduler.promised_blocks == scheduler.waiting_prompt_tokens == 0


def test_stop_and_length_are_distinguished_from_a_deadline():
    scheduler = make_scheduler()
    add(scheduler, "a", output=1, deadline_in_s=0.5)
    _, [advance] = step(scheduler)
    assert advance.finish is FinishReason.LENGTH
    plan, _ = step(scheduler, 1.0)
    assert plan.expired == []


def test_who_stood_aside_runs_in_the_step_that_ends_what_it_waited_for():
    scheduler = make_scheduler(
        blocks=16, block_tokens=4, step_tokens=64, kv_shares={"capped": KVShareConfig(ceiling=0.25)}
    )
    add(scheduler, "capped", prompt=12, output=4, deadline_in_s=5.0)
    second = add(scheduler, "capped", prompt=12, output=4)
    step(scheduler)
    step(scheduler, 1.0)
    plan, _ = step(scheduler, 5.0)
    assert len(plan.expired) == 1
    assert [chunk.sequence for chunk in plan.chunks] == [second]
