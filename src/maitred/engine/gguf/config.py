"""Shape of a model from the metadata of its GGUF file, as the fields of a ``config.json``.

The fields are those of Hugging Face's file for the same model, so that all that reads a checkpoint's shape reads these,
and an architecture is known or refused in one place (`maitred.engine.models.config`).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maitred.core.errors import ConfigInvalid
from maitred.engine.gguf.file import TensorEntry

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""Name of an architecture in GGUF files -> its class. Mistral's models are `llama` there."""
_STORED_TYPES = {"F16": "float16", "BF16": "bfloat16"}
_TABLE = "token_embd.weight"
FREQUENCY_FACTORS = "rope_freqs.weight"
"""Tensor with a divisor of each rotary frequency: how Llama 3.1's scaling is written."""
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""Parameters of that scaling in all models that were published with it."""
_LONGROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_WIDE_HEADS = {("gemma2", 46), ("gemma3", 62)}
"""Family and layers of the models whose scores are scaled by the width of the model, not of a head: both of 27
billion. Their files do not say so; llama.cpp knows them by their layers, too."""
_LOCAL_BASE = 10_000.0
"""Rotary base of Gemma 3's layers with a window, where its file does not name it."""


def config_fields(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], factors: tuple[float, ...], path: Path
) -> dict[str, Any]:
    """Returns the fields of the model's ``config.json``, without the tokens that end an answer.

    Args:
        metadata: Metadata of the file.
        tensors: Entries of all its tensors.
        factors: Numbers of the tensor `FREQUENCY_FACTORS`; empty: there is none.
        path: The file, for messages.

    Raises:
        ConfigInvalid: maitred does not run such models.
    """
    family = str(metadata.get("general.architecture"))
    architecture = _ARCHITECTURES.get(family)
    if architecture is None:
        raise ConfigInvalid(
            f"{path} holds a model of the architecture {family}, which maitred does not run from a GGUF file. It runs "
            f"{', '.join(_ARCHITECTURES)}."
        )
    if _TABLE not in tensors:
        raise ConfigInvalid(f"{path} has no tensor {_TABLE}: it holds a vocabulary or an adapter, but no model.")

    def get(name: str, default: Any = None) -> Any:  # noqa: ANN401 - any value of the metadata
        return metadata.get(f"{family}.{name}", default)

    def need(name: str) -> Any:  # noqa: ANN401 - any value of the metadata
        value = get(name)
        if value is None:
            raise ConfigInvalid(f"{path} does not say {family}.{name}. Fetch the file again, or convert it anew.")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ConfigInvalid(f"{path} gives layers different values of {family}.{name}, which is not supported.")
            return value[0]
        return value

    if any(name in tensors for name in _LONGROPE_FACTORS):
        raise ConfigInvalid(
            f"{path} scales the rotary frequencies by longrope, which is not read from GGUF files. Use the model's own "
            "checkpoint in safetensors."
        )
    if get("expert_count"):
        raise ConfigInvalid(f"{path} holds a mixture of experts, which maitred does not run.")
    hidden_size, heads = int(need("embedding_length")), int(need("attention.head_count"))
    head_dim = int(get("attention.key_length") or hidden_size // heads)
    if int(get("attention.value_length") or head_dim) != head_dim:
        raise ConfigInvalid(f"{path} has keys and values of different widths, which is not supported.")
    vocab_size, _ = tensors[_TABLE].shape
    window = int(get("attention.sliding_window") or 0)
    if window and family == "llama":
        architecture = "MistralForCausalLM"
    rotary = _rotary(get, factors, head_dim, path)
    fields = {
        "architectures": [architecture],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": heads
        if get("attention.head_count_kv") is None
        else int(need("attention.head_count_kv")),
        "head_dim": head_dim,
        "max_position_embeddings": int(need("context_length")),
        "rms_norm_eps": float(need("attention.layer_norm_rms_epsilon")),
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": rotary,
        "partial_rotary_factor": int(get("rope.dimension_count") or head_dim) / head_dim,
        "dtype": _STORED_TYPES.get(tensors[_TABLE].format.name, "float32"),
    }
    if not family.startswith("gemma"):
        return fields
    if get("rope.scaling.type") is None and family == "gemma3" and get("rope.scaling.factor"):
        rotary |= {"rope_type": "linear", "factor": float(get("rope.scaling.factor"))}
    local = {"rope_theta": float(get("rope.freq_base_swa") or _LOCAL_BASE)}
    wide = (family, fields["num_hidden_layers"]) in _WIDE_HEADS
    return {
        **fields,
        # Converters add the 1 that checkpoints leave out.
        "norm_gains_include_one": True,
        "rope_parameters": {"full_attention": rotary, "sliding_attention": local} if family == "gemma3" else rotary,
        "query_pre_attn_scalar": hidden_size // heads if wide else head_dim,
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
    }


def _rotary(get: Any, factors: tuple[float, ...], head_dim: int, path: Path) -> dict[str, Any]:  # noqa: ANN401
    theta = float(get("rope.freq_base") or 10_000.0)
    kind = str(get("rope.scaling.type") or "none")
    if factors:
        return {"rope_theta": theta, **_llama3_scaling(factors, theta, head_dim, path)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = float(get("rope.scaling.factor") or 1.0)
    rotary: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if original := get("rope.scaling.original_context_length"):
        rotary["original_max_position_embeddings"] = int(original)
    return rotary


def _llama3_scaling(factors: tuple[float, ...], theta: float, head_dim: int, path: Path) -> dict[str, Any]:
    """Returns the parameters of Llama 3.1's scaling that gives these factors.

    Raises:
        ConfigInvalid: It cannot give them.
    """
    factor = max(factors)
    for pair, given in enumerate(factors):
        turns = _LLAMA3_CONTEXT * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)))
        if not math.isclose(1.0 / (kept + (1.0 - kept) / factor), given, rel_tol=1e-3):
            raise ConfigInvalid(
                f"{path} scales the rotary frequencies by factors of its own ({FREQUENCY_FACTORS}), which maitred "
                "knows only for Llama 3.1 and later."
            )
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
