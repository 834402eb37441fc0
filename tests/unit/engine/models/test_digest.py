import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from maitred.config.tree import BUNDLED_MODEL
from maitred.core.request import ModelFingerprint
from maitred.engine.models import digest
from maitred.engine.models.digest import WeightsCheck, content_digest, fingerprint_of


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(BUNDLED_MODEL, tmp_path / "copy")


def test_copies_are_the_same_however_they_are_written(copy):
    original = fingerprint_of(BUNDLED_MODEL)
    assert all((original.shape, original.tokenizer, original.weights))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "0"}, indent=7))
    (copy / "tokenizer.json").write_text(json.dumps(json.loads((copy / "tokenizer.json").read_text()), indent=3))
    assert fingerprint_of(copy) == original


def test_weights_may_be_spread_over_files(copy):
    original = fingerprint_of(copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, copy / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, copy / "model-2.safetensors")
    path.unlink()
    assert fingerprint_of(copy) == original


def test_every_tensor_counts(copy):
    original = fingerprint_of(copy)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    for name in list(tensors)[:: max(1, len(tensors) // 5)]:
        save_file({**tensors, name: tensors[name] + 1}, path)
        changed = fingerprint_of(copy)
        assert changed.weights != original.weights
        assert (changed.shape, changed.tokenizer) == (original.shape, original.tokenizer)
    save_file({name: tensor.to(torch.float64) for name, tensor in tensors.items()}, path)
    assert fingerprint_of(copy).weights != original.weights


def test_parts_that_are_not_there_are_not_compared_and_broken_ones_are(copy):
    original = fingerprint_of(copy)
    (copy / "model.safetensors").write_bytes(b"\xff" * 20)
    (copy / "tokenizer.json").write_text("{")
    broken = fingerprint_of(copy)
    assert original.differs_in(broken) == ["tokenizer.json", "weights"]
    (copy / "model.safetensors").unlink()
    (copy / "tokenizer.json").unlink()
    assert original.differs_in(fingerprint_of(copy)) == []
    assert fingerprint_of(copy).completed_by(original) == original
    assert fingerprint_of(copy / "nowhere") == ModelFingerprint()


def test_a_single_changed_bit_of_the_weights_changes_their_content(copy):
    original = content_digest(BUNDLED_MODEL)
    assert content_digest(copy) == original
    path = copy / "model.safetensors"
    data = path.read_bytes()
    for place in (len(data) // 3, len(data) // 2 + 1, len(data) - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert content_digest(copy) != original
    path.write_bytes(data)
    assert content_digest(copy) == original


def test_of_large_weights_the_times_of_their_files_count(copy, monkeypatch):
    path = copy / "model.safetensors"
    monkeypatch.setattr(digest, "MOST_READ_BYTES", path.stat().st_size - 1)
    before = content_digest(copy)
    assert content_digest(copy) == before
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert content_digest(copy) != before


def test_a_folder_without_weights_has_no_content(copy):
    (copy / "model.safetensors").unlink()
    assert content_digest(copy) == ""


def test_weights_that_were_exchanged_are_noticed_whatever_their_time_says(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    check = WeightsCheck(tmp_path)
    check.run()
    before = file.stat()
    other = tmp_path / "other"
    other.write_bytes(b"new")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    with pytest.raises(RuntimeError, match="exchanged"):
        check.run()
