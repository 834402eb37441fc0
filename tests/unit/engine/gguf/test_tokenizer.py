import json
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import ConfigInvalid
from maitred.engine.gguf.tokenizer import GGUFVocabulary
from tests.unit.engine.gguf.random_files import byte_letters, vocabulary

PATH = Path("model.gguf")


def library(metadata) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(GGUFVocabulary(metadata, PATH).tokenizer()))


def words(rule: str, text: str) -> list[str]:
    """The words into which a rule cuts a text."""
    backend = library(vocabulary(**{"tokenizer.ggml.pre": rule, "tokenizer.ggml.merges": ["h e"]}))
    return [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("gpt-2", "I'll pay 1234!  Now", ["I", "'ll", " pay", " 1234", "!", " ", " Now"]),
        ("smollm", "pay 12'S", ["pay", " ", "1", "2", "'", "S"]),
        ("llama-bpe", "I'LL pay 12345\n\n x", ["I", "'LL", " pay", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "pay 12 (x)\n", ["pay", " ", "1", "2", " (", "x", ")\n"]),
        ("tekken", "aBc DEf 12", ["a", "Bc", " DEf", " ", "1", "2"]),
        ("gpt-4o", "aBc's DEf 1234", ["a", "Bc's", " DEf", " ", "123", "4"]),
    ],
)
def test_rules_cut_texts_as_their_models_do(rule, text, expected):
    assert words(rule, text) == expected


def test_merges_and_added_tokens():
    backend = library(vocabulary())
    assert backend.encode("hello<|im_end|>hell").tokens == ["hello", "<|im_end|>", "hell"]
    assert [token.special for token in backend.get_added_tokens_decoder().values()] == [True] * 3
    assert backend.decode(backend.encode("hé 🙂").ids) == "hé 🙂"


def test_user_defined_tokens_are_found_and_are_text():
    metadata = vocabulary()
    metadata["tokenizer.ggml.tokens"].append("<tool>")
    metadata["tokenizer.ggml.token_type"].append(4)
    backend = library(metadata)
    assert backend.decode(backend.encode("he<tool>").ids) == "he<tool>"
    assert backend.encode("he<tool>").tokens == ["he", "<tool>"]


@pytest.mark.parametrize(
    ("rule", "says", "begins"),
    [("smollm", None, False), ("smollm", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_token_at_the_beginning(rule, says, begins):
    others = {} if says is None else {"tokenizer.ggml.add_bos_token": says}
    backend = library(vocabulary(**{"tokenizer.ggml.pre": rule, **others}))
    assert backend.encode("he").tokens == (["<|im_start|>", "he"] if begins else ["he"])
    assert backend.encode("he", add_special_tokens=False).tokens == ["he"]


def test_whole_words_are_not_merged():
    metadata = vocabulary(**{"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False})
    metadata["tokenizer.ggml.tokens"].append("ehe")  # no merge makes it
    metadata["tokenizer.ggml.token_type"].append(1)
    assert library(metadata).encode("ehe").tokens == ["ehe"]
    assert library({**metadata, "tokenizer.ggml.pre": "smollm"}).encode("ehe").tokens == ["e", "he"]


def test_accents_are_composed_for_models_that_do_so():
    assert library(vocabulary(**{"tokenizer.ggml.pre": "qwen2"})).encode("e\u0301").tokens == ["Ã", "©"]


def test_ends_of_answers():
    metadata = vocabulary(**{"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2})
    assert GGUFVocabulary(metadata, PATH).ends == [0, 2]
    metadata = vocabulary(**{"tokenizer.ggml.eos_token_id": 1})
    assert GGUFVocabulary(metadata, PATH).ends == [1, 0, 2]


def test_settings():
    settings = GGUFVocabulary(vocabulary(**{"tokenizer.ggml.add_eos_token": True}), PATH).settings()
    assert settings["eos_token"] == "<|im_end|>"
    assert settings["bos_token"] == "<|im_start|>"
    assert settings["add_eos_token"] is True
    assert "{{ message.content }}" in settings["chat_template"]


def test_no_vocabulary():
    with pytest.raises(ConfigInvalid, match="kind None"):
        GGUFVocabulary({}, PATH)
    assert byte_letters()[0x20] == "Ġ"


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def pieces(words: list[str], scores: list[float], *, prefix: bool) -> dict:
    tokens = ["<unk>", "<s>", "</s>", *_BYTES, "▁", "a", "b", "c", *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.scores": [0.0] * 259 + [-100.0] * 4 + scores,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def merged(metadata: dict, text: str) -> list[str]:
    """SentencePiece's BPE, literally: of all neighbours, merge the two that make the token of the best score."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    score = dict(zip(tokens[259:], scores[259:], strict=True))
    symbols = list((" " if metadata["tokenizer.ggml.add_space_prefix"] and text else "") + text)
    symbols = [symbol.replace(" ", "▁") for symbol in symbols]
    while True:
        best, at = max(
            ((score[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score),
            default=(None, 0),
        )
        if best is None:
            break
        symbols[-at : -at + 2] = [symbols[-at] + symbols[-at + 1]]
    return [part for symbol in symbols for part in ([symbol] if symbol in score else _bytes(symbol))]


def _bytes(symbol: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in symbol.encode()]


@given(
    st.lists(st.text("abc▁", min_size=2, max_size=5), unique=True, max_size=12),
    st.text("abc é", max_size=20),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_scores_merge_as_sentencepiece_does(words, text, prefix, dice):
    # Scores of real vocabularies fall with the size of the token's number, and no two are alike.
    scores = [-float(score) for score in dice.sample(range(100), len(words))]
    metadata = pieces(words, scores, prefix=prefix)
    assert library(metadata).encode(text, add_special_tokens=False).tokens == merged(metadata, text)


def test_pieces_begin_with_a_token_and_a_space():
    backend = library(pieces(["▁a"], [-1.0], prefix=True))
    assert backend.encode("a b").tokens == ["<s>", "▁a", "▁", "b"]
    assert backend.decode(backend.encode("a b").ids) == "a b"
