"""Attention backend on a GPU in torch's own operations: works wherever torch does, and is the last choice.

A decode is a chunk of one row with a mask instead of causality, so all decodes of a step are one gather and one call.
The gathered tensor is as wide as the longest sequence. A graph would have to use the longest possible sequence, so
these steps are not recorded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.kernels.prefill import PrefillBucket, plan_buckets
from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary import rotary_table, rotate


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Plan of a step for `TorchAttention`."""

    slots: Tensor
    angles: Tensor
    num_decodes: int
    decode_tables: Tensor
    decode_mask: Tensor
    buckets: list[PrefillBucket]


class TorchAttention:
    """Attention backend in torch's own operations, for any device that torch supports.

    Args:
        config: Shape of the model.
        device: Device of the model.
    """

    graphable = False

    def __init__(self, config: ModelConfig, device: torch.device | str) -> None:
        self._config = config
        self._device = torch.device(device)
        self._table = rotary_table(config, self._device)

    def plan(self, batch: ForwardBatch, cache: KVCache) -> TorchPlan:
        """Sorts the chunks into buckets and masks the positions behind each decode's newest token."""
        dtype = cache.keys.dtype
        positions = torch.arange(batch.decode_tables.shape[1] * cache.block_tokens, device=self._device)
        behind = positions[None, :] >= batch.decode_lengths[:, None].to(self._device)
        mask = torch.zeros(behind.shape, dtype=dtype, device=self._device).masked_fill_(behind, float("-inf"))
        return TorchPlan(
            slots=batch.slots.to(self._device),
            angles=self._table[batch.positions.to(self._device)],
            num_decodes=batch.num_decodes,
            decode_tables=batch.decode_tables.to(self._device, torch.int64),
            decode_mask=mask[:, None, None, :],
            buckets=plan_buckets(batch.chunks, cache.block_tokens, dtype, self._device),
        )

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: TorchPlan) -> Tensor:
        """Rotates and writes all rows, then computes the decodes in one call and each bucket in one call."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        queries, keys, values = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        queries, keys = rotate(queries, plan.angles), rotate(keys, plan.angles)
        cache.write(layer, keys, values, plan.slots)
        attended = torch.empty_like(queries)
        if plan.num_decodes:
            past_keys, past_values = (past.to(queries.dtype) for past in cache.gather(layer, plan.decode_tables))
            attended[: plan.num_decodes] = functional.scaled_dot_product_attention(
                queries[: plan.num_decodes, :, None],
                past_keys.transpose(1, 2),
                past_values.transpose(1, 2),
                attn_mask=plan.decode_mask.to(queries.dtype),
                enable_gqa=True,
            )[:, :, 0]
        for bucket in plan.buckets:
            bucket.attend(queries, keys, values, layer, cache, attended)
        return attended.flatten(1)
