"""Bit masks of the allowed tokens in rows of a step, and their application to logits."""

# In compiled code an `int` is NumPy's int64, which mypy treats as a different type.
# mypy: disable-error-code="assignment, arg-type"

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maitred.engine.compiled import compiled

WORD_BITS = 32


class RowMasks:
    """Masks of the allowed next tokens.

    Args:
        rows: Indices of the constrained rows of the step.
        words: [rows, words]; bit `t % 32` of word `t // 32` is set if token `t` is allowed.
    """

    def __init__(self, rows: Sequence[int], words: NDArray[np.int32]) -> None:
        self.rows = np.asarray(rows, np.int64)
        self.words = words

    def apply(self, logits: Tensor) -> None:
        """Sets the logits of all other tokens to -inf, in place.

        Args:
            logits: [all rows of the step, vocabulary], contiguous, fp32.
        """
        if logits.device.type == "cpu":
            _mask_rows(logits.numpy(), self.rows, self.words)
            return
        words = torch.from_numpy(self.words).to(logits.device, non_blocking=True)
        rows = torch.from_numpy(self.rows).to(logits.device, non_blocking=True)
        places = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
        allowed = ((words.unsqueeze(-1) >> places) & 1).flatten(1)[:, : logits.shape[1]].bool()
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)


@compiled
def _mask_rows(logits: NDArray[np.float32], rows: NDArray[np.int64], words: NDArray[np.int32]) -> None:
    vocabulary = logits.shape[1]
    for i in range(rows.size):
        row = logits[rows[i]]
        for w in range((vocabulary + 31) // 32):
            word = words[i, w]
            start = w * 32
            end = min(start + 32, vocabulary)
            if word == 0:
                for token in range(start, end):
                    row[token] = -np.inf
            elif word != -1:
                for token in range(start, end):
                    if not (word >> (token - start)) & 1:
                        row[token] = -np.inf
