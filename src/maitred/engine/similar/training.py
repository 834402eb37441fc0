"""Training of a verifier in small units of work, so that whoever runs it can do something else between them."""

import logging
import random
from collections.abc import Generator, Iterable, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from maitred.core.request import LabelledPair
from maitred.engine.similar.edits import make_edits
from maitred.engine.similar.features import FEATURES, TokenWeights, pair_features
from maitred.engine.similar.question import EncodedQuestion, Floats, QuestionPair, Surroundings
from maitred.engine.similar.question_reader import QuestionReader
from maitred.engine.similar.verifier import MIN_LABELS, train_verifier
from maitred.text.question_guards import difference
from maitred.text.wording import Wording

UNIT_TEXTS = 4
"""Texts that are encoded in one unit; more would be hardly faster, and others wait for a unit."""
_UNIT_PAIRS = 32
MOST_EDITED_TEXTS = 1_500
"""Most questions of which edits are made."""

T = TypeVar("T")

logger = logging.getLogger("maitred.engine")


def train_in_units(
    labels: Sequence[LabelledPair], reader: QuestionReader, encoder: str
) -> Generator[None, None, bytes]:
    """Trains a verifier with labelled pairs and with edits of their questions; yields after each unit.

    The same labels give the same verifier.

    Args:
        labels: Labelled pairs. Those with a text that does not fit the encoder's window are left out.
        reader: Reads questions.
        encoder: Version of the encoder's vectors.

    Returns:
        Its weights; empty if the labels are too few, or all the same.
    """
    if len(labels) < MIN_LABELS or len({label.same for label in labels}) < 2:
        return b""
    questions: dict[str, EncodedQuestion] = {}
    for texts in _units(dict.fromkeys(text for label in labels for text in (label.asked, label.cached)), UNIT_TEXTS):
        questions.update((question.text, question) for question in reader.read(texts))
        yield
    labels = [label for label in labels if label.asked in questions and label.cached in questions]
    if not labels:
        return b""
    weights = TokenWeights.of([*questions.values()])
    labelled, edited = _Examples(weights), _Examples(weights)
    for pairs in _units(labels, _UNIT_PAIRS):
        for label in pairs:
            labelled.add(
                QuestionPair(questions[label.asked], questions[label.cached], Surroundings(*label.surroundings))
            )
        yield
    partners = _partners(labels)
    source = random.Random(0)
    originals = source.sample([*partners], min(len(partners), MOST_EDITED_TEXTS))
    edits = make_edits(originals, source)
    yield
    for unit in _units(edits, UNIT_TEXTS):
        # What the guards refuse, the verifier never meets.
        judged = [
            (text, questions[partner], place)
            for index, text in unit
            for partner, place in partners[originals[index]].items()
            if difference(Wording.of(text), questions[partner].wording) is None
        ]
        read = {question.text: question for question in reader.read([*dict.fromkeys(text for text, *_ in judged)])}
        for text, partner, place in judged:
            if text in read:
                edited.add(QuestionPair(read[text], partner, place))
        yield
    dimensions = len(questions[originals[0]].vector)
    try:
        verifier = train_verifier(
            labelled.arrays(dimensions),
            np.array([label.same for label in labels]),
            edited.arrays(dimensions),
            encoder=encoder,
            token_weights=weights,
        )
    except ValueError as fault:
        logger.warning("no verifier was trained: %s", fault)
        return b""
    return verifier.to_bytes()


class _Examples:
    """Pairs for the training, of which only the numbers are kept."""

    def __init__(self, weights: TokenWeights) -> None:
        self._weights = weights
        self._features: list[Floats] = []
        self._middles: list[Floats] = []

    def add(self, pair: QuestionPair) -> None:
        self._features.append(pair_features(pair, self._weights))
        self._middles.append(pair.middle)

    def arrays(self, dimensions: int) -> tuple[Floats, Floats]:
        """Returns ``[pairs, features]`` and ``[pairs, dimensions]``; there may be no pairs."""
        pairs = len(self._features)
        features, middles = np.array(self._features), np.array(self._middles)
        return features.reshape(pairs, len(FEATURES)), middles.reshape(pairs, dimensions)


def _partners(labels: Iterable[LabelledPair]) -> dict[str, dict[str, Surroundings]]:
    """Returns for each question those beside which an edit of it is false: itself, and those with the same answer.

    Beside itself alone an edit is known by what is equal in both, which says little of an edit of a paraphrase.

    An edit takes the surroundings of a labelled pair. Partitions differ in size, and so in density. With surroundings
    that are never those of labelled pairs, a verifier would learn to know edits by them, and not by the words.
    """
    partners: dict[str, dict[str, Surroundings]] = {}
    for label in labels:
        place = Surroundings(*label.surroundings)
        for one, other in ((label.asked, label.cached), (label.cached, label.asked)):
            known = partners.setdefault(one, {one: place})
            if label.same:
                known.setdefault(other, place)
    return partners


def _units(items: Iterable[T], size: int) -> Generator[list[T], None, None]:
    left = iter(items)
    while unit := list(islice(left, size)):
        yield unit
