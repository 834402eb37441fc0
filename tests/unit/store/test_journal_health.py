"""Whether a journal that failed can be written again, found out without an entry."""

import os

import pytest

from maitred.core.errors import StoreUnavailable
from maitred.store.journal import Journal
from maitred.store.orphan_journal import journal_folders, open_orphan
from tests.support.usage_events import usage_event


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path, segment_bytes=20_000)


@pytest.fixture
def full(monkeypatch):
    """Fills the disk, and makes room again."""
    write = os.write
    state = {"full": False}
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:20] if state["full"] else data))
    return lambda full: state.update(full=full)


def test_a_journal_is_healthy_until_an_entry_cannot_be_written_and_from_when_one_could(journal, full):
    journal.record(usage_event(1))
    journal.check()
    full(True)
    assert journal.healthy, "nobody has tried yet"
    with pytest.raises(StoreUnavailable):
        journal.record(usage_event(2))
    assert not journal.healthy
    with pytest.raises(StoreUnavailable, match="Make room"):
        journal.check()
    full(False)
    journal.check()
    assert journal.healthy
    journal.record(usage_event(3))
    assert [event.id for event, _ in journal.read(journal.first_position, 9)] == ["u-000001", "u-000003"]


def test_the_probe_leaves_nothing_behind(journal, full, tmp_path):
    journal.record(usage_event(1))
    (path,) = tmp_path.rglob("*.segment")
    size = path.stat().st_size
    full(True)
    with pytest.raises(StoreUnavailable):
        journal.record(usage_event(2))
    full(False)
    journal.check()
    assert path.stat().st_size == size


def test_a_death_within_the_probe_looks_like_one_within_an_entry(journal, full, tmp_path, monkeypatch):
    journal.record(usage_event(1))
    full(True)
    with pytest.raises(StoreUnavailable):
        journal.record(usage_event(2))
    full(False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", lambda file, size: None)
        journal.check()
    journal.close()
    (folder,) = journal_folders(tmp_path)
    with open_orphan(folder) as orphan:
        assert orphan is not None
        assert [event.id for batch in orphan.batches(9) for event in batch] == ["u-000001"]
        assert orphan.damages == []


def test_a_segment_that_was_given_up_keeps_what_it_has(journal, full, tmp_path, monkeypatch):
    journal.record(usage_event(1))
    (path,) = tmp_path.rglob("*.segment")

    def refuse(*_):
        raise OSError(5, "Input/output error")

    full(True)
    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", refuse)
        with pytest.raises(StoreUnavailable):
            journal.record(usage_event(2))
    size = path.stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(StoreUnavailable):
            journal.record(usage_event(3))
    assert path.stat().st_size == size
