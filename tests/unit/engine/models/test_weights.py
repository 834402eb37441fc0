import json
import re
from pathlib import Path

import pytest
import torch
import transformers
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


def test_tied_embeddings_need_no_head_but_use_one_of_their_own(tmp_path):
    make_model(tmp_path, "smollm")
    model = load_model(tmp_path, dtype=torch.float32)
    assert load(tmp_path).embedding.shape == (131, 48)
    tokens = random_tokens(model.config, 20)
    tied = Driver(model.decoder).prefill(tokens)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(Driver(load_model(tmp_path, dtype=torch.float32).decoder).prefill(tokens), tied)
    torch.manual_seed(1)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.randn(131, 48)}))
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        right = oracle(torch.tensor([tokens])).logits[0, -1]
    ours = Driver(load_model(tmp_path, dtype=torch.float32).decoder).prefill(tokens)
    torch.testing.assert_close(ours.view(-1, 131)[-1], right, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-1000], lambda data: b"", lambda data: b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_file_that_is_cut_is_named(tmp_path, shards, spoil):
    make_model(tmp_path, "qwen2", **({"max_shard_size": "40KB"} if shards else {}))
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(
        ConfigInvalid, match=rf"{re.escape(str(path))} cannot be read: .* Fetch the file again\."
    ) as fault:
        load(tmp_path)
    assert ("git lfs pull" in str(fault.value)) == path.read_bytes().startswith(b"version")


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
    with pytest.raises(ConfigInvalid, match="safetensors and GGUF only"):
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


@pytest.mark.parametrize("index", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": null}', "{"])
def test_an_index_of_another_form_is_named(tmp_path, index):
    make_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigInvalid, match=r"model\.safetensors\.index\.json cannot be read: .*Fetch it again"):
        load(tmp_path)


def test_a_tensor_that_is_named_twice_is_told_of(tmp_path):
    make_model(tmp_path / "whole", "llama")
    path = tmp_path / "whole" / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = next(name for name in header if name != "__metadata__")
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[end:])
    with pytest.raises(ConfigInvalid, match=rf"{re.escape(str(path))} cannot be read: {name} is in it twice"):
        load(tmp_path / "whole")
    make_model(tmp_path / "shards", "llama", max_shard_size="40KB")
    index = tmp_path / "shards" / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": shards})[:-2] + f', "{name}": "{shards[name]}"}}}}')
    with pytest.raises(ConfigInvalid, match=rf"{re.escape(str(index))} cannot be read: {name} is in it twice"):
        load(tmp_path / "shards")
