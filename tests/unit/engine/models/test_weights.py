import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from maitred.core.errors import ConfigInvalid
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.load import load_model
from maitred.engine.models.weights import load_weights
from tests.support.models import make_model
from tests.unit.engine.models.steps import Driver, random_tokens

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32):
    return load_weights(folder, ModelConfig.load(folder), dtype, CPU)


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_sharded_checkpoint_is_the_same_model(tmp_path):
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    make_model(whole, "qwen2")
    make_model(shards, "qwen2", max_shard_size="40KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    first, second = (load_model(folder, dtype=torch.float32) for folder in (whole, shards))
    tokens = random_tokens(first.config, 20)
    assert torch.equal(Driver(first.decoder).prefill(tokens), Driver(second.decoder).prefill(tokens))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cast(tmp_path, stored, dtype):
    make_model(tmp_path, "llama", dtype=stored)
    assert load(tmp_path, dtype).final_norm.dtype == dtype
    assert load(tmp_path, dtype).embedding.dtype == stored


def test_tied_embeddings_need_no_head_and_ignore_one(tmp_path):
    make_model(tmp_path, "smollm")
    assert load(tmp_path).embedding.shape == (131, 48)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(131, 48)}))
    load(tmp_path)


def test_missing_tensor(tmp_path):
    make_model(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigInvalid, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_unexpected_tensors(tmp_path):
    make_model(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.update({f"model.layers.0.lora.{i}": torch.zeros(1) for i in range(5)}))
    with pytest.raises(ConfigInvalid, match=r"does not know: model\.layers\.0\.lora\.0.* and 2 more"):
        load(tmp_path)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path):
    make_model(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(tmp_path)


def test_shape_mismatch(tmp_path):
    make_model(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32)}))
    with pytest.raises(ConfigInvalid, match=r"shape \[32\].*announces \[64\]"):
        load(tmp_path)


def test_integer_weights(tmp_path):
    make_model(tmp_path, "llama")
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}))
    with pytest.raises(ConfigInvalid, match="int8"):
        load(tmp_path)


def test_missing_files(tmp_path):
    make_model(tmp_path, "llama", max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigInvalid, match=f"lacks the weight files {shard.name}"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigInvalid, match="safetensors only"):
        load(tmp_path)


def test_broken_files(tmp_path):
    make_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({}))
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        load(tmp_path)
