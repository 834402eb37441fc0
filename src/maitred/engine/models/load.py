"""Loading of a model from a folder to a decoder that runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from maitred.engine.config import AttentionKernels, ProductFormat
from maitred.engine.kernels.backend import AttentionBackend
from maitred.engine.kernels.cpu import CPUAttention
from maitred.engine.kernels.gpu.choice import make_attention
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.weights import keep_weights
from maitred.engine.weights_cache.config import WeightsCacheConfig


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Decoder of a loaded model with its configuration."""

    config: ModelConfig
    decoder: Decoder


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    scheme: ProductFormat = "none",
    accelerated: bool = False,
    attention: AttentionKernels = "auto",
    cache: WeightsCacheConfig = WeightsCacheConfig(enabled=False),  # noqa: B008 - frozen
    context_tokens: int | None = None,
) -> LoadedModel:
    """Reads a checkpoint and chooses the kernels for the device.

    Args:
        folder: Folder with ``config.json`` and safetensors files.
        dtype: fp32 or bf16, for weights, activations and KV cache.
        device: Device of the model.
        scheme: Quantisation of the linears' weights.
        accelerated: Whether the device is an accelerator; see `maitred.engine.device.ComputeDevice`.
        attention: Attention kernels on an accelerator.
        cache: Cache of converted weights.
        context_tokens: Longest text that will be computed, if it is shorter than the model's own. A rotary embedding
            may depend on it (longrope).

    Raises:
        ConfigInvalid: The checkpoint is not supported, or it is broken.
    """
    device = torch.device(device)
    config = ModelConfig.load(folder)
    if context_tokens is not None and context_tokens < config.context_tokens:
        config = msgspec.structs.replace(config, context_tokens=context_tokens)
    weights = keep_weights(folder, config, dtype, device, cache, scheme=scheme, accelerated=accelerated)
    backend: AttentionBackend[Any] = (
        make_attention(config, device, dtype, attention) if accelerated else CPUAttention(config)
    )
    return LoadedModel(config, Decoder(config, weights, backend, accelerated=accelerated))
