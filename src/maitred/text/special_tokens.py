"""Special tokens that mark parts of an answer, represented as single characters.

At the start of a tool call or of reasoning, models write a token for it (``[TOOL_CALLS]``, ``<think>``). Some of these
are special tokens, which decode to no text, and any caller can write text that looks like them. This module therefore
represents a marker token by half of a surrogate pair. No text has one: bytes that would encode it are not valid UTF-8,
so a model cannot write it either. The half keeps the position of the marker in the text, and markers and text can never
be confused.

A marker that has no token in the vocabulary is searched for as plain text.
"""

from collections.abc import Iterable, Mapping

_FIRST = 0xD800
MOST_MARKS = 1024
"""Number of first halves of surrogate pairs."""


class SpecialTokenText:
    """Mapping between the markers of one model's answers and the characters that represent them in text.

    Args:
        tokens: Maps each marker to its token, or to None if the vocabulary has no token for it.

    Attributes:
        bytes_of: Maps each token to the code point that represents it, encoded as UTF-8 would encode it.
        tokens: Maps each marker to its token or to None.
    """

    def __init__(self, tokens: Mapping[str, int | None]) -> None:
        assert len(tokens) <= MOST_MARKS
        self.tokens = dict(tokens)
        self._characters = {
            marker: chr(_FIRST + number) for number, (marker, token) in enumerate(tokens.items()) if token is not None
        }
        self.bytes_of = {
            token: self._characters[marker].encode("utf-8", "surrogatepass")
            for marker, token in tokens.items()
            if token is not None
        }
        self._literals = str.maketrans({character: marker for marker, character in self._characters.items()})

    def __getitem__(self, marker: str) -> str:
        """Returns the character that represents a marker in a text, or the marker if it has no token."""
        return self._characters.get(marker, marker)

    def literal(self, text: str) -> str:
        """Returns the text with the literal text of every marker."""
        return text if text.isascii() else text.translate(self._literals)


def partial_tail(text: str, markers: Iterable[str]) -> int:
    """Returns the start of the longest suffix that may be the beginning of a marker.

    If there is no such suffix, the result is the length of the text.
    """
    found = len(text)
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0:
            if marker.startswith(text[at:]):
                found = min(found, at)
                break
            at = text.find(marker[0], at + 1)
    return found
