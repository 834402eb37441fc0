import struct
import zlib

import pytest

from maitred.core.errors import StoreUnavailable
from maitred.store.segment import Begun, Recorded, Segment, frame
from tests.usage_events import usage_event


def test_entries_come_back_as_they_were_written(tmp_path):
    entries = [Begun("lease-1", 12.5, usage_event(1)), Recorded(usage_event(2)), Recorded(usage_event(3, ttft_s=0.25))]
    path = tmp_path / "1.segment"
    path.write_bytes(b"".join(map(frame, entries)))
    segment = Segment(path)
    assert [entry for entry, _ in segment] == entries
    assert segment.damage is None


def test_reading_goes_on_where_an_entry_ended(tmp_path):
    path = tmp_path / "1.segment"
    path.write_bytes(frame(Recorded(usage_event(1))) + frame(Recorded(usage_event(2))))
    (_, end), *_ = Segment(path)
    assert [entry.event.id for entry, _ in Segment(path, end)] == ["u-000002"]


def test_zeros_are_not_an_entry(tmp_path):
    path = tmp_path / "1.segment"
    path.write_bytes(frame(Recorded(usage_event(1))) + bytes(4096))
    segment = Segment(path)
    assert len(list(segment)) == 1
    assert segment.damage is not None
    assert segment.damage.lost_bytes == 4096
    assert not segment.damage.torn


def test_an_entry_of_a_later_version_is_reported_not_guessed(tmp_path):
    path = tmp_path / "1.segment"
    good = frame(Recorded(usage_event(1)))
    payload = b"\x92\x07\xc0"  # a tag that nobody knows
    path.write_bytes(good + struct.pack("<III", len(payload), len(payload) ^ 0x4D544431, zlib.crc32(payload)) + payload)
    segment = Segment(path)
    assert len(list(segment)) == 1
    assert segment.damage is not None
    assert "version" in segment.damage.reason


def test_a_file_that_cannot_be_opened_is_no_damage(tmp_path):
    with pytest.raises(StoreUnavailable, match="not lost"):
        list(Segment(tmp_path / "none.segment"))
