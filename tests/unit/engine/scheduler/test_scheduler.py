import pytest

from maitred.core.request import EngineRequest, FinishReason, SamplingParams
from maitred.engine.config import EngineConfig
from maitred.engine.kv.blocks import BlockPool
from maitred.engine.scheduler.scheduler import Scheduler


def make_scheduler(*, blocks=64, block_tokens=4, max_sequences=8, step_tokens=16, prefix_cache=True):
    config = EngineConfig(
        block_tokens=block_tokens,
        max_sequences=max_sequences,
        step_tokens=step_tokens,
        guests=0,
        prefix_cache=prefix_cache,
    )
    return Scheduler(BlockPool(blocks), config, context_tokens=blocks * block_tokens, eos_token_ids=(99,))


def make_request(prompt, *, max_tokens=4, n=1, **sampling):
    return EngineRequest(
        id="r", prompt=list(prompt), sampling=SamplingParams(max_tokens=max_tokens, seed=0, n=n, **sampling)
    )


def run_step(scheduler, token=1, now_s=0.0):
    plan = scheduler.plan(now_s)
    return plan, scheduler.commit(plan, [[token] for chunk in plan.sampling])


def run_until_idle(scheduler):
    while scheduler.busy:
        run_step(scheduler)


def test_a_long_prompt_is_prefilled_in_chunks_beside_decodes():
    scheduler = make_scheduler(step_tokens=8)
    scheduler.add(make_request(range(4), max_tokens=9), 0.0)
    run_step(scheduler)
    scheduler.add(make_request(range(100, 120)), 0.0)
    lengths = []
    for _ in range(4):
        plan, _ = run_step(scheduler)
        assert len(plan.decodes) >= 1, "the running stream must not stall"
        assert plan.tokens <= 8
        lengths.append([chunk.length for chunk in plan.prefills])
    assert lengths == [[7], [7], [6], []]


def test_requests_that_arrive_together_share_their_prefix():
    scheduler = make_scheduler(step_tokens=64)
    for suffix in range(8):
        scheduler.add(make_request([*range(12), 200 + suffix]), 0.0)
    plan, _ = run_step(scheduler)
    assert [chunk.length for chunk in plan.prefills] == [13]
    assert [chunk.start for chunk in plan.decodes] == [12] * 7
    assert scheduler.counters.cached_tokens == 7 * 12


def test_choices_share_the_prompt_even_with_the_prefix_cache_off():
    scheduler = make_scheduler(step_tokens=64, prefix_cache=False)
    choices = scheduler.add(make_request(range(10), n=3), 0.0)
    other = scheduler.add(make_request(range(10)), 0.0)
    run_step(scheduler)
    shared = [choice.table.blocks[:2] for choice in choices]
    assert shared[0] == shared[1] == shared[2]
    assert other[0].table.blocks[0] not in shared[0]
    assert [scheduler.pool.reference_count(block) for block in shared[0]] == [3, 3]
    run_until_idle(scheduler)
    assert scheduler.pool.idle == scheduler.pool.total


def test_the_youngest_is_preempted_and_finishes_later():
    scheduler = make_scheduler(blocks=6, block_tokens=2, max_sequences=3, step_tokens=32)
    old = scheduler.add(make_request([1, 2, 3], max_tokens=8), 0.0)[0]
    young = scheduler.add(make_request([4, 5, 6], max_tokens=8), 0.0)[0]
    finished = []
    while scheduler.busy:
        _, advances = run_step(scheduler)
        finished += [advance.sequence for advance in advances if advance.finish]
    assert finished == [old, young]
    assert old.preemptions == 0
    assert young.preemptions >= 1
    assert len(young.tokens) == 11
    assert scheduler.counters.preemptions == young.preemptions
    assert scheduler.counters.output_tokens == 16, "recomputed tokens are not sampled again"
    assert scheduler.pool.idle == scheduler.pool.total


def test_later_arrivals_do_not_overtake_one_that_does_not_fit():
    scheduler = make_scheduler(blocks=8, block_tokens=1, max_sequences=4, step_tokens=32)
    scheduler.add(make_request(range(4), max_tokens=4), 0.0)
    large = scheduler.add(make_request(range(10, 16), max_tokens=2), 0.0)[0]
    small = scheduler.add(make_request([50], max_tokens=1), 0.0)[0]
    run_step(scheduler)
    assert large.table.blocks == []
    assert small.table.blocks == []
    run_until_idle(scheduler)
    assert large.output_tokens == 2
    assert small.output_tokens == 1


def test_an_answer_ends_by_its_stop_token_or_its_length():
    scheduler = make_scheduler()
    scheduler.add(make_request([1]), 0.0)
    _, [advance] = run_step(scheduler, token=99)
    assert advance.finish is FinishReason.STOP

    scheduler.add(make_request([1], max_tokens=2, ignore_eos=True), 0.0)
    _, [advance] = run_step(scheduler, token=99)
    assert advance.finish is None
    _, [advance] = run_step(scheduler, token=99)
    assert advance.finish is FinishReason.LENGTH

    scheduler.add(make_request([1], stop_token_ids=(5,)), 0.0)
    _, [advance] = run_step(scheduler, token=5)
    assert advance.finish is FinishReason.STOP


def test_a_conversation_reuses_its_own_answer():
    scheduler = make_scheduler(block_tokens=2)
    first = scheduler.add(make_request([1, 2, 3], max_tokens=4), 0.0)[0]
    run_until_idle(scheduler)
    follow_up = scheduler.add(make_request([*first.tokens, 8, 9]), 0.0)[0]
    run_step(scheduler)
    assert follow_up.cached_tokens == 6, "all but the last token of the first turn has KV"


def test_eviction_prefers_the_end_of_a_prefix():
    scheduler = make_scheduler(blocks=8, block_tokens=1, step_tokens=32)
    scheduler.add(make_request(range(6), max_tokens=1), 0.0)
    run_until_idle(scheduler)
    scheduler.add(make_request(range(100, 104), max_tokens=1), 0.0)
    run_until_idle(scheduler)
    again = scheduler.add(make_request(range(6), max_tokens=1), 0.0)[0]
    run_step(scheduler)
    assert again.cached_tokens == 4


def test_choices_keep_one_prompt_between_them_until_they_differ():
    scheduler = make_scheduler()
    request = make_request(range(10), n=3, max_tokens=2)
    choices = scheduler.add(request, 0.0)
    assert all(choice.tokens is request.prompt for choice in choices)
    run_until_idle(scheduler)
    assert request.prompt == list(range(10))
    assert all(len(choice.tokens) == 12 for choice in choices)


def decode_with(scheduler, tokens, *, prompt=range(3), **options):
    """A sequence that got some tokens at the end of its prompt."""
    (sequence,) = scheduler.add(make_request(prompt, **options), 0.0)
    plan = scheduler.plan(0.0)
    (advance,) = scheduler.commit(plan, [tokens])
    return sequence, advance


def test_tokens_that_no_step_has_computed_are_computed_together_in_the_next():
    scheduler = make_scheduler()
    sequence, advance = decode_with(scheduler, [10, 11, 12, 13, 14], max_tokens=20)
    assert advance.tokens == [10, 11, 12, 13, 14]
    assert (sequence.computed, sequence.pending) == (3, 5)
    plan, advances = run_step(scheduler, token=15)
    assert [(chunk.start, chunk.length) for chunk in plan.decodes] == [(3, 5)]
    assert plan.prefills == []
    assert len(sequence.table.blocks) == 2
    assert advances[0].tokens == [15]
    assert sequence.pending == 1
    assert scheduler.counters.output_tokens == 6


def test_a_step_too_small_for_all_pending_tokens_gives_each_sequence_one():
    scheduler = make_scheduler(max_sequences=4, step_tokens=8)
    for prompt in (range(3), [5]):
        scheduler.add(make_request(prompt, max_tokens=30), 0.0)
    advances = scheduler.commit(scheduler.plan(0.0), [list(range(10, 20)), [10]])
    long, short = (advance.sequence for advance in advances)
    scheduler.add(make_request(range(20)), 0.0)
    plan = scheduler.plan(0.0)
    assert {chunk.sequence: chunk.length for chunk in plan.decodes} == {long: 7, short: 1}
    (advance,) = scheduler.commit(plan, [[11]])
    assert advance.sequence is short
    plan = scheduler.plan(0.0)
    assert {chunk.sequence: chunk.length for chunk in plan.decodes} == {long: 3, short: 1}
    assert [chunk.length for chunk in plan.prefills] == [4], "and then the newcomer"


@pytest.mark.parametrize(
    ("sampled", "kept", "finish"),
    [
        ([1, 99, 2], [1, 99], FinishReason.STOP),
        ([1, 50, 2], [1, 50], FinishReason.STOP),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4], FinishReason.LENGTH),
        ([99], [99], FinishReason.STOP),
    ],
)
def test_what_follows_the_end_is_dropped(sampled, kept, finish):
    scheduler = make_scheduler()
    sequence, advance = decode_with(scheduler, sampled, max_tokens=4, stop_token_ids=(50,))
    assert (advance.tokens, advance.finish) == (kept, finish)
    assert sequence.output_tokens == len(kept) == scheduler.counters.output_tokens
    assert not scheduler.busy
    assert scheduler.pool.idle == scheduler.pool.total
