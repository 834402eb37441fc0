"""Shape of an encoder, read from its ``config.json``, and the pooling of its last rows.

Without files of sentence-transformers (`modules`), the rows are averaged and the mean is scaled to length 1.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import PoolingMode
from maitred.engine.encoder.modules import Pooling, has_modules, longest_text, read_object, read_pooling

Activation = Literal["erf", "tanh", "relu"]

_FAMILIES = ("bert", "roberta", "xlm-roberta")
_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "erf",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "relu": "relu",
}


class EncoderShape(Struct, frozen=True, kw_only=True):
    """Shape of a BERT-class encoder (Devlin et al., 2019), with the pooling of its last layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    positions: int
    """Number of rows of the position table."""
    first_position: int
    """Row of the position table for the first token: RoBERTa's table begins with rows for padding."""
    token_types: int
    norm_epsilon: float
    activation: Activation
    context_tokens: int
    """Maximum tokens of an input, including those that the tokenizer adds."""
    pooling: Pooling

    @classmethod
    def load(cls, folder: Path, pooling: PoolingMode | None = None) -> "EncoderShape":
        """Reads the shape from a checkpoint's configuration.

        Args:
            folder: Folder of the checkpoint.
            pooling: Configured pooling, which has precedence over the files.

        Raises:
            ConfigInvalid: The folder contains no checkpoint, or its model is not supported.
        """
        path = folder / "config.json"
        fields = read_object(path)
        try:
            return _parse(path, fields, read_pooling(folder, "mean", pooling), longest_text(folder))
        except KeyError as missing:
            raise ConfigInvalid(f"{path} lacks the field {missing}. Is the checkpoint complete?") from None
        except (TypeError, ValueError) as fault:
            raise ConfigInvalid(f"{path} has a field of the wrong type: {fault}.") from fault


def is_encoder(folder: Path) -> bool:
    """Returns whether the model in this folder is an embedding model."""
    return is_bert(folder) or has_modules(folder)


def is_bert(folder: Path) -> bool:
    """Returns whether the model in this folder is of a family with bidirectional attention."""
    path = folder / "config.json"
    return path.is_file() and read_object(path).get("model_type") in _FAMILIES


def _parse(path: Path, fields: Mapping[str, Any], pooling: Pooling, longest: int | None) -> EncoderShape:
    family = fields.get("model_type")
    if family not in _FAMILIES:
        raise ConfigInvalid(f"{path}: {family} is not an encoder that is supported ({', '.join(_FAMILIES)}).")
    if fields.get("position_embedding_type", "absolute") != "absolute" or fields.get("is_decoder"):
        raise ConfigInvalid(f"{path}: only encoders with absolute positions are supported.")
    activation = fields.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise ConfigInvalid(f"{path}: hidden_act {activation} is not supported ({', '.join(_ACTIVATIONS)}).")
    heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
    if hidden % heads:
        raise ConfigInvalid(f"{path}: hidden_size {hidden} is no multiple of num_attention_heads {heads}.")
    positions = int(fields["max_position_embeddings"])
    first_position = 0 if family == "bert" else int(fields["pad_token_id"]) + 1
    return EncoderShape(
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(fields["intermediate_size"]),
        layers=int(fields["num_hidden_layers"]),
        heads=heads,
        positions=positions,
        first_position=first_position,
        token_types=int(fields["type_vocab_size"]),
        norm_epsilon=float(fields.get("layer_norm_eps", 1e-12)),
        activation=_ACTIVATIONS[activation],
        context_tokens=min(positions - first_position, longest or positions),
        pooling=pooling,
    )
