"""Tokenizer of a GGUF file, as the ``tokenizer.json`` and ``tokenizer_config.json`` of the same model.

A file holds the vocabulary, its merges or scores, and the name of the rule by which texts are cut into words before the
merges. The rules themselves are those of the models' own tokenizers; llama.cpp's ``llama-vocab.cpp`` lists which name
stands for which.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from maitred.core.errors import ConfigInvalid

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Types of tokens in a file; 1 is a plain one, 5 is never used and 6 stands for a byte."""
_TURN_ENDS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>",
     "<|end_of_text|>", "<EOT>", "<|EOT|>", "<｜end▁of▁sentence｜>")
)  # fmt: skip
"""Control tokens that end an answer whatever else the file says. Many files name one end alone, and not the one that
their template writes."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_CASED_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_LINES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_LINES}"
_TEKKEN = _CASED % ("", "") + r"\p{N}|" + _CASED_LINES
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"\p{N}{1,3}|" + _CASED_LINES

Step = dict[str, Any]
"""Step of a pre-tokenizer, as in ``tokenizer.json``."""


def _split(pattern: str) -> tuple[Step, ...]:
    """Returns the steps that cut a text by an expression and write bytes as letters."""
    cut: Step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return cut, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


_GPT2: Step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""Step that cuts a text by GPT-2's expression, and writes bytes as letters."""
_DIGITS: Step = {"type": "Digits", "individual_digits": True}

_RULES: dict[str, tuple[Step, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "phi-2", "jina-es", "jina-de", "gigachat", "roberta-bpe"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGITS, _GPT2)
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3", "pixtral"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), _split(_QWEN2)),
    "tekken": _split(_TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4"), _split(_GPT4O)),
}
"""Name of a rule -> steps that cut a text into words, one after the other."""
_COMPOSED = frozenset(("qwen2",))
"""Rules whose models' own tokenizers compose letters with their accents first (NFC)."""
_WHOLE_WORDS = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"))
"""Rules of vocabularies in which a word that is a token is not merged, and whose texts begin with a token."""


class GGUFVocabulary:
    """Vocabulary of a file, with what the file says of its use.

    Args:
        metadata: Metadata of the file.
        path: The file, for messages.

    Raises:
        ConfigInvalid: The file has no vocabulary, or one of a kind that maitred does not read.
    """

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path
        kind = self._get("model")
        self._sentencepiece = kind == "llama"
        if kind not in ("llama", "gpt2"):
            raise ConfigInvalid(
                f"{path} has a vocabulary of the kind {kind}, which maitred does not read. It reads gpt2 (byte-level) "
                "and llama (SentencePiece). Use the model's own checkpoint."
            )
        self._rule = str(self._get("pre", "default"))
        if not self._sentencepiece and self._rule not in _RULES:
            raise ConfigInvalid(
                f"{path} cuts texts into words by the rule {self._rule} (tokenizer.ggml.pre), which maitred does not "
                f"know. It knows {', '.join(sorted(_RULES))}. Take a newer conversion, or the model's own checkpoint."
            )
        self._tokens: list[str] = self._get("tokens", [])
        self._types: list[int] = self._get("token_type") or [1] * len(self._tokens)
        if not self._tokens or len(self._types) != len(self._tokens):
            raise ConfigInvalid(f"{path} has no complete vocabulary. Fetch it again.")

    def _get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - any value of the metadata
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer, the file's own end first."""
        named = [int(token) for name in _ENDS if (token := self._get(name)) is not None]
        known = [
            token for token, kind in enumerate(self._types) if kind == _CONTROL and self._tokens[token] in _TURN_ENDS
        ]
        return list(dict.fromkeys((*named, *known)))

    def tokenizer(self) -> dict[str, Any]:
        """Returns the fields of the model's ``tokenizer.json``."""
        added = [
            {
                "id": token,
                "content": self._tokens[token],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for token, kind in enumerate(self._types)
            if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and self._sentencepiece)
        ]
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            **(self._pieces() if self._sentencepiece else self._byte_level()),
            "post_processor": self._around_text(),
        }

    def settings(self) -> dict[str, Any]:
        """Returns the fields of the model's ``tokenizer_config.json``."""
        roles = {role: self._get(f"{name}_token_id") for name, role in _ROLES.items()}
        named = {role: self._tokens[token] for role, token in roles.items() if token in range(len(self._tokens))}
        templates = self._templates()
        if len(templates) == 1:
            named["chat_template"] = templates[0]["template"]
        elif templates:
            named["chat_template"] = templates
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "add_eos_token": self._get("add_eos_token") is True,
        }

    def _templates(self) -> list[dict[str, str]]:
        """Returns the chat template, and further ones that the file names, such as ``tool_use``."""
        further = self._metadata.get("tokenizer.chat_templates") or ()
        found = {"default": "tokenizer.chat_template"} | {name: f"tokenizer.chat_template.{name}" for name in further}
        return [
            {"name": name, "template": source} for name, key in found.items() if (source := self._metadata.get(key))
        ]

    def _byte_level(self) -> dict[str, Any]:
        merges = [_pair(merge) for merge in self._get("merges") or ()]
        known = {token: number for number, token in reversed(list(enumerate(self._tokens)))}
        return {
            "normalizer": {"type": "NFC"} if self._rule in _COMPOSED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_RULES[self._rule])},
            "decoder": _GPT2,
            "model": {
                "type": "BPE",
                "vocab": known,
                "merges": merges,
                "ignore_merges": self._rule in _WHOLE_WORDS,
            },
        }

    def _pieces(self) -> dict[str, Any]:
        scores: Sequence[float] = self._get("scores") or [0.0] * len(self._tokens)
        known = {token: number for number, token in reversed(list(enumerate(self._tokens)))}
        prefix = self._get("add_space_prefix", True)
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        before = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
        ]
        unknown = self._get("unknown_token_id")
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*before, spaces]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "vocab": known,
                "merges": list(_merges(known, scores, self._types)),
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
            },
        }

    def _around_text(self) -> dict[str, Any] | None:
        begins = self._get("add_bos_token")
        if begins is None:
            begins = self._sentencepiece or self._rule in _WHOLE_WORDS
        token = self._get("bos_token_id")
        if not begins or token is None:
            return None
        text = self._tokens[token]
        single = [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        special = {text: {"id": text, "ids": [token], "tokens": [text]}}
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _pair(merge: str) -> list[str]:
    """Splits a merge into its two tokens; a space within a byte-level token is written as another letter."""
    first, _, second = merge.partition(" ")
    return [first, second]


def _merges(known: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> Iterator[list[str]]:
    """Yields the merges of a SentencePiece vocabulary, the best first.

    SentencePiece merges the two neighbours whose union is the token of the best score. So a token gives a merge for
    each of its cuts into two tokens, and the order of all merges is that of the scores.
    """
    found = []
    for token, number in known.items():
        if types[number] != 1:
            continue
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in known and second in known:
                found.append((-scores[number], known[first], known[second], first, second))
    found.sort(key=lambda merge: merge[:3])
    return ([first, second] for *_, first, second in found)
