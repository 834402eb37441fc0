"""How long answers are predicted to be."""

from maitred.dispatch.policy.outputs import OutputLengths


def learnt(lengths, tenant="acme", **settings):
    outputs = OutputLengths(**settings)
    for tokens, max_tokens in lengths:
        outputs.observe(tenant, tokens, max_tokens)
    return outputs


def test_before_anything_was_seen_it_is_a_part_of_what_may_come():
    outputs = OutputLengths(unknown_share=0.25)
    assert outputs.lengths("acme", 100)[0] == 25
    assert outputs.lengths("acme", 1)[0] == 1
    assert outputs.lengths("acme", 100)[1] == 25
    assert outputs.sample_remaining_tokens("acme", 10, 100, (0.5,)) == [25]
    assert outputs.mean is None


def test_most_answers_are_no_longer_than_predicted():
    outputs = learnt([(tokens, 1000) for tokens in range(10, 60)])
    assert 48 <= outputs.lengths("acme", 1000)[0] <= 52
    assert outputs.lengths("acme", 20)[0] == 20
    assert 30 < outputs.lengths("acme", 1000)[1] < 40


def test_who_always_uses_all_is_predicted_exactly():
    outputs = learnt([(most, most) for most in (30, 500, 120, 64, 90, 77, 200, 10)])
    assert outputs.lengths("acme", 333)[0] == 333
    assert outputs.lengths("acme", 333)[1] == 333
    assert outputs.sample_remaining_tokens("acme", 300, 333, (0.1,)) == [33]


def test_who_has_sent_little_is_judged_by_all():
    outputs = learnt([(100, 200)] * 20, "other")
    outputs.observe("acme", 3, 200)
    assert outputs.lengths("acme", 200)[0] == 100
    for _ in range(10):
        outputs.observe("acme", 3, 200)
    assert outputs.lengths("acme", 200)[0] == 3


def test_what_is_left_is_that_of_answers_that_got_as_far():
    outputs = learnt([(10, 1000)] * 10 + [(100, 1000)] * 10)
    assert outputs.sample_remaining_tokens("acme", 0, 1000, (0.1, 0.9)) == [10, 100]
    assert outputs.sample_remaining_tokens("acme", 20, 1000, (0.1,)) == [80]
    assert outputs.sample_remaining_tokens("acme", 200, 1000, (0.5,)) == [50], "longer than all that were seen"
    assert outputs.sample_remaining_tokens("acme", 995, 1000, (0.5,)) == [5]


def test_memory_is_bounded():
    outputs = OutputLengths(tenants=10, answers=4)
    for number in range(1000):
        outputs.observe(f"t{number % 37}", number % 50 + 1, 100)
    assert len(outputs) == 10
    for _ in range(100):
        outputs.observe("t1", 7, 100)
    assert outputs.lengths("new", 100)[0] == 7, "only the last ones count"
