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
from maitred.engine.models.config import ModelConfig
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
        self,
        config: ModelConfig,
        heads: tuple[Tensor, Tensor, Tensor],
        layer: int,
        cache: KVCache,
        attended: Tensor,
    ) -> None:
        """Writes the bucket's rows of `attended`.

        Args:
            config: Shape of the model.
            heads: Queries, keys and values of the step, ``[T, heads, head_dim]``.
            layer: Index of the layer in the cache.
            cache: Cache that is read, if the bucket has tables.
            attended: Result, ``[T, heads, head_dim]``.
        """
        queries, keys, values = heads
        if self.tables is None:
            bucket_keys, bucket_values = keys[self.rows], values[self.rows]
        else:
            bucket_keys, bucket_values = (past.to(queries.dtype) for past in cache.gather(layer, self.tables))
        result = masked_attention(
            config,
            queries[self.rows].transpose(1, 2),
            bucket_keys.transpose(1, 2),
            bucket_values.transpose(1, 2),
            self.mask,
        )
        attended[self.kept_rows] = result.transpose(1, 2).flatten(0, 1)[self.kept]


def masked_attention(config: ModelConfig, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Computes attention of ``[B, heads, L, head_dim]``; without a mask it is causal."""
    if not config.score_cap:
        return functional.scaled_dot_product_attention(
            *(queries, keys, values),
            attn_mask=None if mask is None else mask.to(queries.dtype),
            is_causal=mask is None,
            scale=config.scale,
            enable_gqa=True,
        )
    keys, values = (heads.repeat_interleave(config.group_size, dim=1) for heads in (keys, values))
    scores = (queries @ keys.transpose(2, 3)).float() * config.scale
    scores = (scores / config.score_cap).tanh_() * config.score_cap
    if mask is None:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill_(unseen, float("-inf"))
    else:
        scores += mask
    return scores.softmax(dim=-1).to(values.dtype) @ values


def plan_buckets(
    chunks: Sequence[BatchChunk], block_tokens: int, dtype: torch.dtype, device: torch.device, window: int = 0
) -> list[PrefillBucket]:
    """Sorts a step's chunks into buckets of similar length and context.

    Args:
        chunks: Chunks of one step.
        block_tokens: Tokens per KV block.
        dtype: Type of the activations, and so of the masks.
        device: Device of the buckets.
        window: Window of the layers that attend; 0: they attend to the whole context.
    """
    alike: dict[tuple[int, int], list[BatchChunk]] = defaultdict(list)
    for chunk in chunks:
        context = chunk.context if chunk.context_before else 0
        alike[chunk.length.bit_length(), context.bit_length()].append(chunk)
    return [_bucket(members, block_tokens, dtype, device, window) for members in alike.values()]


def _bucket(
    chunks: list[BatchChunk], block_tokens: int, dtype: torch.dtype, device: torch.device, window: int
) -> PrefillBucket:
    starts = torch.tensor([chunk.start_row for chunk in chunks])[:, None]
    lengths = torch.tensor([chunk.length for chunk in chunks])[:, None]
    before = torch.tensor([chunk.context_before for chunk in chunks])[:, None]
    steps = torch.arange(int(lengths.max()))[None, :]
    offsets = torch.minimum(steps, lengths - 1)
    rows = starts + offsets
    kept = (steps < lengths).flatten().nonzero().flatten()
    tables = mask = None
    others = None
    if any(chunk.context_before for chunk in chunks):
        width = max(-(-chunk.context // block_tokens) for chunk in chunks)
        tables = torch.tensor(
            [(chunk.block_table[:width] + [chunk.block_table[0]] * width)[:width] for chunk in chunks], device=device
        )
        others = torch.arange(width * block_tokens)
    elif window and window < steps.shape[1]:
        others = steps[0]
    if others is not None:
        positions = (before + offsets)[:, :, None]
        unseen = others > positions
        if window:
            unseen |= others <= positions - window
        mask = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))[:, None].to(device)
    return PrefillBucket(
        rows=rows.to(device), kept=kept.to(device), kept_rows=rows.flatten()[kept].to(device), tables=tables, mask=mask
    )
