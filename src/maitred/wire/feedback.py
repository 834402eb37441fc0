"""`POST /v1/feedback`: the request, the response and their rules.

An unknown field is rejected, because a text in a misspelt field would be lost without notice.
"""

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from maitred.core.errors import InvalidRequest
from maitred.core.usage import Feedback, FeedbackLabel, FeedbackReceipt
from maitred.wire.admin.rules import WORD_PATTERN, check_count, check_word
from maitred.wire.openai.faults import format_value

MAX_TEXT_CHARACTERS = 4_000
MAX_TAGS = 16
_MAX_ID_CHARACTERS = 128


class GiveFeedback(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Feedback of a client on one answer."""

    request_id: Annotated[
        str,
        Meta(
            description="The `x-request-id` of the answer.",
            extra_json_schema={"minLength": 1, "maxLength": _MAX_ID_CHARACTERS},
        ),
    ]
    score: Annotated[
        float | bool,
        Meta(
            description="From 0, bad, to 1, good; `true` is 1, `false` is 0.",
            extra_json_schema={"minimum": 0, "maximum": 1},
        ),
    ]
    text: Annotated[
        str,
        Meta(
            description=f"In words; at most {MAX_TEXT_CHARACTERS:,} characters.",
            extra_json_schema={"maxLength": MAX_TEXT_CHARACTERS},
        ),
    ] = ""
    tags: Annotated[
        tuple[Annotated[str, Meta(extra_json_schema={"pattern": f"^{WORD_PATTERN}$"})], ...],
        Meta(
            description=f"At most {MAX_TAGS}, each 1 to 63 letters, digits, `.`, `_`, `:` and `-`.",
            extra_json_schema={"maxItems": MAX_TAGS},
        ),
    ] = ()


class FeedbackGiven(Struct, frozen=True, kw_only=True):
    """Feedback that the store has now."""

    object: Literal["feedback"] = "feedback"
    request_id: str
    model: Annotated[str, Meta(description="That served the request.")]
    score: float
    verdict: Annotated[FeedbackLabel, Meta(description="`good` above a score of 0.5, `bad` below it, else `neutral`.")]
    text: str
    tags: list[str]
    replaced: Annotated[bool, Meta(description="Whether it took the place of earlier feedback on this request.")]

    @classmethod
    def of(cls, request_id: str, receipt: FeedbackReceipt) -> "FeedbackGiven":
        """Builds the response from the stored feedback."""
        feedback = receipt.feedback
        return cls(
            request_id=request_id,
            model=receipt.model,
            score=feedback.score,
            verdict=feedback.verdict,
            text=feedback.text,
            tags=list(feedback.tags),
            replaced=receipt.before is not None,
        )


def to_feedback(request: GiveFeedback) -> Feedback:
    """Checks a request and returns its feedback.

    Raises:
        InvalidRequest: A field is out of range.
    """
    if not 0 < len(request.request_id) <= _MAX_ID_CHARACTERS:
        raise InvalidRequest(
            f"request_id must be 1 to {_MAX_ID_CHARACTERS} characters; got {len(request.request_id)}. Send the "
            "x-request-id of the answer.",
            param="request_id",
        )
    if not (math.isfinite(request.score) and 0 <= request.score <= 1):
        raise InvalidRequest(
            f"score must be from 0 (bad) to 1 (good), or true or false; got {format_value(request.score)}. Map "
            "another scale "
            "onto that: a thumb down is 0.",
            param="score",
        )
    if len(request.text) > MAX_TEXT_CHARACTERS:
        raise InvalidRequest(
            f"text must have at most {MAX_TEXT_CHARACTERS:,} characters; got {len(request.text):,}.", param="text"
        )
    check_count("tags", request.tags, MAX_TAGS)
    for position, tag in enumerate(request.tags):
        check_word(f"tags[{position}]", tag)
    return Feedback(score=float(request.score), text=request.text, tags=tuple(dict.fromkeys(request.tags)))
