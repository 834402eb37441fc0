"""What a replica has left, between its reports."""

from maitred.core.replica import LoadReport
from maitred.dispatch.policy.credits import NOTHING, Cost, Credits, request_cost

REPORT = LoadReport(free_blocks=90, total_blocks=100, promised_blocks=10, free_sequences=6, running=2)


def account(unreported_count=0):
    credits_left = Credits()
    credits_left.on_report(REPORT, unreported_count, 8)
    return credits_left


def test_the_choices_of_a_prompt_share_its_whole_blocks():
    assert request_cost(40, 1, 8, 16) == Cost(1, 3, 40)
    assert request_cost(40, 1, 9, 16) == Cost(1, 4, 40)
    assert request_cost(40, 3, 9, 16) == Cost(3, 2 + 3 * 2, 40)


def test_promised_blocks_are_not_free():
    assert account().free == Cost(6, 80)
    assert account().total == Cost(8, 100)


def test_held_credits_are_not_free_until_a_report_counts_them():
    credits_left = account()
    hold = credits_left.acquire([Cost(2, 10, 5), Cost(1, 5, 5)])
    assert credits_left.free == Cost(3, 65, -10)
    credits_left.on_submitted(hold)
    credits_left.on_submitted(hold)
    credits_left.on_report(REPORT, 1, 8)
    assert credits_left.free == Cost(5, 75, -5), "the first was heard"
    credits_left.on_report(REPORT, 0, 8)
    assert credits_left.free == Cost(6, 80)
    credits_left.release(hold)
    assert credits_left.free == Cost(6, 80)
    assert credits_left.outstanding == NOTHING


def test_an_unreported_request_that_leaves_frees_its_credits_and_keeps_its_position():
    credits_left = account()
    first, second = credits_left.acquire([Cost(1, 1)]), credits_left.acquire([Cost(1, 2)])
    credits_left.on_submitted(first)
    credits_left.on_submitted(second)
    credits_left.release(first)
    assert credits_left.free == Cost(5, 78)
    credits_left.on_report(REPORT, 1, 8)
    assert credits_left.free == Cost(5, 78), "it is the second that is unreported"
    credits_left.on_report(REPORT, 0, 8)
    assert credits_left.free == Cost(6, 80)


def test_a_token_proves_that_the_request_was_submitted():
    credits_left = account()
    hold = credits_left.acquire([Cost(1, 1)])
    credits_left.on_answered(hold)
    assert credits_left.free == Cost(6, 80)
    credits_left.release(hold)
    credits_left.release(hold)
    assert credits_left.request_count == 0
    assert credits_left.unreported == NOTHING


def test_without_reports_slots_are_counted_here():
    credits_left = Credits()
    hold = credits_left.acquire([Cost(3, 50)])
    credits_left.on_submitted(hold)
    credits_left.estimate(8)
    assert credits_left.free.slots == 5
    credits_left.on_answered(hold)
    credits_left.estimate(8)
    assert credits_left.free.slots == 5
    credits_left.release(hold)
    credits_left.estimate(8)
    assert credits_left.free.slots == 8
    assert credits_left.idle


def test_an_engine_may_take_fewer_sequences_for_a_while():
    credits_left = Credits()
    credits_left.on_report(REPORT, 0, 16)
    assert credits_left.total == Cost(8, 100)
    credits_left.on_report(LoadReport(running=9, total_blocks=100), 0, 8)
    assert credits_left.total == Cost(8, 100)
