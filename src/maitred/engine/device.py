"""Where a model runs: on which device, and with whose kernels."""

import logging
from dataclasses import dataclass

import psutil
import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import Device
from maitred.engine.lean_torch import complete_torch

_CPU_KV_SHARE = 0.25
"""Of the memory that is free once the weights are loaded; the rest is for activations and others."""

logger = logging.getLogger("maitred.engine")


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """A device, and the kernels that go with it.

    Attributes:
        device: Where weights, cache and activations are.
        accelerated: Whether the engine is the one that a GPU runs: plain products, a cache that is laid out by tokens,
            graphs of decode steps, sampling in tensor operations. A CPU can run it too, slowly, and in the tests it
            does: what a GPU would compute is then computed step by step where there is none.
    """

    device: torch.device
    accelerated: bool

    @classmethod
    def of(cls, wanted: Device) -> "ComputeDevice":
        """As configured; `auto` is the GPU if there is one.

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
        """Whether the device has memory, streams and graphs of its own."""
        return self.device.type == "cuda"


def kv_bytes_on_cpu() -> int:
    """What a KV cache of its own accord takes of the machine's memory."""
    return int(psutil.virtual_memory().available * _CPU_KV_SHARE)


def kv_bytes_on_gpu(*, free: int, total: int, peak: int, fraction: float) -> int:
    """What is left of a GPU's memory for the KV cache; 0 if nothing is.

    Args:
        free: Bytes that are free with the weights loaded.
        total: Bytes of the device.
        peak: Bytes that the largest step takes besides, measured.
        fraction: Of the device that the engine, weights and all, may have; others keep the rest.
    """
    return max(0, free - peak - int(total * (1 - fraction)))


def _why_none() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "torch finds no CUDA device"
