"""A decoder whose steps of decodes alone are replayed from graphs, each for a size of batch.

Such a step launches some hundred small kernels, and for small models to launch them takes longer than to run them. A
graph launches all of them at once, but always the same ones, on the same memory: so a batch is copied into the buffers
of the next larger size, and the rows that are left compute a token that nobody asked for, in a block of the cache that
nobody has. Steps with prompts in them, or larger than the largest size, are computed as they come.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from maitred.engine.graphs.graph import DeviceGraph
from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache

_TOKEN, _POSITION, _SLOT, _LENGTH, _TABLE = range(5)
"""Columns of a row's inputs; its block table is all from the last one on."""


def graph_sizes(most: int) -> list[int]:
    """Batch sizes to record, rising: powers of two up to 8, then steps of 8 up to 64, then of 32.

    Padding then wastes few rows where a row costs something, and the number of graphs stays small.

    Args:
        most: Of the largest batch; 0: none.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, most + 1, 32)]
    return sorted({size for size in sizes if size <= most} | ({most} if most else set()))


class GraphedDecoder:
    """Computes steps, those of decodes alone by replaying graphs.

    Args:
        decoder: The model; its attention is graphable.
        cache: All graphs read and write it. Its last block is written by rows that pad.
        sizes: Of batches, rising.
        table_width: Blocks of the longest sequence.
        make_graph: A new graph.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        *,
        sizes: Iterable[int],
        table_width: int,
        make_graph: Callable[[], DeviceGraph],
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sizes = list(sizes)
        self._replayed = 0
        # They share memory, which the largest is the first to take.
        self._graphs = {
            size: _DecodeGraph(decoder, cache, size, table_width, make_graph()) for size in reversed(self._sizes)
        }

    @property
    def replayed(self) -> int:
        """Steps that came from a graph."""
        return self._replayed

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """See `Decoder`. The logits are overwritten by the next step."""
        rows = len(batch.token_ids)
        place = bisect_left(self._sizes, rows)
        if batch.chunks or place == len(self._sizes) or cache is not self._cache:
            return self._decoder.forward(batch.to(self._decoder.device), cache)
        self._replayed += 1
        return self._graphs[self._sizes[place]].compute(batch)


class _DecodeGraph:
    """The graph of one size."""

    def __init__(self, decoder: Decoder, cache: KVCache, size: int, table_width: int, graph: DeviceGraph) -> None:
        self._decoder = decoder
        self._cache = cache
        self._size = size
        self._graph = graph
        scratch = cache.num_blocks - 1
        idle = torch.full((_TABLE + table_width,), scratch, dtype=torch.int32)
        idle[:_TABLE] = torch.tensor([0, 0, scratch * cache.block_tokens, 1])
        self._idle = idle
        device = decoder.device
        # One copy a step brings all that a step needs to know. Pinned, the device fetches it by itself.
        self._staged = idle.repeat(size, 1)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._staged = self._staged.pin_memory()
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._inputs = self._staged.to(device)
        self._filled = 0
        self._logits = graph.capture(self._run)

    def compute(self, batch: ForwardBatch) -> Tensor:
        """The logits that the batch asks for."""
        rows = len(batch.token_ids)
        staged = self._staged
        if self._copied is not None:
            self._copied.synchronize()  # a step of which nothing was sampled has not been waited for
        staged[:rows, _TOKEN] = batch.token_ids
        staged[:rows, _POSITION] = batch.positions
        staged[:rows, _SLOT] = batch.slots
        staged[:rows, _LENGTH] = batch.decode_lengths
        # What is left behind a row's blocks is the number of some block, and never read.
        staged[:rows, _TABLE : _TABLE + batch.decode_tables.shape[1]] = batch.decode_tables
        staged[rows : self._filled] = self._idle
        self._filled = rows
        self._inputs.copy_(staged, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._graph.replay()
        wanted = batch.logit_rows
        if torch.equal(wanted, torch.arange(len(wanted))):
            return self._logits[: len(wanted)]
        return self._logits[wanted.to(self._logits.device)]

    def _run(self) -> Tensor:
        """The step as a function of the inputs: everything here is on the device, and of a size that never changes."""
        inputs = self._inputs
        return self._decoder.forward(
            ForwardBatch(
                token_ids=inputs[:, _TOKEN].long(),
                positions=inputs[:, _POSITION].long(),
                slots=inputs[:, _SLOT].long(),
                logit_rows=torch.arange(self._size, device=inputs.device),
                num_decodes=self._size,
                decode_tables=inputs[:, _TABLE:],
                decode_lengths=inputs[:, _LENGTH],
            ),
            self._cache,
        )
