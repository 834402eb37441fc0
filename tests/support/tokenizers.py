"""Small tokenizers of the two families, built here; and larger published ones, where a folder of them is given."""

import json
import lzma
import os
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from maitred.text.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "src" / "maitred" / "bundled" / "maitred-tiny"
LINES = [
    "The quick brown fox jumps over the lazy dog, naïve café — déjà vu.",
    "我们在餐厅里吃饭。今日は、世界！",
    "Привет, мир 👋🏽 👩‍👩‍👧 🇫🇷 e\u0301 a\u0308\u0323",
]
_GPT2_WORDS = Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_level() -> Tokenizer:
    """The shipped model's."""
    return Tokenizer.load(TINY)


def sentencepiece(*, metaspace: bool = False) -> Tokenizer:
    """A vocabulary as converted from SentencePiece: ▁ for spaces, a token for every byte, Llama's special tokens.

    Args:
        metaspace: Written the newer way, with one Metaspace step; else as normaliser and a series of decoders.
    """
    words = ["▁the", "▁quick", "▁fox", "▁▁", "the", "é", "世", "界", "。", "ï"]
    prefixes = [word[:length] for word in words for length in range(2, len(word) + 1)]
    alphabet = sorted(set("".join(words) + "abcdefghijklmnopqrstuvwxyz,."))
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, *prefixes]
    vocab = {name: token for token, name in enumerate(dict.fromkeys(names))}
    merges = [(prefix[:-1], prefix[-1]) for prefix in dict.fromkeys(prefixes)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
        )
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, None)


def gpt2() -> Tokenizer:
    """GPT-2's vocabulary, or the test is skipped."""
    folder = data_folder() / "tokenizers"
    vocab = json.loads(lzma.decompress((folder / "gpt2_encoder.json.xz").read_bytes()))
    lines = lzma.decompress((folder / "gpt2_vocab.bpe.xz").read_bytes()).decode().splitlines()[1:]
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines if line)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_GPT2_WORDS, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return Tokenizer(backend, {"eos_token": "<|endoftext|>"}, None)


def data_folder() -> Path:
    """The folder of outside data that MAITRED_TEST_DATA names; the test is skipped if there is none."""
    named = os.environ.get("MAITRED_TEST_DATA")
    if not named:
        pytest.skip("set MAITRED_TEST_DATA to a folder of outside data to run this")
    return Path(named)
