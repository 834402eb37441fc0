"""Guesses by looking up: what followed the last time when the text read like this.

Answers often repeat what stands in their prompts or further up in themselves: code that is edited, text that is
summarised or quoted, names, tables (prompt lookup, Saxena, 2023; Yang et al., "Inference with reference", 2023). The
last three tokens are looked up in an index of all triples of the sequence, and what followed the latest other
occurrence is the guess. Where the occurrence reaches up to the end, the text goes round in a circle, and so does the
guess. The longer the two places agree backwards, the better the guess; its kind is the logarithm of that length.

An index grows with its sequence, by one entry per token, when it is asked.
"""

from maitred.engine.scheduler.sequence import Sequence
from maitred.engine.speculate.guess import DraftTokens

_WIDTH = 3
"""Tokens that must agree. Of two the guess is mostly wrong, and four miss the begin of a copy."""
_LONGEST_MATCH = 32


class NgramDrafter:
    """Drafts by the latest occurrence of the last tokens. A guess costs about two microseconds."""

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
    """Where each triple of a sequence was seen last with a token behind it."""

    __slots__ = ("_indexed", "_places")

    def __init__(self) -> None:
        self._places: dict[tuple[int, int, int], int] = {}
        self._indexed = _WIDTH
        """Triples that end before this position are in."""

    def find(self, tokens: list[int]) -> int | None:
        """Takes in what is new; the position behind the latest earlier occurrence of the last triple."""
        length, places = len(tokens), self._places
        for end in range(self._indexed, length):
            places[tokens[end - 3], tokens[end - 2], tokens[end - 1]] = end
        if length < _WIDTH:
            return None
        self._indexed = max(_WIDTH, length)
        return places.get((tokens[-3], tokens[-2], tokens[-1]))
