"""The verifier: what it learns, and how it is stored."""

import random

import msgspec
import numpy as np
import pytest

from maitred.engine.similar.edits import make_edits
from maitred.engine.similar.features import TokenWeights, pair_features
from maitred.engine.similar.index import SimilarIndex
from maitred.engine.similar.verifier import MIN_LABELS, Verifier, VerifierRecord, train_verifier
from tests.support.similar.encoded_questions import encoded_question
from tests.support.similar.labels import questions


@pytest.fixture(scope="module")
def world():
    """Pairs with labels, and a function that makes a verifier of them with edits or without."""
    source = random.Random(3)
    known = questions()
    encoded = [encoded_question(text) for text, _ in known]
    index = SimilarIndex(1_000)
    for key, question in enumerate(encoded):
        index.add("p", key, question)
    pairs, same = [], []
    while len(pairs) < 700:
        a, b = source.sample(range(len(known)), 2)
        if known[a][1] == known[b][1] or source.random() < 0.05:
            pairs.append(index.pair_with("p", encoded[a], encoded[b]))
            same.append(known[a][1] == known[b][1])
    weights = TokenWeights.of(encoded)
    texts = [text for text, _ in known]
    edits = [index.pair_with("p", encoded_question(edit), encoded[i]) for i, edit in make_edits(texts, source)]
    return index, weights, pairs, np.array(same), edits


def arrays(pairs, weights):
    return np.array([pair_features(pair, weights) for pair in pairs]), np.array([pair.middle for pair in pairs])


def trained_on(examples, weights):
    pairs, same, edits = examples
    return train_verifier(arrays(pairs, weights), same, arrays(edits, weights), encoder="e", token_weights=weights)


@pytest.fixture(scope="module")
def trained(world):
    _, weights, *examples = world
    return trained_on(examples, weights)


def pair(index, asked, cached):
    return index.pair_with("p", encoded_question(asked), encoded_question(cached))


def test_it_tells_paraphrases_from_other_questions(world, trained):
    _, _, pairs, same, _ = world
    scores = trained.score(pairs)
    right = scores[same][:, None] > scores[~same][None, :]
    assert right.mean() > 0.99


def test_edits_teach_it_to_refuse_swaps(world, trained):
    index, weights, pairs, same, edits = world
    swapped = pair(index, "how do i card my block", "how do i block my card")
    without = train_verifier(
        arrays(pairs, weights),
        same,
        tuple(part[:0] for part in arrays(edits, weights)),
        encoder="e",
        token_weights=weights,
    )
    served = np.quantile(trained.score(pairs)[same], 0.1)
    assert trained.score([swapped])[0] < served
    assert trained.score([swapped])[0] < without.score([swapped])[0]


def test_edits_cost_no_paraphrase(world, trained):
    """A question with one word replaced stands behind a paraphrase of which it shares as many words."""
    index, *_ = world
    replaced = pair(index, "how do i close my loan", "how do i change my loan")
    paraphrase = pair(index, "how do i close my loan", "please tell me how i close the loan")
    scores = trained.score([replaced, paraphrase])
    assert scores[1] > scores[0] + 1


def test_errors_nearby_make_it_careful(world):
    """Two questions that look as good as any, in a part of the space in which labels were false before."""
    index, weights, pairs, same, edits = world
    changed = same.copy()
    for i, each in enumerate(pairs):
        if "salary" in each.asked.wording.words and "salary" in each.cached.wording.words:
            changed[i] = False
    careful = train_verifier(
        arrays(pairs, weights), changed, arrays(edits, weights), encoder="e", token_weights=weights
    )
    good, bad = (pair(index, f"how do i find my {x}", f"please tell me how i find the {x}") for x in ("fee", "salary"))
    scores = careful.score([good, bad])
    assert scores[0] > scores[1] + 1


def test_it_is_the_same_after_it_was_stored(world, trained):
    _, _, pairs, _, _ = world
    again = Verifier.load(trained.to_bytes(), "e")
    assert again.version == trained.version
    assert again.score(pairs).tolist() == trained.score(pairs).tolist()


def test_other_encoders_and_features_are_refused(trained):
    data = trained.to_bytes()
    with pytest.raises(ValueError, match="another encoder"):
        Verifier.load(data, "other")
    record = msgspec.msgpack.decode(data, type=VerifierRecord)
    for changes, message in (({"feature_version": 0}, "other features"), ({"weights": [1.0]}, "number of features")):
        broken = msgspec.structs.replace(record, **changes)
        with pytest.raises(ValueError, match=message):
            Verifier.load(msgspec.msgpack.encode(broken), "e")
    with pytest.raises(ValueError, match="no weights"):
        Verifier.load(data[:-5], "e")


def test_too_few_labels_are_refused(world):
    _, weights, pairs, same, edits = world
    for several in (same[: MIN_LABELS - 1], np.ones(len(same), dtype=bool)):
        with pytest.raises(ValueError, match="labels"):
            trained_on((pairs[: len(several)], several, edits), weights)
