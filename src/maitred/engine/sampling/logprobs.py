"""Log-probabilities of the model's own distribution: before edits, temperature and filters."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from maitred.core.request import TokenLogprobs
from maitred.engine.sampling.logprob_kernel import observe_row

Read = Callable[[Sequence[int]], list[TokenLogprobs]]
"""Function from the rows' chosen tokens to their log-probabilities."""


class LogprobRows:
    """Rows of a batch that request log-probabilities.

    Args:
        rows: Indices of these rows in the batch.
        tops: Number of most probable tokens that each row requests, in addition to the chosen token.
        edited: Indices of batch rows whose logits are edited between `observe` and the call of its result.
        device: Device of the logits.
    """

    def __init__(self, rows: Sequence[int], tops: Sequence[int], edited: set[int], device: torch.device) -> None:
        self.rows = rows
        self._tops = tops
        self._edited = edited
        self._index = torch.tensor(rows, dtype=torch.int64, device=device)

    def observe(self, logits: Tensor) -> Read:
        """Reads the logits before they are edited."""
        if logits.device.type == "cpu":
            return self._observe_on_host(logits)
        return self._observe_on_device(logits)

    def _observe_on_host(self, logits: Tensor) -> Read:
        batch = logits.detach().numpy()
        raw = [batch[row].copy() if row in self._edited else batch[row] for row in self.rows]
        observed = []
        for row, top in zip(raw, self._tops, strict=True):
            tokens = np.empty(min(top, row.size), np.int64)
            values = np.empty(tokens.size, np.float64)
            normaliser = observe_row(row, tokens, values)
            observed.append((normaliser, list(zip(tokens.tolist(), (values - normaliser).tolist(), strict=True))))

        def read(tokens: Sequence[int]) -> list[TokenLogprobs]:
            return [
                TokenLogprobs(float(row[token]) - normaliser, top)
                for row, token, (normaliser, top) in zip(raw, tokens, observed, strict=True)
            ]

        return read

    def _observe_on_device(self, logits: Tensor) -> Read:
        logprobs = torch.log_softmax(logits[self._index], dim=-1)
        values, ids = logprobs.topk(min(max(self._tops), logits.shape[1]), dim=-1)

        def read(tokens: Sequence[int]) -> list[TokenLogprobs]:
            dealt = torch.tensor([[token] for token in tokens], dtype=torch.int64, device=logprobs.device)
            chosen = logprobs.gather(1, dealt)[:, 0].tolist()
            return [
                TokenLogprobs(logprob, sorted(zip(own_ids[:k], own_values[:k], strict=True), key=_best_first))
                for logprob, own_ids, own_values, k in zip(
                    chosen, ids.tolist(), values.tolist(), self._tops, strict=True
                )
            ]

        return read


def _best_first(pair: tuple[int, float]) -> tuple[float, int]:
    token, logprob = pair
    return -logprob, token
