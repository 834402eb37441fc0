"""Exact bytes of every token, derived from the decoder section of a tokenizer.

Three families of tokenizers represent bytes in a vocabulary of strings:

* *Byte-level* BPE (GPT-2, Llama 3, Qwen) gives each of the 256 bytes a printable character; a token's bytes are its
  characters mapped back.
* *SentencePiece* (Llama 2, Mistral, Gemma) writes a space as ``▁`` and a byte that no token covers as ``<0xE2>``. Some
  of these vocabularies put a space before the first word, which decoding removes.
* *WordPiece* (BERT) marks a token that continues a word with ``##``; every other token begins a word, after a space.

If each token is a byte string, decoding is concatenation, so a text gives the same result wherever it is split. The
result differs from the reference decoders in one case: if the byte tokens of SentencePiece are not valid UTF-8, those
decoders replace every byte of the run by U+FFFD, including valid characters, and this module keeps the valid
characters.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from maitred.core.errors import ConfigInvalid

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecodingRules(msgspec.Struct, frozen=True):
    """Rules by which tokens are decoded to bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    """Pairs of a symbol in tokens and the text it represents, such as ``▁`` for a space."""
    strips_leading_space: bool = False
    """Whether the space before the first word is added by the tokenizer and is not part of the text."""
    continuation: str = ""
    """Prefix of a token that continues a word; all other tokens begin a word."""

    def bytes_of(self, token: str) -> bytes:
        """Returns the bytes of a token of the model's own vocabulary."""
        if self.byte_level:
            if token.isascii():
                # Printable ASCII characters represent their own bytes, and other ASCII characters represent no byte
                return token.encode()
            try:
                return token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
            except UnicodeEncodeError:
                return token.encode()  # added to the vocabulary as plain text, after training
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for symbol, text in self.replacements:
            token = token.replace(symbol, text)
        if self.continuation:
            token = token.removeprefix(self.continuation) if token.startswith(self.continuation) else f" {token}"
        return token.encode()


def read_decoding_rules(decoder: dict[str, Any] | None) -> DecodingRules:
    """Reads the ``decoder`` section of a ``tokenizer.json``.

    Raises:
        ConfigInvalid: The decoder has a step that does not map each token to bytes.
    """
    byte_level = byte_fallback = strips = False
    continuation = ""
    replacements: list[tuple[str, str]] = []
    for step in _steps(decoder):
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str() as symbol}, "content": str() as text}:
                replacements.append((symbol, text))
            case {"type": "Metaspace", "replacement": str() as symbol}:
                replacements.append((symbol, " "))
                # Older files have `add_prefix_space` instead of `prepend_scheme`.
                strips = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
            case {"type": "Strip", "content": " ", "start": int() as start, "stop": 0}:
                strips = start > 0
            case {"type": "WordPiece", "prefix": str() as continuation} if continuation:
                strips = True
            case _:
                raise ConfigInvalid(
                    f"The tokenizer's decoder step {step.get('type')!r} is not supported. Use a model with a "
                    "byte-level, SentencePiece or WordPiece tokenizer."
                )
    return DecodingRules(
        byte_level,
        byte_fallback,
        replacements=tuple(replacements),
        strips_leading_space=strips,
        continuation=continuation,
    )


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        raise ConfigInvalid(
            "The tokenizer.json has no decoder, so tokens cannot be turned into text. Use another model."
        )
    if decoder.get("type") == "Sequence":
        for inner in decoder.get("decoders", ()):
            yield from _steps(inner)
    else:
        yield decoder


def _byte_of_character() -> dict[int, int]:
    """Makes GPT-2's byte alphabet.

    Printable Latin-1 characters represent their own bytes, and other bytes are mapped to U+0100 and above.

    The table has the form of `str.translate`. A mapped byte must not represent itself, so its own character maps to a
    character that is not a byte.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(moved, 0xFFFF) | {0x100 + offset: byte for offset, byte in enumerate(moved)}


_BYTE_OF_CHARACTER = _byte_of_character()
