"""Attention backend on a GPU with FlashInfer's prefill kernel (Ye et al., MLSys 2025).

Decodes are computed by our own Triton kernel. FlashInfer plans on the host, for every step, how the decodes are shared
out, and a replayed graph would have to wait for that.
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
"""Workspace size that FlashInfer's documentation recommends."""


@dataclass(frozen=True, slots=True)
class FlashInferPlan(TritonPlan):
    """Plan of a step with FlashInfer; FlashInfer's wrapper holds the rest of it."""

    prompts: Tensor | None
    """int64 rows of all chunks, chunk by chunk."""


class FlashInferAttention(TritonAttention):
    """Backend that computes chunks with FlashInfer over the paged cache, and decodes as `TritonAttention`.

    Args:
        config: Shape of the model.
        device: Device of the model.
        dtype: Type of the activations: 16 bits.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device, dtype)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prompts: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, batch: ForwardBatch, cache: KVCache) -> FlashInferPlan:
        """Plans the decodes with Triton and the chunks with FlashInfer."""
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
        """Computes the decodes first, then all chunks in one call."""
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
    """Returns int32 ``[lengths + 1]``: the start of each part, and the end of the last one."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
