"""Whatever is sent as feedback is refused with a sentence, or is an opinion that any database takes."""

import json

from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import InvalidRequest
from maitred.core.usage import FeedbackLabel
from maitred.wire.admin.decode import decode_body
from maitred.wire.feedback import MAX_TAGS, MAX_TEXT_CHARACTERS, GiveFeedback, to_feedback

scores = st.one_of(st.booleans(), st.floats(), st.integers(), st.floats(0, 1), st.text(), st.none())
texts = st.one_of(st.text(), st.integers(3_990, 4_010).map(lambda length: "x" * length))
tags = st.lists(st.one_of(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,62}", fullmatch=True), st.text()), max_size=20)
bodies = st.fixed_dictionaries({"request_id": st.text(), "score": scores}, optional={"text": texts, "tags": tags})


@given(bodies)
def test_feedback(fields):
    try:
        # Python writes NaN and Infinity, too, which are no JSON.
        feedback = to_feedback(decode_body(json.dumps(fields).encode(), GiveFeedback))
    except InvalidRequest as error:
        assert error.message.endswith((".", "?"))  # noqa: PT017
        return
    assert 0 <= feedback.score == fields["score"] <= 1
    assert len(feedback.text) <= MAX_TEXT_CHARACTERS
    assert len(feedback.tags) == len(set(feedback.tags)) <= MAX_TAGS
    assert (
        feedback.verdict
        is [FeedbackLabel.BAD, FeedbackLabel.NEUTRAL, FeedbackLabel.GOOD][
            (feedback.score >= 0.5) + (feedback.score > 0.5)
        ]
    )
