"""The detokenizer at the seam between prompt and answer, and at the end."""

import pytest

from maitred.text.tokenizer import Detokenizer
from tests.support.tokenizers import byte_level, sentencepiece


def pushed(tokenizer, tokens, tail=()):
    detokenizer = Detokenizer(tokenizer, tail)
    return [*(detokenizer.push([token]) for token in tokens), detokenizer.flush()]


def test_half_a_character_waits():
    tokenizer = byte_level()
    tokens = tokenizer.encode("👋!", add_special_tokens=False)
    pieces = pushed(tokenizer, tokens)
    assert "".join(pieces) == "👋!"
    assert "\ufffd" not in "".join(pieces)
    assert pieces[0] == ""


def test_half_a_character_at_the_end_shows_as_a_replacement():
    tokenizer = sentencepiece()
    tokens = tokenizer.encode("a€", add_special_tokens=False)
    assert pushed(tokenizer, tokens[:-1])[-2:] == ["", "\ufffd"]
    assert tokenizer.decode(tokens[:-1]) == "a\ufffd"


@pytest.mark.parametrize("metaspace", [False, True])
def test_the_space_at_the_start_belongs_to_the_text_only_after_text(metaspace):
    tokenizer = sentencepiece(metaspace=metaspace)
    fox = tokenizer.encode("fox", add_special_tokens=False)
    the = tokenizer.encode("the", add_special_tokens=True)
    assert "".join(pushed(tokenizer, fox)) == "fox"
    assert "".join(pushed(tokenizer, fox, tail=the)) == " fox"
    assert "".join(pushed(tokenizer, fox, tail=[1])) == "fox"


def test_a_character_begun_in_the_prompt_is_completed():
    tokenizer = sentencepiece()
    *begun, last = tokenizer.encode("a€", add_special_tokens=False)
    assert pushed(tokenizer, [last], tail=begun) == ["€", ""]


def test_only_the_end_of_a_prompt_counts():
    tokenizer = sentencepiece()
    fox = tokenizer.encode("fox", add_special_tokens=False)
    assert "".join(pushed(tokenizer, fox, tail=[*fox, *[2] * 5])) == "fox"
    assert "".join(pushed(tokenizer, fox, tail=[*[2] * 1000, *fox])) == " fox"


@pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece(), sentencepiece(metaspace=True)])
def test_special_tokens_show_nothing_unless_they_are_asked_for(tokenizer):
    tokens = [1, *tokenizer.encode("the fox", add_special_tokens=False), 2, 1]
    assert "".join(pushed(tokenizer, tokens)) == "the fox"
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    shown = "".join([*(detokenizer.push([token]) for token in tokens), detokenizer.flush()])
    assert shown == tokenizer.decode(tokens, skip_special_tokens=False)
    assert shown.endswith(tokenizer.token_text(2) + tokenizer.token_text(1))
