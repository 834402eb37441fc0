import json
from pathlib import Path

import pytest
import transformers

from maitred.core.errors import ConfigInvalid
from maitred.engine.models.config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": True}

PHI3 = {"architectures": ["Phi3ForCausalLM"]}


def load(folder: Path, generation: dict | None = None, **changes: object) -> ModelConfig:
    fields = {name: value for name, value in {**LLAMA, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.load(folder)


def test_plain_llama(tmp_path):
    config = load(tmp_path)
    assert (config.head_dim, config.group_size, config.qkv_features) == (8, 4, 96)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.head_norms, config.tied_embeddings))
    assert config.rotary.scaling == "none"
    assert config.rotary.theta == 10_000.0


def test_kv_heads_default_to_heads(tmp_path):
    assert load(tmp_path, num_key_value_heads=...).kv_heads == 8


def test_families_differ_in_fields(tmp_path):
    qwen2 = load(tmp_path, architectures=["Qwen2ForCausalLM"])
    qwen3 = load(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=32)
    assert qwen2.qkv_bias
    assert not qwen2.output_bias
    assert qwen3.head_norms
    assert not qwen3.qkv_bias
    assert qwen3.head_dim == 32


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 100}, (100, 100)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": False}, ()),
        (QWEN2 | {"max_window_layers": 0}, (100, 100)),
        (QWEN2, ()),
        ({"sliding_window": 100, "layer_types": ["full_attention", "sliding_attention"]}, ()),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, (4096, 4096)),
        (QWEN2 | {"layer_types": ["full_attention", "full_attention"]}, ()),
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, (0, 100)),
        (QWEN2 | {"max_window_layers": 2}, ()),
        (QWEN2 | {"max_window_layers": 1}, (0, 100)),
        (QWEN2 | {"max_window_layers": 0, "use_sliding_window": ...}, ()),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 100, "pad_token_id": 0}, (100, 100)),
        ({"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}, ()),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 100}, (100, 0)),
        ({"architectures": ["Gemma2ForCausalLM"]}, (4096, 0)),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 9, "use_sliding_window": True}
            | {"no_rope_layer_interval": 2, "pad_token_id": 0},
            (0, 9),
        ),
    ],
)
def test_layers_with_a_window(tmp_path, changes, windows):
    """Each layer's window, as the models' own library has it."""
    config = load(tmp_path, **changes)
    assert config.windows == windows
    assert config.context_tokens == json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"]
    fields = json.loads((tmp_path / "config.json").read_text())
    if fields["architectures"] == LLAMA["architectures"]:
        return  # the library keeps fields that it does not use
    oracle = transformers.AutoConfig.for_model(fields["architectures"][0].partition("For")[0].lower(), **fields)
    window = getattr(oracle, "sliding_window", None)
    kinds = getattr(oracle, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 2
    assert (windows or (0, 0)) == tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def test_defaults_of_gemma_3(tmp_path):
    """Published files of Gemma 3 leave out whatever equals the default, and have it below `text_config`."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config, oracle = ModelConfig.load(tmp_path), transformers.Gemma3TextConfig(**text)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.tied_embeddings
    assert config.context_tokens == oracle.max_position_embeddings
    assert [bool(window) for window in config.windows] == [kind == "sliding_attention" for kind in oracle.layer_types]
    rotary = oracle.rope_parameters["full_attention"]
    assert (config.rotary.theta, config.rotary.scaling, config.rotary.factor) == (rotary["rope_theta"], "linear", 8.0)
    assert config.local_rotary is not None
    assert (config.local_rotary.theta, config.local_rotary.scaling) == (10_000.0, "none")
    assert config.rotary_of(5) == config.rotary
    assert config.rotary_of(4) == config.local_rotary


def test_yarn_makes_the_context_longer(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    assert load(tmp_path, rope_scaling=scaling).context_tokens == 800
    assert load(tmp_path, rope_scaling=scaling | {"factor": 1.0}).context_tokens == 256


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rotary_scaling_under_old_and_new_key(tmp_path, key):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rotary = load(tmp_path, **{key: rope}).rotary
    assert (rotary.scaling, rotary.theta, rotary.factor, rotary.original_context_tokens) == (
        "llama3",
        500000.0,
        8.0,
        8192,
    )


def test_oldest_spelling_of_rotary_scaling(tmp_path):
    rotary = load(tmp_path, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 4.0}).rotary
    assert (rotary.scaling, rotary.factor, rotary.theta) == ("linear", 4.0, 5000.0)


def test_eos_ids_of_generation_config_come_first(tmp_path):
    assert load(tmp_path).eos_token_ids == (7,)
    assert load(tmp_path, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6, 7)
    assert load(tmp_path, {"temperature": 1.0}).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path, eos_token_id=...).eos_token_ids == ()


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({"eos_token": "<|im_end|>"}, 5),
        ({"eos_token": {"content": "<|im_end|>", "lstrip": False}}, 5),
        ({"eos_token": "b"}, 1),
        ({"eos_token": "<turn>", "added_tokens_decoder": {"9": {"content": "<turn>", "special": True}}}, 9),
        ({"eos_token": "nowhere"}, None),
        ({"eos_token": None}, None),
    ],
)
@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 1}, [["a", 0.0], ["b", -1.0]]])
def test_the_token_that_ends_turns_ends_answers(tmp_path, settings, end, vocabulary):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = {"added_tokens": [{"id": 5, "content": "<|im_end|>"}], "model": {"vocab": vocabulary}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load(tmp_path, {"eos_token_id": 3}).eos_token_ids == (3, 7, *(() if end is None else (end,)))
    assert load(tmp_path, {}, eos_token_id=...).eos_token_ids == (() if end is None else (end,))


def test_the_end_of_turns_in_the_older_file_of_tokens(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "b"}}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    assert load(tmp_path).eos_token_ids == (7, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported.*LlamaForCausalLM.*Qwen3ForCausalLM",
        ),
        ({"architectures": ...}, "not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "wide"}, "wrong type"),
        ({"num_key_value_heads": 3}, "shared out"),
        ({"rope_scaling": {"type": "xpos", "factor": 4.0}}, "'xpos' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rotary embeddings of their own"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "short_factor"),
        (PHI3 | {"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 rotates 3 of 8"),
        (
            PHI3 | {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0] * 4}},
            "long_factor.*1 num",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window is -1"),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 2}, "layer_types names chunked_attention"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "relu"}, "relu is not supported"),
    ],
)
def test_refusals_name_the_fault(tmp_path, changes, words):
    with pytest.raises(ConfigInvalid, match=words):
        load(tmp_path, **changes)


def test_no_folder_no_json_no_object(tmp_path):
    with pytest.raises(ConfigInvalid, match="does not exist"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigInvalid, match="object"):
        ModelConfig.load(tmp_path)
