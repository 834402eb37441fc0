"""How many tokens an engine has room for."""

from dataclasses import dataclass

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig
from maitred.engine.models.config import ModelConfig


@dataclass(frozen=True)
class KVCachePlan:
    """How large the KV cache is, and so how long a sequence can be."""

    blocks: int
    context_tokens: int


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
