import logging

import pytest

from maitred.engine.scheduler.step_times import StepWork, TimedStep
from maitred.engine.trials import cache as module
from maitred.engine.trials.cache import StepTimeCache

STEPS = [TimedStep(StepWork(1, 32), 0.004), TimedStep(StepWork(8, 96, 1, 64, 2080), 0.02)]


@pytest.fixture
def notes(tmp_path):
    return StepTimeCache(tmp_path / "cache" / "steps", list[TimedStep])


def test_what_was_noted_is_read_again(notes):
    assert notes.read("a") is None
    notes.write("a", STEPS)
    notes.write("b", [])
    assert notes.read("a") == STEPS
    assert notes.read("b") == []
    assert sorted(path.name for path in notes.folder.iterdir()) == ["a.json", "b.json"]


@pytest.mark.parametrize(
    "content",
    [b"", b'[[{"decodes":1},0.0', b'{"decodes":1}', b'[[{"decodes":"one"},0.004]]', b"\xff\xfe\x00", b"[[{},null]]"],
)
def test_what_cannot_be_understood_is_not_there(notes, content, caplog):
    notes.write("a", STEPS)
    (notes.folder / "a.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert notes.read("a") is None
    assert "a.json is not used, and written anew" in caplog.text
    notes.write("a", STEPS)
    assert notes.read("a") == STEPS


def test_a_folder_that_cannot_be_written_to_costs_the_note_alone(tmp_path, caplog):
    (tmp_path / "file").touch()
    notes = StepTimeCache(tmp_path / "file" / "steps", list[TimedStep])
    with caplog.at_level(logging.WARNING):
        notes.write("a", STEPS)
    assert "cannot be kept" in caplog.text
    assert notes.read("a") is None


def test_without_a_folder_nothing_is_kept():
    notes = StepTimeCache(None, list[TimedStep])
    notes.write("a", STEPS)
    assert notes.read("a") is None


def test_old_results_are_evicted(notes, monkeypatch):
    monkeypatch.setattr(module, "_MOST_NOTES", 3)
    for key in "abcde":
        notes.write(key, STEPS)
    assert sorted(path.stem for path in notes.folder.iterdir()) == ["c", "d", "e"]
