"""Rows of tokens: one epoch of the corpus, cut for one context length.

A long document gives windows that start at a paragraph and are led by `<|begin|>`, as a prompt is.
What is shorter than a row - chats, tales, remainders - is shuffled and packed end to end. Everything
follows from (seed, epoch, row length), so a resumed run sees the rows it would have seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tiny_model.chats import all_chats
from tiny_model.corpus import Book, Corpus, Dialogue, Document
from tiny_model.vocabulary import BEGIN_ID, END_ID, encode_many, render_chat

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class TokenDocument:
    """A document in tokens, ending in `<|end|>`, and where its paragraphs start."""

    ids: Ids
    starts: Ids


class Rows:
    """Makes each epoch's rows; documents are tokenised once, chats anew each epoch."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self._corpus, self._tokenizer, self._seed = corpus, tokenizer, seed
        self._documents = [
            document for book in (*corpus.books, corpus.plays) for document in encode_documents(book.train, tokenizer)
        ]

    def epoch(self, number: int, length_tokens: int) -> Ids:
        """All rows of epoch `number`, `[rows, length_tokens + 1]`, shuffled."""
        rng = random.Random(f"{self._seed}/{number}/{length_tokens}")
        rows: list[Ids] = []
        loose = [np.array(ids) for ids in encode_many(self._tokenizer, all_chats(self._corpus, rng))]
        for document in self._documents:
            for window in _windows(document, length_tokens, rng):
                (rows if len(window) == length_tokens + 1 else loose).append(window)
        rng.shuffle(loose)
        packed = np.concatenate(loose)
        whole = len(packed) // (length_tokens + 1) * (length_tokens + 1)
        rows.extend(packed[:whole].reshape(-1, length_tokens + 1))
        rng.shuffle(rows)
        return np.stack(rows)


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[TokenDocument]:
    """Tokenise paragraph by paragraph, which is how the pre-tokenizer would split them anyway."""
    encoded = []
    for document in documents:
        texts = [paragraph + "\n\n" for paragraph in document[:-1]] + [document[-1]]
        parts = encode_many(tokenizer, texts)
        starts = np.cumsum([0] + [len(part) for part in parts[:-1]])
        ids = np.array([token for part in parts for token in part] + [END_ID])
        encoded.append(TokenDocument(ids, starts))
    return encoded


def scored_windows(documents: Sequence[Document], tokenizer: Tokenizer, length_tokens: int) -> list[Ids]:
    """Cut documents into disjoint windows so that each token is predicted exactly once.

    Every window is led by `<|begin|>`, which is context and not scored.
    """
    return [
        np.concatenate([[BEGIN_ID], document.ids[start : start + length_tokens]])
        for document in encode_documents(documents, tokenizer)
        for start in range(0, len(document.ids), length_tokens)
    ]


def scored_dialogues(dialogues: Sequence[Dialogue], tokenizer: Tokenizer) -> list[Ids]:
    """Dialogues in chat form, without system messages; `<|begin|>` is not scored."""
    texts = [render_chat(dialogue.turns) for dialogue in dialogues]
    return [np.array(ids) for ids in encode_many(tokenizer, texts)]


def training_texts(corpus: Corpus) -> list[str]:
    """The plain text that the tokenizer learns from: the training part only."""
    books: list[Book] = [*corpus.books, corpus.plays]
    texts = ["\n\n".join(document) for book in books for document in book.train]
    return texts + [text for dialogue in corpus.dialogues for _, text in dialogue.turns]


def _windows(document: TokenDocument, length_tokens: int, rng: random.Random) -> list[Ids]:
    """Cover a document once, from a random phase, snapping each start back to a paragraph."""
    windows = []
    position = 0
    end = min(rng.randint(1, length_tokens), len(document.ids))
    while True:
        window = np.concatenate([[BEGIN_ID], document.ids[position:end]])
        windows.append(window)
        if end == len(document.ids):
            return windows
        snapped = document.starts[np.searchsorted(document.starts, end, side="right") - 1]
        # A paragraph longer than the row would otherwise be begun again and again.
        position = int(snapped) if end - snapped < length_tokens // 4 else end
        end = min(position + length_tokens, len(document.ids))
