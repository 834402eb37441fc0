"""Forward pass of a BERT-class encoder.

The model is a post-norm transformer (Devlin et al., 2019), whose last rows are pooled into one vector.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from maitred.engine.config import PoolingMode
from maitred.engine.encoder.modules import Pooling
from maitred.engine.encoder.packing import PackedBatch, TextGroup, pack
from maitred.engine.encoder.pooling import pool, split_rows
from maitred.engine.encoder.shape import Activation, EncoderShape
from maitred.engine.encoder.weights import EncoderLayerWeights, EncoderWeights, Norm, load_encoder_weights


class Encoder:
    """Loaded BERT-class encoder that turns texts into vectors.

    Args:
        shape: Shape of the encoder.
        weights: Parameters of the encoder.
    """

    def __init__(self, shape: EncoderShape, weights: EncoderWeights) -> None:
        self.shape = shape
        self._weights = weights

    @classmethod
    def load(
        cls, folder: Path, *, dtype: torch.dtype, device: torch.device, pooling: PoolingMode | None = None
    ) -> "Encoder":
        """Loads a checkpoint of the BERT family.

        Args:
            folder: Folder of the model.
            dtype: Type of weights and activations.
            device: Device of the model.
            pooling: Configured pooling; None: as the model's files say, or the mean.

        Raises:
            ConfigInvalid: The checkpoint is not supported, or it is broken.
        """
        shape = EncoderShape.load(folder, pooling)
        return cls(shape, load_encoder_weights(folder, shape, dtype, device))

    @property
    def dimensions(self) -> int:
        """Number of dimensions of a vector."""
        return self.shape.pooling.dimensions(self.shape.hidden_size)

    @property
    def pooling(self) -> Pooling:
        """How the rows of a text become its vector."""
        return self.shape.pooling

    @property
    def context_tokens(self) -> int:
        """Maximum tokens of a text."""
        return self.shape.context_tokens

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are below it."""
        return self.shape.vocab_size

    @torch.inference_mode()
    def encode(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Computes one vector for each text.

        Args:
            texts: Token ids, each text at least one and at most `shape.context_tokens`.

        Returns:
            fp32 ``[texts, dimensions]`` on the CPU. The vector of a text does not depend on the other texts, but for
            rounding.
        """
        batch = pack(texts, self._weights.words.device)
        return pool(self._last_rows(batch), batch, self.shape.pooling).cpu()

    @torch.inference_mode()
    def encode_with_tokens(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Tensor]]:
        """Computes one vector for each text, and one for each of its tokens, in one forward pass.

        Args:
            texts: As for `encode`.

        Returns:
            What `encode` returns; and for each text its last rows, fp32 ``[tokens, hidden_size]`` on the CPU, of
            length 1.
        """
        batch = pack(texts, self._weights.words.device)
        rows = self._last_rows(batch)
        return pool(rows, batch, self.shape.pooling).cpu(), split_rows(rows, batch)

    def _last_rows(self, batch: PackedBatch) -> Tensor:
        weights = self._weights
        rows = weights.words[batch.tokens] + weights.positions[batch.positions + self.shape.first_position]
        rows = self._norm(rows, weights.norm)
        for layer in weights.layers:
            rows = self._layer(rows, layer, batch)
        return rows.float()

    def _layer(self, rows: Tensor, layer: EncoderLayerWeights, batch: PackedBatch) -> Tensor:
        attended = layer.attention_output(self._attend(layer.qkv(rows), batch))
        rows = self._norm(rows + attended, layer.attention_norm)
        return self._norm(rows + layer.down(_activate(layer.up(rows), self.shape.activation)), layer.output_norm)

    def _attend(self, qkv: Tensor, batch: PackedBatch) -> Tensor:
        """Computes the attention: each token of a text attends to the whole text."""
        out = qkv.new_empty(len(qkv), self.shape.hidden_size)
        for group in batch.groups:
            out[group.targets] = self._attend_group(qkv[group.rows], group)[group.places]
        return out

    def _attend_group(self, qkv: Tensor, group: TextGroup) -> Tensor:
        heads = qkv.view(group.texts, -1, 3, self.shape.heads, self.shape.hidden_size // self.shape.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=group.filled)
        return attended.transpose(1, 2).reshape(len(qkv), self.shape.hidden_size)

    def _norm(self, rows: Tensor, norm: Norm) -> Tensor:
        return functional.layer_norm(rows, rows.shape[-1:], norm.gain, norm.shift, self.shape.norm_epsilon)


def _activate(rows: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "erf":
            return functional.gelu(rows)
        case "tanh":
            return functional.gelu(rows, approximate="tanh")
        case "relu":
            return functional.relu(rows)
