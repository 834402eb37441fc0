"""What speaks against an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.inference import TextDelta, TokenLogprob, TokenScore
from maitred.core.request import FinishReason
from maitred.routing.escalation.checks import ChoiceText, collect_choices, is_refusal, mean_logprob, requested_schema
from maitred.routing.escalation.config import REFUSAL_OPENINGS

STOP = FinishReason.STOP


def score(logprob):
    return TokenScore(TokenLogprob("x", b"x", logprob), [], 0)


@pytest.mark.parametrize(
    "text",
    [
        "I can't help with that.",
        "I’m sorry, but I can’t assist with that request.",
        "Sorry, I cannot provide medical advice.",
        "I'm very sorry for the inconvenience, but I'm unable to open links.",
        "Unfortunately, I am not able to do that.",
        "I apologize, but as an AI language model, I cannot have opinions.",
        " I must decline. ",
    ],
)
def test_a_refusal_is_known_by_its_beginning(text):
    assert is_refusal(ChoiceText(text, finish=STOP), REFUSAL_OPENINGS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sorry for the delay! Paris.",
        "Paris. I can't help adding that it is beautiful.",
        "You can't help with that by shouting.",
        'He said: "I cannot help you."',
        "I can help.",
        "I can't help with all of it, but here is the most of it. " + "Step by step. " * 60,
    ],
)
def test_an_answer_is_not_a_refusal(text):
    assert not is_refusal(ChoiceText(text, finish=STOP), REFUSAL_OPENINGS)


def test_what_the_server_says_counts_whatever_the_text():
    assert is_refusal(ChoiceText("Paris", refusal="No.", finish=STOP), ())
    assert is_refusal(ChoiceText("Paris", finish=FinishReason.CONTENT_FILTER), ())
    assert not is_refusal(ChoiceText("I can't help", has_tool_calls=True, finish=STOP), REFUSAL_OPENINGS)


def test_without_openings_no_text_is_a_refusal():
    assert not is_refusal(ChoiceText("I can't help with that.", finish=STOP), ())


def test_the_mean_is_that_of_the_chosen_tokens():
    assert mean_logprob(ChoiceText()) is None
    assert mean_logprob(ChoiceText(logprobs=[-1.0, -3.0])) == -2.0
    assert mean_logprob(ChoiceText(logprobs=[-9999.0, 0.0])) == -50.0
    assert mean_logprob(ChoiceText(logprobs=[float("-inf")])) == -100.0


def test_a_token_without_log_probability_does_not_count():
    (choice,) = collect_choices([TextDelta(0, "xx", STOP, scores=[score(None), score(-1.0)])])
    assert mean_logprob(choice) == -1.0


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.floats(-5, 0), max_size=2)), max_size=12))
def test_choices_are_put_together_from_their_parts_in_any_order(pieces):
    parts = [TextDelta(index, text, scores=[*map(score, logprobs)] or None) for index, text, logprobs in pieces]
    indexes = sorted({index for index, _, _ in pieces})
    choices = collect_choices([*parts, *(TextDelta(index, "", STOP) for index in indexes)])
    assert [choice.text for choice in choices] == ["".join(t for i, t, _ in pieces if i == index) for index in indexes]
    assert [choice.logprobs for choice in choices] == [
        [logprob for i, _, logprobs in pieces if i == index for logprob in logprobs] for index in indexes
    ]
    assert {choice.finish for choice in choices} <= {STOP}


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}}}}, {"a": 1}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, None),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": {"type": "text"}}, None),
        ({"guided_json": {"b": 2}}, {"b": 2}),
        ({}, None),
    ],
)
def test_the_schema_is_where_the_request_has_it(fields, schema):
    assert requested_schema(fields) == schema
