"""No token lost or doubled, every request ends: each can be broken, in each of its ways."""

import math

import pytest

from maitred.load.chaos.answers import every_request_ends, same_answers
from maitred.load.measure.record import UserOutcome
from tests.unit.load.chaos.records import answered, cut, evidence, steady


def judged(record, *others):
    return same_answers(evidence([record, *others]))


def test_equal_answers_hold():
    verdict = same_answers(evidence())
    assert verdict.state == "held"
    assert verdict.found == "40 whole and 0 cut answers compared, 0 wrong"


def test_a_cut_answer_that_is_a_beginning_holds():
    verdict = judged(cut(3))
    assert verdict.state == "held"
    assert "0 whole and 1 cut" in verdict.found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["3.0.0 ", "3.0.1 ", "3.0.3 "], "from character 16 it has '3 ' where '2 3.0.3 ' is right"),
        (["3.0.0 ", "3.0.1 ", "3.0.1 ", "3.0.2 ", "3.0.3 "], "from character 16 it has '1 3.0.2 3.0.3 '"),
        (["3.0.0 ", "3.0.1 ", "3.0.2 "], "its last 6 characters are missing"),
        (["3.0.0 ", "3.0.1 ", "3.0.2 ", "3.0.3 ", "x"], "1 characters too many are at its end"),
    ],
)
def test_a_whole_answer_that_is_another_one_is_caught(words, says):
    verdict = judged(answered(3, text=words))
    assert verdict.state == "broken"
    assert says in verdict.examples[0]
    assert "session 3, turn 0 (complete" in verdict.examples[0]


def test_a_usage_that_differs_from_the_calm_one_is_caught():
    verdict = judged(answered(3, output_tokens=5))
    assert "The server counts 5 tokens in it, and 4 in calm." in verdict.examples[0]


def test_a_cut_answer_with_a_doubled_token_is_caught():
    verdict = judged(cut(3, text=["3.0.0 ", "3.0.0 "]))
    assert verdict.state == "broken"


def test_a_cut_answer_that_poses_as_whole_is_caught():
    verdict = judged(cut(3, finish_reason="stop"))
    assert verdict.state == "broken"
    assert "a finish reason, 'stop', says that it is whole" in verdict.examples[0]


def test_a_whole_text_without_its_end_is_no_lie():
    assert judged(cut(3, words=4, finish_reason="length")).state == "held"


def test_a_conversation_is_compared_only_while_it_is_the_same():
    calm = [answered(0, turn, due_s=turn) for turn in range(3)]
    other = answered(0, 2, due_s=2, text=["something else"])
    gone_on = [answered(0, 0), cut(0, 1), other]
    verdict = same_answers(evidence(gone_on, calm=calm))
    assert verdict.state == "held"
    assert "1 whole and 1 cut answers compared, 0 wrong; 1 without a reference" in verdict.found
    assert same_answers(evidence([answered(0, 0), answered(0, 1), other], calm=calm)).state == "broken"


def test_without_a_reference_the_length_must_be_the_one_asked_for():
    assert judged(answered(99), answered(1)).state == "held"
    verdict = judged(answered(99, words=3))
    assert "complete with 3 tokens, and 4 were asked for" in verdict.examples[0]


def test_a_server_that_ends_early_in_calm_too_is_not_held_to_the_length():
    calm = [answered(0, words=2), answered(1)]
    assert same_answers(evidence([answered(0, words=2), answered(99, words=3)], calm=calm)).state == "held"


def test_nothing_to_compare_with_is_not_held():
    assert same_answers(evidence(calm=[cut(0)])).state == "unchecked"
    assert same_answers(evidence([answered(99)])).state == "unchecked"


def test_every_request_ends():
    verdict = every_request_ends(evidence(), 1.0)
    assert verdict.state == "held"
    assert verdict.found == "40 requests; the longest took 0.4 s"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (answered(3, ended_s=math.nan), "it never ended"),
        (cut(3, outcome=UserOutcome.UNFINISHED), "it never ended"),
        (answered(3, ended_s=7.0), "it took 7.0 s"),
        (answered(2, due_s=1.0), "session 2, turn 0: it has 2 outcomes"),
    ],
)
def test_a_request_that_hangs_or_ends_twice_is_caught(record, says):
    verdict = every_request_ends(evidence([*steady(3), record]), 5.0)
    assert verdict.state == "broken"
    assert says in verdict.examples[0]


def test_clients_of_a_burst_must_end_too():
    verdict = every_request_ends(evidence(bursts=[answered(0, ended_s=9.0)]), 5.0)
    assert verdict.state == "broken"
