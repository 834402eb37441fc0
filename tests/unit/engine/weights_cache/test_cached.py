import logging
import os
from pathlib import Path

import pytest
import torch

from maitred.config.tree import BUNDLED_MODEL
from maitred.engine.models.batch import BatchChunk, ForwardBatch
from maitred.engine.models.kv_cache import KVCache
from maitred.engine.models.load import load_model
from maitred.engine.weights_cache.cached import cache_folder
from maitred.engine.weights_cache.config import WeightsCacheConfig
from maitred.engine.weights_cache.key import cache_key


@pytest.fixture
def config(tmp_path):
    return WeightsCacheConfig(folder=str(tmp_path / "weights"))


def files(config):
    return sorted(Path(config.folder).glob("*"))


def logits(config, dtype=torch.float32, scheme="none"):
    """What the bundled model says to five tokens, to the last bit."""
    model = load_model(BUNDLED_MODEL, dtype=dtype, cache=config, scheme=scheme)
    tokens = torch.arange(40, 45)
    places = torch.arange(5)
    step = ForwardBatch(tokens, places, slots=places, logit_rows=places, chunks=[BatchChunk(0, 5, 0, [0])])
    return model.decoder.forward(step, KVCache(model.config, 1, 16, dtype, "cpu"))


@pytest.mark.parametrize(
    ("dtype", "scheme"),
    [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.float32, "int8"), (torch.float32, "int4")],
)
def test_mapped_weights_compute_the_same_to_the_last_bit(config, dtype, scheme):
    converted = logits(WeightsCacheConfig(enabled=False), dtype, scheme)
    assert torch.equal(logits(config, dtype, scheme), converted)
    (file,) = files(config)
    assert file.suffix == ".weights"
    written = file.stat().st_ctime_ns, file.stat().st_ino
    assert torch.equal(logits(config, dtype, scheme), converted)
    assert file.stat().st_ino == written[1]


def test_weights_that_are_mapped_are_no_memory_of_the_process(config):
    kept = logits(config)
    before = {line for line in Path("/proc/self/maps").read_text().splitlines() if config.folder in line}
    assert before == set(), "the model that made them is gone, and so is its mapping"
    model = load_model(BUNDLED_MODEL, dtype=torch.float32, cache=config)
    assert any(config.folder in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert model.decoder.dtype == torch.float32
    assert kept.dtype == torch.float32


def test_a_broken_file_is_written_anew_with_a_warning(config, caplog):
    first = logits(config)
    (file,) = files(config)
    file.write_bytes(b"of somebody else")
    with caplog.at_level(logging.WARNING, "maitred.engine"):
        assert torch.equal(logits(config), first)
    assert "written anew" in caplog.text
    assert file.stat().st_size > 1 << 20


def test_a_folder_that_cannot_be_written_to_costs_time_and_nothing_else(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    config = WeightsCacheConfig(folder=str(tmp_path / "file" / "weights"))
    with caplog.at_level(logging.WARNING, "maitred.engine"):
        assert torch.equal(logits(config), logits(WeightsCacheConfig(enabled=False)))
    assert "cannot be kept" in caplog.text


def test_a_model_that_is_larger_than_all_may_be_is_not_kept(tmp_path, caplog):
    config = WeightsCacheConfig(folder=str(tmp_path), most_bytes=1 << 20)
    with caplog.at_level(logging.WARNING, "maitred.engine"):
        logits(config)
    assert "engine.weights_cache.most_bytes" in caplog.text
    assert files(config) == []


def test_nothing_is_kept_where_that_is_switched_off(config, tmp_path):
    logits(WeightsCacheConfig(enabled=False, folder=config.folder))
    assert not Path(config.folder).exists()


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"XDG_CACHE_HOME": "/var/cache"}, Path("/var/cache/maitred/weights")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "maitred" / "weights"),
        ({}, Path.home() / ".cache" / "maitred" / "weights"),
    ],
)
def test_they_are_in_the_users_cache_unless_configured_otherwise(env, folder):
    assert cache_folder(WeightsCacheConfig(), env) == folder
    assert cache_folder(WeightsCacheConfig(folder="/here"), env) == Path("/here")


def test_the_key_changes_with_the_form_the_threads_and_the_checkpoint(tmp_path):
    copy = tmp_path / "model"
    copy.mkdir()
    for path in BUNDLED_MODEL.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
            os.utime(copy / path.name, ns=(path.stat().st_mtime_ns,) * 2)
    key = cache_key(BUNDLED_MODEL, {"dtype": "float32"})
    assert cache_key(copy, {"dtype": "float32"}) == key, "a copy is the same model"
    assert cache_key(copy, {"dtype": "bfloat16"}) != key
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert cache_key(copy, {"dtype": "float32"}) != key
    finally:
        torch.set_num_threads(threads)
    os.utime(copy / "model.safetensors")
    assert cache_key(copy, {"dtype": "float32"}) != key
