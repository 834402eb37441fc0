"""Training in units: what is learnt, and from what."""

import pytest

from maitred.core.request import LabelledPair
from maitred.engine.similar import training
from maitred.engine.similar.question import QuestionPair, Surroundings
from maitred.engine.similar.training import UNIT_TEXTS, train_in_units
from maitred.engine.similar.verifier import MIN_LABELS, Verifier
from tests.support.similar.labels import labelled_pairs, questions
from tests.support.similar.question_readers import WordReader


def finish(units):
    """Returns the weights, and what was yielded before them."""
    count = 0
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value, count
        count += 1


@pytest.fixture(scope="module")
def trained():
    reader = WordReader()
    weights, units = finish(train_in_units(labelled_pairs(600), reader, "e"))
    return reader, weights, units


def scores(reader, weights, pairs):
    verifier = Verifier.load(weights, "e")
    texts = [reader.read(list(pair)) for pair in pairs]
    return verifier.score([QuestionPair(*pair, Surroundings(0.8, 0.8, 0.0)) for pair in texts])


def test_it_tells_paraphrases_from_other_questions_and_from_swaps(trained):
    reader, weights, _ = trained
    same, other, swapped = scores(
        reader,
        weights,
        [
            ("how do i block my card", "please tell me how i block the card"),
            ("how do i block my card", "how do i close my card"),
            ("how do i block my card", "how do i card my block"),
        ],
    )
    assert same > 0 > max(other, swapped)


def test_units_are_small(trained):
    reader, _, units = trained
    assert max(reader.encoder.batches) == UNIT_TEXTS
    assert units > len(reader.encoder.batches) >= len(questions()) / UNIT_TEXTS


def test_the_same_labels_give_the_same_verifier(trained):
    assert finish(train_in_units(labelled_pairs(600), WordReader(), "e"))[0] == trained[1]


def test_too_few_labels_or_all_the_same_give_nothing_and_cost_nothing():
    reader = WordReader()
    some = labelled_pairs(MIN_LABELS - 1)
    alike = [LabelledPair("a", "b", True, (0, 0, 0))] * MIN_LABELS
    assert [finish(train_in_units(labels, reader, "e")) for labels in (some, alike)] == [(b"", 0)] * 2
    assert reader.encoder.batches == []


@pytest.mark.parametrize("long_labels", [MIN_LABELS, 10])
def test_labels_that_do_not_fit_the_window_are_left_out(long_labels):
    labels = labelled_pairs(MIN_LABELS)
    labels[:long_labels] = [
        LabelledPair(f"{label.asked} {'again ' * 40}", label.cached, label.same, label.surroundings)
        for label in labels[:long_labels]
    ]
    assert finish(train_in_units(labels, WordReader(), "e"))[0] == b""


def test_edits_that_the_guards_refuse_are_left_out(monkeypatch):
    """They are the only ones here, so no edit is encoded."""
    monkeypatch.setattr(training, "make_edits", lambda texts, source: [(0, f"{texts[0]} 17 times")] * 50)
    reader = WordReader()
    weights, _ = finish(train_in_units(labelled_pairs(600), reader, "e"))
    assert weights
    assert "17" not in reader.encoder.words
