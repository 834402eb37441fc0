"""Searches and trainings of verifiers beside plain texts."""

import numpy as np
import pytest

from maitred.core.errors import ConfigInvalid
from maitred.core.request import EngineRequest, FinishReason, SamplingParams, SimilarSearch, VerifierTraining
from maitred.engine.encoder.engine import EncoderEngine
from maitred.engine.similar.cached_questions import CachedQuestions
from maitred.engine.similar.training import UNIT_TEXTS
from maitred.engine.similar.verifier import Verifier
from maitred.fairness.fair_queue import QueueOrderConfig
from maitred.wire.frames import KeptQuestion, UpdateSimilar
from tests.support.clock import FakeClock
from tests.support.similar.labels import labelled_pairs
from tests.support.similar.question_readers import CONTEXT_TOKENS, WordReader

NOTHING = SamplingParams(max_tokens=0, seed=0)
CARD, LOAN = "how do i block my card", "who gives me a loan"


class Bench:
    def __init__(self, *, keeps=True):
        self.clock = FakeClock()
        self.reader = WordReader()
        self.plain_batches = []
        self.engine = EncoderEngine(
            self.encode,
            self.clock,
            line=QueueOrderConfig(policy="fair"),
            vocab_size=1000,
            context_tokens=CONTEXT_TOKENS,
            max_sequences=8,
            step_tokens=100,
            questions=CachedQuestions(self.reader, encoder="e", max_entries=10) if keeps else None,
        )

    def encode(self, texts):
        self.plain_batches.append(len(texts))
        return [np.float32([len(text)]).tobytes() for text in texts]

    def submit(self, name, text, similar=None, owner="gateway"):
        self.engine.submit(owner, EngineRequest(name, self.reader.tokens(text), NOTHING, similar=similar))

    def search(self, name, text):
        self.submit(name, text, SimilarSearch(text, b"p", "s", 3, 0.5))

    def train(self, name, labels=600, owner="gateway", **fields):
        training = VerifierTraining(labelled_pairs(labels))
        self.engine.submit(owner, EngineRequest(name, [], NOTHING, similar=training, **fields))

    def step(self, owner="gateway"):
        return {output.request_id: output.delta for output in self.engine.step().get(owner, [])}

    def run(self, owner="gateway"):
        """Computes until nothing is left, and returns the answers in their order."""
        answers = {}
        while self.engine.max_idle_s() == 0:
            answers |= self.step(owner)
        return answers


def test_a_search_among_plain_texts_shares_their_batch():
    bench = Bench()
    bench.search("first", CARD)
    assert bench.step()["first"].similar.found == []
    bench.engine.update_similar(UpdateSimilar(kept=[KeptQuestion(b"p", CARD, b"key")]))
    bench.submit("plain", LOAN)
    bench.search("search", CARD)
    answers = bench.step()
    assert bench.reader.encoder.batches == [1, 2]
    vectors, _ = bench.reader.encode([bench.reader.tokens(LOAN)])
    assert (answers["plain"].embedding, answers["plain"].similar) == (vectors[0].tobytes(), None)
    assert [each.key for each in answers["search"].similar.found] == [b"key"]
    assert answers["search"].embedding is None
    assert answers["search"].finish is FinishReason.STOP


def test_texts_without_a_search_are_encoded_as_ever():
    bench = Bench()
    bench.submit("plain", LOAN)
    assert bench.step()["plain"].embedding
    assert (bench.plain_batches, bench.reader.encoder.batches) == ([1], [])


def test_a_training_answers_with_the_weights():
    bench = Bench()
    bench.train("training")
    bench.train("small", labels=20)
    assert bench.engine.occupied
    answers = bench.run()
    assert [*answers] == ["training", "small"]
    assert all(answer.finish is FinishReason.STOP for answer in answers.values())
    assert Verifier.load(answers["training"].verifier, "e")
    assert answers["small"].verifier == b""
    assert not bench.engine.occupied


def test_texts_wait_for_one_unit_of_a_training_at_most():
    bench = Bench()
    bench.train("training")
    texts = 0
    while bench.engine.occupied:
        before = len(bench.reader.encoder.batches)
        answers = bench.step()
        assert len(bench.reader.encoder.batches) - before <= 1
        if "training" in answers:
            break
        name = f"text {texts}"
        bench.submit(name, LOAN)
        assert set(bench.step()) == {name}
        texts += 1
    assert texts > 100
    assert Verifier.load(answers["training"].verifier, "e")
    assert max(bench.reader.encoder.batches) == UNIT_TEXTS


@pytest.mark.parametrize("leave", ["cancel", "owner"])
def test_a_training_that_nobody_waits_for_ends(leave):
    bench = Bench()
    bench.train("gone", owner="one")
    bench.train("gone", owner="two", labels=20)
    for _ in range(3):
        assert bench.step("one") == bench.step("two") == {}
    if leave == "cancel":
        bench.engine.cancel("one", "gone", None)
        assert bench.engine.load().cancelled == 1
    else:
        bench.engine.cancel_owner("one")
    batches = len(bench.reader.encoder.batches)
    assert set(bench.step("two")) == {"gone"}
    assert not bench.engine.occupied
    assert len(bench.reader.encoder.batches) == batches


def test_a_training_that_is_too_late_ends():
    bench = Bench()
    bench.train("late", deadline_in_s=5.0)
    assert bench.step() == {}
    bench.clock.now_s += 5
    assert bench.step()["late"].finish is FinishReason.DEADLINE
    assert not bench.engine.occupied


def test_an_id_is_used_once_at_a_time():
    bench = Bench()
    bench.train("one")
    with pytest.raises(ValueError, match="already running"):
        bench.submit("one", LOAN)


@pytest.mark.parametrize("similar", [SimilarSearch(CARD, b"p", "s", 3, 0.5), VerifierTraining([])])
def test_an_engine_that_keeps_no_questions_says_so(similar):
    bench = Bench(keeps=False)
    with pytest.raises(ValueError, match=r"encoder\.similar_questions"):
        bench.submit("r", CARD, similar)
    bench.engine.update_similar(UpdateSimilar(removed=[b"key"]))
    assert not bench.engine.occupied


def test_without_a_tokenizer_nothing_is_trained(monkeypatch):
    def missing(reader):
        raise ConfigInvalid("There is no tokenizer.json.")

    monkeypatch.setattr(WordReader, "tokenizer", property(missing))
    bench = Bench()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        bench.train("training")
    assert not bench.engine.occupied
