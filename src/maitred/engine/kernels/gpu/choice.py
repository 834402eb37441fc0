"""Choice of the attention kernels on an accelerator, by the configuration and the installed packages."""

from importlib.util import find_spec
from typing import Any

import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import AttentionKernels
from maitred.engine.kernels.backend import AttentionBackend
from maitred.engine.kernels.gpu.sdpa import TorchAttention
from maitred.engine.models.config import ModelConfig

_PACKAGES = {"flashinfer": "flashinfer-python", "triton": "triton"}
"""Module -> package that provides it."""
FLASHINFER_HEADS = (64, 128, 256)
"""Head sizes that FlashInfer's prefill kernels are compiled for."""


def make_attention(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, wanted: AttentionKernels = "auto"
) -> AttentionBackend[Any]:
    """Makes the attention backend of that name; `auto` is the best one available.

    Args:
        config: Shape of the model.
        device: Device of the model.
        dtype: Type of the activations.
        wanted: Configured name.

    Raises:
        ConfigInvalid: The kernels are not installed, or do not compute in this type.
    """
    name = _best(config, device, dtype) if wanted == "auto" else wanted
    module = name if name != "torch" else None
    if module is not None and find_spec(module) is None:
        raise ConfigInvalid(
            f"engine.gpu.attention is {name}, which is not installed. Install it (pip install {_PACKAGES[name]}), or "
            "set engine.gpu.attention to auto."
        )
    if name == "flashinfer":
        if not _flashinfer_computes(config, dtype):
            raise ConfigInvalid(
                f"engine.gpu.attention is flashinfer, which computes in 16 bits with heads of {_or(FLASHINFER_HEADS)}, "
                "without windows, caps or scales of the scores, but this model has heads of "
                f"{config.head_dim}, a window of {config.window} and a cap of {config.score_cap:g} (0: none), and is "
                f"to run in {dtype}. Set engine.gpu.attention to auto."
            )
        from maitred.engine.kernels.gpu.flashinfer_attention import FlashInferAttention

        return FlashInferAttention(config, device, dtype)
    if name == "triton":
        from maitred.engine.kernels.gpu.triton_attention import TritonAttention

        return TritonAttention(config, device, dtype)
    return TorchAttention(config, device)


def _best(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> AttentionKernels:
    if device.type != "cuda" or find_spec("triton") is None:
        return "torch"
    if find_spec("flashinfer") is not None and _flashinfer_computes(config, dtype):
        return "flashinfer"
    return "triton"


def _flashinfer_computes(config: ModelConfig, dtype: torch.dtype) -> bool:
    plain = not config.windows and not config.score_cap and not config.score_scale
    return plain and dtype != torch.float32 and config.head_dim in FLASHINFER_HEADS


def _or(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" or {numbers[-1]}"
