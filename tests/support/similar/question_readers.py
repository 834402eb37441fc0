"""Reader of questions without an encoder: each word is a token, whose vector its letters decide."""

from pathlib import Path

import numpy as np

from maitred.engine.similar.question_reader import QuestionReader
from maitred.text.wording import Wording
from tests.support.similar.encoded_questions import DIMENSIONS, word_vector

BEGIN, END = 0, 1
CONTEXT_TOKENS = 32


class WordEncoder:
    """Encodes each word as the mean of its words' vectors, and keeps which batches it was asked for."""

    def __init__(self):
        self.words = ["[BEGIN]", "[END]"]
        self.batches = []

    def encode_embedding_input(self, text):
        return self.encode(text, add_special_tokens=True)

    def encode(self, text, *, add_special_tokens):
        assert add_special_tokens
        words = Wording.of(text).words
        self.words += [word for word in dict.fromkeys(words) if word not in self.words]
        return [BEGIN, *map(self.words.index, words), END]

    def __call__(self, texts):
        self.batches.append(len(texts))
        rows = [np.array([word_vector(self.words[token]) for token in text], np.float32) for text in texts]
        # The tokens at both ends have a part in the vectors of real encoders, but no meaning of their own.
        vectors = np.array([row[1:-1].mean(0) if len(row) > 2 else row.mean(0) for row in rows], np.float32)
        return vectors.reshape(len(texts), DIMENSIONS), rows


class WordReader(QuestionReader):
    """Reader with a vocabulary that grows."""

    def __init__(self, context_tokens=CONTEXT_TOKENS):
        self.encoder = WordEncoder()
        super().__init__(
            self.encoder, Path("/nowhere"), context_tokens=context_tokens, special_tokens=frozenset({BEGIN, END})
        )

    @property
    def tokenizer(self):
        return self.encoder

    def tokens(self, text):
        return self.encoder.encode(text, add_special_tokens=True)
