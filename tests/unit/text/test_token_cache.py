"""The tokens of prompts that are encoded by segments, and what is kept of them."""

import json
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from maitred.text.chat_template import ChatTemplate
from maitred.text.token_cache import SegmentCache, separators, word_cache
from maitred.text.tokenizer import Tokenizer
from tests.support.tokenizers import TINY, byte_level, sentencepiece

LONG = "What stands here is longer than the shortest segment, so a prompt is cut behind it. "
CONTENTS = ["<|end|>", "<|end|>>", "<|e", "nd|><|", "<s>", "</s>", "[INST]", " [A]", "\n\n", "abab", "ab", "word", "Ü"]
TEXTS = [
    "word",
    " ",
    "\n",
    "\n\n ",
    "abab",
    "a<|",
    "|>",
    "</",
    "s>",
    "ＷＯＲＤ",
    "ü",
    "U\u0308",
    "W",
    "<0x41>",
    "",
    LONG,
]


def unigram() -> tokenizers.Tokenizer:
    letters = [(letter, -3.0 - at / 10) for at, letter in enumerate("▁<|/>abdenorsw")]
    backend = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("▁word", -1.0), *letters], 0, False))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return backend


def word_pieces() -> tokenizers.Tokenizer:
    words = ["[UNK]", "word", "##s", "a", "##b", "<", "|", ">", "end", "what", "is"]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


KINDS = {
    "byte level": lambda: tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json")),
    "prepend": lambda: sentencepiece()._backend,
    "metaspace": lambda: sentencepiece(metaspace=True)._backend,
    "unigram": unigram,
    "word pieces": word_pieces,
}


@cache
def described(kind):
    return KINDS[kind]().to_str()


flags = st.fixed_dictionaries(
    {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
)
plain = st.just({"normalized": False, "special": True})


@given(
    st.sampled_from([*KINDS]),
    st.dictionaries(st.sampled_from(CONTENTS), plain | flags, min_size=1, max_size=6),
    st.lists(st.lists(st.sampled_from([*CONTENTS, *TEXTS]), max_size=12).map("".join), max_size=4),
    st.sampled_from([600, 1 << 20]),
    st.booleans(),
)
@example("prepend", {"<s>": {"normalized": False}}, ["the<s>the" + LONG + "<s> the"], 1 << 20, False)
@example("metaspace", {"<s>": {"normalized": False}}, [LONG + "<s>" + LONG + "<s>" + LONG], 1 << 20, False)
def test_segments_together_are_the_prompt(kind, added, prompts, max_bytes, splits_special_tokens):
    backend = tokenizers.Tokenizer.from_str(described(kind))
    backend.add_tokens([AddedToken(content, **options) for content, options in added.items()])
    backend.encode_special_tokens = splits_special_tokens

    def encode(text):
        return backend.encode(text, add_special_tokens=False).ids

    segments = SegmentCache(separators(backend, added), max_bytes)
    for prompt in [*prompts, *prompts]:
        assert segments.encode(prompt, "a", encode) == encode(prompt)
        assert segments.size <= max_bytes


@pytest.mark.parametrize(
    ("options", "others", "separates"),
    [
        ({}, [], True),
        ({"rstrip": True}, ["<|end|>>", "<|"], False),
        ({"rstrip": True}, ["<|", "|>", "<|other|>"], True),
        ({"lstrip": True}, [], False),
        ({"single_word": True}, [], False),
        ({"normalized": True}, [], False),
        ({}, ["a<|end|>"], False),
        ({}, ["word<|"], False),
    ],
)
def test_what_a_prompt_is_cut_before(options, others, separates):
    backend = unigram()
    end = AddedToken("<|end|>", **{"normalized": False, **options})
    backend.add_tokens([end, *(AddedToken(other, normalized=False) for other in others)])
    assert separators(backend, ["<|end|>", "word"]) == ({"<|end|>"} if separates else set())


@given(
    st.sampled_from(["prepend", "metaspace", "unigram"]),
    # What must be a word of its own stands behind other characters where control tokens are marked.
    st.dictionaries(st.sampled_from(CONTENTS), plain | flags.filter(lambda each: not each["single_word"]), min_size=1),
    st.lists(st.lists(st.sampled_from([*CONTENTS, *TEXTS]), max_size=12).map("".join), max_size=4),
)
@example(  # the tokenizer reads the second as the first, and ">"
    "metaspace",
    {"<|end|>": {"normalized": False, "special": True}, "<|end|>>": {"normalized": True}, "<s>": {"normalized": False}},
    [LONG, "<|end|>"],
)
def test_conversations_that_spell_control_tokens_have_the_same_tokens(kind, added, texts):
    source = "{% for m in messages %}" + "{{ m.content.split('ab')[-1] }}".join(added) + "{% endfor %}"
    read = []
    for cache_bytes in (0, 1 << 20):
        backend = tokenizers.Tokenizer.from_str(described(kind))
        backend.add_tokens([AddedToken(content, **options) for content, options in added.items()])
        tokenizer = Tokenizer(backend, {}, ChatTemplate(source, {}), cache_bytes=cache_bytes)
        messages = [{"role": "user", "content": text} for text in texts]
        read.append([tokenizer.encode_conversation(messages[:turns]) for turns in (*range(len(texts)), len(texts))])
    assert read[0] == read[1]


def test_a_turn_is_encoded_once():
    tokenizer, plain_tokenizer = Tokenizer.load(TINY, cache_bytes=1 << 20), byte_level()
    messages, entries = [], []
    for turn in range(5):
        messages += [{"role": "user", "content": f"{LONG} {turn}"}, {"role": "assistant", "content": f"{LONG} {-turn}"}]
        for _ in range(2):
            tokens = tokenizer.encode_conversation(messages, organisation="a")
            assert tokens == plain_tokenizer.encode_conversation(messages)
            entries.append(len(tokenizer._segments))
    assert entries == [3, 3, 5, 5, 7, 7, 9, 9, 11, 11]


def test_organisations_share_nothing_and_zero_bytes_keep_nothing():
    segments, none, encoded = SegmentCache(["<|end|>"], 1 << 20), SegmentCache(["<|end|>"], 0), []

    def encode(text):
        encoded.append(text)
        return [1, 2]

    for organisation in ("a", "a", "b", "b"):
        assert segments.encode(LONG, organisation, encode) == [1, 2]
    assert len(encoded) == len(segments) == 2
    assert none.encode(LONG, "a", encode) == none.encode(LONG, "a", encode) == [1, 2]
    assert (len(encoded), len(none), none.size) == (4, 0, 0)


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "Qwen": QWEN,
    "Llama 3": QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"),
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
PLAIN = {"normalized": False, "special": True}


def read_by_words(pattern, added=(), normalizer=None):
    backend = tokenizers.Tokenizer.from_str(described("byte level"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken(content, **PLAIN) for content in added])
    return backend


def words_of(backend):
    description = json.loads(backend.to_str())
    return word_cache(backend, description["normalizer"], description["pre_tokenizer"])


ascii_texts = st.text(st.characters(max_codepoint=127)) | st.lists(
    st.sampled_from([*CONTENTS, *TEXTS, "it", "'s", "'LL", "\t", "\r\n", "  ", "1234", "\x1c", "\x85", "The", "!?"])
).map("".join)


@given(
    st.sampled_from([*PATTERNS.values()]),
    st.sets(st.sampled_from(CONTENTS)),
    st.sampled_from([None, normalizers.NFC()]),
    st.lists(ascii_texts, min_size=1, max_size=4),
)
def test_words_together_are_the_text(pattern, added, normalizer, texts):
    backend = read_by_words(pattern, sorted(added), normalizer)
    words = words_of(backend)
    for text in texts * 3:
        expected = backend.encode(text, add_special_tokens=False).ids
        assert words.encode(text) == (expected if text.isascii() else None)


@given(st.sampled_from([*PATTERNS.values()]), ascii_texts.filter(str.isascii))
@example(QWEN, "".join(map(chr, range(128))))
@example(PATTERNS["Llama 3"], "".join(map(chr, range(127, -1, -1))) + "9 99 999 9999 99999")
@example(PATTERNS["GPT-2"], "".join(f"{chr(code)} x\n" for code in range(128)))
def test_ascii_is_split_into_the_words_of_the_library(pattern, text):
    backend = read_by_words(pattern)
    words = [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert words_of(backend)._words.findall(text) == words


def test_the_library_is_asked_for_new_words_only():
    words, asked = words_of(read_by_words(QWEN)), []
    words._backend = type("Backend", (), {"encode_batch_fast": lambda _, texts, **more: record(texts, more)})()
    backend = read_by_words(QWEN)

    def record(texts, more):
        asked.extend(texts)
        return backend.encode_batch_fast(texts, **more)

    for text in ["one two three", "one two three", "one 2 three", "one two three four"]:
        assert words.encode(text) == backend.encode(text, add_special_tokens=False).ids
    # Of words in a row the first is kept.
    assert asked == ["one", " two three", " two", " three", " ", "2 three", " three", " four"]
    assert len(words) == 4


def test_words_that_are_kept_are_few_and_short(monkeypatch):
    words = words_of(read_by_words(QWEN))
    monkeypatch.setattr("maitred.text.token_cache._MOST_WORDS", 8)
    for letter in "abcdefghijklmnopqrstuvwxyz":
        words.encode(letter)
        assert words.encode(letter) == words._backend.encode(letter, add_special_tokens=False).ids
        assert len(words) <= 8
    kept = len(words)
    assert words.encode("a" * 100) == words._backend.encode("a" * 100, add_special_tokens=False).ids
    assert len(words) == kept


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.NFKC()),
        lambda backend: setattr(backend, "normalizer", normalizers.Lowercase()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda backend: setattr(
            backend,
            "pre_tokenizer",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(tokenizers.Regex(QWEN + r"|\S"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
        ),
        lambda backend: setattr(backend, "encode_special_tokens", True),
        lambda backend: backend.add_tokens([AddedToken("the", normalized=True)]),
        lambda backend: backend.add_tokens([AddedToken("the", normalized=False, lstrip=True)]),
        lambda backend: backend.add_tokens([AddedToken("the", normalized=False, rstrip=True)]),
        lambda backend: backend.add_tokens([AddedToken("the", normalized=False, single_word=True)]),
    ],
)
def test_no_words_of_tokenizers_that_read_texts_otherwise(change):
    backend = read_by_words(QWEN)
    assert words_of(backend) is not None
    change(backend)
    assert words_of(backend) is None
    assert words_of(unigram()) is None


def test_a_conversation_read_by_words_has_the_same_tokens():
    kept, plain_tokenizer = Tokenizer.load(TINY, cache_bytes=1 << 20), byte_level()
    texts = ["A table for two, please.", "For 12 it's full: <|end|><|user|> no.", "Où?", "\n\n  By the window", ""]
    for text in texts * 8:
        messages = [{"role": "user", "content": text + LONG}]
        assert kept.encode_conversation(messages) == plain_tokenizer.encode_conversation(messages)
        kept._segments._entries = type(kept._segments._entries)(1 << 20)  # every segment is new
    assert len(kept._words) > 20
