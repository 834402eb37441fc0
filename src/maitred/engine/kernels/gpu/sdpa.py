"""Attention backend on a GPU in torch's own operations: works wherever torch does, and is the last choice.

A decode is a chunk of one row with a mask instead of causality, so all decodes of a step are one gather and one call.
The gathered tensor is as wide as the longest sequence. A graph would have to use the longest possible sequence, so
these steps are not recorded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from maitred.engine.kernels.prefill import PrefillBucket, masked_attention, plan_buckets
from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary import RotaryTables, rotate


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Plan of a step for `TorchAttention`."""

    slots: Tensor
    angles: list[Tensor]
    """Angles of the positions, by rotary table."""
    num_decodes: int
    decode_tables: Tensor
    decode_masks: dict[int, Tensor]
    """Masks by the window that a layer has; 0: the whole context."""
    buckets: dict[int, list[PrefillBucket]]
    """Buckets by window."""


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
        self._rotary = RotaryTables(config, self._device)
        self._windows = {config.window_of(layer) for layer in range(config.layers)}

    def plan(self, batch: ForwardBatch, cache: KVCache) -> TorchPlan:
        """Sorts the chunks into buckets and masks the positions behind each decode's newest token."""
        dtype, device = cache.keys.dtype, self._device
        positions = torch.arange(batch.decode_tables.shape[1] * cache.block_tokens, device=device)[None, :]
        lengths = batch.decode_lengths[:, None].to(device)

        def mask(window: int) -> Tensor:
            unseen = positions >= lengths
            if window:
                unseen |= positions < lengths - window
            shape = torch.zeros(unseen.shape, dtype=dtype, device=device)
            return shape.masked_fill_(unseen, float("-inf"))[:, None, None, :]

        return TorchPlan(
            slots=batch.slots.to(device),
            angles=self._rotary.angles(batch.positions.to(device)),
            num_decodes=batch.num_decodes,
            decode_tables=batch.decode_tables.to(device, torch.int64),
            decode_masks={window: mask(window) for window in self._windows},
            buckets={
                window: plan_buckets(batch.chunks, cache.block_tokens, dtype, device, window)
                for window in self._windows
            },
        )

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: TorchPlan) -> Tensor:
        """Rotates and writes all rows, then computes the decodes in one call and each bucket in one call."""
        config, window = self._config, self._config.window_of(layer)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        queries, keys, values = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        angles = self._rotary.angles_of(layer, plan.angles)
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        cache.write(layer, keys, values, plan.slots)
        attended = torch.empty_like(queries)
        if plan.num_decodes:
            past_keys, past_values = (past.to(queries.dtype) for past in cache.gather(layer, plan.decode_tables))
            attended[: plan.num_decodes] = masked_attention(
                config,
                queries[: plan.num_decodes, :, None],
                past_keys.transpose(1, 2),
                past_values.transpose(1, 2),
                plan.decode_masks[window],
            )[:, :, 0]
        for bucket in plan.buckets[window]:
            bucket.attend(config, (queries, keys, values), layer, cache, attended)
        return attended.flatten(1)
