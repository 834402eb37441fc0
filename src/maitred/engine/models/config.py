"""Configuration of a decoder: Hugging Face's ``config.json``, read into one struct for all families.

What the families differ in (biases, norms, windows, caps, rotary scaling, the activation) is a field each here. So the
decoder never asks which family it runs. `families` reads the fields of each family.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from maitred.core.errors import ConfigInvalid
from maitred.engine.models.family import read_family
from maitred.engine.models.rotary_config import RotaryConfig, check_rotary
from maitred.text.tokenizer_config import read_eos_token


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only model."""

    architecture: str
    """The checkpoint's own class name, such as ``Qwen2ForCausalLM``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_tokens: int
    """Maximum tokens of prompt and answer together."""
    norm_epsilon: float
    rotary: RotaryConfig = RotaryConfig()
    local_rotary: RotaryConfig | None = None
    """Rotary embedding of the layers with a window; None: that of all layers."""
    unrotated: tuple[int, ...] = ()
    """Layers that do not rotate queries and keys at all (SmolLM3)."""
    windows: tuple[int, ...] = ()
    """Window of each layer: a token attends to so many tokens at most, itself the last one; 0: to the whole context.

    Empty: no layer has a window. All windows of a model are equal.
    """
    score_scale: float = 0.0
    """Factor of the attention scores; 0: one over the root of the head size."""
    score_cap: float = 0.0
    """Soft cap of the attention scores: ``cap * tanh(score / cap)``; 0: none."""
    logit_cap: float = 0.0
    """Soft cap of the logits; 0: none."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """Whether every query and key head has an RMS norm before the rotation (Qwen3)."""
    sandwich_norms: bool = False
    """Whether the results of attention and MLP have norms of their own before they are added (Gemma 2)."""
    gain_offset: float = 0.0
    """Added to the stored gains of all norms: 1 where they are stored as differences from 1 (Gemma)."""
    embedding_scale: float = 1.0
    """Factor of the embeddings, where they are read."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the MLP's gate."""
    tied_embeddings: bool = False
    """Whether the output projection is the embedding table."""
    stored_dtype: str = "float32"
    """Type in which the checkpoint was saved."""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def qkv_features(self) -> int:
        """Width of the fused projection: queries, keys and values side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def window(self) -> int:
        """Window of the layers that have one; 0: none has."""
        return max(self.windows, default=0)

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.score_scale or self.head_dim**-0.5

    def window_of(self, layer: int) -> int:
        """Returns the window of a layer; 0: it attends to the whole context."""
        return self.windows[layer] if self.windows else 0

    def rotary_of(self, layer: int) -> RotaryConfig | None:
        """Returns the rotary embedding of a layer; None: it rotates nothing."""
        if layer in self.unrotated:
            return None
        return self.local_rotary if self.local_rotary is not None and self.window_of(layer) else self.rotary

    @classmethod
    def load(cls, folder: Path) -> "ModelConfig":
        """Reads ``config.json`` of a checkpoint, and the tokens that end an answer, which any of its files may name.

        Raises:
            ConfigInvalid: The folder is no checkpoint, or its model is not one that maitred runs.
        """
        path = folder / "config.json"
        fields = _read_json(path)
        generation_path = folder / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.is_file() else {}
        end = read_eos_token(folder)
        try:
            return _parse(fields, generation, () if end is None else (end,))
        except KeyError as missing:
            raise ConfigInvalid(f"{path} lacks the field {missing}. Is the checkpoint complete?") from None
        except (TypeError, ValueError) as fault:
            raise ConfigInvalid(f"{path} has a field of the wrong type: {fault}.") from fault


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigInvalid(
            f"{path} does not exist. A model folder holds config.json, tokenizer.json and *.safetensors, as "
            "`save_pretrained` and the Hugging Face hub lay them out."
        ) from None
    except (OSError, ValueError) as fault:
        raise ConfigInvalid(f"{path} cannot be read: {fault}.") from fault
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{path} must hold a JSON object.")
    return fields


def _parse(fields: Mapping[str, Any], generation: Mapping[str, Any], ends: tuple[int, ...]) -> ModelConfig:
    quantised = fields.get("quantization_config")
    fields, traits = read_family(fields)
    if quantised:
        raise ConfigInvalid(
            "The checkpoint is quantised, and maitred reads float32, float16 and bfloat16 weights only. Use the "
            "model's unquantised checkpoint."
        )
    heads = int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    hidden_size = int(fields["hidden_size"])
    if heads % kv_heads:
        raise ConfigInvalid(f"{heads} attention heads cannot be shared out among {kv_heads} key/value heads.")
    head_dim = int(fields.get("head_dim") or hidden_size // heads)
    rotary: RotaryConfig = traits["rotary"]
    check_rotary(rotary, head_dim)
    local_rotary: RotaryConfig | None = traits.get("local_rotary")
    if local_rotary is not None and local_rotary.share != rotary.share:
        raise ConfigInvalid(
            "partial_rotary_factor differs between kinds of layers, which is not supported. Use a checkpoint in which "
            "all layers rotate the same part of each head."
        )
    context_tokens = int(fields["max_position_embeddings"])
    if rotary.scaling == "yarn":  # published files often keep the original length, and say how much longer it may be
        context_tokens = max(context_tokens, int(rotary.factor * rotary.original_context_tokens))
    return ModelConfig(
        architecture=fields["architectures"][0],
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(fields["intermediate_size"]),
        layers=int(fields["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_tokens=context_tokens,
        norm_epsilon=float(fields["rms_norm_eps"]),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        stored_dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        # A fine-tuned model may keep the files of its base, whose texts end with another token than its turns.
        eos_token_ids=tuple(dict.fromkeys((*_eos_token_ids(generation), *_eos_token_ids(fields), *ends))),
        **traits,
    )


def _eos_token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-text tokens from one id, a list of ids, or none."""
    ids = fields.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(int(id_) for id_ in ids) if isinstance(ids, list) else (int(ids),)
