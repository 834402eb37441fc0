import math

from hypothesis import given
from hypothesis import strategies as st

from maitred.admission.policy.retries import RetryBudget
from maitred.core.backoff import BackoffCeiling, GiveUpReason, RetryState

SECONDS = st.floats(0, 1_000)


def drawn(value):
    return lambda: value


def test_the_ceiling_doubles_up_to_the_most():
    assert [BackoffCeiling(1, 5).after(failures) for failures in (1, 2, 3, 4, 10**9)] == [1, 2, 4, 5, 5]


def test_a_wait_is_drawn_from_the_whole_of_it():
    for value, expected in ((0.0, [0, 0, 0]), (0.5, [0.5, 1, 2])):
        attempts = RetryState(9, BackoffCeiling(1, 5), draw=drawn(value))
        assert [attempts.wait(0) for _ in range(3)] == expected


def test_nobody_comes_before_the_time_that_was_named_nor_all_at_it():
    attempts = RetryState(9, BackoffCeiling(1, 5), draw=drawn(0.25))
    assert attempts.wait(0, retry_after_s=7) == 7.25
    assert attempts.wait(0, retry_after_s=-3) == 0.5, "a date that has passed"


def test_a_pause_that_nobody_waits_for_is_the_end():
    assert (
        RetryState(9, BackoffCeiling(), draw=drawn(0), patience_s=10).wait(0, retry_after_s=10.1) is GiveUpReason.TOLD
    )


def test_the_jitter_is_cut_before_the_attempt_is_given_up():
    attempts = RetryState(9, BackoffCeiling(4, 100), draw=drawn(1.0), deadline_s=10)
    assert attempts.wait(7, takes_s=2) == 1
    assert attempts.wait(7, retry_after_s=1, takes_s=2) == 1
    assert attempts.wait(7, retry_after_s=1.1, takes_s=2) is GiveUpReason.DEADLINE


def test_what_is_not_tried_takes_nothing_from_the_budget():
    budget = RetryBudget(0.0, 1)

    def take_retry(tenant):
        return budget.on_refusal(tenant, 0.0)

    def fresh(most=3, deadline_s=math.inf):
        return RetryState(
            most, BackoffCeiling(), draw=drawn(0), take_retry=take_retry, tenant="acme", deadline_s=deadline_s
        )

    assert fresh(most=1).wait(0) is GiveUpReason.ATTEMPTS
    assert fresh(deadline_s=-1).wait(0) is GiveUpReason.DEADLINE
    assert fresh().wait(0, retry_after_s=1e9) is GiveUpReason.TOLD
    assert fresh().wait(0) == 0.0, "the one that the budget has"
    assert fresh().wait(0) is GiveUpReason.BUDGET


@given(
    most=st.integers(1, 8),
    first_s=st.floats(0.001, 10),
    most_s=st.floats(0.001, 100),
    deadline_s=SECONDS,
    patience_s=SECONDS,
    tries=st.lists(st.tuples(st.floats(0, 50), st.none() | SECONDS, SECONDS, st.floats(0, 1, exclude_max=True))),
)
def test_every_attempt_fits(most, first_s, most_s, deadline_s, patience_s, tries):
    """However it goes: as many as allowed, none too early, none that could not be over in time."""
    chance = iter([draw for *_, draw in tries])
    asked = []
    attempts = RetryState(
        most,
        BackoffCeiling(first_s, most_s),
        draw=lambda: next(chance),
        take_retry=lambda tenant: not asked.append(None),
        deadline_s=deadline_s,
        patience_s=patience_s,
    )
    now_s, made = 0.0, 1
    for passes_s, asked_s, takes_s, _ in tries:
        now_s += passes_s
        wait = attempts.wait(now_s, retry_after_s=asked_s, takes_s=takes_s)
        if isinstance(wait, GiveUpReason):
            break
        made += 1
        assert (asked_s or 0.0) <= wait <= (asked_s or 0.0) + most_s
        assert now_s + wait + takes_s <= deadline_s + 1e-6
    assert made <= most
    assert len(asked) == made - 1


def test_a_retry_that_adds_to_no_load_needs_no_budget():
    taken = []
    attempts = RetryState(
        9, BackoffCeiling(1, 5), draw=drawn(0.5), take_retry=lambda tenant: bool(taken.append(tenant))
    )
    assert attempts.wait(0) is GiveUpReason.BUDGET
    assert attempts.wait(0, is_free=True) == 1.0
    assert len(taken) == 1
