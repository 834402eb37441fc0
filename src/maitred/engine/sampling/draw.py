"""Sampling parameters of the rows of a batch, in the units of the kernels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from maitred.core.request import SamplingParams
from maitred.engine.sampling.fixed_point import LOG2_E, ONE, SHARE_ONE

LEAST_TEMPERATURE = 1e-5
"""Temperature below which a row is greedy: other tokens have no chance, and precision would be lost."""


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """Sampling parameters as arrays with one entry per row.

    Attributes:
        scales: log2(e) / temperature; 0 means greedy.
        top_ks: Tokens to keep; 0 keeps all.
        top_ps: Share of the mass to keep, in units of 2^-32.
        min_weights: Minimum weight to keep.
        seeds: Keys of the random bits.
        choices: Index of each row's choice in its request.
    """

    scales: NDArray[np.float32]
    top_ks: NDArray[np.int64]
    top_ps: NDArray[np.int64]
    min_weights: NDArray[np.int64]
    seeds: NDArray[np.uint64]
    choices: NDArray[np.int64]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], choices: Sequence[int]) -> Self:
        """Converts the parameters of the rows."""
        return cls(
            scales=np.array(
                [0.0 if p.temperature < LEAST_TEMPERATURE else LOG2_E / p.temperature for p in params], np.float32
            ),
            top_ks=np.array([max(p.top_k, 0) for p in params], np.int64),
            top_ps=np.array([min(math.ceil(p.top_p * SHARE_ONE), SHARE_ONE) for p in params], np.int64),
            min_weights=np.array([min(math.ceil(p.min_p * ONE), ONE) for p in params], np.int64),
            seeds=np.array([p.seed & 0xFFFFFFFFFFFFFFFF for p in params], np.uint64),
            choices=np.array(choices, np.int64),
        )
