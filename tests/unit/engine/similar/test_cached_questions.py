"""What a search finds among cached questions, and who judges it."""

import numpy as np
import pytest

from maitred.core.request import SimilarQuestions, SimilarSearch
from maitred.engine.similar import cached_questions as module
from maitred.engine.similar.cached_questions import CachedQuestions
from maitred.engine.similar.training import train_in_units
from maitred.wire.frames import KeptQuestion, UpdateSimilar
from tests.support.similar.labels import labelled_pairs
from tests.support.similar.question_readers import WordReader

CARD, CARD_TOO, LOAN = "how do i block my card", "can i block my card", "who gives me a loan"


class Bench:
    def __init__(self, max_entries=10):
        self.reader = WordReader(context_tokens=1000)
        self.questions = CachedQuestions(self.reader, encoder="e", max_entries=max_entries)

    def search(self, text, partition=b"p", scope="s", count=3, least_cosine=0.3):
        search = SimilarSearch(text, partition, scope, count, least_cosine)
        return self.questions.answer([(self.reader.tokens(text), search)])[0]

    def found(self, text, **options):
        return [each.key for each in self.search(text, **options).found]

    def keep(self, text, key, partition=b"p"):
        self.questions.update(UpdateSimilar(kept=[KeptQuestion(partition, text, key)]))

    def ask_and_keep(self, text, key, partition=b"p"):
        self.search(text, partition)
        self.keep(text, key, partition)


@pytest.fixture(scope="module")
def weights():
    return finish(train_in_units(labelled_pairs(600), WordReader(), "e"))


def finish(units):
    while True:
        try:
            next(units)
        except StopIteration as end:
            return end.value


def test_a_search_finds_what_was_kept_in_its_partition():
    bench = Bench()
    assert bench.search(CARD) == SimilarQuestions([])
    bench.keep(CARD, b"1")
    bench.ask_and_keep(LOAN, b"2")
    bench.ask_and_keep(CARD_TOO, b"3", partition=b"other")
    nearest = bench.search(CARD_TOO).found[0]
    assert (nearest.key, nearest.question, nearest.score) == (b"1", CARD, None)
    asked, cached = bench.reader.read([CARD_TOO, CARD])
    assert nearest.cosine == pytest.approx(float(asked.vector @ cached.vector))
    assert nearest.surroundings[2] == 0
    assert bench.found(CARD, partition=b"other") == [b"3"]
    assert bench.found(CARD, partition=b"third") == []


def test_bounds_of_a_search_are_kept():
    bench = Bench()
    for number in range(5):
        bench.ask_and_keep(f"{CARD} {'again ' * number}", b"%d" % number)
    assert bench.found(CARD, count=2) == [b"0", b"1"]
    assert bench.found(CARD, count=9, least_cosine=0.999) == [b"0"]


def test_texts_without_a_search_in_the_same_batch_get_their_vectors():
    bench = Bench()
    plain, search = bench.reader.tokens(LOAN), SimilarSearch(CARD, b"p", "s", 3, 0.5)
    vector, found = bench.questions.answer([(plain, None), (bench.reader.tokens(CARD), search)])
    assert vector == bench.reader.encode([plain])[0][0].tobytes()
    assert found == SimilarQuestions([])


def test_vectors_of_an_encoder_that_does_not_scale_them_are_scaled():
    bench = Bench()
    (question,) = bench.reader.read([CARD])
    assert np.linalg.norm(question.vector) == pytest.approx(1)
    assert len(question.token_ids) == len(question.token_vectors) == 6


def test_what_no_search_has_brought_lately_is_not_kept(monkeypatch):
    monkeypatch.setattr(module, "RECENT_QUESTIONS", 2)
    bench = Bench()
    bench.keep(CARD, b"1")
    for text in (CARD, CARD_TOO, LOAN):
        bench.search(text)
    bench.keep(CARD, b"1")
    bench.keep(LOAN, b"2", partition=b"other")
    assert len(bench.questions.index) == 0
    bench.keep(LOAN, b"2")
    assert bench.found(LOAN) == [b"2"]


def test_what_was_removed_is_not_found_and_what_was_served_stays():
    bench = Bench(max_entries=2)
    bench.ask_and_keep(CARD, b"1")
    bench.ask_and_keep(CARD_TOO, b"2")
    bench.questions.update(UpdateSimilar(served=[b"1", b"unknown"]))
    bench.ask_and_keep("how do i block a card", b"3")
    assert sorted(bench.found(CARD)) == [b"1", b"3"]
    bench.questions.update(UpdateSimilar(removed=[b"1", b"unknown"]))
    assert bench.found(CARD) == [b"3"]


@pytest.mark.parametrize("text", ["a" * (module.MOST_CHARACTERS + 1), "why " * (module.MOST_TOKENS + 1)])
def test_long_questions_take_no_memory(text):
    bench = Bench()
    bench.ask_and_keep(text, b"1")
    assert bench.found(text) == []
    assert len(bench.questions.index) == bench.questions.index.tokens == 0


def test_a_verifier_judges_its_scope(weights):
    bench = Bench()
    bench.questions.update(UpdateSimilar(verifiers={"s": weights}))
    assert bench.search(CARD).verifier.startswith("e:")
    bench.keep(CARD, b"1")
    # As densely as in the labels.
    for number, thing in enumerate(("fee", "bank", "rate", "phone", "loan", "salary", "limit", "branch", "deposit")):
        bench.ask_and_keep(f"how do i block my {thing}", b"other %d" % number)
    same, other = bench.search("please tell me how i block the card"), bench.search("how do i close my card")
    assert same.found[0].key == other.found[0].key == b"1"
    assert same.found[0].score > 0 > other.found[0].score
    assert same.verifier == other.verifier
    elsewhere = bench.search(CARD_TOO, scope="other")
    assert (elsewhere.verifier, elsewhere.found[0].score) == ("", None)
    bench.questions.update(UpdateSimilar(verifiers={"s": b""}))
    assert bench.search(CARD_TOO).verifier == ""


def test_a_verifier_that_is_broken_or_of_another_encoder_is_not_used(weights, caplog):
    bench = Bench()
    foreign = finish(train_in_units(labelled_pairs(600), WordReader(), "another"))
    bench.questions.update(UpdateSimilar(verifiers={"s": weights}))
    for bad in (b"broken", foreign):
        bench.questions.update(UpdateSimilar(verifiers={"s": bad}))
        assert bench.search(CARD).verifier == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_the_verifier_that_was_used_longest_ago_goes_first(weights, monkeypatch):
    monkeypatch.setattr(module, "MOST_VERIFIERS", 2)
    bench = Bench()
    for scope in ("a", "b"):
        bench.questions.update(UpdateSimilar(verifiers={scope: weights}))
    assert bench.search(CARD, scope="a").verifier
    bench.questions.update(UpdateSimilar(verifiers={"c": weights}))
    assert [bool(bench.search(CARD, scope=scope).verifier) for scope in "abc"] == [True, False, True]
