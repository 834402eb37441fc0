"""Tokens that mark something in an answer, as characters.

Where a call of a tool or a thought begins, models write a token of its own (``[TOOL_CALLS]``, ``<think>``). Some of
these are special tokens, which show in no text, and all of them look like a text that anybody can write. So a marking
token becomes one of Unicode's noncharacters, which are set aside for use inside a program (The Unicode Standard, 23.7):
it keeps its place in the text, cannot be taken for text, and no text can be taken for it.

A marker that the vocabulary has no token for is looked for as the text that it is.
"""

from collections.abc import Iterable, Mapping

_FIRST = 0xFDD0
MOST_MARKS = 32
"""So many noncharacters there are side by side."""


class SpecialTokenText:
    """The markers of one model's answers.

    Args:
        tokens: Marker -> the token that is one; of markers without one, None.

    Attributes:
        bytes_of: Token -> what it becomes, in UTF-8.
        tokens: As given.
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
        """What stands for a marker in a text."""
        return self._characters.get(marker, marker)

    def literal(self, text: str) -> str:
        """The text with every marker as it is written."""
        return text if text.isascii() else text.translate(self._literals)


def partial_tail(text: str, markers: Iterable[str]) -> int:
    """Where the longest end of a text begins that could go on as one of the markers, or the text's length."""
    found = len(text)
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0:
            if marker.startswith(text[at:]):
                found = min(found, at)
                break
            at = text.find(marker[0], at + 1)
    return found
