"""A deeper model made from the bundled one, for which the bundled one drafts.

No small pair of models that belong together is at hand, and one made by leaving layers out of the bundled model says
nothing: with three of its five layers it chooses the same token half of the time, at two thirds of the cost. So it is
done the other way round. Behind the bundled model's layers come random ones, whose output is scaled down. With nothing
of it the deeper model says the same as the bundled one, at a multiple of the cost; the more of it, the less they agree.
So how often a draft is right is chosen here, and not found; what is measured is what that brings.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from maitred.config.tree import BUNDLED_MODEL

_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def make_deeper(folder: Path, *, layers: int, noise: float, seed: int) -> None:
    """Saves one.

    Args:
        folder: Created if need be.
        layers: In all; more than the bundled model has.
        noise: Part of the further layers' output that is kept.
        seed: Of the random layers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    weights = load_file(BUNDLED_MODEL / "model.safetensors")
    draw = torch.Generator().manual_seed(seed)
    of_first = {name: tensor for name, tensor in weights.items() if ".layers.0." in name}
    for layer in range(config["num_hidden_layers"], layers):
        for name, like in of_first.items():
            tensor = like.clone()
            if like.dim() > 1:
                scale = noise if name.endswith(_OUTPUTS) else 1.0
                tensor = torch.randn(like.shape, generator=draw).mul_(scale * like.float().std()).to(like.dtype)
            weights[name.replace(".layers.0.", f".layers.{layer}.")] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder / name)
