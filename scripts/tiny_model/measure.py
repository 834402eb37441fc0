"""How good the model is: held-out perplexity, beside a bigram model of the same tokens.

Perplexity alone says little of a model this small; a bigram baseline, interpolated with unigrams and
a uniform floor, says how much is owed to anything beyond the last token. Its weights are fitted on
the held-out tokens themselves, which flatters the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tiny_model.batches import Ids
from tiny_model.llama import Llama
from tiny_model.vocabulary import VOCABULARY_SIZE

_EVAL_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Score:
    """Summed negative log-likelihood in nats, over this many tokens."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """The exponential of the mean."""
        return math.exp(self.nats / max(self.tokens, 1))

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.tokens + other.tokens)


def score_model(model: Llama, windows: Sequence[Ids]) -> Score:
    """Score every token after the first of each window, in batches of like length."""
    nats, tokens = 0.0, 0
    device = model.cos.device
    ordered = sorted(windows, key=len, reverse=True)
    with torch.inference_mode():
        while ordered:
            width = len(ordered[0])
            count = max(1, _EVAL_BATCH_TOKENS // width)
            batch, ordered = ordered[:count], ordered[count:]
            ids = np.zeros((len(batch), width), dtype=np.int64)
            targets = np.full((len(batch), width - 1), -100, dtype=np.int64)
            for row, window in enumerate(batch):
                ids[row, : len(window)] = window
                targets[row, : len(window) - 1] = window[1:]
                tokens += len(window) - 1
            loss = model.loss(
                torch.from_numpy(ids[:, :-1]).to(device),
                torch.from_numpy(targets).to(device),
                reduction="sum",
            )
            nats += float(loss)
    return Score(nats, tokens)


class Bigram:
    """p(w|v) = a·c(v,w)/c(v) + b·c(w)/N + (1-a-b)/V; a and b depend on how often v was seen."""

    def __init__(self, windows: Sequence[Ids]) -> None:
        previous, following = _pairs(windows)
        size = VOCABULARY_SIZE
        self._joint = np.bincount(previous * size + following, minlength=size * size)
        self._context = np.bincount(previous, minlength=size)
        self._unigram = np.bincount(following, minlength=size) / len(following)
        self._bucket = np.log2(self._context + 1).astype(np.int64)

    def score(self, windows: Sequence[Ids], rounds: int = 30) -> Score:
        """Fit the weights to these windows by EM, then score them."""
        previous, following = _pairs(windows)
        seen = self._context[previous]
        terms = np.stack(
            [
                self._joint[previous * VOCABULARY_SIZE + following] / np.maximum(seen, 1),
                self._unigram[following],
                np.full(len(following), 1 / VOCABULARY_SIZE),
            ]
        )
        buckets = self._bucket[previous]
        weights = np.full((3, int(self._bucket.max()) + 1), 1 / 3)
        for _ in range(rounds):
            shares = weights[:, buckets] * terms
            shares /= shares.sum(axis=0)
            sums = np.stack([np.bincount(buckets, s, minlength=weights.shape[1]) for s in shares])
            totals = sums.sum(axis=0)
            weights = np.where(totals > 0, sums / np.maximum(totals, 1e-12), 1 / 3)
        likelihood = (weights[:, buckets] * terms).sum(axis=0)
        return Score(float(-np.log(likelihood).sum()), len(following))


def _pairs(windows: Sequence[Ids]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Neighbouring tokens within each window."""
    previous = np.concatenate([window[:-1] for window in windows])
    following = np.concatenate([window[1:] for window in windows])
    return previous, following
