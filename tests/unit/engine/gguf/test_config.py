import math
from pathlib import Path

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.engine.gguf.config import config_fields
from maitred.engine.gguf.file import FORMATS, TensorEntry

PATH = Path("model.gguf")
TENSORS = {"token_embd.weight": TensorEntry((1000, 256), FORMATS[8], 0)}


def fields(factors=(), family="llama", **others):
    metadata = {
        "general.architecture": family,
        f"{family}.block_count": 2,
        f"{family}.context_length": 512,
        f"{family}.embedding_length": 256,
        f"{family}.feed_forward_length": 300,
        f"{family}.attention.head_count": 4,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        **{f"{family}.{name.replace('__', '.')}": value for name, value in others.items()},
    }
    return config_fields(metadata, TENSORS, factors, PATH)


def llama3_factors(factor, theta, head_dim):
    """The factors as Llama 3.1's rule gives them, in wavelengths."""
    found = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(found)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3(factor):
    rotary = fields(llama3_factors(factor, 500000.0, 64), rope__freq_base=500000.0)["rope_parameters"]
    assert rotary == {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_factors_are_refused():
    with pytest.raises(ConfigInvalid, match="factors of its own"):
        fields((1.0, 1.1, 4.0) + (4.0,) * 29)


def test_scaling_as_it_is_named():
    assert fields(rope__scaling__type="linear", rope__scaling__factor=4.0)["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 10000.0,
        "factor": 4.0,
    }
    yarn = fields(rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=128)
    assert yarn["rope_parameters"]["original_max_position_embeddings"] == 128
    assert fields(rope__dimension_count=32)["partial_rotary_factor"] == 0.5


def test_a_window_makes_a_mistral():
    assert fields(attention__sliding_window=128)["architectures"] == ["MistralForCausalLM"]
    assert fields(family="qwen2")["architectures"] == ["Qwen2ForCausalLM"]


def test_one_value_for_all_layers():
    assert fields(attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2
    assert fields()["num_key_value_heads"] == 4
    with pytest.raises(ConfigInvalid, match="different values"):
        fields(attention__head_count_kv=[2, 4])
