"""Feedback on an answer: a score, a comment and tags."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

_MIDDLE = 0.5


class FeedbackLabel(StrEnum):
    """Label of a score, for counting."""

    GOOD = "good"
    NEUTRAL = "neutral"
    BAD = "bad"


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """One feedback item about one request."""

    score: float
    """Score from 0 (bad) to 1 (good)."""
    text: str = ""
    tags: tuple[str, ...] = ()

    @property
    def verdict(self) -> FeedbackLabel:
        """Returns good above 0.5 and bad below it."""
        if self.score == _MIDDLE:
            return FeedbackLabel.NEUTRAL
        return FeedbackLabel.GOOD if self.score > _MIDDLE else FeedbackLabel.BAD


class FeedbackReceipt(NamedTuple):
    """Result of storing feedback."""

    feedback: Feedback
    """The feedback that is stored now."""
    model: str
    """Model that served the request."""
    rollout: str
    """Rollout arm of the request, such as ``chat=canary``; empty: no rollout."""
    before: Feedback | None
    """The previous feedback; None: this is the first feedback for the request."""
