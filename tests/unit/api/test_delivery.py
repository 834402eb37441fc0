"""Collecting an answer that is sent whole."""

from maitred.api.delivery import WholeChoice
from maitred.core.answer import Part, Score, TokenScore
from maitred.core.request import FinishReason


def scored(offset: int) -> TokenScore:
    return TokenScore(chosen=Score("a", b"a", -1.0), top=[], offset=offset)


def test_a_choice_is_the_sum_of_its_parts() -> None:
    choice = WholeChoice()
    assert choice.scores is None
    first = [scored(0)]
    choice.add(Part(0, "a", None, first))
    collected = choice.scores
    choice.add(Part(0, "", FinishReason.STOP, [scored(1), scored(2)]))
    assert ("".join(choice.text), choice.finish) == ("a", FinishReason.STOP)
    assert choice.scores == [scored(0), scored(1), scored(2)]
    # Appended to, not copied: a copy for each token would cost the square of the answer's length.
    assert choice.scores is collected
    assert first == [scored(0)]
