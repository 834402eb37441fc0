"""A step cut into tiles: a few consecutive rows of one sequence each, which a GPU computes in one go.

Decodes are tiles of one row. They are made on the device, of what a step hands over, so that a captured graph can make
them again of other numbers; chunks are lists on the host, and no graph has any.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from maitred.engine.models.batch import BatchChunk, ForwardBatch

FIELDS = ("table", "first_row", "rows", "position")
"""Of a tile, int32: row of the block tables, first row of the step, how many rows, and position of the first."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a step that are computed alike.

    Attributes:
        fields: int32 ``[tiles, FIELDS]``
        tables: int32 ``[sequences, most blocks]``, block tables; what lies behind a sequence's blocks is not read.
    """

    fields: Tensor
    tables: Tensor


def decode_tiles(batch: ForwardBatch) -> Tiles:
    """One tile for each decode; all of it computed on the batch's device, from its tensors alone."""
    lengths = batch.decode_lengths.to(torch.int32)
    rows = torch.arange(batch.num_decodes, dtype=torch.int32, device=lengths.device)
    return Tiles(torch.stack((rows, rows, torch.ones_like(rows), lengths - 1), dim=1), batch.decode_tables)


def chunk_tiles(chunks: list[BatchChunk], tile_rows: int, device: torch.device) -> Tiles:
    """The chunks in tiles of up to `tile_rows` rows."""
    width = max(len(chunk.block_table) for chunk in chunks)
    tables = [chunk.block_table + [0] * (width - len(chunk.block_table)) for chunk in chunks]
    fields = [
        (index, chunk.start_row + start, min(tile_rows, chunk.length - start), chunk.context_before + start)
        for index, chunk in enumerate(chunks)
        for start in range(0, chunk.length, tile_rows)
    ]
    return Tiles(*(torch.tensor(rows, dtype=torch.int32).to(device) for rows in (fields, tables)))
