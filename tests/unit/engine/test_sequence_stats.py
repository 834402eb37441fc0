"""What the engine tells of how a sequence fared."""

import pytest

from maitred.core.request import FinishReason
from tests.unit.engine.test_engine import Bench


def run(bench, steps=1):
    """The deltas of so many steps that carry a course, by request."""
    with_stats = {}
    for _ in range(steps):
        for name, delta in bench.step():
            if delta.stats is not None:
                with_stats.setdefault(name, []).append((delta, delta.stats))
    return with_stats


def test_stats_are_sent_with_the_first_token_and_at_the_end():
    bench = Bench()
    bench.submit("a", prompt=4, max_tokens=3)
    bench.clock.now_s += 0.5
    bench.runner.step_s = 0.25
    (first, at_first), (last, at_end) = run(bench, 3)["a"]
    assert first.tokens == [5]
    assert last.finish is FinishReason.LENGTH
    assert (at_first.waited_s, at_first.prefill_s, at_first.prefill_steps) == pytest.approx((0.5, 0.25, 1))
    assert (at_first.prefill_batch, at_first.decode_steps) == (1, 0)
    assert (at_end.waited_s, at_end.prefill_s) == (at_first.waited_s, at_first.prefill_s)
    assert (at_end.decode_s, at_end.decode_steps, at_end.decode_batch) == pytest.approx((0.5, 2, 1.0))


def test_a_long_prompt_takes_steps_and_the_batch_is_an_average():
    bench = Bench()
    bench.submit("long", prompt=40, max_tokens=3)
    bench.runner.step_s = 0.1
    bench.step()
    bench.submit("short", prompt=4, max_tokens=9)
    with_stats = run(bench, 12)
    (_, first), (_, last) = with_stats["long"]
    assert (first.prefill_steps, first.prefill_batch) == (3, 2)
    assert last.decode_batch == 2.0
    (_, short) = with_stats["short"][-1]
    assert 1.0 < short.decode_batch < 2.0, "it was alone in the end"


def test_a_single_token_is_all_there_is():
    bench = Bench()
    bench.submit("a", max_tokens=1)
    ((delta, course),) = run(bench)["a"]
    assert delta.finish is FinishReason.LENGTH
    assert (course.decode_s, course.decode_steps, course.decode_batch) == (0.0, 0, 0.0)


def test_who_is_preempted_was_away_and_computes_again():
    bench = Bench(blocks=32, prefix_cache=False)
    bench.runner.step_s = 0.1
    for name in "abcd":
        bench.submit(name, prompt=8, max_tokens=56)
    with_stats = run(bench, 300)
    courses = {name: deltas[-1][1] for name, deltas in with_stats.items()}
    assert bench.engine.load().preemptions == sum(course.preemptions for course in courses.values()) > 0
    recomputed = sum(course.recomputed_tokens for course in courses.values())
    assert bench.engine.load().recomputed_tokens == recomputed > 0
    displaced = [course for course in courses.values() if course.preemptions]
    assert all(course.displaced_s > 0 for course in displaced)
    bench.check_idle()


def test_what_another_replica_had_computed_is_computed_again():
    bench = Bench()
    bench.submit("a", prompt=4, max_tokens=4, resumes={0: [5, 6]})
    (_, first), _ = run(bench, 2)["a"]
    assert first.recomputed_tokens == bench.engine.load().recomputed_tokens == 5


def test_nothing_is_remembered_of_who_has_gone():
    bench = Bench()
    bench.submit("a", n=2, max_tokens=9)
    bench.step()
    bench.engine.cancel("owner", "a", None)
    assert not bench.engine._stats_recorder._notes
    assert not bench.engine._stats_recorder._unanswered
