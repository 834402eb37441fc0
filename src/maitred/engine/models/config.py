"""Configuration of a decoder: Hugging Face's ``config.json``, read into one struct for all families.

The families differ in five small things (biases, norms on query and key heads, rotary scaling, an explicit head size,
tied embeddings), and each is a field here. So the decoder never asks which family it runs.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from maitred.core.errors import ConfigInvalid
from maitred.text.tokenizer_config import read_eos_token

_WINDOW_TOKENS = 4096
"""Sliding window of a Mistral or Qwen model whose configuration does not name one."""
_QWEN3_HEAD_DIM = 128
"""Width of a head of a Qwen 3 model whose configuration does not name it."""
_QWEN_FULL_LAYERS = 28
"""Layers of a Qwen model that attend to the whole context, where its configuration does not name their number."""


class RotaryConfig(Struct, frozen=True):
    """Rotary embedding (Su et al., "RoFormer", 2021) with the scaling of its frequencies.

    `linear` divides every frequency by `factor`; `llama3` divides the low ones only, blending between the two
    wavelengths that `low_frequency_factor` and `high_frequency_factor` mark off (Llama 3.1's rule).
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_tokens: int = 8192


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
    """Maximum tokens of prompt and answer together.

    It is no more than the sliding window, if the checkpoint has one. Within the window, a sliding window changes
    nothing;
    beyond it, the answer would differ from the model's own.
    """
    norm_epsilon: float
    rotary: RotaryConfig = RotaryConfig()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """Whether every query and key head has an RMS norm before the rotation (Qwen3)."""
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
    architecture = (fields.get("architectures") or ["none named"])[0]
    traits = _FAMILIES.get(_HEADLESS.get(architecture, architecture))
    if traits is None:
        raise ConfigInvalid(
            f"The architecture {architecture} is not supported. Supported: {', '.join(sorted(_FAMILIES))}."
        )
    if fields.get("quantization_config"):
        raise ConfigInvalid(
            "The checkpoint is quantised, and maitred reads float32, float16 and bfloat16 weights only. Use the "
            "model's unquantised checkpoint."
        )
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise ConfigInvalid(f"The activation {activation} is not supported; {architecture} models use silu.")
    heads = int(fields["num_attention_heads"])
    kv_heads = int(fields.get("num_key_value_heads") or heads)
    hidden_size = int(fields["hidden_size"])
    if heads % kv_heads:
        raise ConfigInvalid(f"{heads} attention heads cannot be shared out among {kv_heads} key/value heads.")
    context_tokens = int(fields["max_position_embeddings"])
    if window := _sliding_window(architecture, fields):
        context_tokens = min(context_tokens, window)
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(fields["vocab_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(fields["intermediate_size"]),
        layers=int(fields["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=int(fields.get("head_dim") or (_QWEN3_HEAD_DIM if traits is _qwen3_traits else hidden_size // heads)),
        context_tokens=context_tokens,
        norm_epsilon=float(fields["rms_norm_eps"]),
        rotary=_rotary(fields),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        stored_dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        # A fine-tuned model may keep the files of its base, whose texts end with another token than its turns.
        eos_token_ids=tuple(dict.fromkeys((*_eos_token_ids(generation), *_eos_token_ids(fields), *ends))),
        **traits(fields),
    )


def _llama_traits(fields: Mapping[str, Any]) -> dict[str, bool]:
    attention_bias = bool(fields.get("attention_bias", False))
    return {"qkv_bias": attention_bias, "output_bias": attention_bias, "mlp_bias": bool(fields.get("mlp_bias", False))}


def _mistral_traits(fields: Mapping[str, Any]) -> dict[str, bool]:
    return {}


def _qwen2_traits(fields: Mapping[str, Any]) -> dict[str, bool]:
    return {"qkv_bias": True}


def _qwen3_traits(fields: Mapping[str, Any]) -> dict[str, bool]:
    attention_bias = bool(fields.get("attention_bias", False))
    return {"qkv_bias": attention_bias, "output_bias": attention_bias, "head_norms": True}


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], dict[str, bool]]] = {
    "LlamaForCausalLM": _llama_traits,
    "MistralForCausalLM": _mistral_traits,
    "Qwen2ForCausalLM": _qwen2_traits,
    "Qwen3ForCausalLM": _qwen3_traits,
}
_HEADLESS = {name.replace("ForCausalLM", "Model"): name for name in _FAMILIES}
"""Architecture of a model that was saved without its head, for embeddings -> the architecture with a head."""


def _sliding_window(architecture: str, fields: Mapping[str, Any]) -> int | None:
    """Returns the sliding window in tokens; None: every layer attends to the whole context.

    A window is on or off as in `transformers`: Llama has none, Mistral's is on wherever it is given, and Qwen's is off
    unless it is asked for, and then only from layer `max_window_layers` on.
    """
    family = architecture.removesuffix("ForCausalLM").removesuffix("Model")
    if family == "Llama":
        return None
    window = fields.get("sliding_window", _WINDOW_TOKENS)
    if family != "Mistral":
        if not fields.get("use_sliding_window", False):
            return None
        layer_types = fields.get("layer_types")
        if layer_types is None:
            slides = int(fields.get("max_window_layers", _QWEN_FULL_LAYERS)) < int(fields["num_hidden_layers"])
        else:
            slides = "sliding_attention" in layer_types
        window = window if slides else None
    return int(window) if window else None


def _rotary(fields: Mapping[str, Any]) -> RotaryConfig:
    """Parses the rotary settings under ``rope_parameters`` (new) or ``rope_scaling`` and ``rope_theta`` (old)."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigInvalid(
            "Models whose layers have rotary embeddings of their own (rope_parameters) are not supported."
        )
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if float(rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigInvalid("Models that rotate only a part of each head (partial_rotary_factor) are not supported.")
    if kind == "default":
        return RotaryConfig(theta=theta)
    if kind == "linear":
        return RotaryConfig(theta=theta, scaling="linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RotaryConfig(
            theta=theta,
            scaling="llama3",
            factor=float(rope["factor"]),
            low_frequency_factor=float(rope["low_freq_factor"]),
            high_frequency_factor=float(rope["high_freq_factor"]),
            original_context_tokens=int(rope["original_max_position_embeddings"]),
        )
    raise ConfigInvalid(
        f"The rotary scaling {kind!r} is not supported. Supported: default, linear, llama3. Where the checkpoint runs "
        "unscaled within its original context, remove rope_scaling from config.json."
    )


def _eos_token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the end-of-text tokens from one id, a list of ids, or none."""
    ids = fields.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(int(id_) for id_ in ids) if isinstance(ids, list) else (int(ids),)
