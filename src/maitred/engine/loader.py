"""Loader of models and KV caches for an engine's device and number formats."""

from dataclasses import dataclass
from pathlib import Path

from maitred.engine.accelerator import free_bytes_beside, make_graphed_decoder
from maitred.engine.config import EngineConfig
from maitred.engine.device import ComputeDevice, PrecisionPlan, kv_bytes_on_cpu
from maitred.engine.kv.plan import BlockSize, KVCachePlan, local_layers
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
            context_tokens=self.config.context_tokens,
        )

    def block_bytes(self, shape: ModelConfig, *drafts: ModelConfig) -> BlockSize:
        """Returns the bytes of one block of the KV cache, for a model and its draft models."""
        tokens, kv_dtype = self.config.block_tokens, self.precision.kv_dtype
        of_drafts = sum(KVCache.bytes_per_block(draft, tokens, kv_dtype) for draft in drafts)
        # The kernels of accelerators, and graphs of decodes, have one block table for all layers.
        local = 0 if self.target.accelerated else local_layers(shape, self.config)
        of_local = KVCache.bytes_per_block(shape, tokens, kv_dtype, layers=local)
        whole = KVCache.bytes_per_block(shape, tokens, kv_dtype, layers=shape.layers - local)
        return BlockSize(whole + of_drafts, of_local)

    def free_bytes(self, decoder: Decoder, sampler: Sampler) -> float:
        """Returns the bytes that this engine may use for its KV cache."""
        if self.target.accelerated:
            free = free_bytes_beside(decoder, sampler, self.config, self.precision.kv_dtype, self.target)
        else:
            free = kv_bytes_on_cpu()
        return free * self.config.machine_share

    def cache(self, shape: ModelConfig, blocks: int, window_blocks: int = 0) -> KVCache:
        """Makes an empty KV cache."""
        return make_cache(
            *(shape, blocks, self.config.block_tokens, self.precision.kv_dtype, self.target.device),
            accelerated=self.target.accelerated,
            window_blocks=window_blocks,
        )

    def warmed_up(self, decoder: Decoder, blocks: int, window_blocks: int = 0) -> tuple[Decoder, KVCache]:
        """Compiles a model's kernels, reserves its memory and makes its empty KV cache."""
        cache, config = self.cache(decoder.config, blocks, window_blocks), self.config
        decoder.warm_up(cache)
        rows = min(config.step_tokens, _MOST_RESERVED_ROWS)
        decoder.reserve(rows, min(rows, config.max_sequences + config.most_overcommit_slots), cache)
        return decoder, cache

    def with_cache(self, decoder: Decoder, plan: KVCachePlan) -> tuple[ForwardModel, KVCache]:
        """Returns the engine's model, with CUDA graphs where possible, and its empty KV cache."""
        _, cache = self.warmed_up(decoder, plan.blocks, plan.window_blocks)
        if self.target.accelerated:
            return make_graphed_decoder(decoder, cache, self.config, plan.context_tokens, self.target), cache
        return decoder, cache
