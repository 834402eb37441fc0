"""Features of pairs of questions."""

import numpy as np
import pytest

from maitred.engine.similar.features import FEATURES, TokenWeights, pair_features, text_features
from maitred.engine.similar.question import QuestionPair, Surroundings
from tests.support.similar.encoded_questions import encoded_question, word_id

WEIGHTS = TokenWeights.of([encoded_question(f"the {word} of it") for word in ("card", "fee", "card", "bank")])


def features(asked, cached):
    pair = QuestionPair(encoded_question(asked), encoded_question(cached), Surroundings(0.5, 0.6, 0.7))
    return dict(zip(FEATURES, pair_features(pair, WEIGHTS).tolist(), strict=True))


def test_equal_questions():
    found = features("where is my new card", "where is my new card")
    ones = ("cosine", "matched_least", "similarity_least", "common_content", "common_words", "common_sequence")
    assert [found[name] for name in ones] == pytest.approx([1.0] * len(ones), abs=1e-3)
    zeros = ("unmatched_token", "other_content_most", "moved_content", "crossed_matches", "same_words_moved")
    assert [found[name] for name in zeros] == pytest.approx([0.0] * len(zeros), abs=1e-3)
    assert (found["asked_density"], found["cached_density"], found["behind"]) == (0.5, 0.6, 0.7)


def test_swapped_words_show_in_their_order_alone():
    found = features("move money from savings to checking", "move money from checking to savings")
    assert found["common_content"] == found["common_words"] == 1.0
    assert found["cosine"] == pytest.approx(1.0, abs=1e-3)
    assert found["same_words_moved"] == 1.0
    assert found["moved_content"] > 0
    assert found["crossed_matches"] > 0
    assert found["common_sequence"] < 1


def test_a_replaced_word_shows():
    found = features("where is my new card", "where is my old card")
    assert (found["one_word_replaced"], found["other_content_least"], found["other_content_most"]) == (1.0, 1.0, 1.0)
    assert found["unmatched_token"] > features("where is my new card", "where was my new card")["unmatched_token"] / 2
    assert features("where is my card", "how is my card")["other_question_word"] == 1.0


@pytest.mark.parametrize(
    ("other", "one_word", "one_content_word"),
    [
        ("where is my old card", 1.0, 1.0),
        ("where was my new card", 1.0, 0.0),
        ("where are my new cards", 1.0, 0.0),
        ("where is my new card", 0.0, 0.0),
        ("where is my new bank card", 0.0, 0.0),
        ("where is your old card", 0.0, 0.0),
        ("where is card my new", 0.0, 0.0),
    ],
)
def test_questions_that_are_equal_but_for_one_word(other, one_word, one_content_word):
    found = features("where is my new card", other)
    assert (found["one_word_differs"], found["one_content_word_differs"]) == (one_word, one_content_word)


def test_rare_tokens_weigh_more():
    weights = dict(zip(["the", "card", "unknown"], WEIGHTS[encoded_question("the card unknown")], strict=True))
    assert weights["the"] < weights["card"] < weights["unknown"] == pytest.approx(1.0, abs=1e-2)
    assert WEIGHTS.frequencies[word_id("the")] == 4


@pytest.mark.parametrize("other", ["when does the new bank card of mine arrive", "hello", "new card my where is"])
def test_texts_are_measured_alike_in_either_order(other):
    a, b = encoded_question("where is my new card"), encoded_question(other)
    there, back = np.array(text_features(a, b, WEIGHTS)), np.array(text_features(b, a, WEIGHTS))
    assert there == pytest.approx(back, abs=1e-6)


def test_one_word_and_no_word_have_features():
    assert np.isfinite(list(features("hello", "hello").values())).all()
    assert np.isfinite(list(features("hello", "goodbye").values())).all()
