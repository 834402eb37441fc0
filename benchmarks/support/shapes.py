"""Model folders to measure on: the bundled model, and random weights in the shape of published ones."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BUNDLED = Path(__file__).parents[2] / "src" / "maitred" / "bundled" / "maitred-tiny"
WORK = Path(__file__).parents[1] / "work"
"""Not in the repository; made on demand."""

QWEN_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "float32",
}
"""The figures of Qwen/Qwen2.5-0.5B-Instruct's config.json."""

LLAMA_33M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "vocab_size": 8192,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
"""33 million parameters: small enough that what surrounds the arithmetic of a step shows."""


_LETTERS = "abcdefghijklmnop"


@dataclass(frozen=True)
class LinearShape:
    """A weight matrix ``[outputs, inputs]`` that a decode step multiplies with, `count` times."""

    inputs: int
    outputs: int
    count: int


def linear_shapes(folder: Path) -> list[LinearShape]:
    """Every linear of one decode step, fused as the engine fuses them, the vocabulary's included."""
    config = json.loads((folder / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    layers, kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    return [
        LinearShape(hidden, (heads + 2 * kv_heads) * head_dim, layers),
        LinearShape(heads * head_dim, hidden, layers),
        LinearShape(hidden, 2 * config["intermediate_size"], layers),
        LinearShape(config["intermediate_size"], hidden, layers),
        LinearShape(hidden, config["vocab_size"], 1),
    ]


def random_qwen(seed: int = 0) -> Path:
    """A folder with random fp32 weights in Qwen2.5-0.5B's shape (2 GB); made once."""
    return random_model(WORK / "qwen2.5-0.5b-random", QWEN_0_5B, seed)


def random_llama(seed: int = 0) -> Path:
    """A folder with random fp32 weights in the shape of a Llama with 33 million parameters; made once."""
    return random_model(WORK / "llama-33m-random", LLAMA_33M, seed)


def random_model(folder: Path, config: dict[str, Any], seed: int) -> Path:
    """Fills a folder with random fp32 weights in the shape of a Llama or a Qwen2, unless that was done before."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    kv = config["num_key_value_heads"] * head_dim
    tensors = {
        "model.embed_tokens.weight": weight(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
        }
        for name, outputs in (("q", heads * head_dim), ("k", kv), ("v", kv)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = weight(outputs, hidden)
            if config["model_type"] == "qwen2":
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = weight(outputs)
        tensors |= {
            prefix + "self_attn.o_proj.weight": weight(hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": weight(inner, hidden),
            prefix + "mlp.up_proj.weight": weight(inner, hidden),
            prefix + "mlp.down_proj.weight": weight(hidden, inner),
        }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = weight(config["vocab_size"], hidden)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    unfinished = folder / "unfinished.safetensors"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.rename(folder / "model.safetensors")
    return folder


def servable(folder: Path) -> Path:
    """Gives a folder of random weights a tokenizer, so that it can be served.

    It is the bundled model's, with made-up words for the rest of the vocabulary. Every token has a text of its own, so
    that each one that is generated is seen.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        return folder
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((BUNDLED / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    for id_ in range(len(words), size):
        digits = f"{id_:05x}"
        words["Q" + "".join(_LETTERS[int(digit, 16)] for digit in digits) + "Q"] = id_
    shutil.copy(BUNDLED / "tokenizer_config.json", folder)
    unfinished = folder / "unfinished.json"
    unfinished.write_text(json.dumps(tokenizer, ensure_ascii=False))
    unfinished.rename(path)
    return folder
