"""Sampling on a CPU: rows are distributed over threads, and `row_kernels` samples each row."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from maitred.engine.sampling.draw import DrawParameters
from maitred.engine.sampling.row_kernels import draw_rows

_LOGITS_WORTH_A_THREAD = 1 << 19
"""Minimum work per thread: 0.2 ms, which is several times the cost of waking a thread."""


class HostRows:
    """Rows of a batch with their sampling parameters.

    Args:
        parameters: One entry per row.
        pool: Thread pool that helps the calling thread.
        helpers: Number of pool threads to use.
    """

    def __init__(self, parameters: DrawParameters, pool: ThreadPoolExecutor, helpers: int) -> None:
        self._parameters = parameters
        self._pool = pool
        self._helpers = helpers

    def draw(self, logits: Tensor, bits: NDArray[np.int64]) -> list[int]:
        """Chooses a token for each row; `NOT_A_NUMBER` where a row has a NaN or +inf."""
        tokens = np.empty(bits.size, np.int64)
        rows = logits.detach().numpy()
        shares = min(self._helpers + 1, 1 + logits.numel() // _LOGITS_WORTH_A_THREAD, bits.size)
        borders = [bits.size * i // shares for i in range(shares + 1)]
        helping = [
            self._pool.submit(self._draw, rows, bits, tokens, slice(*borders[i : i + 2])) for i in range(1, shares)
        ]
        self._draw(rows, bits, tokens, slice(0, borders[1]))
        for share in helping:
            share.result()
        chosen: list[int] = tokens.tolist()
        return chosen

    def _draw(
        self, rows: NDArray[np.float32], bits: NDArray[np.int64], tokens: NDArray[np.int64], share: slice
    ) -> None:
        p = self._parameters
        draw_rows(
            rows[share],
            p.scales[share],
            p.top_ks[share],
            p.top_ps[share],
            p.min_weights[share],
            bits[share],
            tokens[share],
        )
