"""The budget of retries: who is refused may come back a bounded number of times, however it goes about it."""

import random

from hypothesis import given
from hypothesis import strategies as st

from maitred.admission.policy.retries import WINDOW_S, RetryBudget


def grants(budget, tenant, attempts, now_s=0.0):
    return sum(budget.on_refusal(tenant, now_s) for _ in range(attempts))


def test_who_sends_little_may_come_back_a_few_times():
    budget = RetryBudget(0.2, 10)
    assert grants(budget, "a", 100) == 10
    assert grants(budget, "b", 100) == 10, "each tenant has its own"


def test_first_attempts_earn_a_share_and_retries_earn_nothing():
    budget = RetryBudget(0.2, 10)
    for _ in range(100):
        assert budget.on_request("a", 0.0) == 0
        assert budget.on_request("a", 0.0, retries=1) == 1
    assert grants(budget, "a", 1000) == 10 + 20


def test_a_repeated_key_is_a_retry_though_the_client_does_not_say_so():
    budget = RetryBudget(1.0, 0)
    assert budget.on_request("a", 0.0, key="k") == 0
    assert budget.on_refusal("a", 0.0, key="k")
    assert budget.on_request("a", 0.0, key="k") == 1
    assert not budget.on_refusal("a", 0.0, key="k"), "the repeat has earned nothing"
    assert budget.on_request("a", 0.0, key="k") == 2
    assert budget.on_request("b", 0.0, key="k") == 0, "another tenant's key is another"


def test_what_lies_long_ago_counts_no_more():
    budget = RetryBudget(0.2, 10)
    assert grants(budget, "a", 100) == 10
    assert grants(budget, "a", 100, WINDOW_S) == 6, "3.7 of the 10 count still"
    assert grants(budget, "a", 100, 100 * WINDOW_S) == 10


def test_nothing_is_granted_where_nothing_shall_be():
    budget = RetryBudget(0.0, 0)
    budget.on_request("a", 0.0)
    assert not budget.on_refusal("a", 0.0)


def test_memory_is_bounded():
    budget = RetryBudget(0.0, 1, most_tenants=100, most_keys=100)
    for i in range(1000):
        budget.on_request(f"t{i}", 0.0, key="k")
        budget.on_refusal(f"t{i}", 0.0, key=f"k{i}")
    assert (len(budget._accounts), len(budget._refused)) == (100, 100)
    # The one that came last is among those that are remembered.
    assert not budget.on_refusal("t999", 0.0)


def test_in_the_long_run_a_window_has_its_allowance():
    budget = RetryBudget(0.2, 6)
    granted = sum(budget.on_refusal("a", float(second)) for second in range(100 * int(WINDOW_S)))
    assert 550 < granted < 650


@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.1, 0.2, 1.0]), allowance=st.integers(0, 20))
def test_grants_never_exceed_the_share_and_the_allowance(seed, share, allowance):
    """Whatever the order: within a moment no more is granted than the first attempts have earned."""
    budget = RetryBudget(share, allowance)
    chance = random.Random(seed)
    firsts = granted = 0
    for _ in range(300):
        if chance.random() < 0.4:
            firsts += budget.on_request("a", 5.0, retries=chance.randint(0, 1)) == 0
        else:
            granted += budget.on_refusal("a", 5.0)
        assert granted <= share * firsts + allowance + 0.5
