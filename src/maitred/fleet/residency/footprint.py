"""Memory footprint of a model before its first load, from its files and its settings.

It has three parts. The *weights* are the tensors of the checkpoint in the type that the engine computes with, plus the
embedding table once more in the type in which it is stored. The *KV cache* is `engine.kv_memory_bytes`; if this is not
set, it is what all sequences could use at full length, but no more than a quarter of the budget. The *process* is
Python, torch and the working memory of steps.
"""

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from maitred.core.replica import ModelCard
from maitred.engine.config import EngineConfig
from maitred.engine.gguf.file import count_numbers
from maitred.engine.kv.plan import BlockSize, count_blocks, local_layers, wanted_bytes
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.digest import weight_files

PROCESS_BYTES = 360 << 20
"""Memory of an engine process without weights and KV cache.

It was measured (proportional set size) with the bundled model on a CPU, less its weights: 270 MiB beside another
engine, which shares its libraries, and 355 MiB alone.
"""
_KV_SHARE = 4
"""Divisor of the budget: by default, a KV cache takes at most the budget divided by this number."""
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_SCALE_BYTES = 4
"""Bytes of the scale of each head's key, and of its value, in a KV cache of int8."""
_SCREENED_HEAD_WEIGHTS = 1 << 24
"""Least number of weights of an fp32 head that has an additional copy in 8 bits; see
`maitred.engine.kernels.linear.screened`."""
_WEIGHT_BYTES = {"int8": 1.02, "int8_weight_only": 1.02, "int4": 0.64, "int4_weight_only": 0.64}
"""Bytes of a quantized weight, including its part of the scales."""
_KEPT_8_BITS_BYTES = 1.08
"""Bytes of a weight that a GGUF file stores in 5 to 8 bits, as a CPU keeps it."""
_STORED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_BASE_LOAD_S = 4.0
_BYTES_PER_S = 300e6
"""Guesses for a first load: the start time of Python and torch, and the speed of reading and converting weights."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory footprint of a model.

    Attributes:
        engine: Settings of its engine, with the size of the KV cache decided.
        card: Card that its engine will give, as far as the files tell.
        weights_bytes: Bytes of the tensors, in the type that the engine computes with.
        load_s: Guess at the time of a load.
    """

    engine: EngineConfig
    card: ModelCard
    weights_bytes: int
    load_s: float

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self.engine.kv_memory_bytes or 0

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, KV cache and process together."""
        return self.weights_bytes + self.kv_bytes + PROCESS_BYTES

    def __str__(self) -> str:
        parts = {"weights": self.weights_bytes, "KV cache": self.kv_bytes, "process": PROCESS_BYTES}
        shares = ", ".join(f"{format_mebibytes(part_bytes)} {name}" for name, part_bytes in parts.items())
        return f"{format_mebibytes(self.total_bytes)} ({shares})"


def estimate_footprint(folder: Path, engine: EngineConfig, budget_bytes: int) -> Footprint:
    """Estimates the footprint from the folder's ``config.json`` and the sizes of its files.

    Args:
        folder: Folder of the model.
        engine: Settings of its engine.
        budget_bytes: Memory that all models may take together.

    Raises:
        ConfigInvalid: The folder holds no model that the engine can run.
    """
    model = ModelConfig.load(folder)
    # `auto` is bf16 on a GPU and fp32 on a CPU; the device is not known here, so the larger one counts.
    item_bytes = _ITEM_BYTES.get(engine.dtype, 4)
    weight_bytes = _WEIGHT_BYTES.get(engine.quantization, item_bytes)
    files = weight_files(folder)
    stored_bytes = sum(file.stat().st_size for file in files)
    stored_item_bytes = _STORED_BYTES.get(model.stored_dtype, 4)
    embedding_bytes = model.vocab_size * model.hidden_size * stored_item_bytes
    # Without a scheme, the head is unpacked. The table is counted below, and once more as the head where both are one.
    unpacked = ("token_embd.weight", "output.weight") if engine.quantization == "none" else ()
    counts = [count_numbers(file, unpacked=unpacked) for file in files]
    others, kept_4, kept_8 = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    if item_bytes < _ITEM_BYTES["fp32"]:
        others, kept_4, kept_8 = others + kept_4 + kept_8, 0, 0
    if not others + kept_4 + kept_8:
        others = stored_bytes // stored_item_bytes
    kept_bytes = kept_4 * _WEIGHT_BYTES["int4"] + kept_8 * min(weight_bytes, _KEPT_8_BITS_BYTES)
    weights_bytes = int(others * weight_bytes + kept_bytes) + embedding_bytes
    if weight_bytes == _ITEM_BYTES["fp32"] and model.vocab_size * model.hidden_size >= _SCREENED_HEAD_WEIGHTS:
        weights_bytes += model.vocab_size * model.hidden_size
    head_bytes = model.head_dim * _ITEM_BYTES.get(engine.kv_dtype, item_bytes)
    head_bytes += _SCALE_BYTES if engine.kv_dtype == "int8" else 0
    layer_bytes = 2 * model.kv_heads * head_bytes * engine.block_tokens
    local = 0 if engine.device not in ("auto", "cpu") else local_layers(model, engine)
    block_bytes = BlockSize((model.layers - local) * layer_bytes, local * layer_bytes)
    context_tokens = min(engine.context_tokens or model.context_tokens, model.context_tokens)
    wanted = wanted_bytes(engine, model, block_bytes)
    kv_bytes = engine.kv_memory_bytes or max(1 << 20, min(wanted, budget_bytes // _KV_SHARE))
    capacity_tokens = count_blocks(engine, model, block_bytes, kv_bytes)[0] * engine.block_tokens
    card = ModelCard(
        name=folder.resolve().name,
        context_tokens=min(context_tokens, capacity_tokens),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_sequences=engine.max_sequences,
        kv_capacity_tokens=capacity_tokens,
        max_choices=engine.max_sequences,
        dtype=engine.dtype,
        device=engine.device,
    )
    return Footprint(
        replace(engine, kv_memory_bytes=kv_bytes), card, weights_bytes, _BASE_LOAD_S + stored_bytes / _BYTES_PER_S
    )


def format_mebibytes(size: int) -> str:
    """Formats a size in MiB, for messages."""
    return f"{size / (1 << 20):,.0f} MiB"
