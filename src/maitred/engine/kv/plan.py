"""Division of the memory of a KV cache into blocks, and into blocks of layers with a window."""

from dataclasses import dataclass
from typing import NamedTuple

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig
from maitred.engine.kv.window import window_blocks_needed
from maitred.engine.models.config import ModelConfig

_UNUSED = 8
"""One block with a window for so many others, beyond those that sequences and pins can hold. A prefix that nobody uses
needs few: those at its end."""


@dataclass(frozen=True)
class KVCachePlan:
    """Size of the KV cache, and the maximum sequence length that follows from it."""

    blocks: int
    context_tokens: int
    window_blocks: int = 0
    """Blocks of the layers with a window; 0: they use the same blocks as all layers."""
    window_pin_blocks: int = 0
    """Number of them that pins may hold; see `WindowPool`."""


class BlockSize(NamedTuple):
    """Memory of a block."""

    whole: int
    """Bytes for the layers that attend to the whole context, and for draft models."""
    window: int
    """Bytes for the layers with a window, if these have blocks of their own; otherwise 0."""


def local_layers(model: ModelConfig, config: EngineConfig) -> int:
    """Returns how many layers have blocks of their own, because their window is shorter than the context."""
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    return sum(0 < window < context for window in model.windows)


def wanted_bytes(config: EngineConfig, model: ModelConfig, block_bytes: BlockSize) -> int:
    """Returns the memory that all sequences at maximum length could use."""
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    blocks = -(-context // config.block_tokens) * config.max_sequences
    least = sum(_window_blocks(config, model, block_bytes))
    return blocks * block_bytes.whole + _beside(blocks, least) * block_bytes.window


def plan_kv(config: EngineConfig, model: ModelConfig, *, block_bytes: BlockSize, free_bytes: int) -> KVCachePlan:
    """Computes the size of the KV cache.

    A configured budget is used in full. Otherwise the cache gets a share of the free memory, up to the amount that all
    sequences at maximum length could use.

    Raises:
        ConfigInvalid: The budget is too small for the configured context length.
    """
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    budget = free_bytes if config.kv_memory_bytes is None else config.kv_memory_bytes
    blocks, window_blocks, pin_blocks = count_blocks(config, model, block_bytes, budget)
    capacity = blocks * config.block_tokens
    if capacity < min(context, config.context_tokens or 256):
        raise ConfigInvalid(
            f"The KV cache would hold {capacity} tokens, fewer than one sequence of {context}. "
            f"Raise engine.kv_memory_bytes (a token takes {sum(block_bytes) // config.block_tokens} bytes) "
            "or lower engine.context_tokens."
        )
    return KVCachePlan(blocks, min(context, capacity), window_blocks, pin_blocks)


def count_blocks(config: EngineConfig, model: ModelConfig, block_bytes: BlockSize, budget: int) -> tuple[int, int, int]:
    """Returns how many blocks fit into so much memory, of how many with a window, and how many of these pins may hold.

    Layers with a window get the blocks that all sequences could hold, and an eighth of what the other layers have
    beyond that, for prefixes that nobody uses now.
    """
    context = min(config.context_tokens or model.context_tokens, model.context_tokens)
    most = -(-context // config.block_tokens) * config.max_sequences
    held, pin_blocks = _window_blocks(config, model, block_bytes)
    least, whole, window = held + pin_blocks, block_bytes.whole, block_bytes.window
    blocks = budget // (whole + window)
    if window and blocks > least:  # with so many, windows need fewer than whole contexts
        blocks = (_UNUSED * budget - (_UNUSED - 1) * least * window) // (_UNUSED * whole + window)
        if not whole:  # they take no memory
            blocks = min(blocks, max(most, least + 1))
    if config.kv_memory_bytes is None:
        blocks = min(blocks, most)
    if not window:
        return blocks, 0, 0
    # If there are as many of both kinds, no sequence holds more with a window than others, so none is ever missing.
    return blocks, _beside(blocks, least), pin_blocks if blocks > least else blocks


def _beside(blocks: int, least: int) -> int:
    """Returns how many blocks with a window stand beside so many others, if sequences and pins hold `least` at most."""
    return min(blocks, least + max(0, blocks - least) // _UNUSED)


def _window_blocks(config: EngineConfig, model: ModelConfig, block_bytes: BlockSize) -> tuple[int, int]:
    """Returns the blocks with a window that all sequences could hold, and those that pins may hold beside them."""
    if not block_bytes.window:
        return 0, 0
    held = window_blocks_needed(
        *(model.window, config.block_tokens),
        sequences=config.max_sequences + config.most_overcommit_slots,
        step_tokens=config.step_tokens,
    )
    return held, int(config.pins.share * held)
