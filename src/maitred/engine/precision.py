"""What a model is computed with and its weights are kept in: what was asked for, held against the device."""

from dataclasses import dataclass

import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig, Quantization


@dataclass(frozen=True, slots=True)
class Precision:
    """Types of numbers, settled."""

    dtype: torch.dtype
    """Of activations, of weights that are not rounded, and of the KV cache."""
    quantization: Quantization = "none"

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device) -> "Precision":
        """As configured; `auto` is what is fast on the device.

        Raises:
            ConfigInvalid: The device does not compute in what was asked for.
        """
        fast = "bf16" if device.type == "cuda" else "fp32"
        wanted = fast if config.dtype == "auto" else config.dtype
        if config.quantization != "none" and (device.type != "cpu" or wanted != "fp32"):
            raise ConfigInvalid(
                f"engine.quantization is {config.quantization}, which works with fp32 on a CPU, but the model is to "
                f"run in {wanted} on {device.type}. Set engine.device to cpu and engine.dtype to fp32, or "
                "engine.quantization to none."
            )
        return cls(torch.bfloat16 if wanted == "bf16" else torch.float32, config.quantization)

    def __str__(self) -> str:
        """Everything that an answer depends on: engines that say the same compute the same."""
        computed = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return computed if self.quantization == "none" else f"{computed}, {self.quantization} weights"
