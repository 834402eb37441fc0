"""Encoded questions without an encoder: each word has a vector that its letters decide."""

import zlib

import numpy as np

from maitred.engine.similar.question import EncodedQuestion
from maitred.text.wording import Wording

DIMENSIONS = 32


def word_id(word):
    return zlib.crc32(word.encode()) % 30_000


def word_vector(word):
    vector = np.random.default_rng(word_id(word)).normal(size=DIMENSIONS)
    return vector / np.linalg.norm(vector)


def encoded_question(text):
    wording = Wording.of(text)
    tokens = np.array([word_vector(word) for word in wording.words])
    vector = tokens.mean(0)
    return EncodedQuestion(
        text=text,
        wording=wording,
        vector=(vector / np.linalg.norm(vector)).astype(np.float32),
        token_ids=np.array([word_id(word) for word in wording.words]),
        token_vectors=tokens.astype(np.float16),
    )
