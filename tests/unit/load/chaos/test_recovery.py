"""Recovery: the first whole answer after a fault, and the speed of before."""

import pytest

from maitred.load.chaos.recovery import first_answer, throughput
from maitred.load.measure.record import UserOutcome
from tests.unit.load.chaos.records import answered, cut, evidence, fault, steady, with_users


def interrupted(from_s, until_s):
    """Nothing sent in between is answered."""
    return [
        cut(record.session, words=0, due_s=record.intended_s, outcome=UserOutcome.FAILED)
        if from_s <= record.intended_s < until_s
        else record
        for record in steady()
    ]


def test_the_first_answer_that_was_asked_for_after_the_fault_counts():
    verdict = first_answer(evidence(interrupted(5, 9), faults=[fault(5.0)]), 5.0)
    assert verdict.state == "held"
    assert verdict.found == "fault 0 (kill engine) 4.4 s"


def test_an_answer_that_was_asked_for_before_the_fault_does_not_count():
    records = [answered(0, due_s=4.9), *(cut(number, due_s=5.0 + number) for number in range(1, 4))]
    verdict = first_answer(evidence(records, faults=[fault(5.0)]), 5.0)
    assert verdict.state == "broken"
    assert verdict.examples == ["fault 0 (kill engine): none of the 3 requests sent after it was answered."]


def test_requests_that_found_nobody_to_be_sent_to_show_that_nobody_is_there():
    nobody = [cut(n, due_s=6.0, outcome=UserOutcome.FAILED, sent_s=float("nan"), words=0) for n in range(20, 23)]
    verdict = first_answer(evidence([*steady(10), *nobody], faults=[fault(5.0)]), 5.0)
    assert verdict.state == "broken"


def test_a_late_recovery_is_caught():
    assert first_answer(evidence(interrupted(5, 9), faults=[fault(5.0)]), 4.0).state == "broken"


def test_each_fault_has_a_recovery_of_its_own():
    verdict = first_answer(evidence(interrupted(5, 9), faults=[fault(1.0), fault(5.0, number=1)]), 4.0)
    assert verdict.state == "broken"
    assert verdict.found.startswith("fault 0 (kill engine) 0.4 s; fault 1")


@pytest.mark.parametrize(
    "faults", [[], [fault(25.0)], [fault(5.0, error="no such process")], [fault(5.0, ended_s=None)]]
)
def test_what_the_load_did_not_see_is_not_held(faults):
    assert first_answer(evidence(faults=faults), 5.0).state == "unchecked"


def test_users_who_leave_do_not_show_that_nobody_is_answered():
    records = [*steady(10), cut(11, due_s=6.0, outcome=UserOutcome.CANCELLED)]
    assert first_answer(evidence(records, faults=[fault(5.5)]), 5.0).state == "unchecked"


@pytest.mark.parametrize("users", [2, None])
def test_the_speed_is_back_when_a_window_is_as_fast_as_in_calm(users):
    verdict = throughput(evidence(interrupted(5, 9), faults=[fault(5.0)], spec=with_users(users)), 5.0, 0.9)
    assert verdict.state == "held"
    took_s = float(verdict.found.split()[-2])
    assert 3.0 <= took_s <= 4.25


@pytest.mark.parametrize("users", [2, None])
def test_a_speed_that_stays_low_is_caught(users):
    slow = [
        record if record.intended_s < 5 or record.session % 2 else cut(record.session, words=0) for record in steady()
    ]
    found = evidence(slow, faults=[fault(5.0)], spec=with_users(users))
    verdict = throughput(found, 5.0, 0.9)
    assert verdict.state == "broken"
    assert "still slower than 90% of calm after 5 s" in verdict.examples[0]
    assert throughput(found, 5.0, 0.4).state == "held"


def test_a_load_that_ended_too_soon_shows_nothing():
    verdict = throughput(evidence(interrupted(15, 99), faults=[fault(15.0)]), 10.0, 0.9)
    assert verdict.state == "unchecked"
    assert throughput(evidence(calm=steady(4), faults=[fault(1.0)]), 10.0, 0.9).state == "unchecked"


def test_an_open_load_is_not_held_to_more_than_came():
    """The calm run had a pause there too."""
    calm = [record for record in steady() if not 6 <= record.intended_s < 18]
    found = evidence(calm, calm=calm, faults=[fault(6.5)], spec=with_users(None))
    assert throughput(found, 2.0, 0.9).state == "held"
    assert throughput(evidence(calm, calm=calm, faults=[fault(6.5)]), 2.0, 0.9).state == "broken"
