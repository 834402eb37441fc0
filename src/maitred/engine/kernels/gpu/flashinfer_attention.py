"""Attention on a GPU with FlashInfer's kernel for prompts (Ye et al., MLSys 2025).

Decodes stay with our own kernel. FlashInfer works out on the host how a step's decodes are shared out, afresh for every
step, and a replayed graph would wait for that.
"""

from dataclasses import dataclass
from typing import Any

import flashinfer
import torch
from torch import Tensor

from maitred.engine.kernels.gpu.triton_attention import TritonAttention, TritonPlan
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache

_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation recommends."""


@dataclass(frozen=True, slots=True)
class FlashInferPlan(TritonPlan):
    """What every layer of a step needs; the wrapper holds the rest of it."""

    prompts: Tensor | None
    """int64: the rows of all chunks, chunk by chunk."""


class FlashInferAttention(TritonAttention):
    """Prompts by FlashInfer over the paged cache, with or without context; decodes as in `TritonAttention`.

    Args:
        config: Shape of the model.
        device: Where the model runs.
        dtype: Of what is computed: 16 bits.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device, dtype)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prompts: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, batch: ForwardBatch, cache: KVCache) -> FlashInferPlan:
        """Tells FlashInfer of the step's prompts."""
        chunks, batch = batch.chunks, batch.without_chunks()
        ours = super().plan(batch, cache)
        if chunks:
            self._plan_prompts(chunks, cache)
        rows = [torch.arange(chunk.start_row, chunk.end_row) for chunk in chunks]
        return FlashInferPlan(
            positions=ours.positions,
            slots=ours.slots,
            decodes=ours.decodes,
            splits=ours.splits,
            chunks=None,
            fresh=None,
            prompts=torch.cat(rows).to(self._device) if rows else None,
        )

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: TritonPlan) -> Tensor:
        """Decodes first, then the prompts in one call."""
        attended = super().attend(layer, qkv, cache, plan)
        if isinstance(plan, FlashInferPlan) and plan.prompts is not None:
            config = self._config
            queries = qkv[plan.prompts, : config.heads * config.head_dim].view(-1, config.heads, config.head_dim)
            result = self._prompts.run(queries, (cache.keys[layer], cache.values[layer]))
            attended[plan.prompts] = result.flatten(1)
        return attended

    def _plan_prompts(self, chunks: list[BatchChunk], cache: KVCache) -> None:
        config, size = self._config, cache.block_tokens
        used = [chunk.block_table[: -(-chunk.context // size)] for chunk in chunks]
        self._prompts.plan(
            *(_edges([chunk.length for chunk in chunks]), _edges([len(blocks) for blocks in used])),
            torch.tensor([block for blocks in used for block in blocks], dtype=torch.int32),
            torch.tensor([(chunk.context - 1) % size + 1 for chunk in chunks], dtype=torch.int32),
            *(config.heads, config.kv_heads, config.head_dim, size),
            causal=True,
            q_data_type=self._dtype,
            kv_data_type=cache.keys.dtype,
        )


def _edges(lengths: list[int]) -> Tensor:
    """int32 ``[lengths + 1]``: where each part begins, and where the last one ends."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
