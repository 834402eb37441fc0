import json
import os

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.engine.config import EngineConfig
from maitred.engine.gguf.folder import make_gguf_folder
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.digest import WeightsCheck, content_digest, fingerprint_of
from maitred.engine.models.source import find_model
from maitred.fleet.residency.footprint import estimate_footprint
from maitred.text.generation_defaults import GenerationDefaults
from maitred.text.tokenizer import Tokenizer
from tests.unit.engine.gguf.random_files import make_gguf


@pytest.fixture
def env(tmp_path):
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_CACHE": str(tmp_path / "hub")}


def test_folder_of_a_file(tmp_path, env):
    make_gguf(tmp_path / "Small-1B.Q8_0.gguf", **{"general.sampling.temp": 0.5, "general.sampling.top_k": 30})
    folder = find_model(tmp_path / "Small-1B.Q8_0.gguf", env=env)
    assert folder.name == "Small-1B.Q8_0"
    config = ModelConfig.load(folder)
    assert (config.architecture, config.hidden_size, config.kv_heads, config.context_tokens) == (
        "LlamaForCausalLM",
        256,
        2,
        512,
    )
    assert config.eos_token_ids == (2, 0), "its own end, and another that is known for one"
    assert GenerationDefaults.of(folder) == GenerationDefaults(temperature=0.5, top_k=30)
    assert Tokenizer.load(folder).decode(Tokenizer.load(folder).encode("hello 12", add_special_tokens=False)) == (
        "hello 12"
    )
    assert find_model(folder, env=env) == folder, "it is a model folder itself"


def test_it_is_made_once_and_anew_for_another_file(tmp_path, env):
    path = tmp_path / "a.gguf"
    make_gguf(path)
    first = make_gguf_folder(path, env)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert make_gguf_folder(path, env) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    os.utime(path, ns=(1, 1))
    assert make_gguf_folder(path, env) != first
    assert [entry for entry in first.parent.iterdir() if entry.name.startswith(".")] == []


def test_folder_with_one_file_and_with_several(tmp_path, env):
    make_gguf(tmp_path / "one" / "a.gguf")
    assert find_model(tmp_path / "one", env=env).name == "a"
    (tmp_path / "one" / "config.json").write_text('{"model_type": "llama"}')
    assert find_model(tmp_path / "one", env=env).name == "a", "a description beside the file is no checkpoint"
    make_gguf(tmp_path / "one" / "b.gguf")
    with pytest.raises(ConfigInvalid, match=r"several models: a\.gguf, b\.gguf.*maitred serve .*a\.gguf"):
        find_model(tmp_path / "one", env=env)


def test_other_files_are_no_models(tmp_path, env):
    (tmp_path / "x.bin").write_bytes(b"x")
    with pytest.raises(ConfigInvalid, match="is no model"):
        find_model(tmp_path / "x.bin", env=env)
    with pytest.raises(ConfigInvalid, match="does not exist"):
        find_model(tmp_path / "none.gguf", env=env)
    with pytest.raises(ConfigInvalid, match="does not exist"):
        find_model("none.gguf", env=env)


def test_file_of_a_model_on_the_hub(tmp_path, env):
    asked = []

    def download(name, revision, cache, files):
        asked.append((name, list(files)))
        folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / revision
        make_gguf(folder / "q" / "m.gguf", parts=2)
        return folder

    source = "owner/name/q/m-00001-of-00002.gguf"
    folder = find_model(source, env=env, download=download)
    assert folder.name == "m"
    assert asked == [("owner/name", ["q/m-*-of-00002.gguf"])]
    assert find_model(source, env=env, download=download) == folder
    assert len(asked) == 1
    with pytest.raises(ConfigInvalid, match=r"has no file other\.gguf"):
        find_model("owner/name/other.gguf", env=env, download=lambda *_: folder)


def test_cache_that_cannot_be_written(tmp_path):
    make_gguf(tmp_path / "a.gguf")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigInvalid, match="Set XDG_CACHE_HOME"):
        make_gguf_folder(tmp_path / "a.gguf", {"XDG_CACHE_HOME": str(tmp_path / "file")})


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"seed": 1}, ["weights"]),
        ({"tokenizer.ggml.merges": ["h e", "l l"]}, ["tokenizer.json"]),
        ({"llama.rope.freq_base": 5000.0}, ["config.json"]),
    ],
)
def test_what_differs_has_another_fingerprint(tmp_path, env, change, differs):
    make_gguf(tmp_path / "a.gguf")
    make_gguf(tmp_path / "b.gguf", **change)
    make_gguf(tmp_path / "c.gguf")
    one, other, same = (
        fingerprint_of(make_gguf_folder(tmp_path / name, env)) for name in ("a.gguf", "b.gguf", "c.gguf")
    )
    assert all((one.shape, one.tokenizer, one.weights))
    assert one.differs_in(other) == differs
    assert one == same


def test_every_byte_counts_for_answers_that_are_kept(tmp_path, env):
    path = tmp_path / "a.gguf"
    make_gguf(path)
    before = content_digest(make_gguf_folder(path, env))
    data = bytearray(path.read_bytes())
    data[-100_001] ^= 1
    path.write_bytes(data)
    assert content_digest(make_gguf_folder(path, env)) != before


def test_memory_that_a_file_takes(tmp_path, env):
    """Layers stay as they are in fp32; all else is unpacked, as its numbers say and not the bytes of the file."""
    layers, table = 2 * 7 * 256 * 256 - 2 * 4 * 64 * 256, 263 * 256
    bytes_of = {}
    for kind in ("F32", "Q4_0", "Q4_K", "Q5_0", "Q8_0"):
        make_gguf(tmp_path / f"{kind}.gguf", kind=kind)
        folder = make_gguf_folder(tmp_path / f"{kind}.gguf", env)
        for scheme, dtype in (("none", "auto"), ("int8", "auto"), ("none", "bf16"), ("int4", "auto")):
            engine = EngineConfig(quantization=scheme, dtype=dtype)
            bytes_of[kind, scheme, dtype] = estimate_footprint(folder, engine, 1 << 30).weights_bytes
    assert bytes_of["F32", "none", "auto"] == pytest.approx(4 * (layers + 3 * table), rel=0.01)
    assert bytes_of["Q4_0", "none", "auto"] == pytest.approx(0.64 * layers + 4 * 3 * table, rel=0.01)
    assert bytes_of["Q5_0", "none", "auto"] == pytest.approx(1.08 * layers + 4 * 3 * table, rel=0.01)
    assert bytes_of["Q4_0", "int8", "auto"] == pytest.approx(0.64 * (layers + 2 * table) + 4 * table, rel=0.01)
    assert bytes_of["Q8_0", "none", "bf16"] == bytes_of["F32", "none", "bf16"]
    assert bytes_of["Q8_0", "int4", "auto"] == bytes_of["Q4_0", "int4", "auto"]
    for scheme in ("none", "int8"):
        assert bytes_of["Q4_0", scheme, "auto"] == bytes_of["Q4_K", scheme, "auto"]
        assert bytes_of["Q5_0", scheme, "auto"] == bytes_of["Q8_0", scheme, "auto"]


def test_an_exchanged_file_is_noticed_through_the_link(tmp_path, env):
    make_gguf(tmp_path / "a.gguf")
    check = WeightsCheck(make_gguf_folder(tmp_path / "a.gguf", env))
    check.run()
    (tmp_path / "a.gguf").unlink()
    make_gguf(tmp_path / "a.gguf", seed=1)
    with pytest.raises(RuntimeError, match="exchanged"):
        check.run()


def test_template_reaches_the_tokenizer(tmp_path, env):
    make_gguf(tmp_path / "a.gguf")
    tokenizer = Tokenizer.load(make_gguf_folder(tmp_path / "a.gguf", env))
    ids = tokenizer.encode_conversation([{"role": "user", "content": "hello"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1
    several = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools"}
    make_gguf(tmp_path / "b.gguf", **several)
    settings = json.loads((make_gguf_folder(tmp_path / "b.gguf", env) / "tokenizer_config.json").read_text())
    assert [entry["name"] for entry in settings["chat_template"]] == ["default", "tool_use"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": "mamba"}, "architecture mamba, .* It runs llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.value_length": 32}, "different widths"),
        ({"llama.block_count": [2, 3]}, "different values"),
        ({"tokenizer.ggml.model": "bert"}, "kind bert"),
        ({"tokenizer.ggml.pre": "mine"}, "by the rule mine"),
        ({"tokenizer.ggml.token_type": [1]}, "no complete vocabulary"),
    ],
)
def test_what_is_not_read_is_said(tmp_path, env, change, reason):
    make_gguf(tmp_path / "a.gguf", **change)
    with pytest.raises(ConfigInvalid, match=reason):
        make_gguf_folder(tmp_path / "a.gguf", env)
    assert not list((tmp_path / "cache").rglob("*.json"))
