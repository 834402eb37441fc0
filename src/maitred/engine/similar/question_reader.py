"""Reader of questions: what the encoder makes of a text, as questions are compared."""

from collections.abc import Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np

from maitred.engine.similar.question import EncodedQuestion, Floats
from maitred.text.tokenizer import Tokenizer
from maitred.text.wording import Wording


class TokenEncoder(Protocol):
    """Function that computes the vectors of texts and of their tokens."""

    def __call__(self, texts: Sequence[Sequence[int]]) -> tuple[Floats, Sequence[Floats]]:
        """Computes ``[texts, dimensions]``; and for each text ``[tokens, hidden_size]``, rows of length 1."""
        ...


class QuestionReader:
    """Reader of questions in the encoder's process.

    Args:
        encode: Computes vectors.
        folder: Folder of the model, from which the tokenizer is read when it is first needed.
        context_tokens: Most tokens of a text.
        special_tokens: Ids of the tokens that may begin and end every text.
    """

    def __init__(self, encode: TokenEncoder, folder: Path, *, context_tokens: int, special_tokens: Set[int]) -> None:
        self.encode = encode
        self._folder = folder
        self._context_tokens = context_tokens
        self._special_tokens = special_tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model.

        Raises:
            ConfigInvalid: The model's folder has none that can be used.
        """
        return Tokenizer.load(self._folder)

    def question(self, text: str, tokens: Sequence[int], vector: Floats, token_vectors: Floats) -> EncodedQuestion:
        """Makes a question from what was computed for its text, without the special tokens at both ends.

        Args:
            text: Question.
            tokens: Its token ids.
            vector: ``[dimensions]``
            token_vectors: ``[tokens, hidden_size]``, of length 1.
        """
        first, last = self._inner(tokens)
        return EncodedQuestion(
            text=text,
            wording=Wording.of(text),
            vector=vector / max(float(np.linalg.norm(vector)), 1e-12),
            token_ids=np.array(tokens[first:last], dtype=np.int64),
            token_vectors=token_vectors[first:last].astype(np.float16),
        )

    def read(self, texts: Sequence[str]) -> list[EncodedQuestion]:
        """Tokenises and encodes texts; those that do not fit the encoder's window are left out."""
        tokens = [self.tokenizer.encode_embedding_input(text) for text in texts]
        fitting = [i for i in range(len(texts)) if 1 <= len(tokens[i]) <= self._context_tokens]
        if not fitting:
            return []
        vectors, rows = self.encode([tokens[i] for i in fitting])
        return [self.question(texts[i], tokens[i], *each) for i, *each in zip(fitting, vectors, rows, strict=True)]

    def _inner(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns where a text begins and ends between its special tokens; if it has no others, all count."""
        first, last = 0, len(tokens)
        while first < last and tokens[first] in self._special_tokens:
            first += 1
        while last > first and tokens[last - 1] in self._special_tokens:
            last -= 1
        return (first, last) if first < last else (0, len(tokens))
