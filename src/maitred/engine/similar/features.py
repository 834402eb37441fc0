"""Features of a pair of questions: how well their tokens and their words match.

The cosine of two vectors says that two questions are about the same; whether they ask the same shows in single words.
So each token is matched with the most similar token of the other question (late interaction: Khattab and Zaharia,
"ColBERT", 2020), and what is left without a match counts more the rarer it is. Words tell what token states blur: which
are missing, and in which order they stand.

Two questions that are equal but for one word have a feature of their own. Edits in training are all of that kind
(`maitred.engine.similar.edits`); without it what they teach falls on every other feature, and paraphrases pay for it.
"""

from collections.abc import Mapping, Sequence, Set
from itertools import pairwise

import numpy as np

from maitred.engine.similar.question import EncodedQuestion, Floats, QuestionPair
from maitred.text.wording import is_content_word, stem

FEATURES = (
    "cosine",
    "matched_least",
    "matched_most",
    "unmatched_token",
    "next_unmatched_token",
    "unmatched_least",
    "unmatched_most",
    "similarity_least",
    "similarity_most",
    "crossed_matches",
    "common_content",
    "other_content_least",
    "other_content_most",
    "common_words",
    "other_question_word",
    "common_sequence",
    "moved_content",
    "length_ratio",
    "log_words",
    "same_words_moved",
    "common_word_pairs",
    "one_word_replaced",
    "common_content_sequence",
    "one_word_differs",
    "one_content_word_differs",
    "asked_density",
    "cached_density",
    "behind",
)
"""Names of the features, in their order; most are symmetric in the two questions."""
FEATURE_VERSION = 2
"""Changes with every change of what a feature means."""
_QUESTION_WORDS = {
    *("what", "how", "why", "when", "where", "who", "which"),
    *("can", "could", "is", "are", "was", "do", "does", "did", "will", "would", "should", "may"),
}


class TokenWeights:
    """Weights of tokens by their rarity in a deployment's own questions, from 0 to 1.

    Args:
        frequencies: Number of questions with each token.
        questions: Number of questions.
    """

    def __init__(self, frequencies: Mapping[int, int], questions: int) -> None:
        self.frequencies = frequencies
        self.questions = questions
        self._scale = np.log(questions + 1)

    @classmethod
    def of(cls, questions: Sequence[EncodedQuestion]) -> "TokenWeights":
        """Counts the tokens of questions."""
        tokens = [np.unique(question.token_ids) for question in questions]
        ids, counts = np.unique(np.concatenate(tokens), return_counts=True)
        return cls(dict(zip(ids.tolist(), counts.tolist(), strict=True)), len(questions))

    def __getitem__(self, question: EncodedQuestion) -> Floats:
        """Weights of a question's tokens."""
        counts = np.array([self.frequencies.get(token, 0) for token in question.token_ids.tolist()])
        weights: Floats = np.maximum(0.0, np.log((self.questions + 1) / (counts + 1)) / self._scale) + 1e-3
        return weights


def pair_features(pair: QuestionPair, weights: TokenWeights) -> Floats:
    """Measures a pair: one number for each name in `FEATURES`."""
    return np.array([*text_features(pair.asked, pair.cached, weights), *pair.surroundings])


def text_features(a: EncodedQuestion, b: EncodedQuestion, weights: TokenWeights) -> list[float]:
    """Measures two questions without their surroundings: the same whichever of them was asked."""
    return [float(a.vector @ b.vector), *_token_features(a, b, weights), *_word_features(a, b)]


def _token_features(a: EncodedQuestion, b: EncodedQuestion, weights: TokenWeights) -> list[float]:
    similarities = a.token_vectors.astype(np.float32) @ b.token_vectors.astype(np.float32).T
    weights_a, weights_b = weights[a], weights[b]
    nearest_a, nearest_b = similarities.max(1), similarities.max(0)
    missing_a, missing_b = weights_a * (1 - nearest_a), weights_b * (1 - nearest_b)
    matched = [1 - missing_a.sum() / weights_a.sum(), 1 - missing_b.sum() / weights_b.sum()]
    missing = [float(missing_a.sum()), float(missing_b.sum())]
    plain = [float(nearest_a.mean()), float(nearest_b.mean())]
    second, first = np.sort(np.concatenate([missing_a, missing_b]))[-2:]
    crossed = _crossing_share(similarities.argmax(1), weights_a) + _crossing_share(similarities.argmax(0), weights_b)
    return [
        min(matched),
        max(matched),
        float(first),
        float(second),
        min(missing),
        max(missing),
        min(plain),
        max(plain),
        crossed / 2,
    ]


def _crossing_share(matches: Floats, weights: Floats) -> float:
    """Returns the weighted part of token pairs whose matches stand in the other order."""
    both = np.triu(np.outer(weights, weights), 1)
    return float(both[matches[:, None] > matches[None, :]].sum() / max(1e-6, both.sum()))


def _word_features(a: EncodedQuestion, b: EncodedQuestion) -> list[float]:
    words_a, words_b = a.wording.words, b.wording.words
    content_a, content_b = a.wording.content, b.wording.content
    set_a, set_b, all_a, all_b = set(content_a), set(content_b), set(words_a), set(words_b)
    others = sorted((len(set_a - set_b), len(set_b - set_a)))
    common, in_order = len(set_a & set_b), _common_sequence(content_a, content_b)
    lengths = sorted((len(words_a), len(words_b)))
    return [
        _jaccard(set_a, set_b),
        others[0],
        others[1],
        _jaccard(all_a, all_b),
        float(_question_word(words_a) != _question_word(words_b)),
        _common_sequence(words_a, words_b) / max(1, lengths[1]),
        (common - in_order) / max(1, common),
        lengths[0] / max(1, lengths[1]),
        float(np.log(max(1, lengths[0]))),
        float(all_a == all_b and words_a != words_b),
        _jaccard(set(pairwise(words_a)), set(pairwise(words_b))),
        float(others == [1, 1]),
        in_order / max(1, len(content_a), len(content_b)),
        *_sole_difference(words_a, words_b),
    ]


def _sole_difference(a: Sequence[str], b: Sequence[str]) -> tuple[float, float]:
    """Returns whether two questions are the same but for one word, and whether that is a content word in both."""
    places = [(stem(x), stem(y)) for x, y in zip(a, b, strict=False) if stem(x) != stem(y)]
    if len(a) != len(b) or len(places) != 1:
        return 0.0, 0.0
    return 1.0, float(all(map(is_content_word, places[0])))


def _question_word(words: Sequence[str]) -> str | None:
    return next((word for word in words if word in _QUESTION_WORDS), None)


def _jaccard(a: Set[object], b: Set[object]) -> float:
    return len(a & b) / max(1, len(a | b))


def _common_sequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for i, other in enumerate(b):
            before, row[i + 1] = row[i + 1], before + 1 if word == other else max(row[i], row[i + 1])
    return row[-1]
