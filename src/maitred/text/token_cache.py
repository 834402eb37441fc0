"""Caches of the tokens of segments of prompts and of words, so that neither is encoded each time that it is sent.

Every turn sends all turns before it again, and many conversations begin with the same instructions and tools. To encode
them each time is most of the work of a gateway with a long conversation.

A prompt is cut before control tokens that its template writes. A tokenizer looks for such tokens before anything else,
so what stands on both sides of a cut has the tokens that it would have by itself, and the tokens of all segments, one
after the other, are those of the prompt. `separators` says for which control tokens this holds.

A segment that is new has words that are not. A byte-level tokenizer splits a text into words and makes tokens of each;
for ASCII, Python's own expressions split it, and a dictionary has the tokens, in a quarter of the time.
"""

import re
from array import array
from collections.abc import Callable, Container, Iterable, Mapping
from hashlib import blake2b
from threading import Lock
from typing import Any

import tokenizers
import tokenizers.models

from maitred.core.shared_cache import SharedCache
from maitred.text.control_tokens import CLOSE_MARK

_FEWEST_CHARACTERS = 64
"""Segments have more characters than this, but for the last one: an entry for each ``<|im_end|>`` costs more than it
saves."""
_ENTRY_BYTES = 400
"""What an entry takes beside its tokens."""
_MOST_WORDS = 32_768
_LONGEST_WORD = 32
"""Longer words are not kept."""
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = {
    _LETTERS + r"|\p{N}{1,3}" + _SIGNS,  # Llama 3
    _LETTERS + r"|\p{N}" + _SIGNS,  # Qwen 2, 2.5 and 3
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
}
"""Expressions by which tokenizers split a text into words."""


class SegmentCache:
    """Cache of the tokens of segments of prompts; threads may share it.

    A segment is found again only for the organisation that sent it, as prefixes in the KV cache are: how long an answer
    takes tells nobody what others have sent. When the cache is full, the organisation that uses most of it makes room.

    Args:
        separators: Control tokens before which a prompt may be cut.
        max_bytes: Most bytes that the cache takes.
    """

    def __init__(self, separators: Iterable[str], max_bytes: int) -> None:
        texts = "|".join(sorted(map(re.escape, separators), reverse=True)) or "(?!)"
        # Before a mark, it is text that spells one.
        self._separator = re.compile(f"(?:{texts})(?!{CLOSE_MARK})")
        self._entries: SharedCache[tuple[str, bytes], bytes] = SharedCache(max_bytes)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes that the cache takes."""
        return self._entries.size

    def encode(self, prompt: str, organisation: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Converts a prompt to token ids.

        Args:
            prompt: Its control tokens that are text are marked (`maitred.text.control_tokens`).
            organisation: Who sent it.
            encode: Converts a segment to token ids, and adds none around it.
        """
        tokens: list[int] = []
        begin, length = 0, len(prompt)
        for end in (*map(re.Match.start, self._separator.finditer(prompt)), length):
            if end - begin <= _FEWEST_CHARACTERS and end < length:
                continue
            segment, begin = prompt[begin:end], end
            # A digest, because entries would take twice as much with the texts, and texts of callers are not kept.
            key = organisation, blake2b(segment.encode("utf-8", "surrogatepass"), digest_size=32).digest()
            with self._lock:
                known = self._entries.get(key)
            tokens += self._add(key, encode(segment)) if known is None else array("I", known)
        return tokens

    def _add(self, key: tuple[str, bytes], tokens: list[int]) -> list[int]:
        packed = array("I", tokens).tobytes()
        with self._lock:
            self._entries.put(key, packed, key[0], len(packed) + _ENTRY_BYTES)
        return tokens


class WordCache:
    """Cache of the tokens of words, for a tokenizer that reads each word by itself.

    Organisations share it, as they share the library's own cache of words: a word that nobody has sent costs a few
    microseconds more, and no text takes another way for it.

    Args:
        backend: The tokenizer.
        words: Expression by which the tokenizer splits a text into words.
    """

    def __init__(self, backend: tokenizers.Tokenizer, words: str) -> None:
        self._backend = backend
        self._added = {token.content for token in backend.get_added_tokens_decoder().values()}
        longest_first = sorted(map(re.escape, self._added), key=len, reverse=True)
        self._pieces = re.compile(f"({'|'.join(longest_first) or '(?!)'})")
        in_set = words.replace(r"\p{L}\p{N}]", "a-zA-Z0-9]")
        self._words = re.compile(in_set.replace(r"\p{L}", "[a-zA-Z]").replace(r"\p{N}", "[0-9]"), re.ASCII)
        self._tokens: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, text: str) -> list[int] | None:
        """Converts a text to token ids, and adds none around it; None: it is not ASCII."""
        if not text.isascii():
            return None
        words: list[str] = []
        for piece in self._pieces.split(text):
            words += [piece] if piece in self._added else self._words.findall(piece)
        tokens, new = list[int](), list[str]()
        for word in words:
            if (of_word := self._tokens.get(word)) is None:
                new.append(word)
                continue
            if new:
                tokens += self._encode_new(new)
                new = []
            tokens += of_word
        return tokens + self._encode_new(new) if new else tokens

    def _encode_new(self, words: list[str]) -> list[int]:
        """Converts words in a row to token ids, and keeps those of the first."""
        first, *others = words
        tokens = self._read(first)
        if len(first) <= _LONGEST_WORD:
            if len(self._tokens) >= _MOST_WORDS:
                self._tokens.clear()
            self._tokens[first] = tokens
        return tokens + self._read("".join(others)) if others else tokens

    def _read(self, text: str) -> list[int]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids


def word_cache(
    backend: tokenizers.Tokenizer, normalizer: Mapping[str, Any] | None, splits: Mapping[str, Any] | None
) -> WordCache | None:
    """Makes the cache of words of a tokenizer; None: it is not known how the tokenizer splits texts.

    Args:
        backend: The tokenizer.
        normalizer: Its ``normalizer``, as its JSON describes it. NFC leaves ASCII as it is.
        splits: Its ``pre_tokenizer``.
    """
    match splits:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str() as pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        } if pattern in _WORDS:
            pass
        case _:
            return None
    if not isinstance(backend.model, tokenizers.models.BPE) or backend.model.dropout or backend.encode_special_tokens:
        return None
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    for token in backend.get_added_tokens_decoder().values():
        if token.normalized or token.lstrip or token.rstrip or token.single_word:
            return None  # others are found first, and as they are
    return WordCache(backend, pattern)


def separators(backend: tokenizers.Tokenizer, texts: Container[str]) -> set[str]:
    """Returns those of some texts before which a prompt can be cut, and its tokens stay the same.

    They are tokens that the tokenizer finds in any text, before it normalises it, and whatever stands beside them. None
    of them can be part of another token that was added to the vocabulary, or begin within one.
    """
    added = backend.get_added_tokens_decoder().values()
    contents = {token.content for token in added}
    # What an added token can end with, and another begin.
    ends = {content[at:] for content in contents for at in range(1, len(content))}
    return {
        token.content
        for token in added
        if token.content in texts
        and not (token.normalized or token.lstrip or token.single_word or token.content[0].isspace())
        and not (token.special and backend.encode_special_tokens)
        and not any(token.content in other for other in contents if other != token.content)
        and not any(token.content[:end] in ends for end in range(1, len(token.content)))
    }
