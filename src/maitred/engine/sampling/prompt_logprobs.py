"""Log-probabilities of prompt tokens, read from pieces of a step's logits.

The logits of a whole prompt would take gigabytes, so they come some hundred rows at a time. Of each row only the
prompt's own token, its rank and the most probable tokens are kept.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maitred.core.errors import Bug
from maitred.core.request import PromptLogprobs
from maitred.engine.sampling.logprob_kernel import score_rows

_LOGITS_WORTH_A_THREAD = 1 << 19
"""Minimum work per thread, as in `host_rows`."""


class PromptScorer:
    """Scores of the prompt tokens of one step, which are read piece by piece.

    Args:
        targets: Prompt token behind each row.
        top: Number of the most probable tokens to find for each row.
        pool: Thread pool that helps the calling thread on a CPU; None: tensor operations read the rows, as on every
            other device.
        helpers: Number of pool threads to use.
    """

    def __init__(self, targets: Sequence[int], top: int, pool: ThreadPoolExecutor | None, helpers: int) -> None:
        self._targets = np.array(targets, np.int64)
        self._top = top
        self._pool = pool
        self._helpers = helpers
        self._read = 0
        count = len(self._targets)
        self._logprobs = np.empty(count, np.float32)
        self._ranks = np.empty(count, np.int32)
        self._top_tokens = np.empty((count, top), np.int32)
        self._top_logprobs = np.empty((count, top), np.float32)
        self._on_device: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        """Results of the pieces that are still on their device, which computes on while they are not asked for."""

    def read(self, logits: Tensor) -> None:
        """Reads the logits of the next rows, fp32 ``[piece, vocabulary]``."""
        rows = slice(self._read, self._read + len(logits))
        self._read = rows.stop
        if self._pool is not None:
            self._read_on_host(self._pool, logits.numpy(), rows)
            return
        logprobs = torch.log_softmax(logits, dim=-1)
        targets = torch.from_numpy(self._targets[rows]).to(logits.device)[:, None]
        own = logprobs.gather(1, targets)
        values, tokens = logprobs.topk(self._top, dim=-1)
        self._on_device.append((own[:, 0], (logprobs > own).sum(1, dtype=torch.int32) + 1, tokens, values))

    def _read_on_host(self, pool: ThreadPoolExecutor, logits: NDArray[np.float32], rows: slice) -> None:
        count = len(logits)
        shares = min(self._helpers + 1, 1 + logits.size // _LOGITS_WORTH_A_THREAD, count)
        borders = [count * i // shares for i in range(shares + 1)]

        def score(share: int) -> None:
            part = slice(borders[share], borders[share + 1])
            own = slice(rows.start + part.start, rows.start + part.stop)
            score_rows(
                logits[part],
                self._targets[own],
                self._logprobs[own],
                self._ranks[own],
                self._top_tokens[own],
                self._top_logprobs[own],
            )

        helping = [pool.submit(score, share) for share in range(1, shares)]
        score(0)
        for task in helping:
            task.result()

    def take(self, parts: Iterable[tuple[int, int, int]]) -> list[PromptLogprobs]:
        """Returns the scores of consecutive rows of each sequence.

        Args:
            parts: For each sequence the number of its rows, the position in its prompt of the first token that they
                score, and the number of most probable tokens that it wants.

        Raises:
            Bug: A row holds a NaN or +inf.
        """
        self._fetch()
        if np.isnan(self._logprobs).any():
            raise Bug(
                f"The model computed NaN or infinite logits in row {int(np.isnan(self._logprobs).argmax())} of "
                f"{len(self._targets)}. Check the weights and the dtype (fp32 has the widest range)."
            )
        scores, first = [], 0
        for count, start, top in parts:
            own = slice(first, first + count)
            top_tokens, top_logprobs = self._top_tokens[own, :top], self._top_logprobs[own, :top]
            scores.append(
                PromptLogprobs(
                    start=start,
                    top=top_tokens.shape[1],
                    logprobs=self._logprobs[own].astype("<f4").tobytes(),
                    ranks=self._ranks[own].astype("<i4").tobytes(),
                    top_tokens=top_tokens.astype("<i4").tobytes(),
                    top_logprobs=top_logprobs.astype("<f4").tobytes(),
                )
            )
            first += count
        return scores

    def _fetch(self) -> None:
        """Copies what is on the device; among equally probable tokens the lower id is first, as on a CPU."""
        if not self._on_device:
            return
        own, ranks, tokens, values = (torch.cat(parts).cpu().numpy() for parts in zip(*self._on_device, strict=True))
        self._on_device.clear()
        self._logprobs[:], self._ranks[:] = own, ranks
        order = np.lexsort((tokens, -values), axis=-1)
        self._top_tokens[:] = np.take_along_axis(tokens, order, axis=-1)
        self._top_logprobs[:] = np.take_along_axis(values, order, axis=-1)
