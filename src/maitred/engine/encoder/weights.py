"""Weights of an encoder in the form of the computation: queries, keys and values are one matrix."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from maitred.engine.encoder.shape import EncoderShape
from maitred.engine.kernels.linear import Linear, make_linear
from maitred.engine.models.weights import Checkpoint

_PREFIXES = ("", "bert.", "roberta.")
_UNUSED = ("pooler.", "cls.", "lm_head.")
"""Name prefixes of heads for other tasks, which a checkpoint may contain."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Parameters of a layer norm."""

    gain: Tensor
    shift: Tensor


@dataclass(frozen=True, slots=True)
class EncoderLayerWeights:
    """Weights of one encoder layer."""

    qkv: Linear
    attention_output: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    output_norm: Norm


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """Weights of a whole encoder."""

    words: Tensor
    """``[vocab_size, hidden_size]``"""
    positions: Tensor
    """``[positions, hidden_size]``, with the embedding of the first token type added: no other type is used."""
    norm: Norm
    layers: list[EncoderLayerWeights]


def load_encoder_weights(folder: Path, shape: EncoderShape, dtype: torch.dtype, device: torch.device) -> EncoderWeights:
    """Reads the checkpoint in `folder`, converted to `dtype` on `device`.

    Raises:
        ConfigInvalid: A file is missing or broken, or tensors do not match what ``config.json`` announces.
    """
    with Checkpoint(folder, dtype, device) as checkpoint:
        prefix = next((p for p in _PREFIXES if f"{p}embeddings.word_embeddings.weight" in checkpoint), "")
        weights = _assemble(checkpoint, shape, prefix)
        checkpoint.ignore(f"{prefix}embeddings.position_ids")
        for unused in _UNUSED:
            checkpoint.ignore_all(unused)
            checkpoint.ignore_all(prefix + unused)
        checkpoint.check_nothing_left()
    return weights


def _assemble(checkpoint: Checkpoint, shape: EncoderShape, prefix: str) -> EncoderWeights:
    table, hidden = f"{prefix}embeddings.", shape.hidden_size
    positions = checkpoint.tensor(f"{table}position_embeddings.weight", shape.positions, hidden)
    types = checkpoint.tensor(f"{table}token_type_embeddings.weight", shape.token_types, hidden)
    return EncoderWeights(
        words=checkpoint.tensor(f"{table}word_embeddings.weight", shape.vocab_size, hidden),
        positions=positions + types[0],
        norm=_norm(checkpoint, f"{table}LayerNorm", hidden),
        layers=[_layer(checkpoint, shape, f"{prefix}encoder.layer.{index}.") for index in range(shape.layers)],
    )


def _layer(checkpoint: Checkpoint, shape: EncoderShape, prefix: str) -> EncoderLayerWeights:
    hidden, inner = shape.hidden_size, shape.intermediate_size

    def linear(names: list[str], rows: int, columns: int) -> Linear:
        counts = [rows] * len(names)
        weight = checkpoint.read_fused([f"{prefix}{name}.weight" for name in names], counts, columns)
        return make_linear(weight, checkpoint.read_fused([f"{prefix}{name}.bias" for name in names], counts))

    return EncoderLayerWeights(
        qkv=linear([f"attention.self.{name}" for name in ("query", "key", "value")], hidden, hidden),
        attention_output=linear(["attention.output.dense"], hidden, hidden),
        attention_norm=_norm(checkpoint, f"{prefix}attention.output.LayerNorm", hidden),
        up=linear(["intermediate.dense"], inner, hidden),
        down=linear(["output.dense"], hidden, inner),
        output_norm=_norm(checkpoint, f"{prefix}output.LayerNorm", hidden),
    )


def _norm(checkpoint: Checkpoint, name: str, size: int) -> Norm:
    return Norm(checkpoint.tensor(f"{name}.weight", size), checkpoint.tensor(f"{name}.bias", size))
