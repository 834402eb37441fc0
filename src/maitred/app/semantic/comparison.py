"""Comparison of two answers: whether the answer to one question is one to the other, too. In doubt it is not."""

from collections.abc import Sequence

from maitred.app.request.shadow_traffic import texts_of
from maitred.core.inference import TextDelta
from maitred.core.request import FinishReason
from maitred.routing.rollout.agreement import f1, split_words
from maitred.text.question_guards import difference
from maitred.text.wording import Wording


def are_same(first: Sequence[TextDelta], second: Sequence[TextDelta], agreement: float) -> bool:
    """Returns whether two answers of one choice say the same.

    Args:
        first: Deltas of one answer.
        second: Deltas of the other one.
        agreement: Share of equal words (F1) from which on texts are the same. Texts that differ in numbers, dates,
            names, quoted parts or negations never are; calls of tools must be equal.
    """
    if _finish(first) is not _finish(second):
        return False
    one, other = "".join(texts_of(first)), "".join(texts_of(second))
    words, other_words = split_words(one), split_words(other)
    if words == other_words:
        return True
    if any(part.extra is not None and part.extra.get("tool_calls") for part in (*first, *second)):
        return False
    return difference(Wording.of(one), Wording.of(other)) is None and f1(words, other_words) >= agreement


def _finish(deltas: Sequence[TextDelta]) -> FinishReason | None:
    return next((part.finish for part in reversed(deltas) if part.finish is not None), None)
