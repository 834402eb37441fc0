import pytest
import torch

from maitred.core.errors import ConfigInvalid
from maitred.engine.gguf.tensors import checkpoint_name
from maitred.engine.models.config import ModelConfig
from maitred.engine.models.load import load_model
from maitred.engine.models.source import find_model
from maitred.engine.models.weights import load_weights
from tests.unit.engine.gguf.random_files import TYPES, make_gguf
from tests.unit.engine.models.steps import Driver, random_tokens

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def same(file, plain):
    """Whether both are the same model: logits of a prompt, and greedy tokens after it."""
    ours, theirs = (load_model(folder, dtype=torch.float32).decoder for folder in (find_model(file), plain))
    tokens = random_tokens(ours.config, 40)
    assert torch.allclose(Driver(ours).prefill(tokens), Driver(theirs).prefill(tokens), atol=1e-4)
    assert greedy(ours, tokens) == greedy(theirs, tokens)


def greedy(decoder, tokens, count=32):
    driver = Driver(decoder, num_blocks=64)
    line = driver.open(tokens)
    logits = driver.step([], [(line, len(tokens))])
    for _ in range(count):
        line.tokens.append(int(logits[0].argmax()))
        logits = driver.step([line], [])
    return line.tokens[len(tokens) :]


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_gives_the_model_with_its_numbers(tmp_path, kind):
    make_gguf(tmp_path / "model.gguf", tmp_path / "plain", kind=kind)
    same(tmp_path / "model.gguf", tmp_path / "plain")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_family(tmp_path, family, tied):
    make_gguf(tmp_path / "model.gguf", tmp_path / "plain", family=family, tied=tied)
    same(tmp_path / "model.gguf", tmp_path / "plain")


def test_split_file(tmp_path):
    make_gguf(tmp_path / "files" / "model.gguf", tmp_path / "plain", parts=3)
    for name in ("model-00001-of-00003.gguf", "model-00003-of-00003.gguf"):
        same(tmp_path / "files" / name, tmp_path / "plain")
    same(tmp_path / "files", tmp_path / "plain")


QUANTISED = [kind for kind in TYPES if kind not in ("F32", "F16", "BF16")]


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("scheme", ["none", "int8", "int8_weight_only"])
def test_numbers_stay_as_they_are(tmp_path, kind, scheme):
    """Products with one input alone show each weight: it is that of the format, and nothing was rounded again."""
    make_gguf(tmp_path / "model.gguf", tmp_path / "plain", kind=kind)
    config = ModelConfig.load(tmp_path / "plain")
    ours = load_weights(find_model(tmp_path / "model.gguf"), config, torch.float32, CPU, scheme=scheme)
    theirs = load_weights(tmp_path / "plain", config, torch.float32, CPU)
    assert ours.forms["quantised"] == (8 if scheme == "none" else 9)  # without a scheme, the head is unpacked
    for own, right in zip(ours.products, theirs.products, strict=True):
        rows = torch.eye(256)
        assert torch.allclose(own(rows), right(rows), rtol=1e-6, atol=1e-7 if scheme != "int8" else 1e-6)


@pytest.mark.parametrize(("kind", "kept"), [("Q4_0", True), ("Q4_K", True), ("Q5_K", False), ("Q8_0", False)])
def test_numbers_of_8_bits_are_rounded_where_4_are_asked_for(tmp_path, kind, kept):
    make_gguf(tmp_path / "model.gguf", tmp_path / "plain", kind=kind)
    config = ModelConfig.load(tmp_path / "plain")
    ours, theirs = (
        load_weights(folder, config, torch.float32, CPU, scheme="int4_weight_only" if rounded else "none")
        for folder, rounded in ((find_model(tmp_path / "model.gguf"), True), (tmp_path / "plain", False))
    )
    rows = torch.eye(256)
    for own, right in zip(ours.products, theirs.products, strict=True):
        assert own.kind == "quantised"
        assert torch.allclose(own(rows), right(rows), rtol=1e-6, atol=1e-7) is kept


def test_matrices_of_different_types_are_kept_together(tmp_path):
    """As in files named Q4_K_M, where values have other types than queries and keys."""
    kinds = {"attn_v": "Q6_K", "ffn_up": "Q5_0", "ffn_down": "Q6_K"}
    make_gguf(tmp_path / "model.gguf", tmp_path / "plain", kind="Q4_K", kinds=kinds)
    config = ModelConfig.load(tmp_path / "plain")
    ours = load_weights(find_model(tmp_path / "model.gguf"), config, torch.float32, CPU)
    assert ours.forms["quantised"] == 8
    same(tmp_path / "model.gguf", tmp_path / "plain")


def test_numbers_are_unpacked_for_other_computations(tmp_path):
    make_gguf(tmp_path / "model.gguf", kind="Q4_0")
    folder = find_model(tmp_path / "model.gguf")
    assert load_model(folder, dtype=torch.bfloat16).decoder.forms == {"plain": 9}
    on_device = load_model(folder, dtype=torch.float32, accelerated=True, attention="torch").decoder
    assert on_device.forms == {"plain": 9}


def test_unknown_tensor_is_refused(tmp_path):
    assert checkpoint_name("blk.3.attn_sinks.weight") == "blk.3.attn_sinks.weight"
    make_gguf(tmp_path / "model.gguf", family="qwen3")
    data = (tmp_path / "model.gguf").read_bytes().replace(b"attn_k_norm", b"attn_j_norm")
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ConfigInvalid, match="k_norm"):
        load_model(find_model(tmp_path / "model.gguf"), dtype=torch.float32)
