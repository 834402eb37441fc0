"""Variants of a model with changed weights, which answer differently, without a download."""

import json
import random
import shutil
from pathlib import Path

_WEIGHTS = "model.safetensors"
_FLIPPED = 0.02
"""Share of the weights whose sign is inverted: enough for other answers, but still real words."""


def make_variant(model: Path, folder: Path, seed: int) -> None:
    """Saves a model to a folder, with the signs of a few weights inverted.

    Args:
        model: Folder of the model, with one file of bf16 weights.
        folder: Target folder, which is created if needed.
        seed: Seed that selects the weights; 0 changes none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != _WEIGHTS:
            shutil.copy(file, folder)
    weights = bytearray((model / _WEIGHTS).read_bytes())
    header_end = 8 + int.from_bytes(weights[:8], "little")
    tensors = json.loads(weights[8:header_end])
    draw = random.Random(seed)
    for name, tensor in sorted(tensors.items()):
        if seed and name.endswith("mlp.down_proj.weight"):
            start, end = (header_end + offset for offset in tensor["data_offsets"])
            entries = (end - start) // 2  # bf16, whose sign is the highest bit of the second byte
            for entry in draw.sample(range(entries), int(entries * _FLIPPED)):
                weights[start + 2 * entry + 1] ^= 0x80
    (folder / _WEIGHTS).write_bytes(weights)
