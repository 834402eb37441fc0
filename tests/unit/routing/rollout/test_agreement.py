"""When two answers are the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.routing.rollout.agreement import MAX_EXACT_WORDS, agree, append_tool_calls, f1, split_words

LONG = " ".join(f"word{number}" for number in range(MAX_EXACT_WORDS + 8))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Paris.", "paris", True),
        ("42", "42.0", False),
        ("The answer is 42.", "The answer is 17.", False),
        ("1,234.5 km", "1,234.5  KM!", True),
        (LONG, LONG.replace("word1 ", "another "), True),
        (LONG, " ".join(reversed(LONG.split())), True),
        (LONG, " ".join(f"other{number}" for number in range(40)), False),
        (LONG, "", False),
    ],
)
def test_greedy_answers(one, other, same):
    assert agree([one], [other], 0.8, greedy=True) is same


def test_of_sampled_answers_short_ones_are_measured_too():
    assert agree(["It is rather warm today"], ["Today it is warm"], 0.8, greedy=False)
    assert not agree(["It is rather warm today"], ["I do not know"], 0.8, greedy=False)


def test_every_choice_has_to_agree():
    assert not agree(["a", "b"], ["a", "c"], 0.8, greedy=True)
    assert not agree(["a", "b"], ["a"], 0.8, greedy=True)


def test_a_call_of_another_tool_is_another_answer():
    def call(name, *arguments):
        first = {"index": 0, "function": {"name": name, "arguments": ""}}
        rest = [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in arguments]
        return [append_tool_calls("", [{"tool_calls": [first]}, *rest])]

    one = call("find", '{"city": "Ulm",', ' "day": 1}')
    assert agree(one, call("find", '{"day": 1, "city": "Ulm"}'), 0.8, greedy=True)
    assert not agree(one, call("find", '{"day": 2, "city": "Ulm"}'), 0.8, greedy=True)
    assert not agree(one, call("book", '{"city": "Ulm", "day": 1}'), 0.8, greedy=True)
    assert append_tool_calls("", [{"tool_calls": [{"function": {"name": "find", "arguments": "{"}}]}]) == " find {"


@given(st.text(), st.text(), st.booleans())
def test_it_is_symmetric_and_an_answer_agrees_with_itself(one, other, greedy):
    assert agree([one], [one], 1.0, greedy=greedy)
    assert agree([one], [other], 0.7, greedy=greedy) == agree([other], [one], 0.7, greedy=greedy)
    assert 0 <= f1(split_words(one), split_words(other)) <= 1
