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
    config = getattr(transformers, f"{class_name}Config")(**{**_COMMON, **fields, **overrides})
    torch.manual_seed(sum(map(ord, family)))
    model = getattr(transformers, f"{class_name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # all ones and zeros would hide a fault
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
