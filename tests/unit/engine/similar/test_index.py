"""Search among cached questions."""

import tracemalloc

import numpy as np
import pytest

from maitred.engine.similar.index import MEAN_TOKENS, SimilarIndex
from tests.support.similar.encoded_questions import encoded_question

TEXTS = [f"where can i find {thing} in {place}" for thing in ("bread", "milk", "tea") for place in ("town", "shops")]


def filled(max_entries=100, texts=TEXTS):
    index = SimilarIndex(max_entries)
    for key, text in enumerate(texts):
        index.add("p", key, encoded_question(text))
    return index


def keys(index, text, partition="p", count=10, least_cosine=-1.0):
    return [key for key, _ in index.search(partition, encoded_question(text), count=count, least_cosine=least_cosine)]


def test_the_nearest_come_first():
    asked = encoded_question(TEXTS[2])
    cosines = [float(asked.vector @ encoded_question(text).vector) for text in TEXTS]
    assert keys(filled(), TEXTS[2]) == np.argsort(cosines)[::-1].tolist()
    assert keys(filled(), TEXTS[2], count=2) == np.argsort(cosines)[::-1][:2].tolist()


def test_what_is_too_far_is_no_result():
    assert keys(filled(), TEXTS[2], least_cosine=0.999) == [2]


def test_partitions_do_not_meet():
    index = filled()
    assert keys(index, TEXTS[0], partition="other") == []
    index.add("other", "there", encoded_question(TEXTS[0]))
    assert keys(index, TEXTS[0], partition="other") == ["there"]
    assert "there" not in keys(index, TEXTS[0])


def test_the_entry_that_was_used_longest_ago_goes_first():
    index = filled(max_entries=len(TEXTS))
    index.touch(0)
    assert index.add("other", "new", encoded_question("hello there")) == [1]
    assert len(index) == len(TEXTS)
    assert sorted(keys(index, TEXTS[1])) == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("removed", range(len(TEXTS)))
def test_what_was_removed_is_not_found_and_all_else_is(removed):
    index = filled()
    index.remove(removed)
    index.remove(removed)
    assert sorted(keys(index, TEXTS[removed])) == [key for key in range(len(TEXTS)) if key != removed]
    for key, text in enumerate(TEXTS):
        assert keys(index, text, least_cosine=0.999) == ([] if key == removed else [key])


def test_an_empty_partition_is_forgotten():
    index = filled()
    for key in range(len(TEXTS)):
        index.remove(key)
    assert (len(index), keys(index, TEXTS[0])) == (0, [])


def test_a_key_that_is_added_again_moves():
    index = filled()
    index.add("other", 0, encoded_question(TEXTS[0]))
    assert 0 not in keys(index, TEXTS[0])
    assert keys(index, TEXTS[0], partition="other") == [0]


def test_surroundings_say_how_densely_questions_lie():
    texts = [f"{TEXTS[0]} {number}" for number in "abcdefghijk"]
    asked = encoded_question(f"{TEXTS[0]} other")
    (_, first), (_, second) = filled(texts=texts).search("p", asked, count=2, least_cosine=0.0)
    cosines = sorted(float(asked.vector @ encoded_question(text).vector) for text in texts)
    assert first.surroundings.behind == 0.0
    assert second.surroundings.behind == pytest.approx(cosines[-1] - cosines[-2], abs=1e-6)
    assert first.surroundings.asked_density == pytest.approx(cosines[-10], abs=1e-6)


def test_a_pair_can_be_had_as_if_a_question_were_cached():
    index, cached, asked = filled(), encoded_question("where is the bread"), encoded_question("where is my bread")
    pair = index.pair_with("p", asked, cached)
    assert "new" not in keys(index, "where is the bread")
    index.add("p", "new", cached)
    found = dict(index.search("p", asked, count=10, least_cosine=-1.0))["new"]
    assert pair.surroundings == pytest.approx(found.surroundings, abs=1e-6)
    assert index.pair_with("nowhere", asked, cached).surroundings.behind == 0.0


def test_long_questions_push_others_out():
    index = filled(max_entries=5, texts=TEXTS[:2])
    long = encoded_question("bread " * (4 * MEAN_TOKENS))
    index.add("p", "long", long)
    assert index.tokens == 4 * MEAN_TOKENS + 2 * 7 <= 5 * MEAN_TOKENS
    assert index.add("p", "next", long) == [0, 1, "long"]
    assert index.add("p", "too long", encoded_question("bread " * (5 * MEAN_TOKENS + 1))) == []
    assert keys(index, "bread") == ["next"]
    index.remove("next")
    assert (len(index), index.tokens) == (0, 0)


def test_partitions_that_have_shrunk_give_their_memory_back():
    """Each of many partitions fills the whole index for a while, and keeps one question that is served."""
    entries, question = 500, encoded_question(TEXTS[0])
    index = SimilarIndex(entries)

    def fill(partition):
        for number in range(entries - 30):
            index.add(partition, (partition, number), question)
            for served in range(partition + 1):
                index.touch((served, 0))

    tracemalloc.start()
    try:
        fill(0)
        fill(1)
        before = tracemalloc.get_traced_memory()[0]
        for partition in range(2, 20):
            fill(partition)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert all(keys(index, TEXTS[0], partition=partition, count=1) for partition in range(20))
    assert grown < 18 * entries * question.vector.nbytes / 10  # a tenth of what they had
