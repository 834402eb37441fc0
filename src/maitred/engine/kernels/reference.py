"""Attention in plain torch, one sequence after the other: slow, and the specification of every other backend."""

from dataclasses import dataclass

import torch
from torch import Tensor

from maitred.engine.models.batch import ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary import RotaryTables, rotate


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of one sequence, and its blocks in the cache."""

    first_row: int
    last_row: int
    context: int
    """Tokens up to and including the last row."""
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """Plan of a step: one span per sequence."""

    slots: Tensor
    angles: list[Tensor]
    """Angles of the positions, by rotary table."""
    spans: list[RowSpan]


class ReferenceAttention:
    """Softmax attention written out (Vaswani et al., 2017), in fp32 whatever the type of the cache.

    Args:
        config: Shape of the model.
        device: Device of the model.
    """

    graphable = False

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        self._config = config
        self._device = torch.device(device)
        self._rotary = RotaryTables(config, device)

    def plan(self, batch: ForwardBatch, cache: KVCache) -> ReferencePlan:
        """Lists the sequences of the step."""
        lengths = batch.decode_lengths.tolist()
        spans = [
            RowSpan(row, row, lengths[row], batch.decode_tables[row, : -(-lengths[row] // cache.block_tokens)].long())
            for row in range(batch.num_decodes)
        ]
        for chunk in batch.chunks:
            used = chunk.block_table[: -(-chunk.context // cache.block_tokens)]
            blocks = torch.tensor(used, device=self._device)
            spans.append(RowSpan(chunk.start_row, chunk.end_row - 1, chunk.context, blocks))
        return ReferencePlan(batch.slots, self._rotary.angles(batch.positions), spans)

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: ReferencePlan) -> Tensor:
        """Rotates and writes all rows, then computes the sequences one by one."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        queries, keys, values = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        angles = self._rotary.angles_of(layer, plan.angles)
        queries = rotate(queries, angles)
        cache.write(layer, rotate(keys, angles), values, plan.slots)
        attended = torch.empty_like(queries)
        for span in plan.spans:
            rows = slice(span.first_row, span.last_row + 1)
            attended[rows] = self._attend_one(queries[rows], layer, cache, span)
        return attended.flatten(1)

    def _attend_one(self, queries: Tensor, layer: int, cache: KVCache, span: RowSpan) -> Tensor:
        """Computes the attention of ``[L, heads, head_dim]`` queries, the last L tokens of a sequence."""
        group = self._config.group_size

        def per_query_head(tokens: Tensor) -> Tensor:
            """``[1, n, kv_heads, head_dim]`` -> fp32 ``[context, heads, head_dim]``."""
            return tokens[0, : span.context].float().repeat_interleave(group, dim=1)

        keys, values = map(per_query_head, cache.gather(layer, span.blocks[None]))
        config = self._config
        scores = torch.einsum("lhd,shd->hls", queries.float(), keys) * config.scale
        if config.score_cap:
            scores = (scores / config.score_cap).tanh() * config.score_cap
        positions = torch.arange(span.context - len(queries), span.context, device=queries.device)[:, None]
        others = torch.arange(span.context, device=queries.device)[None, :]
        unseen = others > positions
        if window := config.window_of(layer):
            unseen |= others <= positions - window
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hls,shd->lhd", weights, values).to(queries.dtype)
