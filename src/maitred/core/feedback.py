"""Feedback on an answer: a score, words, tags."""

from enum import StrEnum
from typing import NamedTuple

import msgspec

_MIDDLE = 0.5


class FeedbackLabel(StrEnum):
    """A score in one word, for counting."""

    GOOD = "good"
    NEUTRAL = "neutral"
    BAD = "bad"


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """One opinion of one request."""

    score: float
    """From 0, bad, to 1, good."""
    text: str = ""
    tags: tuple[str, ...] = ()

    @property
    def verdict(self) -> FeedbackLabel:
        """Good above the middle, bad below it."""
        if self.score == _MIDDLE:
            return FeedbackLabel.NEUTRAL
        return FeedbackLabel.GOOD if self.score > _MIDDLE else FeedbackLabel.BAD


class FeedbackReceipt(NamedTuple):
    """Result of storing feedback."""

    feedback: Feedback
    """The one that holds now."""
    model: str
    """That served the request."""
    rollout: str
    """The side of a rollout that the request was on, such as ``chat=canary``; empty: there was none."""
    before: Feedback | None
    """What held before; None: this is the first opinion of the request."""
