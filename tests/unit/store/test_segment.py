import base64
import struct
import zlib

import pytest

from maitred.core.errors import StoreUnavailable
from maitred.store.segment import BeginRecord, Segment, UsageRecord, encode_frame
from tests.support.usage_events import usage_event

FIRST_FORMAT = zlib.decompress(
    base64.b85decode(
        "c-pm)u}=aq6vpp#Ai5e?2R8>IT%yKXz`?}D&4KMw+IP^vwMYAIU_&=o<Kjk?I}l;;KVT;&CT_;K>tEn#;lM;gOdNbu`}+F5@B3}o"
        "mbHC&a{Sb=)-SDIl+8^lKQ3-r(|Wbmt~vYa_Z2iE(CBd%n`1VgAP>OP<6>zvoxiC;bFfp+`#HJ~d(0sTf*=BW3N#Q!s{^SjL~u=z"
        "OVJ@TfH;s0>K){w*;NqMIVJ5_$q1o643!K*^ibA7Xc$sLtH5U0)uEXQqxq{Hhl*2Z-%@G(iAb}D<+lXUM^BIXEK<{r#%kdsjn*~a"
        "sSKd!bK}S8c4?KU3g}jh#3-H)W?{8!LfN~9RK}1xU%7g@u)lM0esXc<Tn?U(HcPGl<>LR!WoZGI_ZgRQ;W1_LCq8HQIt0PoG=V$u"
        "Y9#N{rpf6#nS}&D0lZ}Rs{"
    )
)
"""`BeginRecord("u-000001", 12.5, usage_event(1, ...))` and `UsageRecord(usage_event(2, ttft_s=0.25))`."""


def test_what_was_written_in_the_first_format_is_read(tmp_path):
    path = tmp_path / "1.segment"
    path.write_bytes(FIRST_FORMAT + encode_frame(UsageRecord(usage_event(3))))
    segment = Segment(path)
    assert [entry for entry, _ in segment] == [
        BeginRecord(usage_event(1, time_s=12.5, charges={})),
        UsageRecord(usage_event(2, ttft_s=0.25)),
        UsageRecord(usage_event(3)),
    ]
    assert segment.damage is None


def test_entries_come_back_as_they_were_written(tmp_path):
    entries = [BeginRecord(usage_event(1)), UsageRecord(usage_event(2)), UsageRecord(usage_event(3, ttft_s=0.25))]
    path = tmp_path / "1.segment"
    path.write_bytes(b"".join(map(encode_frame, entries)))
    segment = Segment(path)
    assert [entry for entry, _ in segment] == entries
    assert segment.damage is None


def test_reading_goes_on_where_an_entry_ended(tmp_path):
    path = tmp_path / "1.segment"
    path.write_bytes(encode_frame(UsageRecord(usage_event(1))) + encode_frame(UsageRecord(usage_event(2))))
    (_, end), *_ = Segment(path)
    assert [entry.event.id for entry, _ in Segment(path, end)] == ["u-000002"]


def test_zeros_are_not_an_entry(tmp_path):
    path = tmp_path / "1.segment"
    path.write_bytes(encode_frame(UsageRecord(usage_event(1))) + bytes(4096))
    segment = Segment(path)
    assert len(list(segment)) == 1
    assert segment.damage is not None
    assert segment.damage.lost_bytes == 4096
    assert not segment.damage.torn


def test_an_entry_of_a_later_version_is_reported_not_guessed(tmp_path):
    path = tmp_path / "1.segment"
    good = encode_frame(UsageRecord(usage_event(1)))
    payload = b"\x92\x07\xc0"  # a tag that nobody knows
    path.write_bytes(good + struct.pack("<III", len(payload), len(payload) ^ 0x4D544431, zlib.crc32(payload)) + payload)
    segment = Segment(path)
    assert len(list(segment)) == 1
    assert segment.damage is not None
    assert "version" in segment.damage.reason


def test_a_file_that_cannot_be_opened_is_no_damage(tmp_path):
    with pytest.raises(StoreUnavailable, match="not lost"):
        list(Segment(tmp_path / "none.segment"))
