"""What a model is computed with and its weights are kept in: what was asked for, held against the device."""

from dataclasses import dataclass

import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig, Quantization
from maitred.engine.kernels.linear.torchao_linear import check_torchao

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """Types of numbers, settled."""

    dtype: torch.dtype
    """Of activations and of weights that are not rounded."""
    kv_dtype: torch.dtype
    quantization: Quantization = "none"

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> "PrecisionPlan":
        """As configured; `auto` is what is fast on the device.

        Raises:
            ConfigInvalid: The device does not compute in what was asked for.
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

    def __str__(self) -> str:
        """Everything that an answer depends on: engines that say the same compute the same."""
        parts = [_NAMES[self.dtype]]
        if self.quantization != "none":
            parts.append(f"{self.quantization} weights")
        if self.kv_dtype != self.dtype:
            parts.append(f"{_NAMES[self.kv_dtype]} KV")
        return ", ".join(parts)
