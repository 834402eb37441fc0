"""Tokenizer of text as text: byte for byte, and without control tokens whatever the text spells.

A model's own tokenizer recognises control tokens that stand in a text, and may normalise the text first. Text that a
grammar forces on an answer must be neither: an answer would end where its text spells ``</s>``, and a normalised text
is no word of the grammar.
"""

from collections.abc import Mapping, Set
from typing import Any

import msgspec
import tokenizers


class TextTokenizer:
    """Tokenizer of text as tokens whose bytes, one after the other, are the text.

    The tokens are those of the model's tokenizer where it gives such tokens, and the longest that fit elsewhere.

    Args:
        backend: Tokenizer of the model.
        table: Maps each token to its bytes.
        control: Control tokens, which stand for no text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, table: Mapping[int, bytes], control: Set[int]) -> None:
        described = msgspec.json.decode(backend.to_str())
        described["added_tokens"] = [entry for entry in described["added_tokens"] if entry["id"] not in control]
        described["normalizer"] = _faithful(described.get("normalizer"))
        described["pre_tokenizer"] = _without_prefix(described.get("pre_tokenizer"))
        described["post_processor"] = None
        self._backend = tokenizers.Tokenizer.from_str(msgspec.json.encode(described).decode())
        self._bytes = {token: data for token, data in table.items() if data and token not in control}
        self._tokens: dict[bytes, int] = {}
        for token, data in self._bytes.items():
            self._tokens.setdefault(data, token)
        self._longest = max(map(len, self._tokens), default=1)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; empty if the vocabulary has no tokens for it."""
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        tokens = encoding.ids
        data = text.encode("utf-8", "surrogatepass")
        if b"".join([self._bytes.get(token, b"") for token in tokens]) == data and self._bytes.keys() >= {*tokens}:
            return tokens
        return self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        tokens, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + self._longest), at, -1):
                token = self._tokens.get(data[at:end])
                if token is not None:
                    break
            else:
                return []
            tokens.append(token)
            at = end
        return tokens


def _faithful(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the steps of a normaliser that only write a text with the symbols of the vocabulary."""
    if normalizer is None:
        return None
    if normalizer["type"] == "Sequence":
        steps = [step for step in map(_faithful, normalizer["normalizers"]) if step is not None]
        return {"type": "Sequence", "normalizers": steps}
    return normalizer if normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "} else None


def _without_prefix(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns a pre-tokenizer that writes no space before a text."""
    if pre_tokenizer is None:
        return None
    if pre_tokenizer["type"] == "Sequence":
        steps = [_without_prefix(step) for step in pre_tokenizer["pretokenizers"]]
        return {**pre_tokenizer, "pretokenizers": steps}
    changes = {"prepend_scheme": "never", "add_prefix_space": False}
    return {**pre_tokenizer, **{name: value for name, value in changes.items() if name in pre_tokenizer}}
