"""Loader of models and KV caches for an engine's device and number formats."""

from dataclasses import dataclass
from pathlib import Path

from maitred.core.errors import ConfigInvalid
from maitred.engine.accelerator import free_bytes_beside, make_graphed_decoder
from maitred.engine.config import EngineConfig
from maitred.engine.device import ComputeDevice, PrecisionPlan, kv_bytes_on_cpu
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.decoder import Decoder
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.load import LoadedModel, load_model
from maitred.engine.models.token_major import make_cache
from maitred.engine.runner import ForwardModel
from maitred.engine.sampling.sampler import Sampler

_MOST_RESERVED_ROWS = 2048
"""Maximum rows of a step for which memory is reserved at the start. The settings may allow a million rows, but steps of
this size are very rare."""


@dataclass(frozen=True)
class KVCachePlan:
    """Size of the KV cache, and the maximum sequence length that follows from it."""

    blocks: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Reads models and makes their caches.

    Attributes:
        config: The `engine` section.
        target: Device on which the models run.
        precision: Number formats of weights, activations and KV cache.
    """

    config: EngineConfig
    target: ComputeDevice
    precision: PrecisionPlan

    def model(self, folder: Path) -> LoadedModel:
        """Reads a model's weights, or maps them from the weights cache.

        Raises:
            ConfigInvalid: maitred does not support the model, or its files are broken.
        """
        return load_model(
            folder,
            dtype=self.precision.dtype,
            device=self.target.device,
            scheme=self.precision.quantization,
            accelerated=self.target.accelerated,
            attention=self.config.gpu.attention,
            cache=self.config.weights_cache,
        )

    def block_bytes(self, *shapes: ModelConfig) -> int:
        """Returns the bytes of one block of the KV cache, for all these models together."""
        config, kv_dtype = self.config, self.precision.kv_dtype
        return sum(KVCache.bytes_per_block(shape, config.block_tokens, kv_dtype) for shape in shapes)

    def free_bytes(self, decoder: Decoder, sampler: Sampler) -> float:
        """Returns the bytes that this engine may use for its KV cache."""
        if self.target.accelerated:
            free = free_bytes_beside(decoder, sampler, self.config, self.precision.kv_dtype, self.target)
        else:
            free = kv_bytes_on_cpu()
        return free * self.config.machine_share

    def cache(self, shape: ModelConfig, blocks: int) -> KVCache:
        """Makes an empty KV cache."""
        return make_cache(
            *(shape, blocks, self.config.block_tokens, self.precision.kv_dtype, self.target.device),
            accelerated=self.target.accelerated,
        )

    def warmed_up(self, decoder: Decoder, blocks: int) -> tuple[Decoder, KVCache]:
        """Compiles a model's kernels, reserves its memory and makes its empty KV cache."""
        cache, config = self.cache(decoder.config, blocks), self.config
        decoder.warm_up(cache)
        rows = min(config.step_tokens, _MOST_RESERVED_ROWS)
        decoder.reserve(rows, min(rows, config.max_sequences + config.most_overcommit_slots), cache)
        return decoder, cache

    def with_cache(self, decoder: Decoder, plan: KVCachePlan) -> tuple[ForwardModel, KVCache]:
        """Returns the engine's model, with CUDA graphs where possible, and its empty KV cache."""
        _, cache = self.warmed_up(decoder, plan.blocks)
        if self.target.accelerated:
            return make_graphed_decoder(decoder, cache, self.config, plan.context_tokens, self.target), cache
        return decoder, cache


def plan_kv(config: EngineConfig, model: ModelConfig, *, block_bytes: int, free_bytes: int) -> KVCachePlan:
    """Computes the size of the KV cache.

    A configured budget is used in full. Otherwise the cache gets a share of the free memory, up to the amount that all
    sequences at maximum length could use.

    Raises:
        ConfigInvalid: The budget is too small for the configured context length.
    """
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    wanted = -(-context // config.block_tokens)
    if config.kv_memory_bytes is not None:
        blocks = config.kv_memory_bytes // block_bytes
    else:
        blocks = min(free_bytes // block_bytes, wanted * config.max_sequences)
    capacity = blocks * config.block_tokens
    if capacity < min(context, config.context_tokens or 256):
        raise ConfigInvalid(
            f"The KV cache would hold {capacity} tokens, fewer than one sequence of {context}. "
            f"Raise engine.kv_memory_bytes (a token takes {block_bytes // config.block_tokens} bytes) "
            "or lower engine.context_tokens."
        )
    return KVCachePlan(blocks, min(context, capacity))
