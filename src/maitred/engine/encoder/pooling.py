"""Pooling of the last rows of texts to one vector for each (Reimers and Gurevych, "Sentence-BERT", 2019).

A decoder's row attends only to rows before it, so only its last row has read the whole text. Where all rows are
averaged, later rows may have larger weights (Muennighoff, "SGPT", 2022).
"""

import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.config import PoolingMode
from maitred.engine.encoder.modules import Pooling
from maitred.engine.encoder.packing import PackedRows


def pool(rows: Tensor, batch: PackedRows, pooling: Pooling) -> Tensor:
    """Pools the rows of each text to one vector.

    Args:
        rows: fp32 ``[T, hidden_size]``, of all texts.
        batch: Texts that the rows belong to.
        pooling: Modes and normalisation.

    Returns:
        fp32 ``[N, dimensions]``
    """
    vectors = torch.cat([_pool(rows, batch, mode) for mode in pooling.modes], dim=-1)
    vectors = functional.normalize(vectors, dim=-1) if pooling.normalised else vectors
    return vectors[:, : pooling.longest_vector]


def split_rows(rows: Tensor, batch: PackedRows) -> list[Tensor]:
    """Returns the rows of each text on the CPU, each of length 1."""
    return list(torch.split(functional.normalize(rows, dim=-1).cpu(), batch.lengths.tolist()))


def _pool(rows: Tensor, batch: PackedRows, mode: PoolingMode) -> Tensor:
    match mode:
        case "cls":
            return rows[batch.starts]
        case "lasttoken":
            return rows[batch.starts + batch.lengths - 1]
        case "max":
            lowest = rows.new_full((len(batch.lengths), rows.shape[-1]), -torch.inf)
            return lowest.scatter_reduce_(0, batch.text_of[:, None].expand_as(rows), rows, "amax")
        case "mean":
            return _sum_rows(rows, batch) / batch.lengths[:, None]
        case "mean_sqrt_len_tokens":
            return _sum_rows(rows, batch) / batch.lengths[:, None].sqrt()
        case "weightedmean":
            # Weights 1, 2, 3 …, and their sum.
            places = batch.positions[:, None] + 1
            return _sum_rows(rows * places, batch) / (batch.lengths * (batch.lengths + 1) / 2)[:, None]


def _sum_rows(rows: Tensor, batch: PackedRows) -> Tensor:
    return rows.new_zeros(len(batch.lengths), rows.shape[-1]).index_add_(0, batch.text_of, rows)
