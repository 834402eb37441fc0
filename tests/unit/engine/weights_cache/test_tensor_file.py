import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maitred.engine.weights_cache.tensor_file import AlignedTensor, BrokenFile, map_tensors, write_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64]


@st.composite
def placed(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return AlignedTensor(values.to(dtype), 1 << draw(st.integers(0, 14)))


def written(path, tensors, notes=None):
    with path.open("w+b") as file:
        write_tensors(file, tensors, notes)
    return path


@given(tensors=st.dictionaries(st.text(max_size=20), placed(), max_size=6), notes=st.lists(st.text(), max_size=3))
def test_what_was_written_is_mapped_again_where_it_asked_to_be(tmp_path_factory, tensors, notes):
    path = written(tmp_path_factory.mktemp("file") / "it", tensors, notes)
    mapped, found = map_tensors(path)
    assert found == notes
    assert list(mapped) == list(tensors)
    for name, tensor in mapped.items():
        assert tensor.dtype == tensors[name].tensor.dtype
        assert torch.equal(tensor, tensors[name].tensor)
        assert not tensor.numel() or tensor.data_ptr() % tensors[name].alignment == 0


def test_zeros_take_no_disk(tmp_path):
    path = written(tmp_path / "it", {"holes": AlignedTensor(torch.zeros(1 << 24), 64)})
    assert path.stat().st_size > 1 << 26
    assert path.stat().st_blocks * 512 < 1 << 20
    assert not map_tensors(path)[0]["holes"].any()


def test_a_file_stays_mapped_as_long_as_one_of_its_tensors(tmp_path):
    path = written(tmp_path / "it", {name: AlignedTensor(torch.full((4096,), 7.0), 4096) for name in "ab"})
    kept = map_tensors(path)[0]["a"][5:]
    path.unlink()
    gc.collect()
    assert str(path) in Path("/proc/self/maps").read_text()
    assert kept.sum() == 7.0 * 4091
    del kept
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_what_is_written_to_mapped_memory_never_reaches_the_file(tmp_path):
    path = written(tmp_path / "it", {"a": AlignedTensor(torch.ones(9), 64)})
    map_tensors(path)[0]["a"].fill_(3.0)
    assert map_tensors(path)[0]["a"].sum() == 9.0


@given(data=st.data())
def test_a_file_that_was_cut_or_damaged_in_its_index_or_is_another_one_is_refused(tmp_path_factory, data):
    path = written(tmp_path_factory.mktemp("file") / "it", {"a": AlignedTensor(torch.ones(99), 64)}, "notes")
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        place = data.draw(st.integers(0, 99))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :])
    with pytest.raises(BrokenFile):
        map_tensors(path)


def test_a_file_that_is_not_there_is_not_a_broken_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        map_tensors(tmp_path / "none")
