"""Decoder that replays steps of decodes from graphs, one graph for each batch size.

Such a step launches some hundred small kernels, and for small models the launches take longer than the kernels. A graph
launches all kernels together, but always the same kernels on the same memory. So a batch is copied into the buffers of
the next larger size. The remaining rows compute padding tokens, in a block of the cache that no sequence uses. Steps
with prompts, or larger than the largest size, are computed without a graph.
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
"""Columns of a row's inputs; the block table takes all columns from the last one on."""


def graph_sizes(most: int) -> list[int]:
    """Returns the batch sizes to record, rising: powers of two up to 8, then steps of 8 up to 64, then of 32.

    With these sizes padding wastes few rows, and the number of graphs stays small.

    Args:
        most: Size of the largest batch; 0: no graphs.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, most + 1, 32)]
    return sorted({size for size in sizes if size <= most} | ({most} if most else set()))


class GraphedDecoder:
    """Decoder that computes steps, and replays graphs for steps of decodes alone.

    Args:
        decoder: Decoder of the model; its attention is graphable.
        cache: Cache that all graphs read and write. Padding rows write to its last block.
        sizes: Batch sizes, rising.
        table_width: Number of blocks of the longest sequence.
        make_graph: Makes a new graph.
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
        # All graphs share one memory pool, so the largest is recorded first.
        self._graphs = {
            size: _DecodeGraph(decoder, cache, size, table_width, graph=make_graph()) for size in reversed(self._sizes)
        }

    @property
    def replayed(self) -> int:
        """Number of steps that were replayed from a graph."""
        return self._replayed

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Computes one step, as `Decoder.forward`; the next step overwrites the logits."""
        rows = len(batch.token_ids)
        place = bisect_left(self._sizes, rows)
        if batch.chunks or place == len(self._sizes) or cache is not self._cache:
            return self._decoder.forward(batch.to(self._decoder.device), cache)
        self._replayed += 1
        return self._graphs[self._sizes[place]].compute(batch)


class _DecodeGraph:
    """Graph of the decode steps of one batch size."""

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
        # One copy per step transfers all inputs. From pinned memory the device copies asynchronously.
        self._staged = idle.repeat(size, 1)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._staged = self._staged.pin_memory()
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._inputs = self._staged.to(device)
        self._filled = 0
        self._logits = graph.capture(self._run)

    def compute(self, batch: ForwardBatch) -> Tensor:
        """Replays the graph for a batch and returns the logits of the batch's `logit_rows`."""
        rows = len(batch.token_ids)
        staged = self._staged
        if self._copied is not None:
            self._copied.synchronize()  # without sampling, the host has not waited for the last copy
        staged[:rows, _TOKEN] = batch.token_ids
        staged[:rows, _POSITION] = batch.positions
        staged[:rows, _SLOT] = batch.slots
        staged[:rows, _LENGTH] = batch.decode_lengths
        # Entries behind a row's blocks are valid block numbers, and never read.
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
        """Computes the step from the device's inputs, with tensors of constant size on the device only."""
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
