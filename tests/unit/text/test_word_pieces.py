"""Tokenizers of BERT: whole words and what continues them."""

import pytest

from maitred.text.tokenizer import Tokenizer
from tests.support.models import save_words


@pytest.fixture
def tokenizer(tmp_path):
    save_words(tmp_path)
    return Tokenizer.load(tmp_path)


def test_words_are_put_together_again(tokenizer):
    tokens = tokenizer.encode("Hello world, abc.", add_special_tokens=True)
    assert tokens[:3] == [2, 4, 5]
    assert tokens[-1] == 3
    assert tokenizer.decode(tokens) == "hello world , abc ."
    assert tokenizer.decode(tokens) == tokenizer._backend.decode(tokens)


def test_long_texts_are_not_cut(tokenizer):
    assert len(tokenizer.encode("hello " * 50, add_special_tokens=True)) == 52


def test_nothing_is_known_of_a_text_by_its_length(tokenizer):
    """A word that it cannot read is one token, however long; spaces are none."""
    assert tokenizer.encode("x" * 5_000 + " " * 5_000, add_special_tokens=False) == [1]
    assert tokenizer.fewest_tokens(10_000) == 0
