"""What `POST /v1/feedback` takes, and what it says to everything else."""

import pytest

from maitred.core.errors import InvalidRequest
from maitred.core.usage import Feedback, FeedbackLabel
from maitred.wire.admin.decode import decode_body
from maitred.wire.feedback import GiveFeedback, to_feedback


def read(body):
    return to_feedback(decode_body(body.encode(), GiveFeedback))


@pytest.mark.parametrize(
    ("score", "value", "verdict"),
    [
        *(
            ("1", 1.0, FeedbackLabel.GOOD),
            ("0", 0.0, FeedbackLabel.BAD),
            ("true", 1.0, FeedbackLabel.GOOD),
            ("false", 0.0, FeedbackLabel.BAD),
        ),
        *(("0.5", 0.5, FeedbackLabel.NEUTRAL), ("0.51", 0.51, FeedbackLabel.GOOD), ("0.49", 0.49, FeedbackLabel.BAD)),
    ],
)
def test_a_score_is_a_number_from_0_to_1_or_a_thumb(score, value, verdict):
    feedback = read(f'{{"request_id": "req-1", "score": {score}}}')
    assert (feedback.score, feedback.verdict) == (value, verdict)
    assert isinstance(feedback.score, float)


def test_text_may_have_lines_and_tags_count_once():
    feedback = read('{"request_id": "r", "score": 1, "text": "Good.\\n\\tThanks 🚀", "tags": ["a", "b:1", "a"]}')
    assert feedback == Feedback(score=1.0, text="Good.\n\tThanks 🚀", tags=("a", "b:1"))


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ('"score": -1', "score", "from 0 (bad) to 1 (good), or true or false; got -1. Map another scale"),
        ('"score": 5', "score", "got 5."),
        ('"score": "up"', "score", "score must be"),
        ('"score": null', "score", "score must be"),
        ('"text": "fine"', "score", "score is required."),
        ('"score": 1, "comment": "fine"', "comment", "comment"),
        (f'"score": 1, "text": "{"x" * 4001}"', "text", "at most 4,000 characters; got 4,001."),
        ('"score": 1, "tags": ["two words"]', "tags[0]", "must be 1 to 63 letters"),
        (f'"score": 1, "tags": {str(["t"] * 17).replace(chr(39), chr(34))}', "tags", "at most 16 entries; got 17."),
    ],
)
def test_what_is_refused_is_named(fields, param, says):
    with pytest.raises(InvalidRequest) as refused:
        read(f'{{"request_id": "req-1", {fields}}}')
    assert refused.value.param == param
    assert says in refused.value.message


@pytest.mark.parametrize("request_id", ["", "x" * 129])
def test_an_id_that_no_request_can_have(request_id):
    with pytest.raises(InvalidRequest, match="x-request-id"):
        read(f'{{"request_id": "{request_id}", "score": 1}}')
