"""Tokens to text as they come.

A character can be spread over several tokens, and half a character must never be shown. Since a token is a series of
bytes whatever stands beside it (`maitred.text.vocabulary`), an incremental UTF-8 decoder is all it takes: linear in the
tokens, with at most three bytes held back.
"""

import codecs
from collections.abc import Mapping, Sequence

from maitred.text.tokenizer import NO_MARKS, Tokenizer

_TAIL_TOKENS = 5
"""A character has at most four bytes, so three tokens can be left unfinished; beyond, a turn that begins after nothing
but special tokens reads as a new text, as it did in training."""


class Detokenizer:
    """The text of one choice; all pushes and the flush together are what `Tokenizer.decode` makes of all tokens.

    Args:
        tokenizer: Of the model that writes.
        prompt_tail: The prompt that the answer continues, or its end. Its last few tokens decide whether a space at the
            start belongs to the text, and begin the character that the answer may have to finish.
        marks: Token -> what shows in its place, in UTF-8 (see `maitred.text.special_tokens`).
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int] = (), marks: Mapping[int, bytes] = NO_MARKS
    ) -> None:
        self._visible_bytes = tokenizer.visible_bytes
        self._marks = marks
        tail = self._visible_bytes(prompt_tail[-_TAIL_TOKENS:])
        self._unfinished = b""
        """What there is of a character."""
        self._decoded(tail)
        self._strip = tokenizer.strips_leading_space and not tail

    def push(self, tokens: Sequence[int]) -> str:
        """The characters that are whole with these tokens."""
        return self._shown(self._decoded(self._visible_bytes(tokens, self._marks)))

    def flush(self) -> str:
        """What was held back at the end: U+FFFD for a character that was never finished."""
        return self._shown(self._decoded(b"", final=True))

    def _decoded(self, data: bytes, *, final: bool = False) -> str:
        if self._unfinished:
            data = self._unfinished + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[used:]
        return text

    def _shown(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
