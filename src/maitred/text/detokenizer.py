"""Incremental detokenizer: converts tokens to text while they arrive.

A character can be spread over several tokens, and half a character must never be shown. The bytes of a token do not
depend on its neighbours (`maitred.text.vocabulary`), so an incremental UTF-8 decoder is enough. Its cost is linear in
the tokens, and it holds back at most three bytes.
"""

import codecs
from collections.abc import Mapping, Sequence

from maitred.text.tokenizer import NO_MARKS, Tokenizer

_TAIL_TOKENS = 5
"""Prompt tokens that are looked at.

A character has at most four bytes, so at most three tokens can be unfinished. An answer that follows only special
tokens is decoded as a new text, as in training.
"""


class Detokenizer:
    """Incremental detokenizer of one choice.

    All pushes and the flush together return what `Tokenizer.decode` returns for all tokens.

    Args:
        tokenizer: Tokenizer of the model.
        prompt_tail: The prompt that the answer continues, or its end. Its last few tokens decide whether a leading
            space belongs to the text, and may hold the start of the answer's first character.
        marks: Token -> UTF-8 text that is shown in its place (see `maitred.text.special_tokens`).
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int] = (), marks: Mapping[int, bytes] = NO_MARKS
    ) -> None:
        self._visible_bytes = tokenizer.visible_bytes
        self._marks = marks
        tail = self._visible_bytes(prompt_tail[-_TAIL_TOKENS:])
        self._unfinished = b""
        """Bytes of a character that is not complete yet."""
        self._decoded(tail)
        self._strip = tokenizer.strips_leading_space and not tail

    def push(self, tokens: Sequence[int]) -> str:
        """Returns the characters that these tokens complete."""
        return self._shown(self._decoded(self._visible_bytes(tokens, self._marks)))

    def flush(self) -> str:
        """Returns the text that was held back at the end: U+FFFD for a character that was never completed."""
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
