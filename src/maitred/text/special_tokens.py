"""Special tokens that mark parts of an answer, represented as single characters.

At the start of a tool call or of reasoning, models write a token for it (``[TOOL_CALLS]``, ``<think>``). Some of these
are special tokens, which decode to no text, and any caller can write text that looks like them. This module therefore
represents a marker token by one of Unicode's noncharacters, which are reserved for use inside a program (The Unicode
Standard, 23.7). The noncharacter keeps the position of the marker in the text, and markers and caller text can never be
confused.

A marker that has no token in the vocabulary is searched for as plain text.
"""

from collections.abc import Iterable, Mapping

_FIRST = 0xFDD0
MOST_MARKS = 32
"""Number of contiguous noncharacters."""


class SpecialTokenText:
    """Mapping between the markers of one model's answers and the characters that represent them in text.

    Args:
        tokens: Maps each marker to its token, or to None if the vocabulary has no token for it.

    Attributes:
        bytes_by_token: Maps each token to the UTF-8 bytes of the character that represents it.
        tokens: Maps each marker to its token or to None.
    """

    def __init__(self, tokens: Mapping[str, int | None]) -> None:
        assert len(tokens) <= MOST_MARKS
        self.tokens = dict(tokens)
        self._characters = {
            marker: chr(_FIRST + number) for number, (marker, token) in enumerate(tokens.items()) if token is not None
        }
        self.bytes_of = {
            token: self._characters[marker].encode() for marker, token in tokens.items() if token is not None
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
