import pytest
import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.kernels.gpu import choice
from maitred.engine.kernels.gpu.choice import make_attention
from maitred.engine.kernels.gpu.sdpa import TorchAttention
from tests.unit.engine.kernels.test_attention import config_of

CONFIG, CPU = config_of(8, 4, 64), torch.device("cpu")


def installed(monkeypatch, *modules):
    monkeypatch.setattr(choice, "find_spec", lambda module: module if module in modules else None)


@pytest.mark.parametrize(
    ("modules", "dtype", "device", "best"),
    [
        (("flashinfer", "triton"), torch.bfloat16, "cuda", "flashinfer"),
        (("flashinfer", "triton"), torch.float32, "cuda", "triton"),
        (("triton",), torch.bfloat16, "cuda", "triton"),
        (("flashinfer",), torch.bfloat16, "cuda", "torch"),
        (("flashinfer", "triton"), torch.bfloat16, "cpu", "torch"),
    ],
)
def test_the_best_of_what_is_installed(monkeypatch, modules, dtype, device, best):
    installed(monkeypatch, *modules)
    assert choice._best(CONFIG, torch.device(device), dtype) == best


def test_torch_is_always_there(monkeypatch):
    installed(monkeypatch)
    assert isinstance(make_attention(CONFIG, CPU, torch.float32), TorchAttention)


@pytest.mark.parametrize(("name", "package"), [("flashinfer", "flashinfer-python"), ("triton", "triton")])
def test_what_is_not_installed_says_what_to_do(monkeypatch, name, package):
    installed(monkeypatch)
    with pytest.raises(ConfigInvalid, match=rf"attention is {name}, which is not installed.*pip install {package}\)"):
        make_attention(CONFIG, CPU, torch.bfloat16, name)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (CONFIG, torch.float32),
        (config_of(8, 4, 24), torch.bfloat16),
        (config_of(8, 4, 64, windows=(0, 9)), torch.bfloat16),
    ],
)
def test_flashinfer_takes_what_it_was_compiled_for(monkeypatch, config, dtype):
    installed(monkeypatch, "flashinfer", "triton")
    assert choice._best(config, torch.device("cuda"), dtype) == "triton"
    with pytest.raises(ConfigInvalid, match=r"16 bits with heads of 64, 128 or 256, .*Set engine.gpu.attention to au"):
        make_attention(config, CPU, dtype, "flashinfer")
