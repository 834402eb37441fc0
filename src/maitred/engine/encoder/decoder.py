"""A decoder whose last rows are pooled: Qwen3-Embedding, E5-Mistral and their kin, or any model that generates.

It is the generator's own forward pass (`engine.models.decoder`) without its output projection and without a KV cache:
a text is computed whole, in one step, and nothing of it is needed afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import PoolingMode
from maitred.engine.encoder.modules import Pooling, longest_text, read_object, read_pooling
from maitred.engine.encoder.packing import PackedRows, pack_rows
from maitred.engine.encoder.pooling import pool
from maitred.engine.kernels.prefill import PrefillBucket, plan_buckets
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary import rotary_table, rotate
from maitred.engine.models.weights import load_weights


class PooledDecoder:
    """A loaded decoder that turns texts into vectors.

    Args:
        decoder: Without a head: its "logits" are its last rows.
        pooling: What is made of them.
        context_tokens: The longest text.
    """

    def __init__(self, decoder: Decoder, pooling: Pooling, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self.vocab_size = decoder.config.vocab_size
        self.dimensions = decoder.config.hidden_size * len(pooling.modes)
        self._decoder = decoder
        self._pooling = pooling
        self._nothing = KVCache(decoder.config, 0, 1, decoder.dtype, decoder.device)

    @classmethod
    def load(
        cls, folder: Path, *, dtype: torch.dtype, device: torch.device, pooling: PoolingMode | None = None
    ) -> "PooledDecoder":
        """Reads a checkpoint, with a head or without one.

        Args:
            folder: The model.
            dtype: Of weights and activations.
            device: Where to run.
            pooling: What the operator says; None: what the files say, or the last token.

        Raises:
            ConfigInvalid: It is not one that maitred runs, or it is broken.
        """
        path = folder / "config.json"
        fields = read_object(path)
        if fields.get("is_causal") is False or fields.get("use_bidirectional_attention"):
            raise ConfigInvalid(
                f"{path}: this model was changed to read its texts in both directions, which is not supported for its "
                "family. Use a model whose rows see what is before them, or one of the BERT family."
            )
        config = ModelConfig.load(folder)
        weights = load_weights(folder, config, dtype, device, head=False)
        context_tokens = min(config.context_tokens, longest_text(folder) or config.context_tokens)
        decoder = Decoder(config, weights, WholeTexts(config, device))
        return cls(decoder, read_pooling(folder, "lasttoken", pooling), context_tokens)

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """One vector for each text.

        Args:
            texts: Token ids, each text at least one and at most `context_tokens`.

        Returns:
            fp32 ``[texts, dimensions]`` on the CPU. What one text gets does not depend on the others, but for rounding.
        """
        batch = pack_rows(texts, self._decoder.device)
        rows = self._decoder.forward(_step(batch, [len(text) for text in texts]), self._nothing)
        return pool(rows, batch, self._pooling).cpu()


def _step(batch: PackedRows, lengths: Sequence[int]) -> ForwardBatch:
    """All texts from their beginning, and the last rows of all of them."""
    chunks: list[BatchChunk] = []
    for length in lengths:
        chunks.append(BatchChunk(chunks[-1].end_row if chunks else 0, length, context_before=0, block_table=[]))
    rows = torch.arange(len(batch.tokens), device=batch.tokens.device)
    return ForwardBatch(batch.tokens, batch.positions, slots=rows, logit_rows=rows, chunks=chunks)


@dataclass(frozen=True, slots=True)
class TextsPlan:
    """What every layer of a step needs."""

    angles: Tensor
    buckets: list[PrefillBucket]


class WholeTexts:
    """Attention of chunks that are whole texts: the step's own keys are all there is, and none is kept.

    Implements `maitred.engine.kernels.backend.AttentionBackend`, on any device.

    Args:
        config: Shape of the model.
        device: Where the model runs.
    """

    graphable = False

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._table = rotary_table(config, device)

    def plan(self, batch: ForwardBatch, cache: KVCache) -> TextsPlan:
        """Sorts the texts into buckets of similar length."""
        buckets = plan_buckets(batch.chunks, cache.block_tokens, cache.keys.dtype, self._table.device)
        return TextsPlan(self._table[batch.positions], buckets)

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: TextsPlan) -> Tensor:
        """One call for each bucket."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        queries, keys, values = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        queries, keys = rotate(queries, plan.angles), rotate(keys, plan.angles)
        attended = torch.empty_like(queries)
        for bucket in plan.buckets:
            bucket.attend(queries, keys, values, layer, cache, attended)
        return attended.flatten(1)
