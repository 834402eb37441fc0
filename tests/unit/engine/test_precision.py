import pytest
import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig
from maitred.engine.precision import Precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_auto_is_what_is_fast_on_the_device():
    assert Precision.of(EngineConfig(), CPU).dtype == torch.float32
    assert Precision.of(EngineConfig(), GPU).dtype == torch.bfloat16
    assert Precision.of(EngineConfig(dtype="fp32"), GPU).dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (EngineConfig(), "fp32"),
        (EngineConfig(dtype="bf16"), "bf16"),
        (EngineConfig(quantization="int8"), "fp32, int8 weights"),
        (EngineConfig(kv_dtype="int8"), "fp32, int8 KV"),
        (EngineConfig(quantization="int8", kv_dtype="bf16"), "fp32, int8 weights, bf16 KV"),
        (EngineConfig(dtype="bf16", kv_dtype="bf16"), "bf16"),
        (EngineConfig(quantization="int4_weight_only"), "fp32, int4_weight_only weights"),
    ],
)
def test_engines_that_compute_differently_say_so(config, text):
    assert str(Precision.of(config, CPU)) == text


@pytest.mark.parametrize(
    ("config", "device"),
    [(EngineConfig(dtype="bf16", quantization="int8"), CPU), (EngineConfig(quantization="int4"), GPU)],
)
def test_rounding_where_there_is_no_kernel_for_it_says_what_to_do(config, device):
    with pytest.raises(ConfigInvalid, match=r"in bf16 on c.*Set engine.device to cpu and engine.dtype to fp32, or "):
        Precision.of(config, device)


def test_a_rounded_cache_where_there_is_no_kernel_for_it_says_what_to_do():
    with pytest.raises(
        ConfigInvalid, match=r"int8, which works on a CPU, .* on cuda. Set engine.kv_dtype to auto, or "
    ):
        Precision.of(EngineConfig(kv_dtype="int8"), GPU)
