"""What a checkpoint says of an encoder: its layers from ``config.json``, and how sentence-transformers pools them.

Three files of sentence-transformers' layout are read where they are there: ``modules.json`` lists what follows the
transformer, ``1_Pooling/config.json`` says how its rows become one vector, and ``sentence_bert_config.json`` how long
the texts of its training were. Without them the rows are averaged and the mean is scaled to length 1.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from maitred.core.errors import ConfigInvalid

Pooling = Literal["mean", "cls"]
Activation = Literal["erf", "tanh", "relu"]

_FAMILIES = ("bert", "roberta", "xlm-roberta")
_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "erf",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "relu": "relu",
}
_POOLINGS: Mapping[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


class EncoderShape(Struct, frozen=True, kw_only=True):
    """The shape of a BERT-class encoder (Devlin et al., 2019), and what becomes of its last layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    positions: int
    """Rows of the table of positions."""
    first_position: int
    """Which row the first token gets: RoBERTa's table begins with rows that padding was given."""
    token_types: int
    norm_epsilon: float
    activation: Activation
    context_tokens: int
    """Longest input, with the tokens that the tokenizer adds."""
    pooling: Pooling = "mean"
    normalised: bool = True
    """Whether vectors are scaled to length 1."""

    @classmethod
    def load(cls, folder: Path) -> "EncoderShape":
        """Reads a checkpoint's own description.

        Raises:
            ConfigInvalid: The folder is no checkpoint, or its model is not one that maitred runs.
        """
        path = folder / "config.json"
        fields = _object_in(path)
        try:
            shape = _parse(path, fields)
            return _with_modules(folder, shape)
        except KeyError as missing:
            raise ConfigInvalid(f"{path} lacks the field {missing}. Is the checkpoint complete?") from None
        except (TypeError, ValueError) as fault:
            raise ConfigInvalid(f"{path} has a field of the wrong type: {fault}.") from fault


def is_encoder(folder: Path) -> bool:
    """Whether the model in this folder is one whose answers are vectors."""
    path = folder / "config.json"
    return path.is_file() and _object_in(path).get("model_type") in _FAMILIES


def _parse(path: Path, fields: Mapping[str, Any]) -> EncoderShape:
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
        context_tokens=positions - first_position,
    )


def _with_modules(folder: Path, shape: EncoderShape) -> EncoderShape:
    """The shape with what sentence-transformers' files say."""
    fields = {name: getattr(shape, name) for name in shape.__struct_fields__}
    lengths = folder / "sentence_bert_config.json"
    if lengths.is_file() and (longest := _object_in(lengths).get("max_seq_length")) is not None:
        fields["context_tokens"] = min(shape.context_tokens, int(longest))
    path = folder / "modules.json"
    if not path.is_file():
        return EncoderShape(**fields)
    fields["normalised"] = False
    for module in _json_in(path):
        match str(module["type"]).rpartition(".")[2]:
            case "Transformer":
                pass
            case "Pooling":
                fields["pooling"] = _pooling_in(folder / module["path"] / "config.json")
            case "Normalize":
                fields["normalised"] = True
            case other:
                raise ConfigInvalid(f"{path} has a module {other}, which is not supported. Use another model.")
    return EncoderShape(**fields)


def _pooling_in(path: Path) -> Pooling:
    settings = _object_in(path)
    chosen = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise ConfigInvalid(
            f"{path} pools by {', '.join(chosen) or 'nothing'}; supported is one of {', '.join(_POOLINGS)}."
        )
    return _POOLINGS[chosen[0]]


def _object_in(path: Path) -> dict[str, Any]:
    fields = _json_in(path)
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{path} must hold a JSON object.")
    return fields


def _json_in(path: Path) -> Any:  # noqa: ANN401 - whatever JSON is
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigInvalid(f"{path} does not exist. Is the model's folder complete?") from None
    except (OSError, ValueError) as fault:
        raise ConfigInvalid(f"{path} cannot be read: {fault}.") from fault
