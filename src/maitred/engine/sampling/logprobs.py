"""Log-probabilities of the model's own distribution: before edits, temperature and filters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from maitred.core.request import TokenLogprobs


class LogprobRows:
    """The rows of a batch that ask for log-probabilities.

    `observe` must come before the logits are edited, `read` after the tokens are known.

    Args:
        rows: Their places in the batch.
        tops: How many of the most probable tokens each wants, besides the chosen one.
        device: Where the logits are.
    """

    def __init__(self, rows: Sequence[int], tops: Sequence[int], device: torch.device) -> None:
        self.rows = rows
        self._tops = tops
        self._index = torch.tensor(rows, dtype=torch.int64, device=device)

    def observe(self, logits: Tensor) -> Tensor:
        """Log-probabilities [rows that ask, vocabulary]; each row's are computed apart from the others'."""
        return torch.log_softmax(logits[self._index], dim=-1)

    def read(self, observed: Tensor, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """What each of the rows asked for, given the token that each was dealt."""
        chosen = torch.tensor([[token] for token in tokens], dtype=torch.int64, device=observed.device)
        logprobs = observed.gather(1, chosen)[:, 0].tolist()
        most = min(max(self._tops), observed.shape[1])
        if most == 0:
            return [TokenLogprobs(logprob, []) for logprob in logprobs]
        values, ids = observed.topk(most, dim=-1)
        return [
            TokenLogprobs(logprob, sorted(zip(own_ids[:k], own_values[:k], strict=True), key=_best_first))
            for logprob, own_ids, own_values, k in zip(logprobs, ids.tolist(), values.tolist(), self._tops, strict=True)
        ]


def _best_first(pair: tuple[int, float]) -> tuple[float, int]:
    token, logprob = pair
    return -logprob, token
