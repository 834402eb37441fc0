"""Cache of the tokens of segments of prompts, so that each turn of a conversation is encoded once.

Every turn sends all turns before it again, and many conversations begin with the same instructions and tools. To encode
them each time is most of the work of a gateway with a long conversation.

A prompt is cut before control tokens that its template writes. A tokenizer looks for such tokens before anything else,
so what stands on both sides of a cut has the tokens that it would have by itself, and the tokens of all segments, one
after the other, are those of the prompt. `separators` says for which control tokens this holds.
"""

import re
from array import array
from collections.abc import Callable, Container, Iterable
from hashlib import blake2b
from threading import Lock

import tokenizers

from maitred.core.shared_cache import SharedCache
from maitred.text.control_tokens import CLOSE_MARK

_FEWEST_CHARACTERS = 64
"""Segments have more characters than this, but for the last one: an entry for each ``<|im_end|>`` costs more than it
saves."""
_ENTRY_BYTES = 400
"""What an entry takes beside its tokens."""


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
