"""Prompts: as many words or tokens as asked for, shared where the numbers are shared, and nowhere else."""

from pathlib import Path

import pytest

from maitred.load.workload.prompts import PromptWriter, fit, probe
from maitred.load.workload.words import WORDS
from maitred.text.tokenizer import Tokenizer

BUNDLED = Path(__file__).parents[4] / "src" / "maitred" / "bundled" / "maitred-tiny"
TOKENIZER = Tokenizer.load(BUNDLED)


def writer(*, tokens_per_word=1.25, template_tokens=10.0, block_tokens=16, seed=0, tokenizer=None):
    return PromptWriter(
        tokens_per_word=tokens_per_word,
        template_tokens=template_tokens,
        block_tokens=block_tokens,
        seed=seed,
        tokenizer=tokenizer,
    )


def tokens_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_the_words_are_plain_and_all_different():
    assert len(WORDS) >= 500
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isascii() and word.islower() and word.isalpha() for word in WORDS)


@pytest.mark.parametrize(("tokens", "words"), [(0, 1), (10, 1), (11, 1), (135, 100), (1260, 1000)])
def test_a_message_leaves_tokens_for_the_template(tokens, words):
    assert len(writer().message(0, 0, tokens).split(" ")) == words


def test_a_prefix_is_as_long_as_asked():
    assert len(writer().prefix(3, 250).split(" ")) == 200


def test_the_same_arguments_are_the_same_text_and_others_are_not():
    text = writer().message(7, 1, 100)
    assert text == writer().message(7, 1, 100)
    assert len({text, writer().message(8, 1, 100), writer().message(7, 2, 100), writer(seed=1).message(7, 1, 100)}) == 4


def test_texts_of_other_numbers_begin_with_other_words():
    prompts = writer()
    messages = [prompts.message(session, 0, 100).split(" ") for session in range(5000)]
    assert len({words[0] for words in messages[: len(WORDS) // 2]}) == len(WORDS) // 2
    assert len({tuple(words[:2]) for words in messages}) == 5000


def test_a_shorter_text_is_the_beginning_of_the_longer_one():
    assert writer().prefix(1, 500).startswith(writer().prefix(1, 90) + " ")
    blocks = writer()
    assert blocks.blocks((5, 6, 7), 58).startswith(blocks.blocks((5, 6), 30) + " ")


def test_blocks_are_the_same_words_wherever_they_stand():
    blocks = writer(tokens_per_word=1.0, template_tokens=0.0)
    first, second = blocks.blocks((1, 2, 3), 48).split(" "), blocks.blocks((9, 2), 32).split(" ")
    assert first[16:32] == second[16:32]
    assert first[:16] != second[:16]
    assert len(first) == 48


def test_many_blocks_are_right_in_all_though_each_is_no_whole_number_of_words():
    blocks = writer(tokens_per_word=1.37, template_tokens=0.0)
    words = [len(blocks.blocks((id_,), 16).split(" ")) for id_ in range(3000)]
    assert set(words) == {11, 12}
    assert sum(words) * 1.37 / (16 * 3000) == pytest.approx(1, abs=0.003)


def test_negative_ids_are_ids():
    blocks = writer()
    assert len({blocks.blocks((id_,), 26) for id_ in range(-50, 50)}) == 100


@pytest.mark.parametrize("tokens", [11, 12, 57, 200, 1501])
def test_with_a_tokenizer_lengths_are_exact(tokens):
    exact = writer(tokenizer=TOKENIZER)
    for session in range(40):
        assert len(tokens_of(exact.message(session, 0, tokens))) == pytest.approx(
            tokens - 10, abs=0 if tokens > 14 else 3
        )
    assert len(tokens_of(exact.prefix(4, tokens))) == tokens
    ids = tuple(range(100, 100 + tokens // 16 + 1))
    assert len(tokens_of(exact.blocks(ids, tokens))) == pytest.approx(tokens - 10, abs=0 if tokens > 14 else 3)


def test_a_tokenizer_without_words_of_one_token_gets_lengths_right_on_average():
    class Letters:
        def encode(self, text, *, add_special_tokens):
            return list(text)

    letters = writer(tokenizer=Letters(), template_tokens=0.0)
    sizes = [len(letters.message(session, 0, 500)) for session in range(50)]
    assert sum(sizes) / len(sizes) == pytest.approx(500, rel=0.02)


def test_a_probe_has_exactly_so_many_words():
    for words in (1, 40, 240):
        assert len(probe(words).split()) == words


def test_two_probes_tell_the_tokens_of_a_word_and_of_the_template():
    assert fit(40, 60, 240, 310) == (1.25, 10.0)
    assert fit(40, 40, 240, 260)[1] == 0.0
    assert fit(40, 50, 240, 50) == (1.0, 0.0)
