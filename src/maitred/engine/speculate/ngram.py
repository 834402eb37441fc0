"""Prompt lookup: the draft is the text that followed the last occurrence of the latest tokens.

Answers often repeat parts of their prompts or of themselves: edited code, summarised or quoted text, names, tables
(prompt lookup, Saxena, 2023; Yang et al., "Inference with reference", 2023). The last three tokens are looked up in an
index of all triples of the sequence. The draft is the text behind the latest other occurrence. If the text behind the
occurrence ends at the current position, the text is periodic, and the draft repeats the period. Drafts are better if
more tokens before the two places agree. The kind of a draft is the logarithm of this number.

An index grows by one entry per token of its sequence, when a draft is requested.
"""

from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.speculate.guess import DraftTokens

_WIDTH = 3
"""Number of tokens that must agree. With two tokens the draft is mostly wrong, and four tokens miss the beginning of a
copy."""
_LONGEST_MATCH = 32


class NgramDrafter:
    """Drafter that continues the latest occurrence of the last tokens. A draft costs about two microseconds."""

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def draft(self, sequence: Sequence, most: int) -> DraftTokens | None:
        """Returns the tokens that followed the latest occurrence of the last tokens."""
        tokens = sequence.tokens
        index = self._indexes.get(sequence.key)
        if index is None:
            index = self._indexes[sequence.key] = _Index()
        place = index.find(tokens)
        if place is None:
            return None
        matched = _WIDTH
        while matched < _LONGEST_MATCH and matched < place and tokens[place - 1 - matched] == tokens[-1 - matched]:
            matched += 1
        ahead = tokens[place : place + most]
        while len(ahead) < most:
            ahead += ahead[: most - len(ahead)]
        return DraftTokens(matched.bit_length(), most, tuple(ahead))

    def forget(self, sequence: Sequence) -> None:
        """Drops the index of a sequence."""
        self._indexes.pop(sequence.key, None)


class _Index:
    """Index of the latest position of each triple that has a token behind it."""

    __slots__ = ("_indexed", "_places")

    def __init__(self) -> None:
        self._places: dict[tuple[int, int, int], int] = {}
        self._indexed = _WIDTH
        """Position before which all triples are in the index."""

    def find(self, tokens: list[int]) -> int | None:
        """Indexes new tokens; returns the position behind the last triple's latest earlier occurrence."""
        length, places = len(tokens), self._places
        for end in range(self._indexed, length):
            places[tokens[end - 3], tokens[end - 2], tokens[end - 1]] = end
        if length < _WIDTH:
            return None
        self._indexed = max(_WIDTH, length)
        return places.get((tokens[-3], tokens[-2], tokens[-1]))
