"""Small random models of every supported family, saved as their own library saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "initializer_range": 0.2,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4}),
    "llama3": (
        "Llama",
        {
            "rope_theta": 5000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama_linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": 400}),
    "mistral_window": ("Mistral", {"head_dim": 32, "sliding_window": 24}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3_window": (
        "Qwen3",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
    "qwen2_yarn": (
        "Qwen2",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "llama_dynamic": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": 31}),
    "phi3_longrope": (
        "Phi3",
        {
            "pad_token_id": 0,
            "hidden_size": 96,
            "original_max_position_embeddings": 4,
            "rope_scaling": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.1 * pair for pair in range(12)],
                "long_factor": [1.5 + 0.5 * pair for pair in range(12)],
            },
        },
    ),
    "phi4": (
        "Phi3",
        {
            "pad_token_id": 0,
            "hidden_size": 128,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "rope_scaling": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.1 * pair for pair in range(12)],
                "long_factor": [1.5 + 0.5 * pair for pair in range(12)],
            },
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "smollm3_window": (
        "SmolLM3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 17,
            "pad_token_id": 0,
            "attention_bias": True,
        },
    ),
    "gemma": ("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "query_pre_attn_scalar": 48,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "num_hidden_layers": 7,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "initializer_range": 0.1,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "hidden_size": 96, "use_sliding_window": False}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "smollm": (
        "Llama",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": True},
    ),
}


def make_model(
    folder: Path,
    family: str,
    *,
    max_shard_size: str | int = "5GB",
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> "transformers.PreTrainedModel":
    """Saves a random model of `family` into `folder` and returns the library's own model as an oracle.

    Args:
        folder: Created if need be.
        family: A key of `FAMILIES`.
        max_shard_size: Small values split the weights over several files.
        dtype: Stored type.
        **overrides: Fields of the configuration to set otherwise.
    """
    class_name, fields = FAMILIES[family]
    config_name = f"{class_name}TextConfig" if class_name == "Gemma3" else f"{class_name}Config"
    config = getattr(transformers, config_name)(**{**_COMMON, **fields, **overrides})
    torch.manual_seed(sum(map(ord, family)))
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # all ones and zeros would hide a fault
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
