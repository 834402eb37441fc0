"""Files of every family that has other names or forms in GGUF, against the checkpoints that they were made of."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from maitred.core.errors import ConfigInvalid
from maitred.engine.gguf.config import config_fields
from maitred.engine.gguf.file import FORMATS, TensorEntry
from maitred.engine.gguf.folder import make_gguf_folder
from maitred.engine.models.load import load_model
from tests.support.models import make_model
from tests.unit.engine.gguf.random_files import StoredTensor, vocabulary, write_gguf
from tests.unit.engine.models.steps import Driver, random_tokens

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def theirs(name: str, family: str) -> str:
    """The name of a checkpoint's tensor in a GGUF file."""
    if name in _WHOLE:
        return _WHOLE[name]
    layer, part, kind = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name).groups()
    parts = _PARTS | (_GEMMA_NORMS if family in ("gemma2", "gemma3") else _NORMS)
    return f"blk.{layer}.{parts[part]}.{kind}"


def write(path, folder, family: str, oracle, **metadata: object) -> None:
    """Writes a checkpoint as a GGUF file, as llama.cpp's converter does."""
    config, stored = oracle.config, {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, numbers in load_file(folder / "model.safetensors").items():
        if family.startswith("gemma") and name.endswith("norm.weight"):
            numbers = numbers + 1
        projection = name.split(".")[-2]
        if family == "smollm3" and projection in heads:
            numbers = numbers.view(heads[projection], 2, -1, *numbers.shape[1:]).transpose(1, 2).reshape(numbers.shape)
        data = bytes(numbers.contiguous().view(torch.uint8).flatten().tolist())
        stored[theirs(name, family)] = StoredTensor(tuple(numbers.shape), "F32", data)
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **metadata,
    }
    named = {f"{family}.{name}": value for name, value in fields.items()}
    write_gguf(path, {"general.architecture": family, **named, **vocabulary()}, stored)


WORDS = len(vocabulary()["tokenizer.ggml.tokens"])


@pytest.mark.parametrize(
    ("family", "made_as", "changes", "metadata"),
    [
        ("gemma", "gemma", {}, {"attention.key_length": 32}),
        (
            "gemma2",
            "gemma2",
            {"query_pre_attn_scalar": 32},
            {
                "attention.key_length": 32,
                "attention.sliding_window": 24,
                "attn_logit_softcapping": 5.0,
                "final_logit_softcapping": 3.0,
            },
        ),
        (
            "gemma3",
            "gemma3",
            {"query_pre_attn_scalar": 32},
            {
                "attention.key_length": 32,
                "attention.sliding_window": 20,
                "rope.freq_base": 1000000.0,
                "rope.scaling.type": "linear",
                "rope.scaling.factor": 8.0,
            },
        ),
        ("phi3", "phi3", {}, {"attention.sliding_window": 31}),
        ("smollm3", "smollm3", {}, {"rope.freq_base": 2000000.0}),
    ],
)
def test_a_file_computes_what_its_checkpoint_does(tmp_path, family, made_as, changes, metadata):
    folder, path = tmp_path / "plain", tmp_path / "model.gguf"
    oracle = make_model(folder, made_as, vocab_size=WORDS, **changes)
    write(path, folder, family, oracle, **metadata)
    model = load_model(make_gguf_folder(path, {"XDG_CACHE_HOME": str(tmp_path)}), dtype=torch.float32)
    tokens = random_tokens(model.config, 70)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Driver(model.decoder).prefill(tokens), expected, atol=1e-4, rtol=1e-4)


def test_longrope_is_refused():
    entry = TensorEntry((4,), FORMATS[0], 0)
    tensors = {"token_embd.weight": entry, "rope_factors_long.weight": entry}
    with pytest.raises(ConfigInvalid, match=r"longrope, which is not read from GGUF files\. Use the model's own"):
        config_fields({"general.architecture": "phi3"}, tensors, (), Path("model.gguf"))
