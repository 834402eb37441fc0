"""From the folder of a model to one that can compute, in the numbers and on the device of an engine."""

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
"""Of a step, for which memory is taken at the start. Settings may allow a million, which hardly ever come."""


@dataclass(frozen=True)
class KVCachePlan:
    """How large the KV cache is, and so how long a sequence can be."""

    blocks: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Reads models and makes their caches.

    Attributes:
        config: The `engine` section.
        target: Where they run.
        precision: The numbers that they are computed with.
    """

    config: EngineConfig
    target: ComputeDevice
    precision: PrecisionPlan

    def model(self, folder: Path) -> LoadedModel:
        """Reads one, or maps it.

        Raises:
            ConfigInvalid: It is not one that maitred runs, or it is broken.
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
        """The memory that this engine may take for its cache."""
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
        """A model whose kernels are compiled and whose memory is at hand, and its empty cache."""
        cache, config = self.cache(decoder.config, blocks), self.config
        decoder.warm_up(cache)
        rows = min(config.step_tokens, _MOST_RESERVED_ROWS)
        decoder.reserve(rows, min(rows, config.max_sequences + config.most_overcommit_slots), cache)
        return decoder, cache

    def with_cache(self, decoder: Decoder, plan: KVCachePlan) -> tuple[ForwardModel, KVCache]:
        """The engine's model, its steps recorded where they can be, and its empty cache."""
        _, cache = self.warmed_up(decoder, plan.blocks)
        if self.target.accelerated:
            return make_graphed_decoder(decoder, cache, self.config, plan.context_tokens, self.target), cache
        return decoder, cache


def plan_kv(config: EngineConfig, model: ModelConfig, *, block_bytes: int, free_bytes: int) -> KVCachePlan:
    """Sizes the KV cache.

    A budget that is configured is spent in full. Otherwise the cache gets a share of the free memory, but no more than
    all sequences at full length could use.

    Raises:
        ConfigInvalid: The budget does not hold what was asked for.
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
