"""Index of cached questions: exact search by cosine within a partition, bounded in entries.

A partition is all that must be equal: scope, history, tools, parameters. Questions of different partitions never meet.
Most partitions are small, and a matrix product over one of 10,000 vectors of 384 numbers takes about a millisecond, so
there is no approximate search. When the index is full, the entry that was added or served longest ago goes.

The states of its tokens are most of an entry's memory, so tokens are bounded as well: long questions push others out.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from maitred.engine.similar.question import EncodedQuestion, Floats, QuestionPair, Surroundings

MEAN_TOKENS = 24
"""Tokens of an entry for which there is room, on average."""
DENSITY_RANK = 10
"""Neighbour whose cosine says how densely questions lie around."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Cached question of a partition."""

    key: Hashable
    question: EncodedQuestion
    density: float


class _Partition:
    """Vectors of one partition, one row each, without gaps; there is room for at most four times as many."""

    def __init__(self, dimensions: int) -> None:
        self.entries: list[_Entry] = []
        self._rows: dict[Hashable, int] = {}
        self._matrix = np.empty((1, dimensions), dtype=np.float32)

    def cosines(self, vector: Floats) -> Floats:
        return self._matrix[: len(self.entries)] @ vector.astype(np.float32)

    def append(self, entry: _Entry) -> None:
        rows = len(self.entries)
        if rows == len(self._matrix):
            self._matrix = np.concatenate([self._matrix, np.empty_like(self._matrix)])
        self._matrix[rows] = entry.question.vector
        self._rows[entry.key] = rows
        self.entries.append(entry)

    def remove(self, key: Hashable) -> None:
        row, last = self._rows.pop(key), self.entries.pop()
        if row < len(self.entries):
            self._matrix[row] = last.question.vector
            self._rows[last.key] = row
            self.entries[row] = last
        if 4 * len(self.entries) < len(self._matrix):
            self._matrix = self._matrix[: len(self._matrix) // 2].copy()
            self._rows = dict(self._rows)  # a dictionary never shrinks, but its copy is small

    def question(self, key: Hashable) -> EncodedQuestion:
        return self.entries[self._rows[key]].question


class SimilarIndex:
    """Index of cached questions in partitions.

    Args:
        max_entries: Most entries of all partitions together. All their questions have at most `MEAN_TOKENS` times as
            many tokens.

    Attributes:
        tokens: Tokens of all questions.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self.tokens = 0
        self._partitions: dict[Hashable, _Partition] = {}
        self._places: OrderedDict[Hashable, Hashable] = OrderedDict()
        """Key of each entry, the next to go first, and its partition."""

    def __len__(self) -> int:
        return len(self._places)

    def add(self, partition: Hashable, key: Hashable, question: EncodedQuestion) -> list[Hashable]:
        """Adds a question under a key that is unique in the index, and returns the keys that went for it.

        A question with more tokens than there is room for in all is not added.
        """
        self.remove(key)
        tokens = len(question.token_ids)
        most_tokens = MEAN_TOKENS * self._max_entries
        if tokens > most_tokens:
            return []
        removed = []
        while len(self._places) >= self._max_entries or self.tokens + tokens > most_tokens:
            removed.append(next(iter(self._places)))
            self.remove(removed[-1])
        self.tokens += tokens
        found = self._partitions.setdefault(partition, _Partition(len(question.vector)))
        found.append(_Entry(key, question, _density(found.cosines(question.vector))))
        self._places[key] = partition
        return removed

    def remove(self, key: Hashable) -> None:
        """Removes an entry; an unknown one is ignored."""
        partition = self._places.pop(key, None)
        if partition is None:
            return
        found = self._partitions[partition]
        self.tokens -= len(found.question(key).token_ids)
        found.remove(key)
        if not found.entries:
            del self._partitions[partition]

    def touch(self, key: Hashable) -> None:
        """Notes that an entry was served, so it goes later."""
        if key in self._places:
            self._places.move_to_end(key)

    def search(
        self, partition: Hashable, question: EncodedQuestion, *, count: int, least_cosine: float
    ) -> list[tuple[Hashable, QuestionPair]]:
        """Returns the nearest cached questions with their keys, the nearest first.

        Args:
            partition: Where to search.
            question: What was asked.
            count: Most results.
            least_cosine: Cosine that each result has at least.
        """
        found = self._partitions.get(partition)
        if found is None:
            return []
        cosines = found.cosines(question.vector)
        density = _density(cosines)
        count = min(count, len(cosines))
        nearest = np.argpartition(-cosines, count - 1)[:count]
        nearest = nearest[np.argsort(-cosines[nearest], kind="stable")]
        best = float(cosines[nearest[0]])
        results = []
        for row in nearest[cosines[nearest] >= least_cosine].tolist():
            entry = found.entries[row]
            surroundings = Surroundings(density, entry.density, best - float(cosines[row]))
            results.append((entry.key, QuestionPair(question, entry.question, surroundings)))
        return results

    def pair_with(self, partition: Hashable, asked: EncodedQuestion, cached: EncodedQuestion) -> QuestionPair:
        """Returns the pair that a search would find if a question were cached, without changing anything.

        Measurements ask it about pairs of their choice, such as a question and an edit of it, and no gateway does. It
        stands here because it must say the same as a search.
        """
        found = self._partitions.get(partition, _Partition(len(asked.vector)))
        cosine = float(asked.vector @ cached.vector)
        cosines = np.append(found.cosines(asked.vector), cosine)
        surroundings = Surroundings(
            _density(cosines), _density(found.cosines(cached.vector)), float(cosines.max()) - cosine
        )
        return QuestionPair(asked, cached, surroundings)


def _density(cosines: Floats) -> float:
    """Returns the cosine of the tenth neighbour, of the last if there are fewer, or 0."""
    rank = min(DENSITY_RANK, len(cosines))
    return float(np.partition(cosines, -rank)[-rank]) if rank else 0.0
