"""Tiles of a step: a few consecutive rows of one sequence, which a GPU program computes together.

Decodes are tiles of one row. They are made on the device from the batch's tensors, so that a captured graph can make
them again from other values. Chunks are lists on the host, and no graph contains chunks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from maitred.engine.models.batch import BatchChunk, ForwardBatch

FIELDS = ("table", "first_row", "rows", "position")
"""Names of a tile's int32 fields.

They are the row of the block tables, the first row of the step, the number of rows, and the position of the first row.
"""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a step that one kernel launch computes.

    Attributes:
        fields: int32 ``[tiles, TILE_FIELDS]``
        tables: int32 ``[sequences, most blocks]``, block tables; entries behind a sequence's blocks are not read.
    """

    fields: Tensor
    tables: Tensor


def decode_tiles(batch: ForwardBatch) -> Tiles:
    """Makes one tile for each decode, on the batch's device and from its tensors alone."""
    lengths = batch.decode_lengths.to(torch.int32)
    rows = torch.arange(batch.num_decodes, dtype=torch.int32, device=lengths.device)
    return Tiles(torch.stack((rows, rows, torch.ones_like(rows), lengths - 1), dim=1), batch.decode_tables)


def chunk_tiles(chunks: list[BatchChunk], tile_rows: int, device: torch.device) -> Tiles:
    """Makes tiles of up to `tile_rows` rows from the chunks."""
    width = max(len(chunk.block_table) for chunk in chunks)
    tables = [chunk.block_table + [0] * (width - len(chunk.block_table)) for chunk in chunks]
    fields = [
        (index, chunk.start_row + start, min(tile_rows, chunk.length - start), chunk.context_before + start)
        for index, chunk in enumerate(chunks)
        for start in range(0, chunk.length, tile_rows)
    ]
    return Tiles(*(torch.tensor(rows, dtype=torch.int32).to(device) for rows in (fields, tables)))
