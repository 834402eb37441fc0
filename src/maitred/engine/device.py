"""Device, threads and number formats that a model runs with."""

import logging
import os
from dataclasses import dataclass

import psutil
import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.compiled import processor_features
from maitred.engine.config import Device, EngineConfig, ProductFormat
from maitred.engine.kernels.linear.torchao_linear import check_torchao
from maitred.engine.lean_torch import complete_torch

_CPU_KV_SHARE = 0.25
"""Share of the memory that is free after loading; the rest is for activations and others."""

logger = logging.getLogger("maitred.engine")


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """Compute device, with the kind of kernels that it uses.

    Attributes:
        device: Device of weights, KV cache and activations.
        accelerated: Whether the engine is the one that a GPU runs: plain products, a cache that is laid out by tokens,
            graphs of decode steps, sampling in tensor operations. A CPU can run it too, slowly, and in the tests it
            does: what a GPU would compute is then computed step by step where there is none.
    """

    device: torch.device
    accelerated: bool

    @classmethod
    def of(cls, wanted: Device) -> "ComputeDevice":
        """Returns the configured device; `auto` is the GPU if there is one.

        Raises:
            ConfigInvalid: There is no such device.
        """
        found = torch.cuda.is_available()
        if wanted == "cuda" and not found:
            raise ConfigInvalid(f"engine.device is cuda, but {_why_none()}. Set it to cpu or auto.")
        if wanted == "auto" and not found:
            logger.info("No GPU is used, because %s: the model runs on the CPU", _why_none())
        if not found or wanted == "cpu":
            return cls(torch.device("cpu"), False)
        complete_torch()
        return cls(torch.device("cuda"), True)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, with its own memory, streams and graphs."""
        return self.device.type == "cuda"


def step_threads(configured: int, share: float = 1.0) -> int:
    """Returns the configured threads; for 0 a share of the usable cores minus one, at least one.

    Other processes need the core that is left; see `maitred.engine.lean_torch`.

    Args:
        configured: Number that the operator configured; 0: automatic.
        share: Share of the machine that this engine may use.
    """
    cores = len(os.sched_getaffinity(0)) - 1
    # 1e-9 compensates rounding: three shares of a third use three cores
    return configured or max(1, int(cores * share + 1e-9))


def kv_bytes_on_cpu() -> int:
    """Returns the bytes of the machine's memory that a KV cache takes by default."""
    return int(psutil.virtual_memory().available * _CPU_KV_SHARE)


def kv_bytes_on_gpu(*, free: int, total: int, peak: int, fraction: float) -> int:
    """Returns the bytes of a GPU's memory that are left for the KV cache; 0 if none are left.

    Args:
        free: Bytes that are free with the weights loaded.
        total: Total bytes of the device.
        peak: Measured bytes that the largest step takes in addition.
        fraction: Share of the device's memory that the engine may use, weights included.
    """
    return max(0, free - peak - int(total * (1 - fraction)))


def _why_none() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch finds no CUDA device"


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """Number formats of weights, activations and KV cache, without `auto`."""

    dtype: torch.dtype
    """Type of activations and of weights that are not quantised."""
    kv_dtype: torch.dtype
    quantization: ProductFormat = "none"

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> "PrecisionPlan":
        """Returns the configured precision; `auto` is the fast type of the device.

        Raises:
            ConfigInvalid: The device does not support the configured type.
        """
        fast = "bf16" if device.type == "cuda" else "fp32"
        wanted = fast if config.dtype == "auto" else config.dtype
        if config.quantization != "none" and device.type != "cpu":
            check_torchao(config.quantization, device)
            if wanted != "bf16":
                raise ConfigInvalid(
                    f"engine.quantization is {config.quantization}, which works with bf16 on a GPU. Set engine.dtype "
                    "to bf16 or auto, or engine.quantization to none."
                )
        elif config.quantization != "none" and (wanted != "fp32" or config.quantization.startswith("fp8")):
            raise ConfigInvalid(
                f"engine.quantization is {config.quantization}, but the model is to run in {wanted} on a CPU, which "
                "rounds weights of fp32 to int8 or int4. Set engine.dtype to fp32 and engine.quantization to one of "
                "these, or to none."
            )
        kv_wanted = wanted if config.kv_dtype == "auto" else config.kv_dtype
        if kv_wanted == "int8" and device.type != "cpu":
            raise ConfigInvalid(
                f"engine.kv_dtype is int8, which works on a CPU, but the model is to run on {device.type}. Set "
                "engine.kv_dtype to auto, or engine.device to cpu."
            )
        return cls(_DTYPES[wanted], _DTYPES[kv_wanted], config.quantization)

    def with_bf16_products(self) -> "PrecisionPlan":
        """Returns the plan of a CPU: where the processor multiplies bf16, only products are in bf16, and all else fp32.

        So rows are rounded before a product alone, sums are fp32, and a row does not depend on the rows beside it.
        """
        if self.dtype != torch.bfloat16 or "avx512bf16" not in processor_features():
            return self
        return PrecisionPlan(torch.float32, self.kv_dtype, "bf16")

    def __str__(self) -> str:
        """Names all formats that an answer depends on, so equal names mean equal answers."""
        parts = [_NAMES[self.dtype]]
        if self.quantization != "none":
            parts.append(f"{self.quantization} weights")
        if self.kv_dtype != self.dtype:
            parts.append(f"{_NAMES[self.kv_dtype]} KV")
        return ", ".join(parts)
