"""Attention of prefill chunks with torch's fused kernel, all chunks of similar size in one call.

Many prompts arrive at once, and most chunks are short. A call per chunk and layer would cost more in dispatch than in
arithmetic. So chunks are sorted into buckets of similar length and context, each bucket is padded to a rectangle, and
a layer does one gather and one ``scaled_dot_product_attention`` per bucket. Rows, masks and tables are computed once
per step. Lengths and contexts within a bucket differ by less than a factor of two, so padding at most doubles
either side of the score matrix, and the number of calls grows with the logarithm of the sizes, not with the chunks.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.models.batch import BatchChunk
from maitred.engine.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PrefillBucket:
    """Chunks that are computed as one rectangle of ``B`` sequences and ``L`` rows each."""

    rows: Tensor
    """int64 ``[B, L]``: rows of the step; a short chunk repeats its last row."""
    kept: Tensor
    """int64 ``[N]``: indices of the real results among ``B * L``."""
    kept_rows: Tensor
    """int64 ``[N]``: rows of the step that the real results belong to."""
    tables: Tensor | None
    """int64 ``[B, n]``, block tables; None: no chunk has context, so only the step's own keys are attended to."""
    mask: Tensor | None
    """``[B, 1, L, S]``, added to the scores; None: a causal mask is enough."""

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, layer: int, cache: KVCache, attended: Tensor
    ) -> None:
        """Writes the bucket's rows of `attended`; all tensors are ``[T, heads, head_dim]``."""
        if self.tables is None:
            bucket_keys, bucket_values = keys[self.rows], values[self.rows]
        else:
            bucket_keys, bucket_values = (past.to(queries.dtype) for past in cache.gather(layer, self.tables))
        result = functional.scaled_dot_product_attention(
            queries[self.rows].transpose(1, 2),
            bucket_keys.transpose(1, 2),
            bucket_values.transpose(1, 2),
            attn_mask=None if self.mask is None else self.mask.to(queries.dtype),
            is_causal=self.mask is None,
            enable_gqa=True,
        )
        attended[self.kept_rows] = result.transpose(1, 2).flatten(0, 1)[self.kept]


def plan_buckets(
    chunks: Sequence[BatchChunk], block_tokens: int, dtype: torch.dtype, device: torch.device
) -> list[PrefillBucket]:
    """Sorts a step's chunks into buckets of similar length and context.

    Args:
        chunks: Chunks of one step.
        block_tokens: Tokens per KV block.
        dtype: Type of the activations, and so of the masks.
        device: Device of the buckets.
    """
    alike: dict[tuple[int, int], list[BatchChunk]] = defaultdict(list)
    for chunk in chunks:
        context = chunk.context if chunk.context_before else 0
        alike[chunk.length.bit_length(), context.bit_length()].append(chunk)
    return [_bucket(members, block_tokens, dtype, device) for members in alike.values()]


def _bucket(chunks: list[BatchChunk], block_tokens: int, dtype: torch.dtype, device: torch.device) -> PrefillBucket:
    starts = torch.tensor([chunk.start_row for chunk in chunks])[:, None]
    lengths = torch.tensor([chunk.length for chunk in chunks])[:, None]
    before = torch.tensor([chunk.context_before for chunk in chunks])[:, None]
    steps = torch.arange(int(lengths.max()))[None, :]
    offsets = torch.minimum(steps, lengths - 1)
    rows = starts + offsets
    kept = (steps < lengths).flatten().nonzero().flatten()
    tables = mask = None
    if any(chunk.context_before for chunk in chunks):
        width = max(-(-chunk.context // block_tokens) for chunk in chunks)
        tables = torch.tensor(
            [(chunk.block_table[:width] + [chunk.block_table[0]] * width)[:width] for chunk in chunks], device=device
        )
        positions = before + offsets
        future = torch.arange(width * block_tokens) > positions[:, :, None]
        mask = torch.zeros(future.shape, dtype=dtype).masked_fill_(future, float("-inf"))[:, None].to(device)
    return PrefillBucket(
        rows=rows.to(device), kept=kept.to(device), kept_rows=rows.flatten()[kept].to(device), tables=tables, mask=mask
    )
