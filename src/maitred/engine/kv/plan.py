"""Division of the memory of a KV cache into blocks, and into blocks of layers with a window."""

from dataclasses import dataclass
from typing import NamedTuple

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig
from maitred.engine.kv.window import window_blocks_needed
from maitred.engine.models.config import ModelConfig


@dataclass(frozen=True)
class KVCachePlan:
    """Size of the KV cache, and the maximum sequence length that follows from it."""

    blocks: int
    context_tokens: int
    window_blocks: int = 0
    """Blocks of the layers with a window; 0: they use the same blocks as all layers."""
    window_spare: int = 0
    """Number of them that pins may hold; see `WindowPool`."""


class BlockBytes(NamedTuple):
    """Memory of a block."""

    whole: int
    """Of the layers that attend to the whole context, and of draft models."""
    window: int
    """Of the layers with a window, if these have blocks of their own; otherwise 0."""


def local_layers(model: ModelConfig, config: EngineConfig) -> int:
    """Returns how many layers have blocks of their own, because their window is shorter than the context."""
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    return sum(0 < window < context for window in model.windows)


def wanted_bytes(config: EngineConfig, model: ModelConfig, block_bytes: BlockBytes) -> int:
    """Returns the memory that all sequences at maximum length could use."""
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    blocks = -(-context // config.block_tokens) * config.max_sequences
    held, spare = _window_blocks(config, model, block_bytes)
    return blocks * block_bytes.whole + min(blocks, held + spare) * block_bytes.window


def plan_kv(config: EngineConfig, model: ModelConfig, *, block_bytes: BlockBytes, free_bytes: int) -> KVCachePlan:
    """Computes the size of the KV cache.

    A configured budget is used in full. Otherwise the cache gets a share of the free memory, up to the amount that all
    sequences at maximum length could use.

    Raises:
        ConfigInvalid: The budget is too small for the configured context length.
    """
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    budget = free_bytes if config.kv_memory_bytes is None else config.kv_memory_bytes
    blocks, window_blocks, spare = count_blocks(config, model, block_bytes, budget)
    capacity = blocks * config.block_tokens
    if capacity < min(context, config.context_tokens or 256):
        raise ConfigInvalid(
            f"The KV cache would hold {capacity} tokens, fewer than one sequence of {context}. "
            f"Raise engine.kv_memory_bytes (a token takes {sum(block_bytes) // config.block_tokens} bytes) "
            "or lower engine.context_tokens."
        )
    return KVCachePlan(blocks, min(context, capacity), window_blocks, spare)


def count_blocks(
    config: EngineConfig, model: ModelConfig, block_bytes: BlockBytes, budget: int
) -> tuple[int, int, int]:
    """Returns how many blocks fit into so much memory, of how many with a window, and how many of these pins may hold.

    Layers with a window get the blocks that all sequences could hold, and the other layers get the rest.
    """
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    most = -(-context // config.block_tokens) * config.max_sequences
    held, spare = _window_blocks(config, model, block_bytes)
    blocks = budget // sum(block_bytes)
    window_blocks = 0
    if block_bytes.window and blocks > held + spare:  # with so many, windows need fewer than whole contexts
        window_blocks = held + spare
        left = budget - window_blocks * block_bytes.window
        blocks = left // block_bytes.whole if block_bytes.whole else max(most, window_blocks + 1)
    if config.kv_memory_bytes is None:
        blocks = min(blocks, most)
    if block_bytes.window and blocks <= held + spare:
        # No sequence holds more blocks with a window than others, so none is ever missing.
        window_blocks = spare = blocks
    return blocks, window_blocks, spare


def _window_blocks(config: EngineConfig, model: ModelConfig, block_bytes: BlockBytes) -> tuple[int, int]:
    """Returns the blocks with a window that all sequences could hold, and those that pins may hold beside them."""
    if not block_bytes.window:
        return 0, 0
    held = window_blocks_needed(
        *(model.window, config.block_tokens),
        sequences=config.max_sequences + config.most_overcommit_slots,
        step_tokens=config.step_tokens,
    )
    return held, int(config.pins.share * held)
