"""Text as tokens of text: byte for byte, whatever it spells."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from maitred.text.tokenizer import Tokenizer
from tests.support.models import save_words
from tests.support.tokenizers import LINES, byte_level, sentencepiece


def normalising() -> Tokenizer:
    """The shipped model's, with a normaliser that changes texts and a token that it writes into a prompt."""
    backend = byte_level()._backend
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.add_tokens(
        [tokenizers.AddedToken("<tool_call>", special=False), tokenizers.AddedToken("  ", special=False)]
    )
    return Tokenizer(backend, {}, None)


TOKENIZERS = {
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece(),
    "metaspace": sentencepiece(metaspace=True),
    "normalising": normalising(),
}
SPELT = [
    *(*LINES, "<s></s><unk>", "a <|end|> b<|system|>", "a\u2581b \u2581", "e\u0301 \u212b", "<0xE2>", " the the", ""),
    *("THE  Fox", "<tool_call>", "\ufeff"),
]


def encoded(name: str, text: str) -> list[int]:
    tokenizer = TOKENIZERS[name]
    control = set(tokenizer.control_tokens)
    tokens = tokenizer.text_tokenizer(control).encode(text)
    assert not control.intersection(tokens)
    return tokens


@pytest.mark.parametrize("text", SPELT)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_spell_the_text(name, text):
    tokenizer = TOKENIZERS[name]
    assert b"".join(map(tokenizer.token_bytes, encoded(name, text))) == text.encode()


@given(st.sampled_from(list(TOKENIZERS)), st.text(max_size=20))
@settings(deadline=None, max_examples=60)
def test_the_tokens_spell_any_text(name, text):
    assert b"".join(map(TOKENIZERS[name].token_bytes, encoded(name, text))) == text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("text", ["The quick brown fox", "naïve café", '{"name": "value"}'])
def test_plain_text_has_the_tokens_that_the_model_knows_it_by(text):
    assert encoded("byte-level", text) == byte_level().encode(text, add_special_tokens=False)


def test_a_vocabulary_without_a_token_for_a_character_gives_none(tmp_path):
    save_words(tmp_path)
    encoder = Tokenizer.load(tmp_path).text_tokenizer(set())
    assert encoder.encode(" hello") != []
    assert encoder.encode("世") == []
