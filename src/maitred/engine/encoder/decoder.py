"""Embedding model made from a decoder whose last rows are pooled: Qwen3-Embedding, E5-Mistral and similar models.

It uses the generator's forward pass (`engine.models.decoder`) without output projection and without KV cache: a text is
computed whole, in one step, and none of its keys and values are needed afterwards. Any model that generates can be
used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import PoolingMode
from maitred.engine.encoder.modules import Pooling, longest_text, read_object, read_pooling
from maitred.engine.encoder.packing import PackedRows, pack_rows
from maitred.engine.encoder.pooling import pool, split_rows
from maitred.engine.kernels.prefill import PrefillBucket, plan_buckets
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.rotary import RotaryTables, rotate
from maitred.engine.models.weights import load_weights


class PooledDecoder:
    """Loaded decoder that turns texts into vectors.

    Args:
        decoder: Decoder without a head: its "logits" are its last rows.
        pooling: How the last rows become a vector.
        context_tokens: Maximum tokens of a text.

    Attributes:
        pooling: How the last rows become a vector.
    """

    def __init__(self, decoder: Decoder, pooling: Pooling, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self.vocab_size = decoder.config.vocab_size
        self.dimensions = pooling.dimensions(decoder.config.hidden_size)
        self._decoder = decoder
        self.pooling = pooling
        self._nothing = KVCache(
            decoder.config, num_blocks=0, block_tokens=1, dtype=decoder.dtype, device=decoder.device
        )

    @classmethod
    def load(
        cls, folder: Path, *, dtype: torch.dtype, device: torch.device, pooling: PoolingMode | None = None
    ) -> "PooledDecoder":
        """Loads a checkpoint, with a head or without one.

        Args:
            folder: Folder of the model.
            dtype: Type of weights and activations.
            device: Device of the model.
            pooling: Configured pooling; None: as the model's files say, or the last token.

        Raises:
            ConfigInvalid: The checkpoint is not supported, or it is broken.
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
        # The cap is for logits, and there are none: the last rows stand in their place.
        decoder = Decoder(msgspec.structs.replace(config, logit_cap=0.0), weights, WholeTexts(config, device))
        return cls(decoder, read_pooling(folder, "lasttoken", pooling), context_tokens)

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Computes one vector for each text.

        Args:
            texts: Token ids, each text at least one and at most `context_tokens`.

        Returns:
            fp32 ``[texts, dimensions]`` on the CPU. The vector of a text does not depend on the other texts, but for
            rounding.
        """
        batch = pack_rows(texts, self._decoder.device)
        return pool(self._last_rows(batch), batch, self.pooling).cpu()

    @torch.inference_mode()
    def encode_with_tokens(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        """Computes one vector for each text, and one for each of its tokens, in one forward pass.

        Args:
            texts: As for `encode`.

        Returns:
            What `encode` returns; and for each text its last rows, fp32 ``[tokens, hidden_size]`` on the CPU, of
            length 1.
        """
        batch = pack_rows(texts, self._decoder.device)
        rows = self._last_rows(batch)
        return pool(rows, batch, self.pooling).cpu(), split_rows(rows, batch)

    def _last_rows(self, batch: PackedRows) -> Tensor:
        return self._decoder.forward(_step(batch, batch.lengths.tolist()), self._nothing)


def _step(batch: PackedRows, lengths: Sequence[int]) -> ForwardBatch:
    """Makes a batch of one chunk per text, with all rows as logit rows."""
    chunks: list[BatchChunk] = []
    for length in lengths:
        chunks.append(BatchChunk(chunks[-1].end_row if chunks else 0, length, context_before=0, block_table=[]))
    rows = torch.arange(len(batch.tokens), device=batch.tokens.device)
    return ForwardBatch(batch.tokens, batch.positions, slots=rows, logit_rows=rows, chunks=chunks)


@dataclass(frozen=True, slots=True)
class TextsPlan:
    """Plan of a step for the attention backend `WholeTexts`."""

    angles: list[Tensor]
    """Angles of the positions, by rotary table."""
    buckets: dict[int, list[PrefillBucket]]
    """Buckets by the window that a layer has; 0: the whole text."""


class WholeTexts:
    """Attention backend for chunks that are whole texts: only the step's own keys are used, and none is stored.

    Implements `maitred.engine.kernels.backend.AttentionBackend`, on any device.

    Args:
        config: Shape of the model.
        device: Device of the model.
    """

    graphable = False

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._rotary = RotaryTables(config, device)
        self._windows = {config.window_of(layer) for layer in range(config.layers)}

    def plan(self, batch: ForwardBatch, cache: KVCache) -> TextsPlan:
        """Sorts the texts into buckets of similar length."""
        shape = (cache.block_tokens, cache.keys.dtype, self._device)
        buckets = {window: plan_buckets(batch.chunks, *shape, window) for window in self._windows}
        return TextsPlan(self._rotary.angles(batch.positions), buckets)

    def attend(self, layer: int, qkv: Tensor, cache: KVCache, plan: TextsPlan) -> Tensor:
        """Computes the attention of each bucket in one call."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        queries, keys, values = heads.tensor_split((config.heads, config.heads + config.kv_heads), dim=1)
        angles = self._rotary.angles_of(layer, plan.angles)
        queries, keys = rotate(queries, angles), rotate(keys, angles)
        attended = torch.empty_like(queries)
        for bucket in plan.buckets[config.window_of(layer)]:
            bucket.attend(config, (queries, keys, values), layer, cache, attended)
        return attended.flatten(1)
