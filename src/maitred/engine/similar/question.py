"""Question as the encoder has read it, and pair of questions with its surroundings."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.text.wording import Wording

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedQuestion:
    """Question with its vectors.

    Attributes:
        text: Question.
        wording: Its words.
        vector: ``[dimensions]``, of length 1.
        token_ids: ``[tokens]``, without the tokens that begin and end every text.
        token_vectors: ``[tokens, hidden_size]``: the encoder's last rows, of length 1; kept in half precision.
    """

    text: str
    wording: Wording
    vector: Floats
    token_ids: NDArray[np.int64]
    token_vectors: Floats


class Surroundings(NamedTuple):
    """Where a pair lies among the cached questions.

    Attributes:
        asked_density: Cosine of the asked question and its tenth neighbour.
        cached_density: The same of the cached question, when it was added.
        behind: By how much the cosine of the pair is behind that of the asked question's nearest neighbour.
    """

    asked_density: float
    cached_density: float
    behind: float


@dataclass(frozen=True, slots=True)
class QuestionPair:
    """Asked question and cached question that may have the same answer."""

    asked: EncodedQuestion
    cached: EncodedQuestion
    surroundings: Surroundings

    @property
    def middle(self) -> Floats:
        """Vector of length 1 half-way between both questions."""
        middle = self.asked.vector + self.cached.vector
        return middle / np.linalg.norm(middle)
