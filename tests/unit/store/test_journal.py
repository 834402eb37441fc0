import os
import resource
import subprocess
import sys

import pytest

from maitred.core.context import Outcome
from maitred.core.errors import StoreUnavailable
from maitred.store.journal import Journal, JournalPosition
from maitred.store.orphan_journal import journal_folders, open_orphan
from tests.support.usage_events import usage_event


def make(folder, **options):
    return Journal(folder, **options)


def adopted(folder):
    """What all orphans in a folder hold; they are removed."""
    events = []
    for path in journal_folders(folder):
        with open_orphan(path) as orphan:
            if orphan is not None:
                events += [event for batch in orphan.batches(2) for event in batch]
                orphan.remove()
    return events


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_was_recorded_is_read_from_any_position(tmp_path):
    journal = make(tmp_path, segment_bytes=500)
    events = [usage_event(number) for number in range(10)]
    positions = [journal.record(event) for event in events]
    assert len(files(tmp_path)) > 2
    assert [event for event, _ in journal.read(journal.first_position, 100)] == events
    assert journal.read(positions[4], 2) == list(zip(events[5:7], positions[5:7], strict=True))
    assert journal.read(positions[-1], 100) == []


def test_segments_go_once_they_are_written(tmp_path):
    journal = make(tmp_path, segment_bytes=1_000)
    positions = [journal.record(usage_event(number)) for number in range(10)]
    before = files(tmp_path)
    journal.release(positions[0])
    assert files(tmp_path) == before
    journal.release(positions[-1])
    assert len(files(tmp_path)) == 1
    assert journal.record(usage_event(11)) > positions[-1]


def test_a_segment_stays_while_a_request_runs_that_began_in_it(tmp_path):
    journal = make(tmp_path, segment_bytes=1_000)
    journal.begin(usage_event(99))
    positions = [journal.record(usage_event(number)) for number in range(10)]
    journal.release(positions[-1])
    assert len(files(tmp_path)) == 2
    last = journal.record(usage_event(99))
    journal.release(last)
    assert len(files(tmp_path)) == 1


def test_closed_with_everything_written_it_leaves_nothing(tmp_path):
    journal = make(tmp_path)
    position = journal.record(usage_event(1))
    journal.close(position)
    journal.close(position)
    assert list(tmp_path.iterdir()) == []


def test_closed_with_something_left_it_becomes_an_orphan(tmp_path):
    journal = make(tmp_path)
    position = journal.record(usage_event(1))
    journal.record(usage_event(2))
    journal.close(position)
    assert [event.id for event in adopted(tmp_path)] == ["u-000001", "u-000002"]
    assert list(tmp_path.iterdir()) == []


def test_a_closed_journal_takes_nothing(tmp_path):
    journal = make(tmp_path)
    journal.close()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            journal.record(usage_event(1))
    assert adopted(tmp_path) == []


def test_the_living_are_not_adopted(tmp_path):
    journal = make(tmp_path)
    journal.record(usage_event(1))
    assert adopted(tmp_path) == []
    journal.close()
    assert len(adopted(tmp_path)) == 1


def test_one_orphan_has_one_adopter_at_a_time(tmp_path):
    journal = make(tmp_path)
    journal.record(usage_event(1))
    journal.close()
    (path,) = journal_folders(tmp_path)
    with open_orphan(path) as first, open_orphan(path) as second:
        assert first is not None
        assert second is None
    with open_orphan(path) as third:
        assert third is not None
        third.remove()
    with open_orphan(path) as late:
        assert late is None


def test_interrupted_work_leaves_a_trace_without_cost(tmp_path):
    journal = Journal(tmp_path)
    journal.begin(usage_event(1, time_s=100.0))
    journal.begin(usage_event(2, time_s=107.0))
    journal.record(usage_event(2, time_s=108.0))
    journal.close()
    ended, interrupted = adopted(tmp_path)
    assert ended == usage_event(2, time_s=108.0)
    assert (interrupted.id, interrupted.outcome) == ("u-000001", Outcome.FAILED)
    assert (interrupted.cost_nusd, interrupted.charges, interrupted.prompt_tokens, interrupted.output_tokens) == (
        0,
        {},
        0,
        0,
    )
    assert interrupted.taken == usage_event(1).taken  # it may have used all that it had reserved
    assert (interrupted.time_s, interrupted.duration_s) == (108.0, 8.0)  # the last sign of life


def test_damage_is_reported_and_kept(tmp_path, caplog):
    journal = make(tmp_path, segment_bytes=1_000)
    for number in range(6):
        journal.record(usage_event(number))
    journal.close()
    first = next(tmp_path.rglob("00000001.segment"))
    data = bytearray(first.read_bytes())
    data[-5] ^= 0xFF
    first.write_bytes(data)
    events = adopted(tmp_path)
    assert len(events) == 5  # all but the one that was hit
    assert "checksum" in caplog.text
    (kept,) = (tmp_path / "damaged").iterdir()
    assert kept.read_bytes() == bytes(data)
    assert adopted(tmp_path) == []  # and is not read again


def test_a_torn_end_is_no_damage(tmp_path, caplog):
    journal = make(tmp_path)
    journal.begin(usage_event(1))
    journal.record(usage_event(1))
    journal.close()
    (path,) = tmp_path.rglob("*.segment")
    path.write_bytes(path.read_bytes()[:-1])
    (event,) = adopted(tmp_path)
    assert event.outcome == Outcome.FAILED  # nobody knows that it was recorded
    assert "died while it wrote" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def file_limit():
    """Lets files grow to so many bytes only: the kernel then writes what fits, and refuses the next write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_refuses_and_takes_half_an_entry_back(tmp_path, file_limit):
    journal = make(tmp_path)
    journal.record(usage_event(1))
    (path,) = tmp_path.rglob("*.segment")
    size = path.stat().st_size
    file_limit(size + 100)
    try:
        with pytest.raises(StoreUnavailable, match="no space is left"):
            journal.record(usage_event(2))
        after = path.stat().st_size
        file_limit(size)
        with pytest.raises(StoreUnavailable, match="Make room"):
            journal.begin(usage_event(3))
    finally:
        file_limit(resource.RLIM_INFINITY)
    assert after == size
    journal.record(usage_event(4))
    assert [event.id for event, _ in journal.read(journal.first_position, 9)] == ["u-000001", "u-000004"]


def test_half_an_entry_that_cannot_be_taken_back_ends_its_segment(tmp_path, monkeypatch):
    journal = make(tmp_path)
    journal.record(usage_event(1))
    write = os.write
    with monkeypatch.context() as patched:

        def refuse(file, size):
            raise OSError(5, "Input/output error")

        patched.setattr(os, "write", lambda file, data: write(file, data[:20]))
        patched.setattr(os, "ftruncate", refuse)
        with pytest.raises(StoreUnavailable):
            journal.record(usage_event(2))
    journal.record(usage_event(3))
    journal.close()
    assert [event.id for event in adopted(tmp_path)] == ["u-000001", "u-000003"]


def test_a_folder_that_cannot_be_written_is_reported_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="journal"):
        make(tmp_path / "file" / "journal")


def test_durable_entries_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    journal = make(tmp_path, durable=True)
    journal.record(usage_event(1))
    journal.begin(usage_event(2))
    assert len(synced) == 2


def test_a_child_of_the_process_does_not_hold_the_lock(tmp_path):
    journal = make(tmp_path)
    journal.record(usage_event(1))
    lives = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(lives, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    try:
        assert child.stdout is not None
        child.stdout.readline()  # until it runs its own program, it is a copy of ours and holds what we hold
        journal.close()
        assert len(adopted(tmp_path)) == 1
    finally:
        child.communicate(b"\n")


def test_positions_come_in_the_order_of_the_journal():
    assert JournalPosition(1, 900) < JournalPosition(2, 10)
