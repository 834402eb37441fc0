import struct

import pytest

from maitred.core.errors import ConfigInvalid
from maitred.engine.gguf.file import GGUFHeader, count_numbers, gguf_models, gguf_parts, model_name
from tests.unit.engine.gguf.random_files import StoredTensor, make_gguf, write_gguf

METADATA = {
    "general.architecture": "llama",
    "a.number": 7,
    "a.share": 0.5,
    "a.flag": True,
    "a.list": ["é", "", "x"],
    "a.numbers": [1, 2, 3],
}


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_entries(tmp_path, version):
    tensors = {
        "first": StoredTensor((3, 32), "Q8_0", bytes(range(102))),
        "second": StoredTensor((5,), "F32", struct.pack("<5f", *range(5))),
    }
    path = tmp_path / "x.gguf"
    write_gguf(path, METADATA, tensors, version=version)
    header = GGUFHeader.read(path)
    assert header.metadata == METADATA
    for name, tensor in tensors.items():
        entry = header.tensors[name]
        assert (entry.shape, entry.format.name) == (tensor.shape, tensor.type)
        assert entry.offset % 32 == 0
        assert path.read_bytes()[entry.offset : entry.offset + entry.bytes] == tensor.data
    assert count_numbers(path) == (5, 0, 96)
    assert count_numbers(path, unpacked=["first"]) == (101, 0, 0)
    assert count_numbers(tmp_path / "model.safetensors") == (0, 0, 0)


def test_alignment_of_its_own(tmp_path):
    write_gguf(tmp_path / "x.gguf", {"general.alignment": 64}, {"a": StoredTensor((1,), "F32", bytes(4))})
    data = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(data + bytes(64))
    assert GGUFHeader.read(tmp_path / "x.gguf").tensors["a"].offset % 64 == 0


@pytest.mark.parametrize("length", [0, 3, 20, 60, 200, -1])
def test_cut_file(tmp_path, length):
    make_gguf(tmp_path / "x.gguf")
    data = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(data[: length if length >= 0 else -40])
    with pytest.raises(ConfigInvalid, match="Fetch it again"):
        GGUFHeader.read(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"PK\3\4" + bytes(60), "does not begin with"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "its version is 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + b"\xff" * 60, "it is cut"),
    ],
)
def test_other_files(tmp_path, head, reason):
    (tmp_path / "x.gguf").write_bytes(head)
    with pytest.raises(ConfigInvalid, match=reason):
        GGUFHeader.read(tmp_path / "x.gguf")


def test_a_type_that_is_not_read_is_named(tmp_path):
    write_gguf(tmp_path / "x.gguf", {}, {"blk.0.w": StoredTensor((256,), "Q6_K", bytes(210))})
    data = (tmp_path / "x.gguf").read_bytes()
    place = data.index(b"blk.0.w") + 7 + 4 + 8
    (tmp_path / "x.gguf").write_bytes(data[:place] + struct.pack("<I", 20) + data[place + 4 :])
    with pytest.raises(ConfigInvalid, match=r"type IQ4_NL, such as blk\.0\.w\. .*Q4_K_M"):
        GGUFHeader.read(tmp_path / "x.gguf")


def test_parts_of_a_split_model(tmp_path):
    make_gguf(tmp_path / "m.gguf", parts=3)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [gguf_parts(part) for part in parts] == [parts] * 3
    assert gguf_models(tmp_path) == parts[:1]
    assert {model_name(part) for part in parts} == {"m"}
    parts[1].unlink()
    with pytest.raises(ConfigInvalid, match=r"one of 3 files .* m-00002-of-00003\.gguf"):
        gguf_parts(parts[0])
