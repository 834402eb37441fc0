"""Minimal edits for training."""

import random

from maitred.engine.similar.edits import content_words, make_edits, replace_word, swap_words

TEXT = "Can I move 20 dollars from savings to my new account?"


def test_a_swap_exchanges_two_content_words():
    for seed in range(30):
        swapped = swap_words(TEXT, random.Random(seed))
        assert swapped != TEXT
        assert sorted(swapped.split(" ")) == sorted(TEXT.split(" ")) or "account?" not in swapped
        assert sorted(w.group() for w in content_words(swapped)) == sorted(w.group() for w in content_words(TEXT))
        assert swapped.startswith("Can I ")


def test_a_replacement_changes_one_content_word():
    for seed in range(30):
        replaced = replace_word(TEXT, ["loan"], random.Random(seed))
        assert sum(a != b for a, b in zip(TEXT.split(" "), replaced.split(" "), strict=True)) == 1
        assert "loan" in replaced
        assert "20" in replaced


def test_what_has_no_content_words_has_no_edits():
    source = random.Random(1)
    assert swap_words("what is it", source) is None
    assert swap_words("card or cards", source) is None
    assert replace_word("what is it", ["card"], source) is None
    assert replace_word("cards", ["card"], source) is None
    assert make_edits(["what is it"], source) == []


def test_edits_name_their_texts():
    texts = ["where is my new card", "what is it", "the old fee"]
    edits = make_edits(texts, random.Random(1))
    assert {index for index, _ in edits} == {0, 2}
    assert all(edited != texts[index] for index, edited in edits)
