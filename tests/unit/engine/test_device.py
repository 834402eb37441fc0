import os

import pytest
import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine import device
from maitred.engine.config import EngineConfig
from maitred.engine.device import PrecisionPlan, step_threads
from maitred.engine.kernels.linear import torchao_linear

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_auto_is_what_is_fast_on_the_device():
    assert PrecisionPlan.of(EngineConfig(), CPU).dtype == torch.float32
    assert PrecisionPlan.of(EngineConfig(), GPU).dtype == torch.bfloat16
    assert PrecisionPlan.of(EngineConfig(dtype="fp32"), GPU).dtype == torch.float32


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
    assert str(PrecisionPlan.of(config, CPU)) == text


@pytest.mark.parametrize(
    ("config", "device", "remedy"),
    [
        (EngineConfig(dtype="bf16", quantization="int8"), CPU, "in bf16 on a CPU, .*Set engine.dtype to fp32 and"),
        (EngineConfig(quantization="fp8"), CPU, "Set engine.dtype to fp32 and engine.quantization to one of these"),
        (EngineConfig(quantization="int4"), GPU, "which works on a CPU. On a GPU set it to one of int8, .*or none"),
    ],
)
def test_rounding_where_there_is_no_kernel_for_it_says_what_to_do(config, device, remedy):
    with pytest.raises(ConfigInvalid, match=remedy):
        PrecisionPlan.of(config, device)


def test_a_cpu_that_multiplies_bf16_computes_the_rest_in_fp32(monkeypatch):
    bf16 = PrecisionPlan.of(EngineConfig(dtype="bf16"), CPU)
    monkeypatch.setattr(device, "processor_features", lambda: frozenset({"avx512bf16"}))
    assert str(bf16.with_bf16_products()) == "fp32, bf16 weights, bf16 KV"
    for config in (EngineConfig(), EngineConfig(quantization="int8")):
        assert PrecisionPlan.of(config, CPU).with_bf16_products() == PrecisionPlan.of(config, CPU)
    monkeypatch.setattr(device, "processor_features", lambda: frozenset({"avx512f"}))
    assert bf16.with_bf16_products() == bf16


def test_rounding_on_a_gpu_takes_torchao(monkeypatch):
    monkeypatch.setattr(torchao_linear, "find_spec", lambda module: None)
    with pytest.raises(ConfigInvalid, match=r"torchao is not installed. Install it \(pip install torchao\)"):
        PrecisionPlan.of(EngineConfig(quantization="int8"), GPU)
    monkeypatch.setattr(torchao_linear, "find_spec", lambda module: module)
    assert str(PrecisionPlan.of(EngineConfig(quantization="int8"), GPU)) == "bf16, int8 weights"
    with pytest.raises(ConfigInvalid, match=r"works with bf16 on a GPU. Set engine.dtype to bf16"):
        PrecisionPlan.of(EngineConfig(dtype="fp32", quantization="int8"), GPU)


def test_a_rounded_cache_where_there_is_no_kernel_for_it_says_what_to_do():
    with pytest.raises(
        ConfigInvalid, match=r"int8, which works on a CPU, .* on cuda. Set engine.kv_dtype to auto, or "
    ):
        PrecisionPlan.of(EngineConfig(kv_dtype="int8"), GPU)


@pytest.mark.parametrize(
    ("cores", "engines", "each"), [(16, 1, 15), (16, 3, 5), (16, 4, 3), (2, 1, 1), (2, 3, 1), (1, 1, 1), (31, 10, 3)]
)
def test_engines_share_the_cores_and_one_is_left(monkeypatch, cores, engines, each):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert step_threads(0, 1 / engines) == each


def test_what_is_configured_is_what_each_engine_takes():
    assert step_threads(7, 0.25) == 7
