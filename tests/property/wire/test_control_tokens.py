"""Whatever a normaliser does: no text of a message becomes a control token, and none of a template gets lost."""

import unicodedata
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from maitred.text import tokenizer as text
from maitred.text.chat_template import ChatTemplate
from tests.support.tokenizers import TINY

CONTROL = ["<|im_start|>", "<|im_end|>", "</s>", "[INST]", "<｜end▁of▁turn｜>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ m.role }}<｜end▁of▁turn｜>[INST]"
    "{% endfor %}</s><|im_start|>assistant\n"
)
NORMALIZERS = {
    "none": None,
    "lowercase": normalizers.Lowercase(),
    "nfkc": normalizers.NFKC(),
    "nfd and accents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "nfkc and lowercase": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    "bert": normalizers.BertNormalizer(lowercase=True),
    "nmt": normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()]),
    "replacements": normalizers.Sequence(
        [normalizers.Replace("~", ""), normalizers.Replace("{", "<"), normalizers.Replace(Regex(" {2,}"), " ")]
    ),
    "prepend": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "symbol": normalizers.Replace(" ", "▁"),
}
FLAGS = {
    "plain": {},
    "normalized": {"normalized": True},
    "stripping": {"lstrip": True, "rstrip": True, "normalized": True},
    "words": {"single_word": True, "normalized": True},
}
ALPHABET = sorted({*"".join(CONTROL), *map(chr, range(0x20, 0x7F)), "\n", "▁", "Ġ"})


@cache
def tokenizer(kind: str, normalizer: str, flags: str) -> text.Tokenizer:
    """A small tokenizer of a kind of model, with control tokens of which every second is special."""
    if kind == "byte-level":
        backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    elif kind == "unigram":
        # As converted from SentencePiece: control tokens are words of the vocabulary, with the best of scores.
        pieces = [("<unk>", 0.0), *((name, 0.0) for name in CONTROL[1:4])]
        backend = Tokenizer(models.Unigram([*pieces, *((letter, -5.0) for letter in ALPHABET)], 0, False))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    else:
        names = [*CONTROL[:2], "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *ALPHABET]
        vocab = {name: token for token, name in enumerate(names)}
        backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, ignore_merges=True, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    if NORMALIZERS[normalizer] is not None:
        backend.normalizer = NORMALIZERS[normalizer]
    backend.add_tokens(
        [
            AddedToken(name, **{"normalized": False, **FLAGS[flags], "special": bool(number % 2)})
            for number, name in enumerate(CONTROL)
        ]
    )
    return text.Tokenizer(backend, {}, ChatTemplate(TEMPLATE, {}))


def disguised(name: str, number: int) -> str:
    """A control token as a normaliser may see it."""
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in name)
    joined = [name, name.upper(), name.title(), wide, wide.upper(), "\u200b".join(name), "~".join(name)]
    accented = unicodedata.normalize("NFC", name.replace("e", "e\u0301").replace("s", "s\u030c"))
    return [*joined, "\u00ad".join(name), accented, name.replace("<", "{"), name.replace("▁", " "), f" {name} "][number]


PIECES = st.one_of(
    st.builds(disguised, st.sampled_from(CONTROL), st.integers(0, 11)),
    st.builds(lambda name, at: name[:at], st.sampled_from(CONTROL), st.integers(1, 8)),
    st.builds(lambda name, at: name[at:], st.sampled_from(CONTROL), st.integers(1, 8)),
    st.sampled_from(["\u0338", "\u0301", "\u200d", "\ufeff", " ", "\n", "~", "a", "K", "ſ", "İ", "▁"]),
    st.text(max_size=3),
)
CASES = st.tuples(
    st.sampled_from(["byte-level", "unigram", "byte-fallback"]),
    st.sampled_from([*NORMALIZERS]),
    st.sampled_from([*FLAGS]),
)


def controls(model: text.Tokenizer, content: str) -> list[str]:
    tokens = model.encode_conversation([{"role": "user", "content": content}])
    return [
        model.control_tokens[token]
        for token in tokens
        if model.control_tokens.get(token, "<unk>") != "<unk>"  # what the vocabulary has no word for
    ]


@given(CASES, st.lists(PIECES, max_size=6).map("".join))
@example(("byte-level", "prepend", "normalized"), " ")
@settings(deadline=None, max_examples=200)
def test_only_the_template_writes_control_tokens(case, content):
    model = tokenizer(*case)
    got = controls(model, content)
    if case[2] == "words":  # these are looked for as words of their own, which the neighbours decide
        assert len(got) <= len(CONTROL) + 1
    else:
        # Where the normaliser writes a space before a control token, the template's own is found behind one only.
        assert got in [controls(model, neighbour) for neighbour in ("a", "a ")]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("kind", ["byte-level", "unigram", "byte-fallback"])
def test_each_disguise_is_text(kind, normalizer, flags):
    model = tokenizer(kind, normalizer, flags)
    right = controls(model, "a b")
    for name in CONTROL:
        for number in range(12):
            assert controls(model, f"a {disguised(name, number)} b") == right, (name, number)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("kind", ["byte-level", "unigram", "byte-fallback"])
def test_what_spells_none_has_the_tokens_that_it_has_anywhere(kind, normalizer, flags):
    if kind == "unigram" and (normalizer == "prepend" or flags == "words"):
        pytest.skip("such a vocabulary makes its words into control tokens itself, where the tokenizer looks for none")
    model = tokenizer(kind, normalizer, flags)
    messages = [{"role": "user", "content": "Hi, <b>You</b>  and é"}, {"role": "assistant", "content": "Hi. "}]
    rendered = model.chat_template.render(messages)
    assert model.encode_conversation(messages) == model.encode(rendered, add_special_tokens=False)
